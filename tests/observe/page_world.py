"""A learner's memory behind a page: steps fill it, and HTTP questions read it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from observe_records import step
from prometheus_client import CollectorRegistry
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.batch import Origin
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Descriptor
from stream_ssl.observe.health import Health
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.page.producers import ProducersView
from stream_ssl.observe.server import Server
from stream_ssl.receiver.sessions import ProducerTable

BATCH, SIDE = 8, 16


class Feed:
    """Batches of random rows into a memory; every tenth sample is a copy of the one before it.

    Args:
        slots: of the memory.
        labelled: give each sample a class of 0 to 3.
        descriptor: of the memory.
        channels: of the images: 3, or 1 for grey.
    """

    def __init__(
        self,
        slots: int = 32,
        labelled: bool = True,
        producer: str = "camera",
        descriptor: Descriptor | None = None,
        channels: int = 3,
    ) -> None:
        self.memory = WorkingMemory(
            slots,
            8,
            image_shape=(channels, SIDE, SIDE),
            duplicates=Duplicates(threshold=0.99),
            descriptor=descriptor,
        )
        self.producer, self.labelled, self.number = producer, labelled, 0
        self.original: str | None = None  # the name of each sample's original
        self.origins = Origins()
        self._draw = torch.Generator().manual_seed(5)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        z_BD = normalize(torch.randn(BATCH, 8, generator=self._draw), dim=1)
        z_BD[7] = z_BD[6]
        assert self.memory.image_shape is not None
        shape = (BATCH, *self.memory.image_shape)
        image_BCHW = torch.randint(0, 256, shape, generator=self._draw)
        return torch.arange(BATCH) + self.number, z_BD, image_BCHW.to(torch.uint8)

    def step(self, drawn: int = 4) -> StepRecord:
        """Make a step with anchors "memory": the batch joins, then some samples are drawn."""
        ids_B, z_BD, image_BCHW = self.batch()
        labels_B = ids_B % 4 if self.labelled else torch.full_like(ids_B, -1)
        admission = self.memory.add(ids_B, z_BD, images=image_BCHW, labels=labels_B)
        self.number += BATCH
        self.memory.sample(min(drawn, len(self.memory)), generator=self._draw)
        origins = [
            Origin(self.producer, "lens", f"frame-{number}", 100.0, self.original)
            for number in ids_B.tolist()
        ]
        return step(
            ids_B=ids_B,
            keys_BD=z_BD,
            labels_B=labels_B,
            admission=admission,
            origins_B=origins,
            evicted_origins=self.origins.follow(ids_B.tolist(), origins, admission),
            images_BCHW=image_BCHW,
        )


@contextmanager
def serving(feed: Feed | None, **options: object) -> Iterator[tuple[Server, MemoryView | None]]:
    """Yield a learner's server. With a feed, a thread serves the page like the learner."""
    health = Health()
    health.expect("learner", 60.0)
    sources = options.pop("sources", None) or Sources(run=Path("runs/parked"))
    assert isinstance(sources, Sources)
    view, stop = None, threading.Event()
    if feed is not None:
        view = sources.memory = MemoryView(feed.memory, feed.origins)
        view.jobs.share = 1.0  # nothing is learned here that would have to be spared

    def loop() -> None:
        while view is not None and not stop.wait(0.005):
            view.consume(Idle(0.0))

    thread = threading.Thread(target=loop)
    metrics = LearnerMetrics(CollectorRegistry())
    with Server(metrics.registry, health, "learner", sources=sources, **options) as server:  # type: ignore[arg-type]
        thread.start()
        try:
            yield server, view
        finally:
            stop.set()
            thread.join()


@contextmanager
def receiving(table: ProducerTable, **options: object) -> Iterator[Server]:
    """Yield a receiver's server, and hand over its table of producers."""
    stop = threading.Event()
    sources = options.pop("sources", None) or Sources(run=Path("runs/parked"))
    assert isinstance(sources, Sources)
    view = sources.producers = ProducersView()

    def loop() -> None:
        while not stop.wait(0.01):
            view.offer(table.copy)

    thread = threading.Thread(target=loop)
    metrics = ReceiverMetrics(CollectorRegistry())
    with Server(metrics.registry, Health(), "receiver", sources=sources, **options) as server:  # type: ignore[arg-type]
        thread.start()
        try:
            yield server
        finally:
            stop.set()
            thread.join()
