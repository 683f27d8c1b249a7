"""The working memory as the page shows it: sorted slots, pictures, neighbours and a map.

Shapes: A descriptor, D embedding, K capacity, k occupied slots, S evenly spaced slots, n requested
slots, C H W image.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from stream_ssl.learning.origins import Origins
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Descriptor, Weighted
from stream_ssl.observe.page import slot_rows
from stream_ssl.observe.page.dropped_pairs import DroppedPairs
from stream_ssl.observe.page.last_evictions import LastEvictions
from stream_ssl.observe.page.memory_reader import TILE, MemoryReader, SlotsCopy
from stream_ssl.observe.page.picture_search import PictureSearch
from stream_ssl.observe.page.picture_sheet import picture_sheet, sheet
from stream_ssl.observe.page.slots_map import SlotsMap
from stream_ssl.observe.page.step_jobs import ANSWER_PATIENCE, Busy, StepJobs
from stream_ssl.observe.slot_history import Fate, SlotHistory, shrunk

FRESH = 3.0
"""The least seconds for which a snapshot is used.

A snapshot that took long is used for longer, so that snapshots keep to SNAPSHOT_SHARE."""
SNAPSHOT_SHARE = 0.008
"""The share of the learner's time for snapshots. `StepJobs` has its own share for other jobs."""
FIRST_PATIENCE, PATIENCE = ANSWER_PATIENCE, 1.0
"""Seconds to wait for the first snapshot, and for a newer one while there is an older one."""


