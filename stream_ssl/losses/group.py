"""Exchange between ranks that each hold a part of the negatives.

Negatives are never sent. Each rank compares the anchors of all ranks with its own negatives. It
then returns the partial results to the anchors' ranks, where they are merged exactly. The traffic
grows with the number of anchors, not with the number of negatives.

Shapes: W ranks, B anchors of each rank, A = W B anchors of all ranks, in order of rank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The ranks of a run, for example `stream_ssl.memory.process_group.ProcessGroup`."""

    rank: int
    size: int

    def gather_equal(self, row_B: Tensor) -> Tensor:
        """Return the rows of all ranks [A, ...]."""

    def exchange(self, row_R: Tensor) -> Tensor:
        """Send each rank its part of `row_R` [A, ...] and return the parts received [W, B, ...]."""

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the element-wise sum over ranks."""


def of_all(row_B: Tensor, group: Group | None) -> Tensor:
    """Return the rows of all ranks [A, ...], without gradient.

    Without a group, return the rows of this process unchanged.
    """
    return row_B if group is None else group.gather_equal(row_B.detach())


def summed(value_A: Tensor, group: Group | None) -> Tensor:
    """Return the sum over ranks of their values for this rank's anchors [B, ...]."""
    return value_A if group is None else group.exchange(value_A).sum(0)
