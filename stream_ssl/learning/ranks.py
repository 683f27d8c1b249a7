"""The agreement of a run's ranks: whether to stop, which ranks have samples, and the mean gradient.

A run of one process needs no exchange.

Shapes: W ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stream_ssl.batch import START, Offset
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.process_group import RankGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of all ranks in one turn of the learner's loop. Lists are in order of rank.

    Attributes:
        stop: a rank was asked to stop, so all ranks stop at this turn.
        save: a rank wants a checkpoint, so all ranks write one before they continue.
        reload: the weights have diverged, so all ranks reload a checkpoint before they continue.
        batches: number of samples in the batch that came from each rank's stream, 0 for none.
        waiting: number of new samples that each rank has kept from earlier batches.
        offsets: position of each rank's stream.
        ready: whether each rank's process is ready.
    """

    stop: bool = False
    save: bool = False
    reload: bool = False
    batches: Sequence[int] = (0,)
    waiting: Sequence[int] = (0,)
    offsets: Sequence[Offset] = (START,)
    ready: Sequence[bool] = (True,)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one rank in all turns so far.

    Attributes:
        busy: seconds outside exchanges and outside waits for a stream that pauses. Waits for the
            device within a step count here too.
        waited: seconds in exchanges, mostly waits for slower ranks.
        sent: bytes sent to the other ranks.
        samples: number of samples of the rank's stream.
    """

    busy: float = 0.0
    waited: float = 0.0
    sent: int = 0
    samples: int = 0


class Ranks:
    """The ranks of one run, which take every step together.

    Args:
        group: the ranks that hold the memory.
        device: the device where the learner computes.

    Attributes:
        last: the last turn.
        ready: whether this process is ready; the other ranks learn it at the next turn.
        work: the work by rank.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self.save_asked = False
        self.last, self.ready = Turn(), True
        self.work = [Work()] * group.size
        self._since, self._paused = (time.perf_counter(), group.waited), 0.0

    @property
    def alone(self) -> bool:
        """Whether the run has only one process."""
        return self.group.size == 1

    def asked(self, batches: Callable[[], T | None]) -> T | None:
        """Return the next batch. If there is none, the time until now was no work."""
        began = time.perf_counter()
        if (found := batches()) is None:
            self._paused += time.perf_counter() - began
        return found

    def agree(self, stop: bool, reload: bool, batch: int, waiting: int, offset: Offset) -> Turn:
        """Exchange eleven numbers and return the turn, which is the same on every rank.

        Args:
            stop: whether this rank was asked to stop.
            reload: whether the weights have diverged on this rank.
            batch: number of samples that came from this rank's stream.
            waiting: number of new samples that this rank has kept.
            offset: position of this rank's stream after its last batch.
        """
        if self.alone:
            self.last = Turn(stop, False, reload, (batch,), (waiting,), (offset,))
            return self.last
        began, waited = self._since
        busy = time.perf_counter() - began - (self.group.waited - waited) - self._paused
        numbers = [stop, self.save_asked, reload, batch, waiting]
        numbers += [offset.record, offset.sample, self.ready]
        numbers += [int(1e6 * busy), int(1e6 * self.group.waited), self.group.bytes]
        row_11 = torch.tensor([numbers], dtype=torch.int64, device=self._device)
        stops, saves, reloads, batches, kept, records, samples, ready, *work = to_host(
            self.group.gather_equal(row_11)
        ).T.tolist()
        self._since, self._paused = (time.perf_counter(), self.group.waited), 0.0
        self.work = [
            Work(one.busy + busy / 1e6, waited / 1e6, sent, one.samples + batch)
            for one, busy, waited, sent, batch in zip(self.work, *work, batches, strict=True)
        ]
        offsets = [Offset(*pair) for pair in zip(records, samples, strict=True)]
        self.save_asked = False
        all_ready = [bool(one) for one in ready]
        asked = any(stops), any(saves), any(reloads)
        self.last = Turn(*asked, batches, kept, offsets, all_ready)
        return self.last

    def tell(self, value: Any) -> list[Any]:
        """Send a value to all ranks; return the values of all ranks, in order of rank.

        Values travel as JSON, so data from other ranks is only parsed, never executed.
        """
        if self.alone:
            return [value]
        line = bytearray(f"{json.dumps(value)}\n".encode())  # JSON escapes newlines within a value
        (lines,) = self.group.all_gather(torch.frombuffer(line, dtype=torch.uint8).to(self._device))
        return [json.loads(one) for one in bytes(to_host(lines).numpy()).splitlines()]

    @torch.no_grad()
    def average(
        self, tensors: Sequence[Tensor], loss: Tensor, usable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Replace these tensors by their means over all ranks, in one exchange.

        Args:
            tensors: gradients and BatchNorm's averages, written in place.
            loss: the loss of this rank's anchors.
            usable: bool, whether this rank's keys are usable.

        Returns:
            The mean loss, and whether all ranks' keys are usable, both 0-dimensional.
        """
        if self.alone:
            return loss, usable
        scalars = [loss.detach().reshape(1).float(), usable.reshape(1).float()]
        flat = torch.cat([*[tensor.flatten().float() for tensor in tensors], *scalars])
        flat = self.group.all_reduce_sum(flat) / self.group.size
        sizes = [tensor.numel() for tensor in tensors]
        *means, mean, share = torch.split(flat, [*sizes, 1, 1])
        for tensor, new in zip(tensors, means, strict=True):
            tensor.copy_(new.view_as(tensor))
        return mean[0], share[0] == 1
