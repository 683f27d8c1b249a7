"""Tests of MinRed against its naive twin, step by step, and against the published algorithm.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.minred import published_step, redundancy
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MinimumRedundancy, minimum_redundancy
from tests import naive_policies as naive
from tests.naive import STREAMS, unit_rows

CASES = 10  # of each stream, in each setting; some 5,000 steps in total


SETTINGS = {
    "as it is": {},
    "short lists": {"LIST": 2, "AHEAD": 2},
    "blocks": {"BLOCK_ELEMENTS": 200},
}
"""At small K these settings empty the lists, and compare newcomers of several blocks."""


@pytest.fixture(params=SETTINGS)
def lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in SETTINGS[request.param].items():
        monkeypatch.setattr(minimum_redundancy, name, value)
    return str(request.param)


def judged(memory: WorkingMemory, z_ND: Tensor, cuts: list[int], rounding: float) -> None:
    """Add the rows in batches, and check that the twin allows every step."""
    evicted = []
    for start, end in zip([0, *cuts], [*cuts, len(z_ND)], strict=True):
        evicted += memory.add(torch.arange(start, end), z_ND[start:end]).evicted.tolist()
        assert memory.check_valid() == (True, "")
    rule = partial(naive.minimum_redundancy, rounding=rounding)
    samples = [naive.Sample(z_D, -1, n) for n, z_D in enumerate(z_ND)]
    assert memory.ids.tolist() == naive.follow(rule, memory.capacity, samples, evicted)


@pytest.mark.parametrize("stream", STREAMS)
def test_every_step_evicts_from_the_closest_pair(stream: str, lists: str) -> None:
    for seed in range(CASES):
        rng = np.random.default_rng([seed, STREAMS.index(stream)])
        capacity, dim = int(rng.integers(1, 48)), int(rng.integers(2, 10))
        z_ND = unit_rows(rng, stream, capacity + int(rng.integers(5, 100)), dim)
        cuts = sorted(rng.integers(0, len(z_ND), size=3).tolist())
        judged(WorkingMemory(capacity, dim, MinimumRedundancy()), z_ND, cuts, 1e-13)


@pytest.mark.parametrize("stream", STREAMS)
def test_evictions_after_a_refresh_use_the_closest_pair_of_the_new_rows(
    stream: str, lists: str
) -> None:
    rng = np.random.default_rng(STREAMS.index(stream))
    z_ND = unit_rows(rng, stream, 400, 5)
    memory = WorkingMemory(30, 5, MinimumRedundancy())
    for start in range(0, 400, 10):
        memory.add(torch.arange(start, start + 10), z_ND[start : start + 10])
        slots = torch.from_numpy(rng.permutation(len(memory))[:7])
        memory.refresh(slots, unit_rows(rng, stream, 7, 5))
        assert memory.check_valid() == (True, "")
        if len(memory) == 30:
            held = [naive.Sample(z_D, -1, 0) for z_D in memory.embeddings.clone()]
            admission = memory.add(torch.tensor([start + 1000]), z_ND[start : start + 1])
            assert int(admission.slots) in naive.minimum_redundancy(held, held[0])


@pytest.mark.parametrize("stream", [*STREAMS, "copies"])
def test_float32_rows_are_evicted_from_a_closest_pair_up_to_rounding(stream: str) -> None:
    """This includes hundreds of bit-equal copies, many more than a list has entries."""
    z_ND = unit_rows(np.random.default_rng(5), stream.replace("copies", "clustered"), 500, 16)
    if stream == "copies":
        z_ND[:80], z_ND[100:150] = z_ND[0], z_ND[1]
    memory = WorkingMemory(100, 16, MinimumRedundancy())
    judged(memory, z_ND.to(torch.float32), [100], 1e-5)


@pytest.mark.parametrize("kind", ["uniform", "one class"])
def test_thousands_of_equal_rows_cause_few_new_lists(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    write = minimum_redundancy.NeighbourLists.write

    def counted(lists: minimum_redundancy.NeighbourLists, *args: object) -> None:
        nonlocal made
        made += len(args) == 2  # a list made from cosines with all slots
        write(lists, *args)  # type: ignore[arg-type]

    z_ND = unit_rows(np.random.default_rng(1), kind, 2048 + 512, 16).to(torch.float32)
    z_ND[:2048] = z_ND[0]
    memory = WorkingMemory(2048, 16, MinimumRedundancy())
    memory.add(torch.arange(2048), z_ND[:2048])
    monkeypatch.setattr(minimum_redundancy.NeighbourLists, "write", counted)
    memory.add(torch.arange(512), z_ND[2048:])
    assert made < 512 / 4
    assert (memory.embeddings == z_ND[0]).all(dim=1).sum() == 2048 - 512


def test_check_valid_finds_a_planted_row() -> None:
    memory = WorkingMemory(20, 4, MinimumRedundancy())
    memory.add(torch.arange(40), unit_rows(np.random.default_rng(2), "uniform", 40, 4))
    memory.embeddings[7] = memory.embeddings[3]
    ok, reason = memory.check_valid()
    assert not ok
    assert "not as listed" in reason or "missing" in reason


def test_the_published_step_drops_the_nearest_one_by_one() -> None:
    rng = np.random.default_rng(4)
    # Sixteenths have cosines without rounding, so both cosines of a pair are equal.
    z_KD, x_BD = ((16 * unit_rows(rng, "clustered", count, 6)).round() / 16 for count in (30, 12))
    left = list(torch.cat([z_KD, x_BD]))
    while len(left) > 30:
        nearest = [
            max(float(a @ b) for j, b in enumerate(left) if j != i) for i, a in enumerate(left)
        ]
        left.pop(nearest.index(max(nearest)))
    assert torch.equal(published_step(z_KD, x_BD), torch.stack(left))


def test_redundancy_equals_a_loop_and_falls_as_the_memory_evicts() -> None:
    rng = np.random.default_rng(6)
    z_ND = unit_rows(rng, "clustered", 600, 8)
    memory = WorkingMemory(64, 8, MinimumRedundancy())
    memory.add(torch.arange(64), z_ND[:64])
    before = redundancy(memory.embeddings)
    rows = list(memory.embeddings)
    loop = [max(float(a @ b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]
    assert before == pytest.approx(sum(loop))
    for start in range(64, 600, 67):
        memory.add(torch.arange(start, start + 67), z_ND[start : start + 67])
    assert redundancy(memory.embeddings) < 0.96 * before
    assert redundancy(torch.ones(1, 1)) == 0
