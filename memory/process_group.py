"""Who holds a shard of the memory: one process alone, or the ranks of torch.distributed.

Every rank holds as many slots. Slot j of all lies on rank j mod W, as slot j // W of its shard: so
shards fill evenly, and what all ranks hold is the same whatever W is. What the methods give is the
same on every rank unless said otherwise, so that all ranks decide alike from it. Tensors stay on
their device, as both gloo and NCCL want them.

Shapes: W ranks, R rows, B rows of each rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stream_ssl.memory.compute import to_host


class RankLost(RuntimeError):
    """Another rank died, hangs, or called another collective; this one cannot go on."""


class RankGroup:
    """The ranks that hold the slots together: as it stands here, one process that holds them all.

    Attributes:
        rank, size: of this process, and how many there are.
        collectives: how often this rank met the others.
        bytes: that this rank gave to them.
        waited: seconds that its host spent there, most of them for the slowest.
    """

    rank, size = 0, 1
    collectives = bytes = 0
    waited = 0.0

    def __deepcopy__(self, memo: object) -> RankGroup:
        return self  # a copy of a memory is held by the same ranks

    def share(self, total: int) -> int:
        """How many of the first `total` slots of all lie in this shard."""
        return -(-(total - self.rank) // self.size)

    def mine(self, slots: Any) -> Any:
        """bool, whether slots of all (tensor or array) lie in this shard."""
        return slots % self.size == self.rank

    def own(self, slots: Any) -> Any:
        """Slots of all, which lie in this shard, in its own numbers."""
        return slots // self.size

    def of_all(self, slots: Any) -> Any:
        """What `own` undoes."""
        return slots * self.size + self.rank

    def all_gather(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        """The rows of all ranks, in order of rank; as many of each tensor.

        Ranks may give different numbers of rows.
        """
        return row_R

    def gather_equal(self, row_B: Tensor) -> Tensor:
        """The rows of all ranks [W B, ...], in order of rank, where each gives as many."""
        return row_B

    def exchange(self, row_R: Tensor) -> Tensor:
        """[W, B, ...]: what each rank has for this one's rows. `row_R` [W B, ...] has the rows for
        rank 0 first. Differs between ranks."""
        return row_R.unsqueeze(0)

    def send(self, row_R: Tensor, counts: list[int], come: list[int]) -> Tensor:
        """The rows that others send here, in order of rank. Differs between ranks.

        Args:
            row_R: those for rank 0 first.
            counts: how many go to each rank.
            come: how many come from each.
        """
        del counts, come
        return row_R

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, element by element."""
        return value

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        return value


SINGLE_PROCESS = RankGroup()


class ProcessGroup(RankGroup):
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
        lengths: list[int] = to_host(self.gather_equal(count)).tolist()
        return tuple(self._gather(rows, lengths) for rows in row_R)

    def _gather(self, row_R: Tensor, lengths: list[int]) -> Tensor:
        # Ranks pad to the longest: not every backend gathers different lengths.
        longest = max(lengths)
        if not longest:
            return row_R
        padded = row_R
        if len(row_R) < longest:
            padded = row_R.new_zeros(longest, *row_R.shape[1:])
            padded[: len(row_R)] = row_R
        gathered = self.gather_equal(padded)
        if min(lengths) == longest:
            return gathered
        parts = torch.split(gathered, longest)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def gather_equal(self, row_B: Tensor) -> Tensor:
        row_B = row_B.contiguous()
        gathered = row_B.new_empty(self.size * len(row_B), *row_B.shape[1:])
        with self._meeting(row_B, self.size - 1):
            dist.all_gather_into_tensor(gathered, row_B, group=self._group)
        return gathered

    def exchange(self, row_R: Tensor) -> Tensor:
        row_R = row_R.contiguous()
        found = torch.empty_like(row_R)
        with self._meeting(row_R):
            dist.all_to_all_single(found, row_R, group=self._group)
        return found.view(self.size, -1, *row_R.shape[1:])

    def send(self, row_R: Tensor, counts: list[int], come: list[int]) -> Tensor:
        found = row_R.new_empty(sum(come), *row_R.shape[1:])
        with self._meeting(row_R):
            dist.all_to_all_single(found, row_R.contiguous(), come, counts, group=self._group)
        return found

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = value.clone()
        with self._meeting(reduced):
            dist.all_reduce(reduced, op=operation, group=self._group)
        return reduced

    @contextmanager
    def _meeting(self, value: Tensor, times: int = 1) -> Iterator[None]:
        """Counts what is given so many times; gloo and NCCL have no error of their own."""
        self.collectives += 1
        self.bytes += times * value.numel() * value.element_size()
        began = time.perf_counter()
        try:
            yield
            self.waited += time.perf_counter() - began
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RankLost(f"rank {self.rank} waited for another in vain: {reason}") from error
