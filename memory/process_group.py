"""The processes that hold a memory: a single process, or the ranks of torch.distributed.

Every rank holds the same number of slots. Slot j of all lies on rank j mod W, as slot j // W of its
shard. Shards therefore fill evenly, and the contents of all ranks together do not depend on W.
Results are the same on every rank unless stated otherwise, so that all ranks make the same
decisions. Tensors stay on their device, as gloo and NCCL both require.

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

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of the collective that gathers equal tensors. torch 2.14 warns about the older name."""


class RankLost(RuntimeError):
    """Another rank died, hangs, or called a different collective, so this rank cannot continue."""


class RankGroup:
    """The ranks that hold the slots together. This base class is a single process with all slots.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        collectives: the number of collective operations of this rank.
        bytes: the bytes that this rank has sent.
        waited: the seconds that the host has spent in collectives, mostly waiting for the slowest
            rank.
    """

    rank, size = 0, 1
    collectives = bytes = 0
    waited = 0.0

    def __deepcopy__(self, memo: object) -> RankGroup:
        return self  # the same ranks hold a copy of a memory

    def share(self, total: int) -> int:
        """Return how many of the first `total` slots of all lie in this shard."""
        return _share(total, self.rank, self.size)

    def shares(self, total: int) -> list[int]:
        """Return how many of the first `total` slots of all lie in the shard of each rank.

        >>> group = RankGroup()
        >>> group.size = 2
        >>> group.shares(7)
        [4, 3]
        """
        return [_share(total, rank, self.size) for rank in range(self.size)]

    def mine(self, slots: Any) -> Any:
        """Return whether slots of all (tensor or array) lie in this shard, bool."""
        return slots % self.size == self.rank

    def own(self, slots: Any) -> Any:
        """Convert slot numbers over all ranks, of slots in this shard, to numbers of the shard."""
        return slots // self.size

    def of_all(self, slots: Any) -> Any:
        """Convert slot numbers of the shard to numbers over all ranks, the inverse of `own`."""
        return slots * self.size + self.rank

    def all_gather(self, *row_R: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of all ranks, in order of rank.

        On each rank, all tensors must have the same number of rows. Ranks may have different
        numbers of rows. A rank without rows may have tensors of another floating point type.

        Raises:
            ValueError: rows of several ranks are of different types. Every rank raises it.
        """
        return row_R

    def gather_equal(self, row_B: Tensor) -> Tensor:
        """Return the rows of all ranks [W B, ...], in order of rank.

        All ranks must have equally many rows.
        """
        return row_B

    def exchange(self, row_R: Tensor) -> Tensor:
        """Return the rows that each rank has for this rank, [W, B, ...].

        `row_R` [W B, ...] has the rows for rank 0 first. The result differs by rank.
        """
        return row_R.unsqueeze(0)

    def send(self, row_R: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows that other ranks send here, in order of rank. The result differs by rank.

        Args:
            row_R: the rows to send, those for rank 0 first.
            sent: the number of rows to send to each rank.
            received: the number of rows to receive from each rank.
        """
        del sent, received
        return row_R

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, element by element."""
        return value

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """Return the maximum over ranks, element by element."""
        return value


SINGLE_PROCESS = RankGroup()


class ProcessGroup(RankGroup):
    """The ranks of a torch.distributed process group. All ranks must call the same methods in turn.

    Args:
        group: the process group that shares a memory. None means the default group.

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
        own = [len(row_R[0]), *(rows.element_size() for rows in row_R)]
        own_WX = to_host(self.gather_equal(torch.tensor([own], device=row_R[0].device)))
        lengths, *sizes = own_WX.T.tolist()
        alike = [_in_one_type(rows, lengths, of) for rows, of in zip(row_R, sizes, strict=True)]
        return tuple(self._gather(rows, lengths) for rows in alike)

    def _gather(self, row_R: Tensor, lengths: list[int]) -> Tensor:
        # Pad to the longest, because not every backend gathers different lengths.
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
            getattr(dist, GATHER)(gathered, row_B, group=self._group)
        return gathered

    def exchange(self, row_R: Tensor) -> Tensor:
        row_R = row_R.contiguous()
        found = torch.empty_like(row_R)
        with self._meeting(row_R):
            dist.all_to_all_single(found, row_R, group=self._group)
        return found.view(self.size, -1, *row_R.shape[1:])

    def send(self, row_R: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found = row_R.new_empty(sum(received), *row_R.shape[1:])
        with self._meeting(row_R):
            dist.all_to_all_single(found, row_R.contiguous(), received, sent, group=self._group)
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
        """Count a collective and its bytes, and turn errors of gloo and NCCL into RankLost."""
        self.collectives += 1
        self.bytes += times * value.numel() * value.element_size()
        began = time.perf_counter()
        try:
            yield
            self.waited += time.perf_counter() - began
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RankLost(f"rank {self.rank} waited for another rank in vain: {reason}") from error


def _share(total: int, rank: int, ranks: int) -> int:
    return -(-(total - rank) // ranks)


def _in_one_type(row_R: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
    """Return this rank's rows in the type of all ranks that have rows.

    Gloo ends the process if ranks send numbers of different types.

    Args:
        row_R: the rows of this rank.
        lengths: the number of rows of each rank.
        sizes: the bytes of a number of each rank.
    """
    used = {size for size, length in zip(sizes, lengths, strict=True) if length}
    if len(used) > 1:
        raise ValueError(
            f"the numbers of ranks 0 to {len(sizes) - 1} have {', '.join(map(str, sizes))} bytes: "
            "give embeddings of one type on all ranks, float32 or float64"
        )
    if not used or row_R.element_size() in used:
        return row_R
    return row_R.to(torch.float64 if used == {8} else torch.float32)
