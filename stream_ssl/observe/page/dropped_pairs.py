"""The samples that were dropped lately, each beside the picture that it duplicates."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import torch

from stream_ssl.learning.records import DroppedSample, StepRecord
from stream_ssl.observe.page.memory_reader import TILE, MemoryReader
from stream_ssl.observe.page.picture_sheet import picture_sheet
from stream_ssl.observe.slot_history import shrunk

PAIRS = 24
"""The number of dropped samples that the page shows beside their twins."""


class DroppedPairs:
    """The newest dropped samples that have a picture, with their twins."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._pairs: deque[tuple[int, float, DroppedSample]] = deque(maxlen=PAIRS)
        self._numbers = itertools.count()  # numbers of the dropped samples

    def consume(self, record: StepRecord) -> None:
        """Take one record of `Learner.run`. The learner's thread calls this."""
        shown = (one for one in record.dropped if one.twin_CHW is not None)
        self._pairs.extend((next(self._numbers), time.time(), one) for one in shown)

    def newest(self, limit: int) -> dict[str, Any]:
        """Return the newest dropped samples, each with its twin, the last first.

        The twin is the picture that the sample is a near-duplicate of. `pictures` has both images
        of each pair, under the names in the pair's own `pictures`.
        """
        lately = list(self._pairs)[: -limit - 1 : -1]
        pairs, names, images = [], [], []
        for number, at, one in lately:
            pair = [f"dropped-{number}", f"twin-{number}"]
            for image in (one.picture_CHW, one.twin_CHW):
                assert image is not None  # `consume` left out samples without pictures
                images.append(shrunk(image[None], TILE)[0])
            names += pair
            pairs.append(
                {
                    "at": at,
                    "origin": None if one.origin is None else one.origin.known(),
                    "distance": round(one.distance, 3),
                    "label": one.label if one.label >= 0 else None,
                    "twin_label": one.twin_label if one.twin_label >= 0 else None,
                    "pictures": pair,
                }
            )
        drawn = images and self._reader.most_pictures
        pictures = picture_sheet(names, torch.stack(images)) if drawn else None
        return {"dropped": pairs, "pictures": pictures}
