"""An index over the embedding column for memories too large to search row by row.

Approximate: a search looks only into the cells nearest to the query. `memory.nearest` is exact.

Shapes: B queries, C cells, D embedding, K slots, N rows, R pairs, k neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.arguments import check_count, check_number
from memory.by_faiss import CellsByFaiss, serves
from memory.clusters import cells_of, kmeans
from memory.nearest import check_queries, nearest

FIT_LOST = 0.05
"""Train anew once the mean cosine of rows with their centre is so much lower than at training."""

CROWDED = 4
"""Or once the largest cell is so many times larger than the largest at training."""


class CellIndex:
    """Slots of a column grouped into cells by k-means; searches look into a few cells.

    The index keeps copies of the rows: after a row is overwritten, `add` its slot again.

    Args:
        row_KD: the column, unit rows; read at `add` and `train`.
        cells: C; fewer where the column holds fewer rows at training.
        probe: cells that a search looks into, at least 1; all cells make it exact.
        seed: of the clustering.
        faiss: whether faiss searches; None: where it can.

    >>> column = torch.eye(4)
    >>> index = CellIndex(column, cells=2, probe=2)
    >>> index.train(torch.arange(4))
    >>> index.search(column[2:3], k=1)[1].tolist()
    [[2]]
    """

    def __init__(
        self,
        row_KD: Tensor,
        cells: int,
        probe: int = 8,
        seed: int = 0,
        faiss: bool | None = None,
    ) -> None:
        check_count("cells", cells, least=1)
        check_count("probe", probe, least=1)
        able = serves(row_KD) and row_KD.device.type == "cpu"
        if faiss and not able:
            raise ValueError(
                f"faiss cannot index {row_KD.dtype} on {row_KD.device} here: it takes float32 on "
                "the CPU and must be installed (pip install faiss-cpu)"
            )
        self._row_KD, self._cells, self._probe, self._seed = row_KD, cells, probe, seed
        self._by_faiss = able if faiss is None else faiss
        self._cell_K = torch.full((len(row_KD),), -1, device=row_KD.device)
        self._cosine_K = torch.zeros(len(row_KD), device=row_KD.device)
        self._centre_CD: Tensor | None = None
        self._held: CellsByFaiss | CellsByTorch | None = None
        self._fit_trained, self._crowd_trained = 0.0, 0

    def __len__(self) -> int:
        return int((self._cell_K >= 0).sum())

    @property
    def slots(self) -> Tensor:
        """Slots held, int64, in rising order."""
        return (self._cell_K >= 0).nonzero()[:, 0]

    def train(self, slots: Tensor | None = None) -> None:
        """Fit the cells to these slots, and hold them alone; those held where None.

        Raises:
            ValueError: no slots to train on.
        """
        slots = self.slots if slots is None else slots
        if len(slots) == 0:
            raise ValueError("an index needs rows to train on: name at least one slot")
        centre_CD, _ = kmeans(self._row_KD[slots], self._cells, self._seed)
        self._start(centre_CD)
        self.add(slots)
        self._fit_trained, self._crowd_trained = self.fit(), self._largest()

    def _start(self, centre_CD: Tensor) -> None:
        self._centre_CD = centre_CD
        self._held = CellsByFaiss(centre_CD) if self._by_faiss else CellsByTorch(centre_CD)
        self._cell_K.fill_(-1)

    def add(self, slots: Tensor) -> None:
        """Take the rows that stand in these slots now, distinct ones, held before or not."""
        if self._held is None or self._centre_CD is None:
            self.train(slots)
            return
        self.remove(slots)
        z_ND = self._row_KD[slots]
        self._held.add(slots, z_ND)
        cell_N = cells_of(z_ND, self._centre_CD)
        self._cell_K[slots] = cell_N
        self._cosine_K[slots] = (z_ND * self._centre_CD[cell_N]).sum(dim=1).to(torch.float32)

    def remove(self, slots: Tensor) -> None:
        """Give up these slots; those not held are passed over."""
        known = slots[self._cell_K[slots] >= 0]
        if self._held is not None:
            self._held.remove(known)
        self._cell_K[known] = -1

    def search(self, z_BD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The nearest slots found for each query, the nearest first.

        Returns:
            cosine [B, k] and slot int64 [B, k]; -inf and -1 where fewer were found.
        """
        check_count("k", k, least=1)
        check_queries(z_BD, self._row_KD)
        if self._held is None:
            none_Bk = torch.full((len(z_BD), k), -1, device=z_BD.device)
            return torch.full((len(z_BD), k), -torch.inf, device=z_BD.device), none_Bk
        return self._held.search(z_BD, k, self._probe)

    def within(self, z_BD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs found whose cosine is at least `cosine`: query, slot and cosine, each [R]."""
        check_number("cosine", cosine)
        check_queries(z_BD, self._row_KD)
        if self._held is None:
            nothing = torch.empty(0, dtype=torch.int64, device=z_BD.device)
            return nothing, nothing, torch.empty(0, device=z_BD.device)
        return self._held.within(z_BD, cosine, self._probe)

    def fit(self) -> float:
        """Mean cosine of the rows held with the centre of their cell; 0 where there are none."""
        held_K = self._cell_K >= 0
        return float(self._cosine_K[held_K].mean()) if bool(held_K.any()) else 0.0

    def _largest(self) -> int:
        held = self._cell_K[self._cell_K >= 0]
        return int(torch.bincount(held).max()) if len(held) else 0

    @property
    def outdated(self) -> bool:
        """Whether rows have moved so far from the centres, or into so few cells, that `train`
        would pay."""
        if self._held is None:
            return False
        lost = self.fit() < self._fit_trained - FIT_LOST
        return len(self) > 0 and (lost or self._largest() > CROWDED * self._crowd_trained)

    def state(self) -> dict[str, Tensor]:
        """What `load` needs beside the column."""
        centre_CD = torch.zeros(0, self._row_KD.shape[1])
        trained = torch.tensor([self._fit_trained, self._crowd_trained], dtype=torch.float64)
        return {
            "centres": centre_CD if self._centre_CD is None else self._centre_CD.clone().cpu(),
            "cells": self._cell_K.clone().cpu(),
            "cosines": self._cosine_K.clone().cpu(),
            "trained": trained,
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a state; the column holds the rows it was saved beside."""
        device = self._row_KD.device
        self._held = self._centre_CD = None
        self._cell_K.fill_(-1)
        if len(state["centres"]):
            self._start(state["centres"].to(device))
            self.add((state["cells"] >= 0).nonzero()[:, 0].to(device))
        self._cell_K, self._cosine_K = state["cells"].to(device), state["cosines"].to(device)
        self._fit_trained = float(state["trained"][0])
        self._crowd_trained = int(state["trained"][1])


class CellsByTorch:
    """Rows by id in cells, a tensor a cell; twin of `CellsByFaiss` for any device and dtype."""

    def __init__(self, centre_CD: Tensor) -> None:
        self._centre_CD = centre_CD
        self._ids: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return sum(len(ids) for ids in self._ids.values())

    def add(self, ids_N: Tensor, z_ND: Tensor) -> None:
        cell_N = cells_of(z_ND, self._centre_CD) if len(ids_N) else ids_N
        for cell in torch.unique(cell_N).tolist():
            chosen_N = cell_N == cell
            old_ids, old_rows = self._ids.get(cell, ids_N[:0]), self._rows.get(cell, z_ND[:0])
            self._ids[cell] = torch.cat([old_ids, ids_N[chosen_N]])
            self._rows[cell] = torch.cat([old_rows, z_ND[chosen_N]])

    def remove(self, ids_N: Tensor) -> None:
        for cell, ids in self._ids.items():
            stay = ~torch.isin(ids, ids_N)
            self._ids[cell], self._rows[cell] = ids[stay], self._rows[cell][stay]

    def search(self, z_BD: Tensor, k: int, probe: int) -> tuple[Tensor, Tensor]:
        cosine_Bk = torch.full((len(z_BD), k), -torch.inf, dtype=z_BD.dtype, device=z_BD.device)
        id_Bk = torch.full((len(z_BD), k), -1, device=z_BD.device)
        for query_b, ids_N, cosine_bN in self._visits(z_BD, probe):
            both_bM = torch.cat([cosine_Bk[query_b], cosine_bN], dim=1)
            ids_bM = torch.cat([id_Bk[query_b], ids_N.expand(len(query_b), -1)], dim=1)
            top = both_bM.topk(k, dim=1)
            cosine_Bk[query_b], id_Bk[query_b] = top.values, ids_bM.gather(1, top.indices)
        return cosine_Bk, id_Bk

    def within(self, z_BD: Tensor, cosine: float, probe: int) -> tuple[Tensor, Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for query_b, ids_N, cosine_bN in self._visits(z_BD, probe):
            at_b, at_N = (cosine_bN >= cosine).nonzero(as_tuple=True)
            found.append((query_b[at_b], ids_N[at_N], cosine_bN[at_b, at_N]))
        nothing = torch.empty(0, dtype=torch.int64, device=z_BD.device)
        found.append((nothing, nothing, z_BD.new_empty(0)))
        query_R, id_R, cosine_R = (torch.cat(part) for part in zip(*found, strict=True))
        order = torch.argsort(id_R, stable=True)
        order = order[torch.argsort(query_R[order], stable=True)]
        return query_R[order], id_R[order], cosine_R[order]

    def _visits(self, z_BD: Tensor, probe: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each cell that holds rows: the queries that look into it, its ids, the cosines."""
        if len(z_BD) == 0:
            return []
        _, probed_Bp = nearest(z_BD.to(torch.float32), self._centre_CD, probe)
        visits = []
        for cell, ids_N in self._ids.items():
            query_b = (probed_Bp == cell).any(dim=1).nonzero()[:, 0]
            if len(query_b) and len(ids_N):
                visits.append((query_b, ids_N, z_BD[query_b] @ self._rows[cell].T))
        return visits
