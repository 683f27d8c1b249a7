"""Tests of draws against their distributions and against loops, and of masks.

Shapes: B anchors, C cells, D embedding, N negatives, k occupied slots, n slots drawn.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from table import table
from torch import Tensor

from stream_ssl.memory import WorkingMemory, draws
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.memory.eviction import MostDuplicated, Oldest
from stream_ssl.memory.index import cells_of
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import unit_rows
from tests.naive_memory import (
    chi_square_bound,
    hardest_one_by_one,
    ordered_choice_law,
    stratified_law,
)

DRAWN = 30_000
WEIGHTS = [4.0, 1.0, 0.5, 2.0]


def filled(count: int, dim: int = 4, kind: str = "clustered", **options: Any) -> WorkingMemory:
    """Return a memory with ids from 100 on and hashes 0 to 4."""
    memory = WorkingMemory(count, dim, **options)
    z_ND = unit_rows(np.random.default_rng(count), kind, count, dim)
    memory.add(torch.arange(count) + 100, z_ND, hashes=torch.arange(count) % 5)
    return memory


def follows(counts: Counter[Any], law: dict[Any, float]) -> bool:
    drawn = counts.total()
    off = sum((counts[key] - drawn * p) ** 2 / (drawn * p) for key, p in law.items())
    return set(counts) <= set(law) and off < chi_square_bound(len(law) - 1)


def alike(keys: Any) -> dict[Any, float]:
    return dict.fromkeys(keys, 1 / len(keys))


def test_weighted_draws_follow_the_law_of_drawing_one_by_one() -> None:
    weight_k = torch.tensor(WEIGHTS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    pairs = Counter(tuple(draws.weighted(2, weight_k, generator).tolist()) for _ in range(DRAWN))
    assert follows(pairs, ordered_choice_law(WEIGHTS, 2))
    many = draws.weighted(DRAWN, weight_k, generator)  # with replacement
    assert follows(Counter(many.tolist()), {n: w / 7.5 for n, w in enumerate(WEIGHTS)})


@pytest.mark.parametrize("score", [None, VonMisesFisher(0.1)], ids=repr)
def test_training_draws_follow_the_inverse_of_the_counts(score: Any) -> None:
    """Without replacement the first draw follows the shares; with replacement all draws do."""
    memory = filled(40, eviction=MostDuplicated(score), seed=5)
    weight_k = 1 / (1 + memory.counts())
    law = dict(enumerate((weight_k / weight_k.sum()).tolist()))
    # The shares must differ enough that a uniform draw fails the test.
    assert max(law.values()) > 1.2 * min(law.values())
    assert follows(Counter(memory.sample(DRAWN, how="inverse-count").slots.tolist()), law)
    firsts = (int(memory.sample(3, how="inverse-count").slots[0]) for _ in range(4000))
    assert follows(Counter(firsts), law)
    assert follows(Counter(memory.sample(DRAWN).slots.tolist()), alike(range(40)))
    for how in draws.ORDERS:
        every = memory.sample(40, how=how)
        assert sorted(every.slots.tolist()) == list(range(40))
        assert torch.equal(every.ids, memory.ids[every.slots])
        assert every.images is None


def test_epochs_draw_newcomers_first_and_no_slot_twice_before_all_others() -> None:
    memory, rng = filled(20, eviction=Oldest(), seed=2), np.random.default_rng(0)
    epoch, drawn = dict.fromkeys(range(100, 120), 0), Counter[int]()
    for turn in range(60):
        if turn % 7 == 3:  # newcomers, fewer or more than a batch
            ids = torch.arange(5 if turn % 2 else 9) + 1000 * turn
            admission = memory.add(ids, unit_rows(rng, "uniform", len(ids), 4))
            for gone in admission.evicted.tolist():
                del epoch[gone], drawn[gone]
            epoch |= dict.fromkeys(ids.tolist(), 0)
        least = sorted(epoch.values())[:6]
        ids = memory.sample(6, how="epochs").ids.tolist()
        assert len(set(ids)) == 6
        assert sorted(epoch[i] for i in ids) == least  # never drawn, or drawn longest ago
        now = max(1, *epoch.values())
        for i in ids:
            epoch[i] = now + (epoch[i] == now)
        drawn.update(ids)
        assert memory.draws.tolist() == [drawn[i] for i in memory.ids.tolist()]
        assert memory.check_valid() == (True, "")
    firsts = Counter(int(filled(6, seed=s).sample(1, how="epochs").ids[0]) for s in range(800))
    assert follows(firsts, alike(range(100, 106)))
    orders = Counter[tuple[int, ...]]()
    memory = filled(3, seed=9)
    for _ in range(20):
        orders[tuple(memory.sample(3, how="epochs").slots.sort().values.tolist())] += 1
        assert len(set(memory.draws.tolist())) == 1
    assert set(orders) == {(0, 1, 2)}


@table("few", [0, 1000], ids=["one after the other", "a permutation"])
def test_every_ordered_choice_is_equally_likely(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "FEW", few)
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    for count, total in ((1, 5), (2, 5), (4, 4)):
        drawn = Counter(
            tuple(draws.uniform(count, total, generator, cpu).tolist()) for _ in range(DRAWN // 5)
        )
        assert follows(drawn, alike(list(permutations(range(total), count))))


def test_a_uniform_draw_of_few_numbers_has_no_repeats() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        drawn = draws.uniform(300, 300 * draws.FEW, generator, torch.device("cpu"))
        assert len(set(drawn.tolist())) == 300
    assert not len(draws.uniform(0, 10, generator, torch.device("cpu")))


def test_uniform_negatives_are_distinct_and_equally_likely() -> None:
    memory = filled(25, seed=3)
    seen: Counter[int] = Counter()
    firsts: Counter[int] = Counter()
    for _ in range(3000):
        ids = memory.negatives(10).ids_N.tolist()
        assert len(set(ids)) == 10
        seen.update(ids)
        firsts[ids[0]] += 1
    assert follows(seen, alike(range(100, 125)))
    assert follows(firsts, alike(range(100, 125)))
    for drawn in (memory.negatives(), memory.negatives(4), memory.negatives(50)):
        slots = drawn.ids_N - 100
        assert torch.equal(drawn.z_ND, memory.embeddings[slots])
        assert torch.equal(drawn.hashes_N, slots % 5)
    assert len(memory.negatives()) == len(memory.negatives(50)) == 25
    for n in (None, 2):
        assert WorkingMemory(3, 2).negatives(n).z_ND.shape == (0, 2)


@pytest.mark.parametrize("count", [2, 4, 11])
def test_stratified_draws_take_equally_many_slots_from_each_cell(count: int) -> None:
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
        # No cell has given two more than a cell that has members left.
        assert not short or max(taken.values()) - min(taken[c] for c in short) <= 1
        seen_k[slots] += 1
    deviation_k = (seen_k - runs * expected_k).abs()
    assert bool((deviation_k <= 4.5 * (runs * expected_k * (1 - expected_k)).sqrt() + 1e-6).all())


def test_stratified_negatives_take_equally_many_rows_from_each_cell() -> None:
    memory = filled(200, 6, seed=1)
    for n, cells in ((16, 4), (30, 7), (199, 5)):
        drawn = memory.negatives(n, how="stratified", cells=cells)
        assert len(set(drawn.ids_N.tolist())) == n
        assert torch.equal(drawn.z_ND, memory.embeddings[drawn.ids_N - 100])
        centre_CD = memory.state_dict()["strata.centres"]
        assert len(centre_CD) == cells
        size_C = torch.bincount(cells_of(memory.embeddings, centre_CD), minlength=cells)
        taken_C = torch.bincount(cells_of(drawn.z_ND, centre_CD), minlength=cells)
        more_C = taken_C < size_C
        assert bool(more_C.any())
        assert int(taken_C.max()) - int(taken_C[more_C].min()) <= 1
    assert len(memory.negatives(500, how="stratified", cells=4)) == 200
    assert len(WorkingMemory(3, 2).negatives(2, how="stratified")) == 0


def test_cells_are_found_again_when_all_rows_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    seeds: set[int] = set()
    kmeans = draws.kmeans

    def spy(z_ND: Tensor, cells: int, seed: int) -> tuple[Tensor, Tensor]:
        found.append(len(z_ND))
        seeds.add(seed)
        return kmeans(z_ND, cells, seed)

    monkeypatch.setattr(draws, "kmeans", spy)
    z_ND = unit_rows(np.random.default_rng(0), "clustered", 100, 4)
    memory = WorkingMemory(32, 4, Oldest())
    for start in range(0, 100, 10):
        memory.add(torch.arange(start, start + 10), z_ND[start : start + 10])
        memory.negatives(5, how="stratified", cells=3)
        memory.negatives(5, how="stratified", cells=3)
    assert found == [10, 20, 32, 32]  # new cells at 10, 20, 40 and 80 samples
    memory.refresh(memory.stalest(32), z_ND[:32])
    memory.negatives(5, how="stratified", cells=3)
    memory.negatives(5, how="stratified", cells=4)
    assert len(found) == len(seeds) == 6


@table("dtype", [torch.float32, torch.float64], ids=str)
@table("block", [1 << 22, 50])
def test_the_hardest_negatives_equal_those_of_a_loop(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr("stream_ssl.memory.compute.CACHED_ELEMENTS", block)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        k, count = int(rng.integers(1, 40)), int(rng.integers(1, 45))
        memory = WorkingMemory(40, 5, Oldest())
        ids, hashes = rng.integers(0, 12, k), rng.integers(0, 6, k)
        memory.add(ids, unit_rows(rng, "uniform", k, 5).to(dtype), hashes=hashes)
        anchor_BD = unit_rows(rng, "uniform", 6, 5).to(dtype)
        ids_B, hashes_B = (torch.from_numpy(rng.integers(0, most, 6)) for most in (12, 6))
        options: dict[str, Any] = {"how": "hardest", "anchors": anchor_BD, "ids_B": ids_B}
        for barred_by in (None, hashes_B):
            barred_Bk = memory.negatives().mask(ids_B, barred_by)
            each, shared = hardest_one_by_one(anchor_BD, memory.embeddings, barred_Bk, count)
            there = int((~barred_Bk).any(dim=0).sum())  # the others are barred for all
            drawn = memory.negatives(count, **options, hashes_B=barred_by)
            assert drawn.ids_N[:there].tolist() == memory.ids[shared[:there]].tolist()
            assert len(drawn) == len(shared) == min(count, k)
            own = memory.negatives(count, **options, hashes_B=barred_by, each=True)
            mask_BN = own.mask(ids_B, barred_by)
            for b, slots in enumerate(each):
                there = int((~barred_Bk[b]).sum())
                assert torch.equal(own.z_ND[b, :there], memory.embeddings[slots[:there]])
                assert mask_BN[b].tolist() == [n >= there for n in range(len(own))]


@table("count", [1, 3, 40])
@table("by", ["embeddings", "descriptors"])
def test_the_nearest_slots_equal_those_of_a_loop(by: Any, count: int) -> None:
    """The nearest slots are the hardest negatives if none is barred. Half of the slots are free."""
    rng = np.random.default_rng(3)
    memory = WorkingMemory(60, 4, image_shape=(1, 4, 4), descriptor=Thumbnail(side=4))
    image_NCHW = torch.from_numpy(rng.integers(0, 256, (30, 1, 4, 4), dtype=np.uint8))
    memory.add(torch.arange(30), unit_rows(rng, "uniform", 30, 4), image_NCHW)
    row_kX = getattr(memory, by)
    query_BX = unit_rows(rng, "uniform", 5, row_kX.shape[1]).to(row_kX.dtype)
    cosine_Bn, slot_Bn = memory.nearest(query_BX, count, by)
    barred_Bk = torch.zeros(5, 30, dtype=torch.bool)
    each, _ = hardest_one_by_one(query_BX.double(), row_kX.double(), barred_Bk, count)
    assert slot_Bn.tolist() == each
    assert torch.allclose(cosine_Bn, (query_BX @ row_kX.T).gather(1, slot_Bn), atol=1e-6)


def test_the_hardest_negatives_among_ties_have_the_highest_cosines() -> None:
    memory = filled(30, 5, "one-hot")
    anchor_BD = memory.embeddings[:6].clone()
    near_Bk = anchor_BD @ memory.embeddings.T
    drawn = memory.negatives(7, how="hardest", anchors=anchor_BD)
    assert torch.equal(
        (anchor_BD @ drawn.z_ND.T).amax(0), near_Bk.amax(0).sort().values.flip(0)[:7]
    )
    each = memory.negatives(7, how="hardest", anchors=anchor_BD, each=True)
    near_BN = (anchor_BD[:, None] * each.z_ND).sum(dim=2)
    assert torch.equal(near_BN, near_Bk.sort(dim=1, descending=True).values[:, :7])
    with pytest.raises(ValueError, match="one for each row"):
        each.mask(torch.arange(len(anchor_BD) + 1), None)
    again = memory.negatives(7, how="hardest", anchors=anchor_BD, each=True)
    assert torch.equal(again.ids_N, each.ids_N)
    one = memory.negatives(1, how="hardest", anchors=anchor_BD[:1])
    assert torch.equal(one.z_ND, anchor_BD[:1])  # itself, as no ids are masked


def test_draws_with_equal_generators_are_equal() -> None:
    memory = filled(30)
    for draw in (
        lambda g: memory.negatives(8, g).ids_N,
        lambda g: memory.negatives(8, g, how="stratified", cells=4).ids_N,
        lambda g: memory.sample(8, g, how="inverse-count").slots,
        lambda g: memory.sample(50, g, how="inverse-count").slots,
    ):
        one, two = (draw(torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(draw(None), draw(None))


def test_masks_exclude_the_same_id_and_the_same_hash() -> None:
    memory = filled(6)  # ids 100 to 105, hashes 0 1 2 3 4 0
    ids, hashes = torch.tensor([100, 7, 7]), torch.tensor([0, 1, 0])
    expected = torch.zeros(3, 6, dtype=torch.bool)
    expected[0, 0] = True
    assert torch.equal(memory.negatives().mask(ids, None), expected)
    expected[1, 1] = True
    assert torch.equal(memory.negatives().mask(ids, hashes), expected)  # hash 0 means no hash
    drawn = memory.negatives(4)
    chosen = expected[:, drawn.ids_N - 100]
    assert torch.equal(drawn.mask(ids, hashes), chosen)
    assert torch.equal(drawn.mask(ids.numpy(), hashes.numpy()), chosen)
