"""The k-means cells of the memory, for stratified draws.

Shapes: C cells, D embedding, k occupied slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.clusters import cells_of, kmeans


class Strata:
    """Centres, found anew when as many rows have changed as there were the last time.

    In between, rows are assigned to the present centres at each draw. The centres are kept rather
    than the cells, so what a draw gives depends on the rows and on this state alone.

    Args:
        seed: of the clusterings; each has its own.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._centre_CD = torch.zeros(0, 0)
        self._wanted = self._changed = self._limit = self._times = 0

    def changed(self, rows: int) -> None:
        """So many rows were written or encoded anew."""
        self._changed += rows if self._wanted else 0

    def cells(self, z_kD: Tensor, cells: int) -> tuple[Tensor, int]:
        """The cell of each row, int64 [k], and how many cells there are: at most `cells`, and k."""
        if cells != self._wanted or self._changed >= self._limit:
            self._times += 1
            self._centre_CD, cell_k = kmeans(z_kD, cells, self.seed + self._times)
            self._wanted, self._changed, self._limit = cells, 0, len(z_kD)
            return cell_k, len(self._centre_CD)
        return cells_of(z_kD, self._centre_CD), len(self._centre_CD)

    def state(self) -> dict[str, Tensor]:
        numbers = [self._wanted, self._changed, self._limit, self._times, self.seed]
        return {"centres": self._centre_CD.clone(), "numbers": torch.tensor(numbers)}

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Take over what `state` gave; an empty one is that of a memory never drawn from."""
        self._centre_CD = state.get("centres", torch.zeros(0, 0)).clone().to(device)
        numbers = state["numbers"].tolist() if "numbers" in state else [0, 0, 0, 0, self.seed]
        self._wanted, self._changed, self._limit, self._times, self.seed = numbers
