"""What the memory does not keep: who left lately, small pictures of those, and what became of each
producer's samples, which it is told where it asks.

It begins anew with the process, and nothing that is learned depends on it.

Shapes: B samples of a step; n pictures, R kept, C S S small.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from stream_ssl.batch import Origin
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import Admission, WorkingMemory
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.wire.messages import Verdict

if TYPE_CHECKING:
    from stream_ssl.receiver.verdicts import VerdictSender

EVICTIONS = 256
"""Evictions remembered."""
PRODUCERS = 4096
"""Producers whose samples are counted apart; OTHERS has those of the rest."""
OTHERS = "others"
PICTURED = 64
"""Evicted images of which a step keeps pictures, at most: the last ones."""
SIDE = 48
"""Of these pictures, pixels, at most."""
SHARE = 0.001
"""Of the time, that keeping pictures may take."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A sample that left the memory.

    Attributes:
        at: seconds since the Unix epoch.
        age: samples offered between its arrival and its leaving.
        origin: where it came from; None where that is not known.
        by: where the sample came from that took its slot; None where that cannot be told: in the
            batch that filled the memory, or where an id came twice in one.
        slot: which one.
    """

    at: float
    id: int
    age: int
    origin: Origin | None
    by: Origin | None
    slot: int


@dataclass(slots=True)
class Fate:
    """What became of a producer's samples at admission, since this process started."""

    offered: int = 0
    refused: int = 0
    # By the learner's `novelty` or the memory's `duplicates`, let in or not.
    near_duplicates: int = 0


