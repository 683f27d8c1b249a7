"""The test for near-duplicates at admission, by cosine, and its result.

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
    """A test for near-duplicates, which runs before the eviction policy.

    A newcomer is a near-duplicate if its cosine reaches `threshold`, within rounding, with one of
    these:

    - a slot that was held when the batch began, even if the batch evicts it;
    - an earlier newcomer of the batch that passed this test, even if the policy refuses it.

    Args:
        threshold: a cosine of descriptors in (-1, 1]. 1 finds only equal rows. "auto" compares
            pictures in detail instead (memory/near_duplicates.py), with the same meaning for all
            kinds of pictures.
        action: "count" counts near-duplicates and admits them. "refuse" refuses them. "merge"
            refuses them and adds one to the multiplicity of the most similar slot. Within rounding
            the lowest slot wins, and held slots win over newcomers. If the batch evicts that slot's
            sample, its multiplicity is lost.

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
        """Find the near-duplicates among the newcomers by cosine, in order.

        Args:
            x_BA: descriptors of the newcomers, the same on every rank.
            row_kA: descriptors of the slots that this rank holds.
            group: the ranks. Several ranks cannot merge.
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
            found.admitted_B = ~found.duplicate_B
        step = max(1, BLOCK_ELEMENTS // max(1, count))
        for start in range(0, count, step):
            near_Tb = x_BA[start : start + step] @ x_BA[: start + step].T
            self._among(found, start, to_host(near_Tb).numpy(), cosine_B, unit)
        return found

    def _among(
        self, found: Found, start: int, near_Tb: NDArray[Any], cosine_B: NDArray[Any], unit: float
    ) -> None:
        """Compare the newcomers from `start` on with earlier newcomers of the batch.

        Only rows that are close to an earlier row are processed one at a time.
        """
        assert isinstance(self.threshold, float)
        close_Tb = near_Tb >= self.threshold - unit
        close_Tb &= np.tri(len(close_Tb), close_Tb.shape[1], start - 1, dtype=bool)
        if self.action == "count":  # all are admitted, so the order does not matter
            found.duplicate_B[start : start + len(close_Tb)] |= close_Tb.any(axis=1)
            return
        for row in np.flatnonzero(close_Tb.any(axis=1)).tolist():
            turn = start + row
            close = close_Tb[row, :turn] & found.admitted_B[:turn]
            if not close.any():
                continue
            found.duplicate_B[turn] = True
            found.admitted_B[turn] = False
            cosine = np.where(close, near_Tb[row, :turn], -np.inf)
            unmerged = found.twin_B[turn] == NOBODY
            if self.action == "merge" and (unmerged or cosine.max() > cosine_B[turn] + unit):
                found.twin_B[turn] = found.held + int((cosine >= cosine.max() - unit).argmax())


class Found:
    """The near-duplicates of a batch, and which newcomers the test admitted.

    Args:
        held: the number of occupied slots k when the batch began.
        duplicate_B: bool [B], True for near-duplicates of a held slot.

    Attributes:
        admitted_B: bool [B], True for newcomers that the test admitted.
        twin_B: int64 [B], the merge target: a slot below k, or k + the position of a newcomer; -1
            for no merge.
        distance_B: the distance to the nearest candidate if pictures were compared in detail,
            infinite without a candidate; None for a test by cosine.
        nearest_B: int64 [B], the nearest candidate; -1 if unknown.
    """

    def __init__(self, held: int, duplicate_B: NDArray[np.bool_]) -> None:
        self.held, self.duplicate_B = held, duplicate_B
        self.admitted_B: NDArray[np.bool_] = np.ones(len(duplicate_B), dtype=bool)
        self.twin_B: NDArray[np.int64] = np.full(len(duplicate_B), NOBODY)
        self.distance_B: NDArray[np.float32] | None = None
        self.nearest_B: NDArray[np.int64] = np.full(len(duplicate_B), NOBODY)

    def enter(self, rows: Rows, columns: Columns) -> Rows:
        """Return the newcomers that the test admitted, and count merges in the multiplicities."""
        twins = self.twin_B[self.twin_B != NOBODY]
        if len(twins):
            more = torch.from_numpy(np.bincount(twins, minlength=self.held + len(rows)))
            more = to_device(more, columns.device)
            columns.multiplicity[: self.held] += more[: self.held]
            rows = replace(rows, multiplicity=1 + more[self.held :])
        return rows if self.admitted_B.all() else rows[torch.from_numpy(self.admitted_B)]

    def merged(self, slot_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each merged newcomer's target; -1 if the target has left.

        Args:
            slot_B: the current slot of each newcomer; -1 for none.
        """
        twins: NDArray[np.int64] = self.twin_B[self.twin_B != NOBODY]
        if not len(twins):
            return twins
        # A slot in slot_B now holds a newcomer, so its old sample has left.
        stays = np.where(np.isin(twins, slot_B), NOBODY, twins)
        return np.where(twins < self.held, stays, slot_B[np.maximum(twins - self.held, 0)])


def closest(x_BA: Tensor, row_kA: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each unit row with a slot [B], and that slot, int64 [B].

    Among slots within about `unit` of the largest cosine, the lowest slot is returned. Without
    occupied slots the result is -inf and slot 0.
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
