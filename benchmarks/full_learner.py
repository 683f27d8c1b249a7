"""The learner of a configuration as the daemon builds it, with its observers and a full memory.

Shapes: B batch, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch.nn.functional import normalize

from stream_ssl.batch import Batch, Offset, Origin
from stream_ssl.config import build, options
from stream_ssl.daemon.observers import Observers
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import WorkingMemory
from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.metrics import LearnerMetrics

FILL = 4096  # samples that join the memory at a time


class Repeated:
    """A stream that repeats prepared images [N, B, C, H, W] from several producers without end."""

    def __init__(self, images_NBCHW: np.ndarray, producers: int = 3, classes: int = 0) -> None:
        self._images, self._producers, self._classes = images_NBCHW, producers, classes
        self._next = 0

    def next(self, timeout: float) -> Batch[Any]:  # noqa: ARG002
        images_BCHW = self._images[self._next % len(self._images)]
        self._next += 1
        size = len(images_BCHW)
        ids_B = np.arange(size, dtype=np.int64) + (self._next << 32)
        return Batch(
            ids_B=ids_B,
            hashes_B=ids_B,
            labels_B=ids_B % self._classes if self._classes else np.full(size, -1),
            images_BCHW=images_BCHW,
            received_B=np.zeros(size),
            origins_B=[
                Origin(f"producer-{n % self._producers}", "repeated", str(n), 0.0)
                for n in ids_B.tolist()
            ],
            offset=Offset(self._next + 1, 0),
        )

    def lag(self) -> float:
        return 0.0


def noise(settings: Any, batches: int = 8) -> Repeated:
    """Return a stream of random images of this configuration's sizes."""
    shape = batches, settings.batches.batch_size, *build.image_shape(settings)
    images_NBCHW = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Repeated(images_NBCHW, classes=settings.classes)


def settings_of(arguments: Sequence[str]) -> Any:
    """Return the settings of a configuration with options over it, as for `stream-ssl learner`."""
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, list(arguments)))
    if build.vectors(settings) is not None:
        raise ValueError("the samples are vectors: the benchmark needs a configuration with images")
    return settings


def fill(memory: WorkingMemory, width: Any = 0) -> None:
    """Fill a memory with random keys and images, and with features of this width if it counts them.

    The ids are 0 to K - 1.
    """
    draw = torch.Generator().manual_seed(0)
    for ids_B in torch.arange(memory.capacity).split(FILL):
        count, images = len(ids_B), None
        z_BD = normalize(torch.randn(count, memory.dim, generator=draw), dim=1)
        features = torch.rand(count, width, generator=draw)
        if memory.image_shape is not None:
            shape = count, *memory.image_shape
            images = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
        memory.add(
            ids_B,
            z_BD,
            images=images,
            producers=[f"producer-{n % 3}" for n in range(count)],
            features=features if memory.descriptor.needs_features else None,
        )


def steps(learner: Learner, settings: Any) -> Iterator[StepRecord]:
    """Make the learner's steps, and yield each record after the observers have had it."""
    observers = Observers(
        LearnerMetrics(
            CollectorRegistry(), memories=(WORKING, *settings.shadows), classes=settings.classes
        ),
        learner.memory,
        learner.novelty.of_pictures,
        build.shadows(settings, learner.method.dim),
        mock.Mock(),
        mock.Mock(),
        clock=count(0.0, -1.0).__next__,  # no surveys, which take at most 2 % of the time
    )
    for record in learner.run(threading.Event()):
        if isinstance(record, StepRecord):
            observers.consume(record)
            yield record
