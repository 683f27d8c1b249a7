"""Near-duplicates among newcomers: counted, refused, or merged into what they resemble.

Shapes: B newcomers, D embedding, k occupied slots, T newcomers compared at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.admission import Admission
from memory.arguments import check_number
from memory.blocks import columns_at_a_time
from memory.columns import Columns, Rows
from memory.scores import BLOCK_ELEMENTS

NOBODY = -1


@dataclass(frozen=True)
class Duplicates:
    """A test at admission, before the eviction policy is asked.

    A newcomer is a duplicate if its cosine is at least `threshold`, to rounding, with a slot held
    when the batch began, even one that is evicted in the course of the batch, or with an earlier
    newcomer of the batch that this test let in, even one that the policy refuses.

    Args:
        threshold: in (-1, 1]. 1 finds equal rows only.
        action: "count" only counts duplicates and lets them in; "refuse" refuses them; "merge"
            refuses them and raises by one the multiplicity of the slot that each resembles most
            (the lowest of those within rounding, held slots before newcomers). Where that slot's
            sample leaves in the course of the batch, its multiplicity leaves with it.

    >>> from memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=4, dim=2, duplicates=Duplicates(action="merge"))
    >>> admission = memory.add(torch.arange(3), torch.eye(2)[[0, 1, 0]])
    >>> admission.refused.tolist(), memory.multiplicity.tolist()
    ([2], [2, 1])
    """

    threshold: float = 0.98
    action: Literal["count", "refuse", "merge"] = "count"

    def __post_init__(self) -> None:
        if not -1 < check_number("threshold", self.threshold) <= 1:
            raise ValueError(f"threshold is {self.threshold}: a cosine above -1 and at most 1")
        object.__setattr__(self, "threshold", float(self.threshold))
        if self.action not in ("count", "refuse", "merge"):
            raise ValueError(f'action is {self.action!r}: choose "count", "refuse" or "merge"')

    def find(self, x_BD: Tensor, z_kD: Tensor) -> Found:
        """The duplicates among newcomers, decided in turn, against these held rows."""
        count, k = len(x_BD), len(z_kD)
        unit = 1e-12 if x_BD.dtype == torch.float64 else 1e-6
        most_B, slot_B = closest(x_BD, z_kD, unit)
        cosine_B = most_B.cpu().numpy()
        found = Found(k, cosine_B >= self.threshold - unit)
        if self.action == "merge":
            found.twin_B = np.where(found.duplicate_B, slot_B.cpu().numpy(), NOBODY)
        if self.action != "count":
            found.let_in_B = ~found.duplicate_B
        step = max(1, BLOCK_ELEMENTS // max(1, count))
        for start in range(0, count, step):
            near_Tb = x_BD[start : start + step] @ x_BD[: start + step].T
            self._among(found, start, near_Tb.cpu().numpy(), cosine_B, unit)
        return found

    def _among(
        self, found: Found, start: int, near_Tb: NDArray[Any], cosine_B: NDArray[Any], unit: float
    ) -> None:
        """Compare newcomers from `start` on with those before them. Only rows that are close to
        any earlier one are looked at singly.
        """
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
    """Which newcomers are duplicates, which were let in, and what those merged resemble most.

    Args:
        held: k when the batch began.
        duplicate_B: of a held slot, bool [B].

    Attributes:
        twin_B: int64 [B], a slot below k, or k + the turn of a newcomer; -1 for no merge.
    """

    def __init__(self, held: int, duplicate_B: NDArray[np.bool_]) -> None:
        self.held, self.duplicate_B = held, duplicate_B
        self.let_in_B: NDArray[np.bool_] = np.ones(len(duplicate_B), dtype=bool)
        self.twin_B: NDArray[np.int64] = np.full(len(duplicate_B), NOBODY)

    def enter(self, rows: Rows, columns: Columns) -> Rows:
        """Those let in, with the multiplicity of what merged into them; held slots get theirs."""
        twins = self.twin_B[self.twin_B != NOBODY]
        if len(twins):
            more = torch.from_numpy(np.bincount(twins, minlength=self.held + len(rows)))
            more = more.to(columns.device)
            columns.multiplicity[: self.held] += more[: self.held]
            rows = replace(rows, multiplicity=1 + more[self.held :])
        return rows if self.let_in_B.all() else rows[torch.from_numpy(self.let_in_B)]

    def report(self, ids: Tensor, admission: Admission, joined: Tensor) -> Admission:
        """The admission of those let in as one of all newcomers.

        Args:
            ids: of all newcomers [B].
            admission: of those let in.
            joined: bool, of those let in: the policy took them.
        """
        turn = np.flatnonzero(self.let_in_B)
        slots = np.full(len(self.let_in_B), NOBODY)
        slots[turn] = admission.slots.numpy()
        out_B = np.ones(len(slots), dtype=bool)
        out_B[turn[joined.numpy()]] = False
        twins = self.twin_B[self.twin_B != NOBODY]
        # A slot that was overwritten holds a newcomer of this batch now.
        was_held = (twins < self.held) & ~np.isin(twins, slots)
        of_batch = np.maximum(twins - self.held, 0)
        ids_B = ids.cpu()
        return replace(
            admission,
            slots=torch.from_numpy(slots),
            refused=ids_B[torch.from_numpy(out_B)],
            duplicates=ids_B[torch.from_numpy(self.duplicate_B)],
            merged=torch.from_numpy(
                np.where(was_held, twins, np.where(twins < self.held, NOBODY, slots[of_batch]))
            ),
        )


def closest(x_BD: Tensor, z_kD: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """The largest cosine of each row with a slot [B], and that slot int64 [B]; the lowest where
    others are within about `unit` of it. -inf and slot 0 where no slot is held.
    """
    most_B = x_BD.new_full((len(x_BD),), -torch.inf)
    slot_B = torch.zeros(len(x_BD), dtype=torch.int64, device=x_BD.device)
    step = columns_at_a_time(len(x_BD), x_BD.device)
    for start in range(0, len(z_kD), step):
        near_Bb = x_BD @ z_kD[start : start + step].T
        here_B = near_Bb.amax(dim=1)
        row = (here_B > most_B + unit).nonzero()[:, 0]
        tied_Rb = near_Bb[row] >= (here_B[row] - unit)[:, None]
        slot_B[row] = start + tied_Rb.to(torch.uint8).argmax(dim=1)
        most_B = torch.maximum(most_B, here_B)
    return most_B, slot_B
