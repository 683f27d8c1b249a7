"""The newest evictions, with the pictures of the samples that left and of those that came."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from stream_ssl.observe.page.memory_reader import MemoryReader
from stream_ssl.observe.page.picture_sheet import picture_sheet
from stream_ssl.observe.page.step_jobs import StepJobs
from stream_ssl.observe.slot_history import Eviction, SlotHistory, shrunk


class LastEvictions:
    """The newest evictions, as the page shows them."""

    def __init__(self, slots: SlotHistory, reader: MemoryReader, jobs: StepJobs) -> None:
        self._slots, self._reader, self._jobs = slots, reader, jobs

    def newest(self, limit: int, producer: str | None = None) -> dict[str, Any]:
        """Return the newest evictions, the last first, and their `pictures`.

        With `producer`, these are the evictions of its samples, and those that its samples caused.

        `by_id` is the id of the sample that took the slot, if the slot still holds this sample.
        `pictures` shows the samples that left and the samples that took their slots, in the form of
        `MemoryView.pictures`. It is None if there are no pictures.

        Raises:
            Busy: the learner has no time.
        """
        lately, by_ids, ids, image_nCHW = self._jobs.ask(lambda: self._read(limit, producer))
        evictions = [
            {
                **asdict(eviction),
                "id": str(eviction.id),
                "origin": None if eviction.origin is None else eviction.origin.known(),
                "by": None if eviction.by is None else eviction.by.known(),
                "by_id": by_id,
            }
            for eviction, by_id in zip(lately, by_ids, strict=True)
        ]
        return {"evictions": evictions, "pictures": picture_sheet(ids, image_nCHW)}

    def _read(
        self, limit: int, producer: str | None
    ) -> tuple[list[Eviction], list[str | None], list[str], Tensor]:
        """Return evictions, the ids of those that replaced them, and ids and images to show.

        This runs on the learner's thread.
        """
        slots, reader = self._slots, self._reader
        shown = (
            one
            for one in reversed(slots.evictions)
            if producer is None or producer in {o.producer for o in (one.origin, one.by) if o}
        )
        lately = list(itertools.islice(shown, limit))
        ids, image_nCHW = slots.pictures.of([eviction.id for eviction in lately])
        standing = reader.samples_in([eviction.slot for eviction in lately])
        by_ids = [
            str(number) if eviction.by is not None and eviction.by == origin else None
            for eviction, (number, origin) in zip(lately, standing, strict=True)
        ]
        if ids:
            taken = [one.slot for one, by in zip(lately, by_ids, strict=True) if by is not None]
            more, by_nCHW = reader.images(taken[: reader.most_pictures])
            ids += [int(number) for number in more if number is not None]
            image_nCHW = torch.cat([image_nCHW, shrunk(by_nCHW, image_nCHW.shape[-1])])
        return lately, by_ids, list(map(str, ids)), image_nCHW
