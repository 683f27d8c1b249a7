"""An index of the slots' rows, which change with every batch, for nearest-neighbour search.

A small memory compares all rows. In a large memory on a CPU, faiss sorts the rows into cells, and
each query compares only the cells around it.

Shapes: A size of a row, B queries, C cells, K slots, n neighbours.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.compute import columns_at_a_time
from stream_ssl.memory.index import HAVE_FAISS, load_faiss

CELL_ROWS: Final = 16_384
"""The number of slots from which cells are faster than a comparison of all rows."""

PROBES: Final = 8
"""The number of cells that a query searches.

With 65,536 keys of CIFAR-10 in 1,024 cells, 3,464 queries missed 1 in 1,100 of the neighbours
within reach.
"""

_CODES_PER_UNIT = 28  # values from -4.5 to 4.5 become codes of 8 bits; faiss scans the codes
_SPARE = 4  # rows found by their codes, besides the wanted ones; exact distances choose among them
_FITTED = 32  # rows per cell in the fit
_ROUNDS = 4  # rounds of k-means


class SlotIndex:
    """An index that finds the slots whose rows are nearest to a query, by squared distance.

    Cells are fitted to the rows held at that time. They are fitted again after four times as many
    changes as there were rows, or when there are four times as many rows.

    Args:
        capacity: K.
        dim: A.
        device: the device of the rows.

    Cells hold codes of 8 bits, which a query compares in 60 % of the time of 16-bit floats. The
    exact distances of the rows found by their codes give the answer.
    """

    def __init__(self, capacity: int, dim: int, device: torch.device) -> None:
        self.device = device
        self._row_KA = torch.zeros(capacity, dim, dtype=torch.float32, device=device)
        self._held = 0
        self._by_cells = HAVE_FAISS and device.type == "cpu"
        self._cells: Any = None
        self._changes_left = 0  # changes until the cells are fitted again

    def __len__(self) -> int:
        """Return the number of slots up to the last slot with a row."""
        return self._held

    def put(self, slot_N: Tensor, row_NA: Tensor, held: int | None = None) -> None:
        """Set the rows of these slots, each slot at most once.

        Args:
            slot_N: int64, below K. Slots are filled from 0 on without a gap.
            row_NA: float32, finite.
            held: the number of slots that are filled then, if the caller knows it. A GPU would
                otherwise be waited for.
        """
        if not len(slot_N):
            return
        self._row_KA[slot_N] = row_NA
        before = self._held
        self._held = max(before, int(slot_N.max()) + 1) if held is None else held
        if not self._by_cells:
            return
        if self._cells is not None:
            replaced = slot_N[slot_N < before].numpy()
            self._cells.remove_ids(load_faiss().IDSelectorArray(replaced))
            self._insert(slot_N, row_NA)
            self._changes_left -= len(replaced)
            if self._changes_left > 0 and _cells_for(self._held) <= 2 * self._cells.nlist:
                return
        if self._held >= CELL_ROWS:
            self._make_cells()

    def nearest(self, query_BA: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the n nearest rows of each query, nearest first.

        Returns:
            Squared distances, float32 [B, n], infinite if fewer rows are known, and the slots,
            int64 [B, n].
        """
        if self._cells is not None:
            near_Bp, cell_Bp = self._nearest_cells(query_BA, PROBES)
            code_BA, cells = _codes(query_BA).numpy(), cell_Bp.numpy()
            found = self._cells.search_preassigned(code_BA, n + _SPARE, cells, near_Bp.numpy())
            slot_Bm = torch.from_numpy(found[1])
            gap_BmA = self._row_KA[slot_Bm.clamp(min=0)] - query_BA[:, None]
            square_Bm = gap_BmA.square_().sum(dim=2).masked_fill_(slot_Bm < 0, torch.inf)
            square_Bn, place_Bn = torch.topk(square_Bm, n, dim=1, largest=False)
            return square_Bn, slot_Bm.gather(1, place_Bn).clamp_(min=0)
        return nearest_rows(query_BA, self._row_KA[: self._held], n)

    def _make_cells(self) -> None:
        row_KA = self._row_KA[: self._held].numpy()
        count = _cells_for(len(row_KA))
        drawn = np.random.default_rng(0).permutation(len(row_KA))[: count * _FITTED]
        centres = load_faiss().Kmeans(
            row_KA.shape[1],
            count,
            niter=_ROUNDS,
            seed=0,
            min_points_per_centroid=1,
            max_points_per_centroid=_FITTED,
        )
        centres.train(row_KA[drawn])
        self._fill(torch.from_numpy(centres.centroids.copy()))
        self._changes_left = 4 * len(row_KA)

    def _nearest_cells(self, row_BA: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the n nearest cells of each row, [B, n], in any order, with their distances.

        torch finds them in half of the time that faiss takes. A distance is the squared distance
        minus the row's own square.
        """
        far_BC = torch.addmm(self._square_C, row_BA, self._centre_CA.T, alpha=-2)
        if n == 1:
            nearest = torch.min(far_BC, dim=1, keepdim=True)
            return nearest.values, nearest.indices
        best = torch.topk(far_BC, min(n, far_BC.shape[1]), dim=1, largest=False, sorted=False)
        return best.values, best.indices

    def _insert(self, slot_N: Tensor, row_NA: Tensor) -> None:
        """Add slots to the cells of their rows."""
        _, cell_N1 = self._nearest_cells(row_NA, 1)
        arrays = [it.contiguous().numpy() for it in (_codes(row_NA), slot_N, cell_N1)]
        self._cells.add_core(len(slot_N), *map(load_faiss().swig_ptr, arrays))

    def _fill(self, centre_CA: Tensor) -> None:
        dim = centre_CA.shape[1]
        self._centre_CA, self._square_C = centre_CA, centre_CA.square().sum(dim=1)
        self._of_cells = load_faiss().IndexFlatL2(dim)  # faiss does not keep a reference
        self._of_cells.add(centre_CA.numpy())
        codes, metric = load_faiss().ScalarQuantizer.QT_8bit_direct, load_faiss().METRIC_L2
        cells = load_faiss().IndexIVFScalarQuantizer(
            self._of_cells, dim, len(centre_CA), codes, metric, False
        )
        cells.is_trained = True
        cells.set_direct_map_type(load_faiss().DirectMap.Hashtable)  # needed for removals
        cells.nprobe = PROBES
        self._cells = cells
        for slot_N in torch.split(torch.arange(self._held), CELL_ROWS):
            self._insert(slot_N, self._row_KA[slot_N])

    def state(self) -> dict[str, Tensor]:
        """Return the cells' centres, which are needed besides the rows for the same results."""
        if self._cells is None:
            return {}
        return {"centres": self._centre_CA, "changes_left": torch.tensor(self._changes_left)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the cells of `state`, if it has any.

        Then call `put` with the rows of all slots.
        """
        if self._by_cells and state:
            self._fill(state["centres"].to("cpu", torch.float32))
            self._changes_left = int(state["changes_left"])


def _codes(row_NA: Tensor) -> Tensor:
    """Return rows as the whole numbers that 8 bits hold, float32 [N, A]."""
    return (row_NA * _CODES_PER_UNIT + 128.5).clamp_(0, 255).floor_()


def _cells_for(rows: int) -> int:
    return 1 << round(math.log2(4 * math.sqrt(rows)))


def nearest_rows(query_BA: Tensor, row_KA: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the same as `SlotIndex.nearest`, by comparing each query with all rows.

    >>> square, row = nearest_rows(torch.eye(2)[:1], torch.eye(2), 2)
    >>> square.tolist(), row.tolist()
    ([[0.0, 2.0]], [[0, 1]])
    """
    count = len(query_BA)
    square_Bn = query_BA.new_full((count, n), torch.inf)
    row_Bn = torch.zeros(count, n, dtype=torch.int64, device=query_BA.device)
    step = max(n, columns_at_a_time(count, query_BA.device))
    own_B1 = query_BA.square().sum(dim=1, keepdim=True)
    for start in range(0, len(row_KA), step):
        part_bA = row_KA[start : start + step]
        square_Bb = torch.addmm(part_bA.square().sum(dim=1) + own_B1, query_BA, part_bA.T, alpha=-2)
        found = torch.topk(square_Bb, min(n, len(part_bA)), dim=1, largest=False)
        best = torch.topk(torch.cat([square_Bn, found.values], dim=1), n, dim=1, largest=False)
        row_Bn = torch.cat([row_Bn, start + found.indices], dim=1).gather(1, best.indices)
        square_Bn = best.values
    return square_Bn.clamp_(min=0), row_Bn
