"""The demo's stream: the embedded images, shaped.

N images.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producers.shaping import Shaped
from producers.sources import IdxDataset
from stream_ssl.app.demo import data

RATIO = 27.0
DOMINANT = 0
DUPLICATES = 0.2
SAMPLES_PER_SECOND = 2000.0
SHOWN = 2000
NAME = "demo"
IMAGES, LABELS = "streamed-images-idx3-ubyte", "streamed-labels-idx1-ubyte"


@dataclass(frozen=True)
class StreamSample:
    """Images of the stream as it was sent, N of them, with their classes."""

    image_NHW: NDArray[np.uint8]
    label_N: NDArray[np.int64]


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
            "name": "fashion-mnist",
            "epochs": None,
        },
        "shape": {
            "bias": RATIO,
            "dominant": DOMINANT,
            "duplicates": DUPLICATES,
            "rate": SAMPLES_PER_SECOND,
        },
        # Little, so that little waits when the learner sets the pace.
        "producer": {"buffer_bytes": 256 * 1024},
    }


def sample(where: Path, sent: int) -> StreamSample:
    """Images spread evenly over the first `sent` of the stream, as they were sent.

    The stream is a function of its settings, so it is made again rather than kept.
    """
    chosen = settings(where)
    source = IdxDataset(**chosen["source"])
    again = Shaped(source, **{**chosen["shape"], "rate": None})
    step = max(1, sent // SHOWN)
    taken = [sent for sent, _ in itertools.islice(again.samples(), 0, max(sent, 1), step)]
    pixels = [np.frombuffer(one.data, np.uint8).reshape(data.SIDE, data.SIDE) for one in taken]
    return StreamSample(np.stack(pixels), np.array([one.label for one in taken], np.int64))
