"""Tests of the nearest slots while their rows change.

Shapes: A of a row, B queries, K slots, n neighbours.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stream_ssl.memory.slot_index import SlotIndex, nearest_rows

A, N = 64, 4


def by_sorting(query_BA: Tensor, row_KA: Tensor) -> tuple[Tensor, Tensor]:
    square_BK = torch.cdist(query_BA.double(), row_KA.double()).square()
    return square_BK.sort(dim=1, stable=True)


def test_the_nearest_rows_equal_those_of_sorting_also_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query_BA, row_KA = torch.randn(9, A), torch.randn(101, A)
    expected, row = by_sorting(query_BA, row_KA)
    for columns in (1 << 20, 10):
        name = "stream_ssl.memory.slot_index.columns_at_a_time"
        monkeypatch.setattr(name, lambda *_, n=columns: n)
        square_Bn, row_Bn = nearest_rows(query_BA, row_KA, N)
        assert row_Bn.tolist() == row[:, :N].tolist()
        assert square_Bn.numpy() == pytest.approx(expected[:, :N].numpy(), rel=1e-4)


def test_missing_neighbours_are_infinitely_far() -> None:
    index = SlotIndex(8, A, torch.device("cpu"))
    index.put(torch.arange(2), torch.eye(A)[:2])
    square_Bn, slot_Bn = index.nearest(torch.eye(A)[:1], N)
    assert slot_Bn[0, :2].tolist() == [0, 1]
    assert square_Bn.tolist() == [[0.0, 2.0, torch.inf, torch.inf]]


def test_cells_follow_changed_slots_also_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows form clusters. A query finds rows of its own cluster, whatever was overwritten since."""
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 1000)
    generator = torch.Generator().manual_seed(0)
    centre_CA = torch.randn(300, A, generator=generator)

    def rows(count: int) -> Tensor:
        chosen = torch.randint(300, (count,), generator=generator)
        return centre_CA[chosen] + 0.1 * torch.randn(count, A, generator=generator)

    index, row_KA = SlotIndex(3000, A, torch.device("cpu")), torch.zeros(3000, A)
    made = []
    for turn in range(60):
        held = min(3000, 200 * (turn + 1))
        slot_N = torch.arange(held - 200, held)
        if turn >= 15:
            slot_N = torch.randperm(3000, generator=generator)[:200]
        row_KA[slot_N] = rows(200)
        index.put(slot_N, row_KA[slot_N])
        made.append(index.state()["centres"].data_ptr() if "centres" in index.state() else None)
        if turn == 40:
            other = SlotIndex(3000, A, torch.device("cpu"))
            other.load(index.state())
            other.put(torch.arange(3000), row_KA)
            index = other
        query_BA = rows(20)
        square_Bn, slot_Bn = index.nearest(query_BA, N)
        expected, _ = by_sorting(query_BA, row_KA[:held])
        near_Bn = expected[:, :N] < 10  # of the same cluster
        assert near_Bn.any()
        found_BnA = row_KA[slot_Bn] - query_BA[:, None]
        for square in (square_Bn, found_BnA.square().sum(dim=2)):
            assert square[near_Bn].numpy() == pytest.approx(
                expected[:, :N][near_Bn].numpy(), rel=1e-4
            )
    assert made[:4] == [None] * 4
    assert made[4] is not None


def test_cells_are_fitted_again_after_many_changes_also_across_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 1000)
    generator = torch.Generator().manual_seed(0)
    runs = []
    for stops in (False, True):
        generator.manual_seed(1)
        index, row_KA = SlotIndex(1000, A, torch.device("cpu")), torch.zeros(1000, A)
        centres = []
        for turn in range(30):
            slot_N = torch.arange(1000) if not turn else torch.arange(turn, turn + 250)
            row_KA[slot_N] = torch.randn(len(slot_N), A, generator=generator)
            index.put(slot_N, row_KA[slot_N])
            centres.append(index.state()["centres"].clone())
            if stops and turn % 7 == 3:
                state = index.state()
                index = SlotIndex(1000, A, torch.device("cpu"))
                index.load(state)
                index.put(torch.arange(1000), row_KA)
        runs.append(centres)
    changed = [turn for turn in range(1, 30) if not torch.equal(*runs[0][turn - 1 : turn + 1])]
    assert changed == [16]  # 4,000 changes
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
