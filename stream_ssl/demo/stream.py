"""The demo's stream: embedded images in the order of a camera on a robot that is mostly parked.

Shapes: N images, K slots, H height, W width.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.demo import data
from stream_ssl.feed.decode import sample_ids
from stream_ssl.producers.shaping import Parked
from stream_ssl.producers.sources import IdxDataset
from stream_ssl.wire.sample import Sample

SHARE = 0.95
SCENES = 16
STRETCH = 500
SAMPLES_PER_SECOND = 2000.0
NAME, SOURCE = "demo", "fashion-mnist"
IMAGES, LABELS = "streamed-images-idx3-ubyte", "streamed-labels-idx1-ubyte"


@dataclass(frozen=True)
class Replay:
    """The samples that were sent, generated again: the stream is a function of its settings.

    Attributes:
        newest_KHW: the newest images, which a queue of K slots would hold.
        newest_K: their classes.
        newest_originals: the ids of the pictures that they show.
        originals: the id of the shown picture, by the key of each sample sent. A sample of a stop
            shows the scene's picture; any other sample shows its own.
    """

    newest_KHW: NDArray[np.uint8]
    newest_K: NDArray[np.int64]
    newest_originals: list[str]
    originals: dict[int, str]


def write_images(where: Path) -> None:
    """Write the images that may be streamed, and their labels, as IDX files."""
    image_NHW, label_N = data.load()
    rows = data.split(label_N).streamed
    where.mkdir()
    for name, array in ((IMAGES, image_NHW[rows]), (LABELS, label_N[rows].astype(np.uint8))):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        (where / name).write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def settings(where: Path) -> dict[str, Any]:
    """Return the content of the file for `stream-ssl produce idx --config FILE`, as plain values.

    Args:
        where: the folder that `write_images` created.
    """
    return {
        "source": {
            "images": str(where / IMAGES),
            "labels": str(where / LABELS),
            "name": SOURCE,
            "epochs": None,
        },
        "parked": {"share": SHARE, "scenes": SCENES, "stretch": float(STRETCH)},
        "shape": {"rate": SAMPLES_PER_SECOND},
        # A small buffer, so that few samples wait when the learner sets the pace.
        "producer": {"buffer_bytes": 256 * 1024},
    }


def replay(where: Path, sent: int, slots: int) -> Replay:
    """Generate the first `sent` samples again, and return what a queue of `slots` then holds."""
    chosen = settings(where)
    again = Parked(IdxDataset(**chosen["source"]), **chosen["parked"]).samples()
    newest: deque[Sample] = deque(maxlen=max(1, slots))
    originals: dict[str, str] = {}
    for sample, _ in itertools.islice(again, max(1, sent)):
        newest.append(sample)
        originals[sample.id] = original(sample)
    pixels = [np.frombuffer(one.data, np.uint8).reshape(data.SIDE, data.SIDE) for one in newest]
    keys = sample_ids(SOURCE, list(originals)).tolist()
    return Replay(
        np.stack(pixels),
        np.array([one.label for one in newest], np.int64),
        [original(one) for one in newest],
        dict(zip(keys, originals.values(), strict=True)),
    )


def original(sample: Sample) -> str:
    """Return the id of the picture that a sample shows: its scene's id, or its own."""
    return str((sample.meta or {}).get("duplicate_of", sample.id))
