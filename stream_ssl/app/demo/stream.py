"""The demo's stream: the embedded images, as a robot's camera sends them that is parked mostly.

N images, K slots.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.app.demo import data
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
    """What was sent, made again: the stream is a function of its settings.

    Attributes:
        newest_KHW: the last images, which a queue of K slots would hold.
        newest_K: their classes.
        newest_originals: the ids of the pictures that they show.
        originals: by the key of every sample sent, the id of the picture that it shows: of the
            scene where the robot was parked, else its own.
    """

    newest_KHW: NDArray[np.uint8]
    newest_K: NDArray[np.int64]
    newest_originals: list[str]
    originals: dict[int, str]


def write_images(where: Path) -> None:
    """Write the images that may be streamed, and their labels, as IDX files of their own."""
    image_NHW, label_N = data.load()
    rows = data.split(label_N).streamed
    where.mkdir()
    for name, array in ((IMAGES, image_NHW[rows]), (LABELS, label_N[rows].astype(np.uint8))):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        (where / name).write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def settings(where: Path) -> dict[str, Any]:
    """The file that `stream-ssl produce idx --config FILE` takes, as plain values.

    Args:
        where: the folder that `write_images` made.
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
        # Little, so that little waits when the learner sets the pace.
        "producer": {"buffer_bytes": 256 * 1024},
    }


def replay(where: Path, sent: int, slots: int) -> Replay:
    """The first `sent` samples again, and what a queue of `slots` holds then."""
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
    """The id of the picture that a sample shows: its scene's, or its own."""
    return str((sample.meta or {}).get("duplicate_of", sample.id))
