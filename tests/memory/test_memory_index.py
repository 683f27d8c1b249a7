"""The index over the column: faiss, its torch twin and a search of every row agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory.by_faiss import HAVE_FAISS
from memory.index import CellIndex
from tests.naive import unit_rows
from tests.naive_index import EveryRow

ENGINES = [False, pytest.param(True, marks=pytest.mark.skipif(not HAVE_FAISS, reason="no faiss"))]


def rows(kind: str, count: int, seed: int = 0) -> Tensor:
    return unit_rows(np.random.default_rng(seed), kind, count, 16).to(torch.float32)


@pytest.mark.parametrize("faiss", ENGINES)
@pytest.mark.parametrize("kind", ["uniform", "clustered", "duplicates"])
def test_with_all_cells_probed_it_finds_what_every_row_gives(kind: str, faiss: bool) -> None:
    """Rows come, go and are overwritten; after each the answers are the twin's."""
    rng = np.random.default_rng(1)
    column_KD = rows(kind, 300)
    index, naive = CellIndex(column_KD, cells=12, probe=12, faiss=faiss), EveryRow()
    index.train(torch.arange(200))
    naive.add(list(range(200)), column_KD[:200])
    for turn in range(4):
        gone = rng.choice(200, size=20, replace=False)
        index.remove(torch.from_numpy(gone))
        naive.remove([one for one in gone.tolist() if one in naive.row])
        fresh = torch.from_numpy(rng.choice(300, size=40, replace=False))
        column_KD[fresh] = rows("uniform", 40, seed=turn)
        index.add(fresh)
        naive.add(fresh.tolist(), column_KD[fresh])
        assert index.slots.tolist() == sorted(naive.row)
        query_BD = rows("uniform", 9, seed=turn + 50)
        cosine_Bk, slot_Bk = index.search(query_BD, k=5)
        for z_D, cosine_k, slot_k in zip(query_BD, cosine_Bk, slot_Bk, strict=True):
            expected = [cosine for cosine, _ in naive.search(z_D, 5)]
            assert cosine_k.tolist() == pytest.approx(expected, abs=1e-6)
            assert (column_KD[slot_k] @ z_D).tolist() == pytest.approx(expected, abs=1e-6)
        query_R, slot_R, _ = index.within(query_BD, 0.2)
        for b, z_D in enumerate(query_BD):
            assert set(slot_R[query_R == b].tolist()) == naive.within(z_D, 0.2)


@pytest.mark.skipif(not HAVE_FAISS, reason="faiss is an optional dependency")
@pytest.mark.parametrize("probe", [1, 3])
def test_both_engines_look_into_the_same_cells(probe: int) -> None:
    column_KD, query_BD = rows("clustered", 500), rows("clustered", 40, seed=7)
    by_faiss, by_torch = (
        CellIndex(column_KD, cells=20, probe=probe, faiss=faiss) for faiss in (True, False)
    )
    by_faiss.train(torch.arange(500))
    by_torch.load(by_faiss.state())
    cosine_f, slot_f = by_faiss.search(query_BD, 6)
    cosine_t, slot_t = by_torch.search(query_BD, 6)
    assert torch.allclose(cosine_f, cosine_t, atol=1e-6)
    assert torch.equal(slot_f, slot_t)
    for found_f, found_t in zip(
        by_faiss.within(query_BD, 0.2), by_torch.within(query_BD, 0.2), strict=True
    ):
        assert len(found_f) > 0
        assert torch.allclose(found_f.to(torch.float32), found_t.to(torch.float32), atol=1e-6)


@pytest.mark.parametrize("faiss", ENGINES)
def test_probing_more_cells_finds_more(faiss: bool) -> None:
    column_KD, query_BD = rows("uniform", 1000), rows("uniform", 60, seed=3)
    best = (query_BD @ column_KD.T).max(dim=1).indices
    recalls = []
    for probe in (1, 6, 30):
        index = CellIndex(column_KD, cells=30, probe=probe, faiss=faiss)
        index.train(torch.arange(1000))
        recalls.append(float((index.search(query_BD, 1)[1][:, 0] == best).float().mean()))
    assert recalls[0] < recalls[1] <= recalls[2] == 1.0
    assert recalls[1] > 0.5


