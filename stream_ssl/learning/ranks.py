"""What the ranks of one run agree on: whether to stop, who has samples, and the gradient.

A run of one process agrees with itself, at no cost.

Shapes: W ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stream_ssl.batch import START, Offset
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks know of a turn of the learner's loop; lists are by rank.

    Attributes:
        stop: some rank was asked to stop: all do, at this turn.
        save: some rank wants a checkpoint: all write theirs before they go on.
        reload: the weights have diverged: all reload a checkpoint before they go on.
        batches: samples in the batch that came from each one's stream, 0 for none.
        waiting: new samples that each has kept from earlier batches.
        offsets: where each one's stream stands.
        ready: whether each one's process is.
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
    """What a rank has done in all turns.

    Attributes:
        busy: seconds on its own, not in an exchange. What a device waits for within a step counts
            here too.
        waited: seconds in exchanges, most of them for slower ranks.
        sent: bytes that it gave to the others.
        samples: of its stream.
    """

    busy: float = 0.0
    waited: float = 0.0
    sent: int = 0
    samples: int = 0


class Ranks:
    """The ranks of one run, which take every step together.

    Args:
        group: who holds the memory.
        device: where the learner computes.

    Attributes:
        last: the turn before.
        ready: of this process, told to the others at the next turn.
        work: by rank.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self.save_asked = self.reload_asked = False
        self.last, self.ready = Turn(), True
        self.work = [Work()] * group.size
        self._since = time.perf_counter(), group.waited

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.group.size == 1

    def agree(self, stop: bool, batch: int, waiting: int, offset: Offset) -> Turn:
        """One turn, the same on every rank: a single exchange of eleven numbers.

        Args:
            stop: whether this rank was asked to.
            batch: samples that came from its stream.
            waiting: new samples that it has kept.
            offset: of the stream behind its last batch.
        """
        if self.alone:
            reload = self.reload_asked
            self.last = Turn(stop, False, reload, (batch,), (waiting,), (offset,))
            return self.last
        began, waited = self._since
        busy = time.perf_counter() - began - (self.group.waited - waited)
        numbers = [stop, self.save_asked, self.reload_asked, batch, waiting]
        numbers += [offset.record, offset.sample, self.ready]
        numbers += [int(1e6 * busy), int(1e6 * self.group.waited), self.group.bytes]
        row_11 = torch.tensor([numbers], dtype=torch.int64, device=self._device)
        stops, saves, reloads, batches, kept, records, samples, ready, *work = to_host(
            self.group.gather_equal(row_11)
        ).T.tolist()
        self._since = time.perf_counter(), self.group.waited
        self.work = [
            Work(one.busy + busy / 1e6, waited / 1e6, sent, one.samples + batch)
            for one, busy, waited, sent, batch in zip(self.work, *work, batches, strict=True)
        ]
        offsets = [Offset(*pair) for pair in zip(records, samples, strict=True)]
        self.save_asked = False
        all_ready = [bool(one) for one in ready]
        told = any(stops), any(saves), any(reloads)
        self.last = Turn(*told, batches, kept, offsets, all_ready)
        return self.last

    def tell(self, value: Any) -> list[Any]:
        """What each rank tells here, by rank. It is JSON: what others send is only parsed."""
        if self.alone:
            return [value]
        told = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.group.gather_equal(torch.tensor([len(told)], device=self._device))
        (texts,) = self.group.all_gather(told.to(self._device))
        parts = torch.split(to_host(texts), to_host(lengths).tolist())
        return [json.loads(bytes(part.numpy())) for part in parts]

    @torch.no_grad()
    def average(
        self, tensors: Sequence[Tensor], loss: Tensor, usable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give all ranks the mean of these tensors, in one exchange.

        Args:
            tensors: of floats: gradients, and BatchNorm's averages; written in place.
            loss: of this rank's anchors.
            usable: bool, whether its keys are.

        Returns:
            The mean loss, and whether all keys are usable, 0-dimensional.
        """
        if self.alone:
            return loss, usable
        told = [loss.detach().reshape(1).float(), usable.reshape(1).float()]
        flat = torch.cat([*[tensor.flatten().float() for tensor in tensors], *told])
        flat = self.group.all_reduce_sum(flat) / self.group.size
        sizes = [tensor.numel() for tensor in tensors]
        *means, mean, share = torch.split(flat, [*sizes, 1, 1])
        for tensor, new in zip(tensors, means, strict=True):
            tensor.copy_(new.view_as(tensor))
        return mean[0], share[0] == 1