class MemoryView:
    """The page's view of a learner's memory.

    Only `consume` and its jobs run on the learner's thread. A job copies the columns (some
    milliseconds for 65,536 slots), reads the pictures of at most `TILES` slots, or makes one
    search. The thread that asks computes everything else from the snapshot. Nothing is copied
    unless a viewer asks. Snapshots keep to SNAPSHOT_SHARE, and other jobs to the share of `jobs`.
    Each question raises Busy if the learner has no time.

    Attributes:
        jobs: runs jobs on the learner's thread.
        slots: the recent past of the slots.
        reader: reads the memory between two steps.
        dropped, evictions: the samples that were dropped and evicted lately.
        search: finds slots that look like a picture; None until the learner sets it.
    """

    def __init__(self, memory: WorkingMemory, origins: Origins) -> None:
        self.jobs = StepJobs()
        self.slots = SlotHistory(memory)
        self.reader = MemoryReader(memory, origins)
        self.dropped = DroppedPairs(self.reader)
        self.evictions = LastEvictions(self.slots, self.reader, self.jobs)
        self._plane = SlotsMap()
        self.search: PictureSearch | None = None
        self._memory = memory
        self._lock = threading.Lock()  # guards the next two
        self._snapshot: SlotsCopy | None = None
        self._copying: Future[SlotsCopy] | None = None  # the next snapshot

    def consume(self, record: object) -> None:
        """Take one record of `Learner.run`, then run waiting jobs, on the learner's thread."""
        if isinstance(record, StepRecord):
            self.slots.consume(record)
            self.dropped.consume(record)
        self.jobs.serve()

    # Questions, from any other thread.

    def summary(self) -> dict[str, Any]:
        """Return the balance and histograms of the slots."""
        snapshot = self.snapshot()
        ages_k = snapshot.added - snapshot.born_k
        histograms = {
            "ages": slot_rows.histogram(ages_k),
            "staleness": slot_rows.histogram(snapshot.added - snapshot.encoded_k),
            "drawn": slot_rows.histogram(snapshot.drawn_k),
        }
        if snapshot.duplicates_k is not None:
            histograms["duplicates"] = slot_rows.histogram(snapshot.duplicates_k)
        return {
            "at": snapshot.at,
            "occupied": len(snapshot),
            "capacity": self._memory.capacity,
            "added": snapshot.added,
            "policy": self._memory.eviction.name,
            "descriptor": _in_words(self._memory.descriptor),
            "pictures": self.reader.most_pictures,
            "learner_share": round(self.jobs.used, 5),
            "umap": self._plane.umap.installed(),
            "turnover": slot_rows.number(float((ages_k <= self._memory.capacity).mean()))
            if len(snapshot)
            else None,
            "balance": slot_rows.balance(snapshot),
            "histograms": histograms,
        }

    def listing(
        self, sort: str, offset: int, limit: int, producer: str | None = None
    ) -> dict[str, Any]:
        """Return up to `limit` slots in order, from number `offset` on.

        Args:
            sort: "duplicates", "drawn", "oldest", "newest" or "stalest". The slots with the most
                duplicates, the most draws and so on come first.
            offset: the number of the first slot, from 0.
            limit: the number of slots, 1 to 512.
            producer: only slots with samples of this producer; None: all slots.
        """
        snapshot = self.snapshot()
        order = slot_rows.order(snapshot, sort)
        if producer is not None:
            held = [one is not None and one.producer == producer for one in snapshot.origins_k]
            order = order[np.array(held, bool)[order]]
        rows = [slot_rows.row(snapshot, int(slot)) for slot in order[offset : offset + limit]]
        return {"at": snapshot.at, "total": len(order), "offset": offset, "slots": rows}

    def slot(self, slot: int, neighbours: int = 12) -> dict[str, Any]:
        """Return one slot and its nearest slots, by cosine of descriptors and of embeddings.

        The jobs for neighbours, images and the snapshot are given to the learner together, because
        each job may wait for a step. The field `pictures` has the form of `MemoryView.pictures`. It
        is None if the memory keeps no images.

        Raises:
            LookupError: the slot does not exist or is empty.
        """
        reader, memory = self.reader, self._memory
        self._check_exists(slot)

        def read() -> tuple[
            dict[str, list[tuple[int, float]]], tuple[list[str | None], Tensor] | None
        ]:
            _check_filled(slot, len(memory))
            near = reader.nearest(slot, neighbours)
            shown = dict.fromkeys([slot, *(one for rows in near.values() for one, _ in rows)])
            most = reader.most_pictures
            return near, reader.images(list(shown)[:most]) if most else None

        asked = self.jobs.submit(read)
        snapshot = self.snapshot()
        found, images = self.jobs.result(asked)
        _check_filled(slot, len(snapshot))
        pictures = None if images is None else picture_sheet(*images)
        near = slot_rows.near(snapshot, found)
        return {**slot_rows.row(snapshot, slot), "near": near, "pictures": pictures}

    def origin(self, slot: int) -> dict[str, Any] | None:
        """Return the origin of the sample in a slot as `slot` does, without a job."""
        self._check_exists(slot)
        snapshot = self.snapshot()
        _check_filled(slot, len(snapshot))
        return slot_rows.row(snapshot, slot)["origin"]  # type: ignore[no-any-return]

    def like(self, data: bytes, count: int) -> dict[str, Any]:
        """Return the slots that look like a picture, and the picture as the learner sees it.

        Args:
            data: the bytes of a JPEG, PNG or WebP file.

        Raises:
            LookupError: this memory keeps no pictures.
            ValueError: the bytes are not a picture that the run would accept.
        """
        if (search := self.search) is None or not self.reader.most_pictures:
            raise LookupError("this memory keeps no pictures, so none can look like another")
        image_CHW = search.decode(data)
        snapshot = self.snapshot()
        found = self.jobs.ask(lambda: search.nearest(image_CHW, count))
        seen = sheet(shrunk(image_CHW[None], TILE), 1)
        return {"near": slot_rows.near(snapshot, found), "seen": seen}

    def pictures(self, slots: Sequence[int]) -> dict[str, Any]:
        """Return the current images of these slots, side by side in one JPEG or PNG.

        Returns:
            `tile`, the side of each image in pixels; `columns`, the number of columns; `ids`, the
            ids as strings, None for empty slots; `sheet`, the image as a data URL.

        Raises:
            LookupError: the memory keeps no images.
        """
        if self._memory.image_shape is None:
            raise LookupError("this memory keeps no images")
        found = picture_sheet(*self.jobs.ask(lambda: self.reader.images(slots)))
        assert found is not None, "slots is empty: must have at least one number"
        return found

    def map(self, by: str = "pca", producer: str | None = None) -> dict[str, Any]:
        """Return the slots as points on a plane, with coordinates from -1 to 1.

        Args:
            by: "pca" for the two principal axes of the embeddings, or "umap". If no UMAP map exists
                yet, the result is the PCA map, and its `note` gives the reason.
            producer: only slots with samples of this producer; None: all slots. They stand where
                they stand among all slots.

        Raises:
            LookupError: UMAP is not installed.
        """
        if by == "umap" and not self._plane.umap.installed():
            raise LookupError("UMAP is not installed: pip install 'stream-ssl[umap]'")
        return self._plane.of(self.snapshot(), by, producer)

    def close(self) -> None:
        """Close the jobs and end UMAP. Waiting and later questions raise Busy."""
        self.jobs.close()
        self._plane.umap.close()

    def producers(self, limit: int) -> dict[str, Any]:
        """Return for each producer its slots, its newest slot, and the fate of its samples."""
        snapshot = self.snapshot()
        held: Counter[str] = Counter()
        newest: dict[str, int] = {}  # slot by producer
        born_k = snapshot.born_k.tolist()
        for slot, origin in enumerate(snapshot.origins_k):
            if origin is not None:
                held[origin.producer] += 1
                best = newest.setdefault(origin.producer, slot)
                if born_k[slot] > born_k[best]:
                    newest[origin.producer] = slot
        fates = dict(self.slots.fates)  # copied in one step, because the learner goes on counting
        # A producer whose samples came before this process started also holds slots.
        chosen = sorted(fates.keys() | held, key=lambda name: (-held[name], name))[:limit]
        return {
            "occupied": len(snapshot),
            "offered": sum(fate.offered for fate in fates.values()),
            "producers": {
                name: {
                    **asdict(fates.get(name, Fate())),
                    "held": held[name],
                    "newest": slot_rows.placed_slot(snapshot, newest.get(name)),
                }
                for name in chosen
            },
        }

    def snapshot(self) -> SlotsCopy:
        """Return a fresh snapshot, or the last snapshot if the learner has no time for another.

        See FRESH for how long a snapshot stays fresh. A step may take longer than the caller waits.
        The learner then makes the next snapshot at the end of the step, for the next caller.

        Raises:
            Busy: there is no snapshot yet, and the learner has no time.
        """
        patience = FIRST_PATIENCE if self._snapshot is None else PATIENCE
        try:
            with self._lock:
                self._take()
                if self._snapshot is not None and _is_fresh(self._snapshot):
                    return self._snapshot
                if self._copying is None:
                    self._copying = self.jobs.submit(self.reader.copy, metered=False)
                copying = self._copying
            wait([copying], patience)  # without the lock, so that callers wait together
            with self._lock:
                self._take()
        except Busy:
            if self._snapshot is None:
                raise
        if self._snapshot is None:
            raise Busy(f"the learner did not answer within {patience:g} s")
        return self._snapshot

    def _check_exists(self, slot: int) -> None:
        """Raise LookupError for a slot beyond the capacity, without a question to the learner."""
        capacity = self._memory.capacity
        if not 0 <= slot < capacity:
            raise LookupError(f"slot {slot}: the memory has slots 0 to {capacity - 1}")

    def _take(self) -> None:
        """Keep the next snapshot, if the learner has made it. The caller holds the lock."""
        if self._copying is not None and self._copying.done():
            made, self._copying = self._copying, None
            self._snapshot = made.result()


def _in_words(descriptor: Descriptor) -> str:
    """Return what a descriptor describes, such as "embedding and features"."""
    parts = descriptor.parts if isinstance(descriptor, Weighted) else [descriptor]
    return " and ".join(type(part).__name__.lower() for part in parts)


def _is_fresh(snapshot: SlotsCopy) -> bool:
    serves = max(FRESH, snapshot.seconds / SNAPSHOT_SHARE)
    return time.monotonic() - snapshot.taken <= serves


def _check_filled(slot: int, occupied: int) -> None:
    if slot >= occupied:
        filled = f"slots 0 to {occupied - 1} hold a sample" if occupied else "no slot is filled yet"
        raise LookupError(f"slot {slot} is empty: {filled}")
