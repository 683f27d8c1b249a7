"""Anchors of all ranks against negatives that each rank has its own part of.

No negative travels. Each rank compares the anchors of all with its own negatives, and hands the
partial results back to the rank of the anchor, where they merge exactly: what travels grows with
the anchors, not with the negatives.

Shapes: W ranks, B anchors of each rank, A = W B of all, in order of rank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The ranks. `stream_ssl.memory.process_group.ProcessGroup` is one."""

    rank: int
    size: int

    def gather_equal(self, row_B: Tensor) -> Tensor:
        """The rows of all ranks [A, ...]."""

    def exchange(self, row_R: Tensor) -> Tensor:
        """[W, B, ...]: what each rank has for this one's rows, of its rows [A, ...] for all."""

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, element by element."""


def of_all(row_B: Tensor, group: Group | None) -> Tensor:
    """The rows of all ranks [A, ...], without gradient; None: of this process alone."""
    return row_B if group is None else group.gather_equal(row_B.detach())


def summed(value_A: Tensor, group: Group | None) -> Tensor:
    """[B, ...]: the sums over ranks of what each has for this one's anchors."""
    return value_A if group is None else group.exchange(value_A).sum(0)
