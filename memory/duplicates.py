"""The test for near-duplicates at admission, and its answer: by a cosine, or by a close look.

Shapes: B newcomers, A descriptor, k occupied slots, T newcomers compared at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory.checks import check_number
from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import columns_at_a_time, to_device, to_host
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.scores import BLOCK_ELEMENTS

NOBODY = -1

Action = Literal["count", "refuse", "merge"]


@dataclass(frozen=True)
class Duplicates:
    """A test for near-duplicates. It runs before the eviction policy is asked.

    A newcomer is a duplicate if its cosine is at least `threshold`, to rounding, with a slot held
    when the batch began, even one that is evicted in the course of the batch, or with an earlier
    newcomer of the batch that this test let in, even one that the policy refuses.

    Args:
        threshold: a cosine of descriptors in (-1, 1]; 1 finds equal rows only. Or "auto": pictures
            are compared closely (memory/near_duplicates.py), which means the same for all pictures.
        action: "count" only counts duplicates and lets them in; "refuse" refuses them; "merge"
            refuses them and raises by one the multiplicity of the slot that each resembles most
            (the lowest of those within rounding, held slots before newcomers). Where that slot's
            sample leaves in the course of the batch, its multiplicity leaves with it.

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=4, dim=2, duplicates=Duplicates(action="merge"))
    >>> admission = memory.add(torch.arange(3), torch.eye(2)[[0, 1, 0]])
    >>> admission.refused.tolist(), memory.multiplicity.tolist()
    ([2], [2, 1])
    """

    threshold: float | Literal["auto"] = 0.98
    action: Action = "count"

    def __post_init__(self) -> None:
        if self.threshold != "auto":
            if not -1 < check_number("threshold", self.threshold) <= 1:
                raise ValueError(f"threshold is {self.threshold}: a cosine above -1 and at most 1")
            object.__setattr__(self, "threshold", float(self.threshold))
        if self.action not in ("count", "refuse", "merge"):
            raise ValueError(f'action is {self.action!r}: choose "count", "refuse" or "merge"')

    def find(self, x_BA: Tensor, row_kA: Tensor, group: RankGroup = SINGLE_PROCESS) -> Found:
        """Return the duplicates by cosine among newcomers, decided in turn.

        Args:
            x_BA: descriptors of newcomers, the same on every rank.
            row_kA: those that this rank holds.
            group: the ranks; on several of them nothing is merged.
        """
        assert isinstance(self.threshold, float)
        count, k, x_BA = len(x_BA), len(row_kA), normalize(x_BA, dim=1)
        unit = 1e-12 if x_BA.dtype == torch.float64 else 1e-6
        most_B, slot_B = closest(x_BA, row_kA, unit)
        most_B = group.all_reduce_max(most_B)
        cosine_B = to_host(most_B).numpy()
        found = Found(k, cosine_B >= self.threshold - unit)
        if self.action == "merge":
            found.twin_B = np.where(found.duplicate_B, to_host(slot_B).numpy(), NOBODY)
        if self.action != "count":
            found.let_in_B = ~found.duplicate_B
        step = max(1, BLOCK_ELEMENTS // max(1, count))
        for start in range(0, count, step):
            near_Tb = x_BA[start : start + step] @ x_BA[: start + step].T
            self._among(found, start, to_host(near_Tb).numpy(), cosine_B, unit)
        return found

    def _among(
        self, found: Found, start: int, near_Tb: NDArray[Any], cosine_B: NDArray[Any], unit: float
    ) -> None:
        """Compare newcomers from `start` on with those before them. Only rows that are close to
        any earlier one are looked at singly.
        """
        assert isinstance(self.threshold, float)
        close_Tb = near_Tb >= self.threshold - unit
        close_Tb &= np.tri(len(close_Tb), close_Tb.shape[1], start - 1, dtype=bool)
        if self.action == "count":  # all are let in, so nothing hangs on the order
            found.duplicate_B[start : start + len(close_Tb)] |= close_Tb.any(axis=1)
            return
        for row in np.flatnonzero(close_Tb.any(axis=1)).tolist():
            turn = start + row
            close = close_Tb[row, :turn] & found.let_in_B[:turn]
            if not close.any():
                continue
            found.duplicate_B[turn] = True
            found.let_in_B[turn] = False
            cosine = np.where(close, near_Tb[row, :turn], -np.inf)
            if self.action == "merge" and cosine.max() > cosine_B[turn] + unit:
                found.twin_B[turn] = found.held + int((cosine >= cosine.max() - unit).argmax())


class Found:
    """Which newcomers are duplicates by the test, and which of them were let in.

    Args:
        held: k when the batch began.
        duplicate_B: of a held slot, bool [B].

    Attributes:
        twin_B: int64 [B], a slot below k, or k + the turn of a newcomer; -1 for no merge.
        distance_B: to the nearest candidate, where pictures were compared closely; infinite where
            there was none.
        nearest_B: int64 [B], that candidate; -1 where it is unknown.
    """

    def __init__(self, held: int, duplicate_B: NDArray[np.bool_]) -> None:
        self.held, self.duplicate_B = held, duplicate_B
        self.let_in_B: NDArray[np.bool_] = np.ones(len(duplicate_B), dtype=bool)
        self.twin_B: NDArray[np.int64] = np.full(len(duplicate_B), NOBODY)
        self.distance_B: NDArray[np.float32] | None = None
        self.nearest_B: NDArray[np.int64] = np.full(len(duplicate_B), NOBODY)

    def enter(self, rows: Rows, columns: Columns) -> Rows:
        """Return the newcomers that were let in. Each merged one raises its twin's multiplicity."""
        twins = self.twin_B[self.twin_B != NOBODY]
        if len(twins):
            more = torch.from_numpy(np.bincount(twins, minlength=self.held + len(rows)))
            more = to_device(more, columns.device)
            columns.multiplicity[: self.held] += more[: self.held]
            rows = replace(rows, multiplicity=1 + more[self.held :])
        return rows if self.let_in_B.all() else rows[torch.from_numpy(self.let_in_B)]

    def merged(self, slot_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each newcomer merged the slot of its twin; -1 where that has left.

        Args:
            slot_B: where each newcomer stands now; -1: nowhere.
        """
        twins = self.twin_B[self.twin_B != NOBODY]
        # A slot that was overwritten holds a newcomer of this batch now.
        stays = np.where(np.isin(twins, slot_B), NOBODY, twins)
        return np.where(twins < self.held, stays, slot_B[np.maximum(twins - self.held, 0)])


def closest(x_BA: Tensor, row_kA: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """The largest cosine of each unit row with a slot [B], and that slot int64 [B]; the lowest
    where others are within about `unit` of it. -inf and slot 0 where no slot is held.
    """
    most_B = x_BA.new_full((len(x_BA),), -torch.inf)
    slot_B = torch.zeros(len(x_BA), dtype=torch.int64, device=x_BA.device)
    step = columns_at_a_time(len(x_BA), x_BA.device)
    for start in range(0, len(row_kA), step):
        near_Bb = x_BA @ normalize(row_kA[start : start + step], dim=1).T
        here_B = near_Bb.amax(dim=1)
        lowest_B = start + (near_Bb >= (here_B - unit)[:, None]).to(torch.uint8).argmax(dim=1)
        slot_B = torch.where(here_B > most_B + unit, lowest_B, slot_B)
        most_B = torch.maximum(most_B, here_B)
    return most_B, slot_B
