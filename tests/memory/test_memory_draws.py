"""Draws against their laws and against loops.

Shapes: B anchors, C cells, D embedding, N negatives, k occupied slots, n slots drawn.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory, blocks, draws
from memory.clusters import cells_of
from memory.eviction import MostDuplicated, Oldest
from memory.scores import VonMisesFisher
from stream_ssl.losses import InfoNCE
from tests.naive import unit_rows
from tests.naive_memory import (
    chi_square_bound,
    hardest_one_by_one,
    ordered_choice_law,
    stratified_law,
)

DRAWN = 50_000


def filled(count: int, dim: int = 4, kind: str = "clustered", **options: Any) -> WorkingMemory:
    memory = WorkingMemory(count, dim, **options)
    z_ND = unit_rows(np.random.default_rng(count), kind, count, dim)
    memory.add(torch.arange(count) + 100, z_ND, hashes=torch.arange(count) % 5)
    return memory


def chi_square(counts: Counter[Any], law: dict[Any, float], drawn: int) -> float:
    assert set(counts) <= set(law)
    return sum((counts[key] - drawn * p) ** 2 / (drawn * p) for key, p in law.items())


def test_weighted_draws_follow_the_law_of_one_after_the_other() -> None:
    weights = [4.0, 1.0, 0.5, 2.0]
    weight_k = torch.tensor(weights, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    counts = Counter(tuple(draws.weighted(2, weight_k, generator).tolist()) for _ in range(DRAWN))
    law = ordered_choice_law(weights, 2)
    assert sum(law.values()) == pytest.approx(1)
    assert chi_square(counts, law, DRAWN) < chi_square_bound(len(law) - 1)


def test_weighted_draws_of_more_than_there_are_repeat() -> None:
    weights = [4.0, 1.0, 0.5, 2.0]
    weight_k = torch.tensor(weights, dtype=torch.float64)
    drawn = draws.weighted(DRAWN, weight_k, torch.Generator().manual_seed(1))
    law = {n: w / 7.5 for n, w in enumerate(weights)}
    assert chi_square(Counter(drawn.tolist()), law, DRAWN) < chi_square_bound(3)


@pytest.mark.parametrize("score", [None, VonMisesFisher(0.1)], ids=repr)
def test_training_draws_are_inverse_to_the_count(score: Any) -> None:
    """Without replacement, by the shares of the first place; with it, by all."""
    memory = filled(40, eviction=MostDuplicated(score), seed=5)
    weight_k = 1 / (1 + memory.counts())
    law = dict(enumerate((weight_k / weight_k.sum()).tolist()))
    # More often than alike: else a uniform draw would pass as well.
    assert max(law.values()) > 1.2 * min(law.values())
    drawn = memory.sample(DRAWN, how="inverse-count")
    assert chi_square(Counter(drawn.slots.tolist()), law, DRAWN) < chi_square_bound(39)
    firsts = Counter(int(memory.sample(3, how="inverse-count").slots[0]) for _ in range(4000))
    assert chi_square(firsts, law, 4000) < chi_square_bound(39)
    uniform = Counter(memory.sample(DRAWN).slots.tolist())
    assert chi_square(uniform, dict.fromkeys(range(40), 1 / 40), DRAWN) < chi_square_bound(39)
    every = memory.sample(40, how="inverse-count")
    assert sorted(every.slots.tolist()) == list(range(40))
    assert torch.equal(every.ids, memory.ids[every.slots])


@pytest.mark.parametrize("count", [2, 4, 11])
def test_stratified_draws_take_from_each_cell_alike(count: int) -> None:
    cell_k = torch.tensor([0, 2, 0, 0, 2, 0, 3, 0, 2, 0, 0, 0])  # sizes 8, 0, 3, 1
    law = stratified_law([8, 0, 3, 1], count)
    expected_k = torch.tensor([law[c] for c in cell_k.tolist()], dtype=torch.float64)
    assert float(expected_k.sum()) == pytest.approx(count)
    generator, seen_k, runs = torch.Generator().manual_seed(count), torch.zeros(12), DRAWN // count
    for _ in range(runs):
        slots = draws.stratified(count, cell_k, 4, generator)
        assert len(set(slots.tolist())) == count
        taken = Counter(cell_k[slots].tolist())
        short = [c for c, size in ((0, 8), (2, 3), (3, 1)) if taken[c] < size]
        if short:  # no cell has two more than one that could give more
            assert max(taken.values()) - min(taken[c] for c in short) <= 1
        seen_k[slots] += 1
    deviation_k = (seen_k - runs * expected_k).abs()
    assert bool((deviation_k <= 4.5 * (runs * expected_k * (1 - expected_k)).sqrt() + 1e-6).all())


def test_stratified_negatives_take_from_each_cell_of_the_memory() -> None:
    memory = filled(200, 6, seed=1)
    for n, cells in ((16, 4), (30, 7), (199, 5)):
        drawn = memory.negatives(n, how="stratified", cells=cells)
        assert len(set(drawn.ids_N.tolist())) == n
        assert torch.equal(drawn.z_ND, memory.embeddings[drawn.ids_N - 100])
        assert torch.equal(drawn.hashes_N, memory.hashes[drawn.ids_N - 100])
        centre_CD = memory.state_dict()["strata.centres"]
        assert len(centre_CD) == cells
        size_C = torch.bincount(cells_of(memory.embeddings, centre_CD), minlength=cells)
        taken_C = torch.bincount(cells_of(drawn.z_ND, centre_CD), minlength=cells)
        more_C = taken_C < size_C
        assert bool(more_C.any())
        assert int(taken_C.max()) - int(taken_C[more_C].min()) <= 1
    assert len(memory.negatives(500, how="stratified", cells=4)) == 200
    assert len(WorkingMemory(3, 2).negatives(2, how="stratified")) == 0


def test_cells_are_found_anew_when_all_rows_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from memory import strata

    found: list[int] = []
    seeds: set[int] = set()
    kmeans = strata.kmeans

    def spy(z_ND: Tensor, cells: int, seed: int) -> tuple[Tensor, Tensor]:
        found.append(len(z_ND))
        seeds.add(seed)
        return kmeans(z_ND, cells, seed)

    monkeypatch.setattr(strata, "kmeans", spy)
    z_ND = unit_rows(np.random.default_rng(0), "clustered", 100, 4)
    memory = WorkingMemory(32, 4, Oldest())
    for start in range(0, 100, 10):
        memory.add(torch.arange(start, start + 10), z_ND[start : start + 10])
        memory.negatives(5, how="stratified", cells=3)
        memory.negatives(5, how="stratified", cells=3)
    assert found == [10, 20, 32, 32]  # at 10, 20, 40 and 80 samples
    memory.refresh(memory.stalest(32), z_ND[:32])
    memory.negatives(5, how="stratified", cells=3)
    memory.negatives(5, how="stratified", cells=4)
    assert len(found) == len(seeds) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [1 << 22, 50])
def test_the_hardest_are_found_by_loops(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(blocks, "CACHED_ELEMENTS", block)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        # One-hot rows tie exactly, and often; on the others there are no ties.
        kind, k = ("one-hot", "uniform")[seed % 2], int(rng.integers(1, 40))
        memory = WorkingMemory(40, 5, Oldest())
        ids, hashes = rng.integers(0, 12, k), rng.integers(0, 6, k)
        memory.add(ids, unit_rows(rng, kind, k, 5).to(dtype), hashes=hashes)
        anchor_BD = unit_rows(rng, kind, 6, 5).to(dtype)
        ids_B = torch.from_numpy(rng.integers(0, 12, 6))
        hashes_B = torch.from_numpy(rng.integers(0, 6, 6))
        options: dict[str, Any] = {"how": "hardest", "anchors": anchor_BD, "ids_B": ids_B}
        for barred_by in (None, hashes_B):
            barred_Bk = memory.mask(ids_B, barred_by)
            count = int(rng.integers(1, 45))
            each, shared = hardest_one_by_one(anchor_BD, memory.embeddings, barred_Bk, count)
            drawn = memory.negatives(count, **options, hashes_B=barred_by)
            assert drawn.ids_N.tolist() == memory.ids[shared].tolist()
            assert torch.equal(drawn.z_ND, memory.embeddings[shared])
            own = memory.negatives(count, **options, hashes_B=barred_by, each=True)
            assert torch.equal(own.z_ND, memory.embeddings[torch.tensor(each)])
            assert len(own) == min(count, k)
            mask_BN = memory.mask(ids_B, barred_by, own)
            assert torch.equal(mask_BN, barred_Bk.gather(1, torch.tensor(each)))
            # Nothing is marked for an anchor that had enough left.
            enough_B = (~barred_Bk).sum(dim=1) >= len(own)
            assert not bool(mask_BN[enough_B].any())


def test_without_ids_nothing_is_left_out() -> None:
    memory = filled(10)
    drawn = memory.negatives(1, how="hardest", anchors=memory.embeddings[[4]], each=True)
    assert drawn.ids_N.tolist() == [[104]]
    drawn = memory.negatives(1, how="hardest", anchors=memory.embeddings[[4]], ids_B=[104])
    assert drawn.ids_N.tolist() != [104]


@pytest.mark.parametrize("each", [False, True])
def test_losses_take_what_is_drawn(each: bool) -> None:
    memory = filled(30)
    anchors, ids_B = memory.embeddings[:6].clone(), memory.ids[:6]
    negatives = memory.negatives(7, how="hardest", anchors=anchors, ids_B=ids_B, each=each)
    mask_BN = memory.mask(ids_B, negatives=negatives)
    assert mask_BN.shape == (6, 7)
    out = InfoNCE(temperature=0.5)(anchors, anchors[:, None], negatives.z_ND, mask_BN)
    assert bool(torch.isfinite(out.per_anchor).all())
    easier = memory.negatives(7, torch.Generator().manual_seed(0))
    plain = InfoNCE(temperature=0.5)(anchors, anchors[:, None], easier.z_ND)
    assert float(out.loss) > float(plain.loss)


def test_draws_follow_the_generator_given() -> None:
    memory = filled(30)
    for draw in (
        lambda g: memory.negatives(8, g, how="stratified", cells=4).ids_N,
        lambda g: memory.sample(8, g, how="inverse-count").slots,
        lambda g: memory.sample(50, g, how="inverse-count").slots,
    ):
        one, two = (draw(torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(draw(None), draw(None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n is -1"),
        ({"n": 2, "how": "easiest"}, "how is 'easiest': choose one of uniform"),
        ({"n": 2, "how": "hardest"}, "pass anchors="),
        ({"n": 2, "how": "hardest", "anchors": torch.ones(2, 4)}, "row 0 has norm 2"),
        ({"n": 2, "how": "hardest", "anchors": torch.eye(4), "hashes_B": [1] * 4}, "without ids"),
        ({"n": 2, "how": "hardest", "anchors": torch.eye(4), "ids_B": [1]}, r"must be \[4\]"),
        ({"n": 2, "how": "stratified", "cells": 0}, "cells is 0"),
    ],
)
def test_negatives_name_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(6).negatives(**arguments)


def test_samples_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="how is 'count': choose one of uniform, inverse-count"):
        filled(6).sample(2, how="count")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty memory"):
        WorkingMemory(4, 4).sample(2, how="inverse-count")


@pytest.mark.parametrize(
    ("ids", "hashes"),
    [
        (torch.arange(3), torch.ones(1, dtype=torch.int64)),  # would be every anchor's
        (torch.arange(3), torch.ones(2, dtype=torch.int64)),
        (torch.arange(3)[:, None], None),
        (torch.arange(3.0), None),
    ],
)
def test_masks_are_refused_for_what_is_not_one_integer_an_anchor(ids: Any, hashes: Any) -> None:
    memory = WorkingMemory(8, 4)
    memory.add(torch.arange(4), torch.eye(4))
    for mask in (memory.mask, memory.negatives().mask):
        with pytest.raises(ValueError, match=r"ids_B|hashes_B"):
            mask(ids, hashes)