class SlotHistory:
    """Follows a memory by the learner's records; on the learner's thread alone.

    A step costs some microseconds a sample.

    Args:
        memory: the working memory.
        clock: seconds since the Unix epoch.
        pictures: of those that leave; they are taken from here on.

    Attributes:
        evictions: those that left lately; where pictures are taken, those that have one.
        latest: all of the last record.
        fates: by producer; those beyond PRODUCERS under OTHERS.
    """

    def __init__(
        self,
        memory: WorkingMemory,
        clock: Callable[[], float] = time.time,
        pictures: EvictedPictures | None = None,
    ) -> None:
        self._memory, self._clock = memory, clock
        self.pictures = EvictedPictures(memory) if pictures is None else pictures
        self.evictions: deque[Eviction] = deque(maxlen=EVICTIONS)
        self.latest: list[Eviction] = []
        self.fates: dict[str, Fate] = {}

    def consume(self, record: StepRecord) -> None:
        """Take one record, when its step is done."""
        self.latest = []
        for origin in record.turned_away:  # before the memory was asked
            self._count_fate(origin, refused=True, near=True)
        if record.admission is not None:
            ids = to_host(record.ids_B).tolist()
            origins_B = record.origins_B or [None] * len(ids)
            refused = set(record.admission.refused.tolist())
            joined = [origins_B[b] for b, number in enumerate(ids) if number not in refused]
            self._remember_evictions(record.admission, joined, record.evicted_origins)
            near = set(record.admission.duplicates.tolist())
            for number, origin in zip(ids, origins_B, strict=True):
                self._count_fate(origin, number in refused, number in near)

    def _remember_evictions(
        self,
        admission: Admission,
        joined: Sequence[Origin | None],
        origins: Sequence[Origin | None],
    ) -> None:
        """The last of this step's evictions. In a full memory each newcomer that joined evicted
        one, in order; on several ranks others' newcomers evict here, and ours there."""
        if len(joined) != len(admission.evicted) or self._memory.group.size > 1:
            joined = [None] * len(admission.evicted)
        gone = (column.tolist() for column in (admission.evicted, admission.ages, admission.left))
        rows = list(zip(*gone, origins, joined, strict=True))[-EVICTIONS:]
        now = self._clock()
        self.latest = [
            Eviction(now, number, age, origin, by, slot) for number, age, slot, origin, by in rows
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
    """Small pictures of those that left lately, the last `EVICTIONS` of them.

    They are taken just before their slots are overwritten, on the learner's thread, and lie where
    the memory's images do, so that a GPU is not waited for. Some are passed over where taking all
    would exceed `SHARE` of the time.

    Args:
        memory: the working memory; one without images has none.
        clock: monotonic seconds.
    """

    def __init__(
        self, memory: WorkingMemory, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory, self._clock = memory, clock
        self._next, self._count = -math.inf, 0
        self._new: Tensor | None = None
        shape, images = memory.image_shape, memory.images
        self._taken = shape is not None and shape[0] in (1, 3)  # else the bytes of vectors
        if shape is None or images is None or not self._taken:
            return
        side = min(SIDE, shape[1])
        self._id_R = torch.zeros(EVICTIONS, dtype=torch.int64, device=images.device)
        self._small_RCSS = torch.zeros(
            EVICTIONS, shape[0], side, side, dtype=torch.uint8, device=images.device
        )
        memory.on_overwrite(self.keep)

    def keep(self, slots: Tensor) -> None:
        """Take pictures of what these slots hold."""
        images, began = self._memory.images, self._clock()
        if images is None or began < self._next or len(images) < self._memory.capacity:
            return  # nobody leaves before the memory is full
        slots = slots[-PICTURED:]
        id_n = self._memory.ids[slots].to(images.device)
        small_nCSS = shrunk(images[slots.to(images.device)], self._small_RCSS.shape[-1])
        for start, stop, first in _around(self._count % EVICTIONS, len(slots)):
            self._id_R[start:stop] = id_n[first : first + stop - start]
            self._small_RCSS[start:stop] = small_nCSS[first : first + stop - start]
        self._new = id_n if self._new is None else torch.cat([self._new, id_n])
        self._count += len(slots)
        now = self._clock()
        self._next = now + (now - began) / SHARE

    def take_new(self) -> set[int] | None:
        """The ids whose pictures were taken since the call before; None where none ever are."""
        new, self._new = self._new, None
        if not self._taken:
            return None
        return set() if new is None else set(to_host(new).tolist())

    def of(self, ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """Those of these ids that have a picture, and the pictures, uint8 [n, C, S, S], on the
        host. On the learner's thread."""
        if not self._count:
            return [], torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        newest = range(max(0, self._count - EVICTIONS), self._count)
        id_R = to_host(self._id_R).tolist()
        place = {id_R[turn % EVICTIONS]: turn % EVICTIONS for turn in newest}
        found = [number for number in ids if number in place]
        rows = torch.tensor([place[number] for number in found], dtype=torch.int64)
        return found, to_host(self._small_RCSS[to_device(rows, self._small_RCSS.device)])


def shrunk(image_nCHW: Tensor, side: int) -> Tensor:
    """uint8 images of at most this side, the means of what each pixel covers."""
    if image_nCHW.shape[-1] <= side:
        return image_nCHW
    return adaptive_avg_pool2d(image_nCHW.float(), side).round().to(torch.uint8)


def _around(begin: int, count: int) -> list[tuple[int, int, int]]:
    """(start, stop, of which the first) in a ring of `EVICTIONS`, in one part or two."""
    first = min(count, EVICTIONS - begin)
    return [(begin, begin + first, 0), (0, count - first, first)][: 2 if count > first else 1]


# -- told to the producers that ask


class VerdictFeed:
    """Tells producers of each step's newcomers and evictions; on the learner's thread.

    Args:
        history: of the slots, which has consumed the same record before.
        sender: where to. Nothing is put together unless it is wanted.
    """

    def __init__(self, history: SlotHistory, sender: VerdictSender) -> None:
        self._history, self._sender = history, sender

    def consume(self, record: StepRecord) -> None:
        """Take one record."""
        if not self._sender.wanted:
            return
        verdicts: dict[str, list[Verdict]] = defaultdict(list)
        for origin in record.turned_away:
            if origin is not None:
                told = Verdict(origin.source, origin.id, "refused", near=True)
                verdicts[origin.producer].append(told)
        if record.admission is not None and record.origins_B is not None:
            self._admitted(record, record.admission, record.origins_B, verdicts)
        if verdicts:
            self._sender.send(verdicts)

    def _admitted(
        self,
        record: StepRecord,
        admission: Admission,
        origins_B: Sequence[Origin | None],
        verdicts: dict[str, list[Verdict]],
    ) -> None:
        refused, near = set(admission.refused.tolist()), set(admission.duplicates.tolist())
        counts: list[float | None] = [None] * len(origins_B)
        if record.duplicates_B is not None:
            counts = to_host(record.duplicates_B).tolist()
        ids = to_host(record.ids_B).tolist()
        for number, origin, count in zip(ids, origins_B, counts, strict=True):
            if origin is None:
                continue
            what = "refused" if number in refused else "kept"
            told = Verdict(origin.source, origin.id, what, count, number in near)
            verdicts[origin.producer].append(told)
        for gone in self._history.latest:
            if gone.origin is not None:
                told = Verdict(gone.origin.source, gone.origin.id, "evicted", age=gone.age)
                verdicts[gone.origin.producer].append(told)
