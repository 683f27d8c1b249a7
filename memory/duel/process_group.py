"""Who holds a shard of the memory: one process alone, or the ranks of torch.distributed.

Every rank holds as many slots; slot j of rank r is slot r K + j of all. What the methods give is
the same on every rank, so that all ranks decide alike from it. Tensors stay on their device, as
both gloo and NCCL want them.

Shapes: K slots of a shard, R rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from memory.compute import to_host


class SingleProcess:
    """One process that holds all slots."""

    rank, size = 0, 1

    def all_gather(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        """The rows of all ranks, in order of rank; as many of each tensor.

        Ranks may give different numbers of rows.
        """
        return row_R

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, element by element."""
        return value

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        return value


SINGLE_PROCESS = SingleProcess()


class ProcessGroup(SingleProcess):
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

    def all_gather(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        count = torch.tensor([len(row_R[0])], device=row_R[0].device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count, group=self._group)
        lengths: list[int] = to_host(torch.cat(counts)).tolist()
        return tuple(self._gather(rows, lengths) for rows in row_R)

    def _gather(self, row_R: Tensor, lengths: list[int]) -> Tensor:
        # Ranks pad to the longest: not every backend gathers different lengths.
        padded = row_R.new_zeros(max(lengths), *row_R.shape[1:])
        padded[: len(row_R)] = row_R
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = value.clone()
        dist.all_reduce(reduced, op=operation, group=self._group)
        return reduced