@pytest.mark.parametrize("faiss", ENGINES)
def test_fewer_rows_than_asked_for_are_marked(faiss: bool) -> None:
    index = CellIndex(rows("uniform", 6), cells=2, probe=2, faiss=faiss)
    assert index.search(rows("uniform", 2), 3)[1].tolist() == [[-1] * 3] * 2
    assert [len(found) for found in index.within(rows("uniform", 2), 0.0)] == [0, 0, 0]
    index.add(torch.tensor([4, 1]))
    cosine_Bk, slot_Bk = index.search(rows("uniform", 1, seed=2), 4)
    assert set(slot_Bk[0].tolist()) == {4, 1, -1}
    assert cosine_Bk[0, 2:].tolist() == [-torch.inf, -torch.inf]
    index.remove(torch.tensor([4, 1, 3]))
    assert len(index) == 0
    assert index.search(rows("uniform", 1), 2)[1].tolist() == [[-1, -1]]


@pytest.mark.parametrize("faiss", ENGINES)
def test_it_is_outdated_once_the_rows_have_moved(faiss: bool) -> None:
    column_KD = rows("clustered", 400)
    index = CellIndex(column_KD, cells=16, faiss=faiss)
    index.train(torch.arange(400))
    index.add(torch.arange(100))
    assert not index.outdated
    fit = index.fit()
    column_KD[:300] = rows("uniform", 300, seed=5)
    index.add(torch.arange(300))
    assert index.fit() < fit - 0.05
    assert index.outdated
    index.train()
    assert not index.outdated
    assert len(index) == 400


def test_it_is_outdated_once_one_cell_holds_most() -> None:
    column_KD = rows("uniform", 400)
    index = CellIndex(column_KD, cells=16)
    index.train(torch.arange(400))
    column_KD[:] = column_KD[:1].clone()
    index.add(torch.arange(400))
    assert index.outdated


@pytest.mark.parametrize("faiss", ENGINES)
def test_a_state_answers_alike(faiss: bool) -> None:
    column_KD, query_BD = rows("clustered", 300), rows("clustered", 20, seed=8)
    index = CellIndex(column_KD, cells=9, probe=2, faiss=faiss)
    index.train(torch.arange(250))
    index.remove(torch.arange(30))
    again = CellIndex(column_KD, cells=9, probe=2, faiss=faiss)
    again.load(index.state())
    assert all(torch.equal(again.state()[name], value) for name, value in index.state().items())
    assert torch.equal(index.search(query_BD, 4)[0], again.search(query_BD, 4)[0])
    empty = CellIndex(column_KD, cells=9)
    again.load(empty.state())
    assert len(again) == 0


def test_float64_goes_through_torch() -> None:
    column_KD = rows("uniform", 50).to(torch.float64)
    index = CellIndex(column_KD, cells=4, probe=4)
    index.train(torch.arange(50))
    cosine_Bk, slot_Bk = index.search(column_KD[:3], 1)
    assert slot_Bk[:, 0].tolist() == [0, 1, 2]
    assert cosine_Bk.dtype == torch.float64


def test_errors_say_the_rule() -> None:
    column_KD = rows("uniform", 5)
    with pytest.raises(ValueError, match="cells is 0: must be at least 1"):
        CellIndex(column_KD, cells=0, probe=1)
    with pytest.raises(ValueError, match="pip install faiss-cpu"):
        CellIndex(column_KD.to(torch.float64), cells=1, faiss=True)
    with pytest.raises(ValueError, match="at least one slot"):
        CellIndex(column_KD, cells=1).train()
    with pytest.raises(ValueError, match="k is 0"):
        CellIndex(column_KD, cells=1).search(column_KD, 0)
