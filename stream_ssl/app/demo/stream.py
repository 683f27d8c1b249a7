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
SAMPLES_PER_SECOND = 500.0
SHOWN = 2000
NAME = "demo"


@dataclass(frozen=True)
class StreamSample:
    """Images of the stream as it was sent, N of them, with their classes."""

    image_NHW: NDArray[np.uint8]
    label_N: NDArray[np.int64]


def settings() -> dict[str, Any]:
    """The file that `stream-ssl produce idx --config FILE` takes, as plain values."""
    _, label_N = data.load()
    return {
        "source": {
            "images": str(data.folder() / data.IMAGES),
            "labels": str(data.folder() / data.LABELS),
            "name": "fashion-mnist",
            "subset": data.split(label_N).streamed.tolist(),
            "epochs": None,
        },
        "shape": {
            "bias": RATIO,
            "dominant": DOMINANT,
            "duplicates": DUPLICATES,
            "rate": SAMPLES_PER_SECOND,
        },
    }


def sample(sent: int) -> StreamSample:
    """Images spread evenly over the first `sent` of the stream, as they were sent.

    The stream is a function of its settings, so it is made again rather than kept.
    """
    chosen = settings()
    source = IdxDataset(**{**chosen["source"], "images": Path(chosen["source"]["images"])})
    again = Shaped(source, **{**chosen["shape"], "rate": None})
    step = max(1, sent // SHOWN)
    taken = [sent for sent, _ in itertools.islice(again.samples(), 0, max(sent, 1), step)]
    pixels = [np.frombuffer(one.data, np.uint8).reshape(data.SIDE, data.SIDE) for one in taken]
    return StreamSample(np.stack(pixels), np.array([one.label for one in taken], np.int64))
