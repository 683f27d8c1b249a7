"""What the learnt encoder is worth: held-out images, found by their nearest neighbours.

Shapes: B batch, C channels, F features, H height, W width, K slots, N images, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from stream_ssl.app.demo import data
from stream_ssl.bounded_files import read_map
from stream_ssl.evaluation.neighbours import knn_accuracy

Extractor = Callable[[Tensor], Tensor]
"""Gives features [B, F] of images."""

BATCH = 250
NEIGHBOURS = 20


@dataclass(frozen=True)
class Probe:
    """Accuracy of the nearest neighbours' vote on the held-out query images.

    Args:
        overall: part of all queries.
        by_class: part of each class's queries.
    """

    overall: float
    by_class: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """What the two learners' checkpoints are worth, and what the working memory holds.

    Args:
        probes: by representation: the encoder trained from the working memory, the one trained
            with a queue, the same before training, raw pixels.
        image_KHW: the memory's images.
        label_K: their classes.
        key_K: the keys of their samples.
        updates: of the weights when the checkpoint was made.
        samples: samples of the stream read until then.
        queue_updates: of the other learner's weights.
        queue_samples: samples of the stream that it read.
    """

    probes: Mapping[str, Probe]
    image_KHW: NDArray[np.uint8]
    label_K: NDArray[np.int64]
    key_K: NDArray[np.int64]
    updates: int
    samples: int
    queue_updates: int
    queue_samples: int


def evaluate(checkpoint: Path, of_queue: Path) -> Evaluation:
    """Evaluate the checkpoint folders of both learners; takes some seconds."""
    from stream_ssl.app.encoder import fresh_encoder, load_encoder

    state, queue_state = (read_map(folder / "state.json") for folder in (checkpoint, of_queue))
    extractors: dict[str, Extractor] = {
        "memory": load_encoder(checkpoint),
        "queue": load_encoder(of_queue),
        "untrained": fresh_encoder(state["config"]),
        "pixels": pixels,
    }
    paces = (state["pace"], queue_state["pace"])
    done = (int(pace[what]) for pace in paces for what in ("updates", "samples"))
    return Evaluation(probe_all(extractors), *memory_content(checkpoint), *done)


def memory_content(
    checkpoint: Path,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Grey images [K, H, W] of the occupied slots, their labels [K] and their keys [K].

    Raises:
        ValueError: the memory keeps no images.
    """
    tensors = load_file(checkpoint / "memory.safetensors")
    if "columns.images" not in tensors:
        raise ValueError(f"{checkpoint}: the memory keeps no images, so there are none to show")
    return tensors["columns.images"][:, 0], tensors["columns.labels"], tensors["columns.ids"]


def probe_all(extractors: Mapping[str, Extractor]) -> dict[str, Probe]:
    """Probe each representation on the same held-out images."""
    image_NHW, label_N = data.load()
    parts = data.split(label_N)
    probes = {}
    for name, extract in extractors.items():
        result = knn_accuracy(
            features(extract, image_NHW[parts.query]),
            torch.from_numpy(label_N[parts.query]),
            features(extract, image_NHW[parts.reference]),
            torch.from_numpy(label_N[parts.reference]),
            k=NEIGHBOURS,
        )
        by_class = tuple(result.per_class[label] for label in range(len(data.CLASSES)))
        probes[name] = Probe(result.accuracy, by_class)
    return probes


@torch.inference_mode()
def features(extract: Extractor, image_NHW: NDArray[np.uint8]) -> Tensor:
    """Features [N, F] of grey images, a batch at a time, in float32 on the CPU."""
    image_NCHW = torch.from_numpy(image_NHW[:, None].copy())
    return torch.cat(
        [
            extract(image_NCHW[start : start + BATCH]).float().cpu()
            for start in range(0, len(image_NCHW), BATCH)
        ]
    )


def pixels(image_BCHW: Tensor) -> Tensor:
    """The image itself as features [B, C * H * W], in [0, 1]."""
    return image_BCHW.flatten(1).float() / 255
