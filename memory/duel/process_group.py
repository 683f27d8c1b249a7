"""Who holds a shard of the memory: one process alone, or the ranks of torch.distributed.

Every rank holds as many slots; slot j of rank r is slot r K + j of all. What the methods give is
the same on every rank, so that all ranks decide alike from it.

Shapes: K slots of a shard, R rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """One process that holds all slots."""

    rank, size = 0, 1

    def together(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        """The rows of all ranks, in order of rank; as many of each tensor.

        Ranks may give different numbers of rows.
        """
        return row_R

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, element by element."""
        return value

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return number


ALONE = Group()


class Ranks(Group):
    """The ranks of torch.distributed's process group. All must call the same methods in turn.

    Args:
        group: of the ranks that share a memory; the default group where not given.

    Raises:
        ValueError: torch.distributed has not been initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group: call torch.distributed.init_process_group first"
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def together(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        count = torch.tensor([len(row_R[0])], device=row_R[0].device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count, group=self._group)
        lengths = [int(one) for one in counts]
        return tuple(self._gather(rows, lengths) for rows in row_R)

    def _gather(self, row_R: Tensor, lengths: list[int]) -> Tensor:
        # Ranks pad to the longest: not every backend gathers different lengths.
        padded = row_R.new_zeros(max(lengths), *row_R.shape[1:])
        padded[: len(row_R)] = row_R
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def total(self, value: Tensor) -> Tensor:
        summed = value.clone()
        dist.all_reduce(summed, group=self._group)
        return summed

    def least(self, number: int) -> int:
        value = torch.tensor([number])
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self._group)
        return int(value)
