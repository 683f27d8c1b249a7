"""The recent past of the memory: evictions, their pictures, and the fate of samples by producer.

The history starts with the process, and training does not depend on it.

Shapes: B samples of a step, n pictures, R kept pictures, C S S small picture.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from stream_ssl.batch import Origin
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import Admission, WorkingMemory
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.memory.duplicates import NOBODY

EVICTIONS = 256
"""The number of evictions that are kept."""
PRODUCERS = 4096
"""The most producers with a count of their own. All others count under OTHERS."""
OTHERS = "others"
PICTURED = 64
"""The most pictures that one step keeps, of its last evictions."""
SIDE = 48
"""The maximum side of these pictures, in pixels."""
SHARE = 0.001
"""The share of the learner's time that keeping pictures may take."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A sample that left the memory.

    Attributes:
        at: the time of the eviction, in seconds since the Unix epoch.
        age: samples offered to the memory between its arrival and its eviction.
        origin: the origin of the sample; None if unknown.
        by: the origin of the sample that had its slot at the end of the same step. None if unknown,
            such as for a sample of another rank.
    """

    at: float
    id: int
    age: int
    origin: Origin | None
    by: Origin | None
    slot: int


@dataclass(slots=True)
class Fate:
    """Counts of a producer's samples at admission, since this process started."""

    offered: int = 0
    refused: int = 0
    # Found by the learner's `novelty` or the memory's `duplicates`, admitted or not.
    near_duplicates: int = 0


class SlotHistory:
    """A history of a memory's slots, made from the learner's records.

    Only the learner's thread may use it. A step costs some microseconds per sample.

    Args:
        pictures: keeps the pictures of evicted samples; by default a new `EvictedPictures`.

    Attributes:
        evictions: the newest evictions. If pictures are taken, only evictions with a picture.
        latest: all evictions of the last record.
        fates: the fates by producer. Producers beyond PRODUCERS share OTHERS.
    """

    def __init__(self, memory: WorkingMemory, pictures: EvictedPictures | None = None) -> None:
        self._memory = memory
        self.pictures = EvictedPictures(memory) if pictures is None else pictures
        self.evictions: deque[Eviction] = deque(maxlen=EVICTIONS)
        self.latest: list[Eviction] = []
        self.fates: dict[str, Fate] = {}

    def consume(self, record: StepRecord) -> None:
        """Take one record, after its step."""
        self.latest = []
        for origin in record.dropped_origins:  # dropped before the memory was asked
            self._count_fate(origin, refused=True, near=True)
        if record.admission is not None:
            ids = to_host(record.ids_B).tolist()
            origins_B = record.origins_B or [None] * len(ids)
            refused = set(record.admission.refused.tolist())
            self._remember_evictions(record.admission, origins_B, record.evicted_origins)
            near = set(record.admission.duplicates.tolist())
            for number, origin in zip(ids, origins_B, strict=True):
                self._count_fate(origin, number in refused, number in near)

    def _remember_evictions(
        self,
        admission: Admission,
        origins_B: Sequence[Origin | None],
        origins: Sequence[Origin | None],
    ) -> None:
        """Keep the last evictions of this step.

        Later samples of a batch may evict earlier ones, so the slots after the batch tell who took
        each slot.
        """
        by = dict(zip(admission.slots.tolist(), origins_B, strict=True))
        by.pop(NOBODY, None)
        gone = (column.tolist() for column in (admission.evicted, admission.ages, admission.left))
        rows = zip(*gone, origins, strict=True)
        now = time.time()
        self.latest = [
            Eviction(now, number, age, origin, by.get(slot), slot)
            for number, age, slot, origin in rows
        ]
        taken = self.pictures.take_new()
        self.evictions.extend(one for one in self.latest if taken is None or one.id in taken)

    def _count_fate(self, origin: Origin | None, refused: bool, near: bool) -> None:
        if origin is None:
            return
        known = origin.producer in self.fates or len(self.fates) < PRODUCERS
        fate = self.fates.setdefault(origin.producer if known else OTHERS, Fate())
        fate.offered += 1
        fate.refused += refused
        fate.near_duplicates += near


class EvictedPictures:
    """Small pictures of the last `EVICTIONS` evicted samples.

    The learner's thread takes them just before it overwrites the slots. They stay on the device of
    the memory's images, so that the thread does not wait for a GPU. Pictures are left out if they
    would take more than `SHARE` of the time.

    Args:
        memory: the working memory. A memory without images has no pictures.
    """

    def __init__(
        self, memory: WorkingMemory, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory, self._clock = memory, clock
        self._next, self._count = -math.inf, 0
        self._new: Tensor | None = None
        shape, images = memory.image_shape, memory.images
        self._taken = shape is not None and shape[0] in (1, 3)  # other shapes hold vectors
        if shape is None or images is None or not self._taken:
            return
        side = min(SIDE, shape[1])
        self._id_R = torch.zeros(EVICTIONS, dtype=torch.int64, device=images.device)
        self._small_RCSS = torch.zeros(
            EVICTIONS, shape[0], side, side, dtype=torch.uint8, device=images.device
        )
        memory.on_overwrite(self.keep)

    def keep(self, slots: Tensor) -> None:
        """Take pictures of the samples in these slots, before they are overwritten."""
        images, began = self._memory.images, self._clock()
        if images is None or began < self._next or len(images) < self._memory.capacity:
            return  # no time for pictures, or no evictions before the memory is full
        slots = slots[-PICTURED:]
        id_n = self._memory.ids[slots].to(images.device)
        small_nCSS = shrunk(images[slots.to(images.device)], self._small_RCSS.shape[-1])
        turns = torch.arange(self._count, self._count + len(slots), device=images.device)
        row_n = turns % EVICTIONS  # the oldest pictures make room
        self._id_R[row_n] = id_n
        self._small_RCSS[row_n] = small_nCSS
        self._new = id_n if self._new is None else torch.cat([self._new, id_n])
        self._count += len(slots)
        now = self._clock()
        self._next = now + (now - began) / SHARE

    def take_new(self) -> set[int] | None:
        """Return the ids of the pictures taken since the last call.

        Return None if this memory never has pictures.
        """
        new, self._new = self._new, None
        if not self._taken:
            return None
        return set() if new is None else set(to_host(new).tolist())

    def of(self, ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """Return the ids that have a picture, and the pictures, uint8 [n, C, S, S], on the host.

        Only the learner's thread may call this method.
        """
        if not self._count:
            return [], torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        newest = range(max(0, self._count - EVICTIONS), self._count)
        id_R = to_host(self._id_R).tolist()
        place = {id_R[turn % EVICTIONS]: turn % EVICTIONS for turn in newest}
        found = [number for number in ids if number in place]
        rows = torch.tensor([place[number] for number in found], dtype=torch.int64)
        return found, to_host(self._small_RCSS[to_device(rows, self._small_RCSS.device)])


def shrunk(image_nCHW: Tensor, side: int) -> Tensor:
    """Return square uint8 images of at most `side` pixels a side, shrunk by averaging.

    Smaller images are returned unchanged.
    """
    if image_nCHW.shape[-1] <= side:
        return image_nCHW
    return adaptive_avg_pool2d(image_nCHW.float(), side).round().to(torch.uint8)
