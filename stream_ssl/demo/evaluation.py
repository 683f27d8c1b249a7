"""Measure the demo's encoders: a kNN probe on held-out images.

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

from stream_ssl.demo import data
from stream_ssl.evaluation.neighbours import knn_accuracy
from stream_ssl.evaluation.scores import ProbeResult
from stream_ssl.learning.checkpoint_layout import IDS, IMAGES, LABELS, facts_in, file_of

Extractor = Callable[[Tensor], Tensor]
"""A function that returns features [B, F] of images."""

BATCH = 250
NEIGHBOURS = 20


@dataclass(frozen=True)
class DemoEvaluation:
    """The measured accuracies, and the content of the working memory.

    Args:
        probes: kNN on the held-out queries, by representation: "memory" and "queue" (encoders that
            were trained from the working memory and with a queue), "untrained" and "pixels".
        image_KHW: the memory's images.
        label_K: their classes.
        key_K: the keys of their samples.
        updates: updates of the weights until the checkpoint.
        samples: samples of the stream read until the checkpoint.
        queue_updates: updates of the queue's learner.
        queue_samples: samples of the stream that the queue's learner read.
    """

    probes: Mapping[str, ProbeResult]
    image_KHW: NDArray[np.uint8]
    label_K: NDArray[np.int64]
    key_K: NDArray[np.int64]
    updates: int
    samples: int
    queue_updates: int
    queue_samples: int


def evaluate(checkpoint: Path, of_queue: Path) -> DemoEvaluation:
    """Evaluate the checkpoint folders of both learners. Takes some seconds."""
    from stream_ssl.trained.encoder import fresh_encoder, load_encoder

    state, queue_state = (facts_in(folder) for folder in (checkpoint, of_queue))
    extractors: dict[str, Extractor] = {
        "memory": load_encoder(checkpoint),
        "queue": load_encoder(of_queue),
        "untrained": fresh_encoder(state["config"]),
        "pixels": pixels,
    }
    paces = (state["pace"], queue_state["pace"])
    done = (int(pace[what]) for pace in paces for what in ("updates", "samples"))
    return DemoEvaluation(probe_all(extractors), *memory_content(checkpoint), *done)


def memory_content(
    checkpoint: Path,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return grey images [K, H, W], labels [K] and keys [K] of the occupied slots.

    Raises:
        ValueError: the memory keeps no images.
    """
    tensors = load_file(checkpoint / file_of("memory"))
    if IMAGES not in tensors:
        raise ValueError(f"{checkpoint}: the memory keeps no images, so there are none to show")
    return tensors[IMAGES][:, 0], tensors[LABELS], tensors[IDS]


def probe_all(extractors: Mapping[str, Extractor]) -> dict[str, ProbeResult]:
    """Probe each representation on the same held-out images."""
    image_NHW, label_N = data.load()
    parts = data.split(label_N)
    return {
        name: knn_accuracy(
            features(extract, image_NHW[parts.query]),
            torch.from_numpy(label_N[parts.query]),
            features(extract, image_NHW[parts.reference]),
            torch.from_numpy(label_N[parts.reference]),
            k=NEIGHBOURS,
        )
        for name, extract in extractors.items()
    }


@torch.inference_mode()
def features(extract: Extractor, image_NHW: NDArray[np.uint8]) -> Tensor:
    """Return features [N, F] of grey images, in float32 on the CPU, computed in batches."""
    image_NCHW = torch.from_numpy(image_NHW[:, None].copy())
    return torch.cat(
        [
            extract(image_NCHW[start : start + BATCH]).float().cpu()
            for start in range(0, len(image_NCHW), BATCH)
        ]
    )


def pixels(image_BCHW: Tensor) -> Tensor:
    """Return the images themselves as features [B, C * H * W], in [0, 1]."""
    return image_BCHW.flatten(1).float() / 255
