"""A small learner on a stream that repeats exactly from any offset.

Shapes: B samples, H height, W width, C channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stream_ssl.batch import START, Batch, Offset, Origin
from stream_ssl.encoder.network import Projector, ResNet
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.views import Views
from stream_ssl.losses import InfoNCE, Loss, NegativeCosine, SelfLabeling
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Descriptor
from stream_ssl.methods import METHODS, Method
from stream_ssl.methods.momentum import Momentum

BATCH, SIZE, SLOTS, DIM = 8, 8, 24, 6


class Repeatable:
    """A stream whose batch n depends only on n and is record n of a journal. It ends after
    `count`.
    """

    def __init__(self, start: Offset = START, count: int | None = None, labelled: bool = True):
        self.record, self.count, self.labelled = start.record, count, labelled

    def next(self, timeout: float) -> Batch | None:
        if self.count is not None and self.record > self.count:
            return None
        draw = np.random.default_rng(self.record)
        ids = np.arange(BATCH, dtype=np.int64) + BATCH * self.record
        labels = draw.integers(0, 4, BATCH) if self.labelled else np.full(BATCH, -1)
        image_BHWC = draw.integers(0, 256, (BATCH, SIZE, SIZE, 1), dtype=np.uint8)
        self.record += 1
        return Batch(
            ids_B=ids,
            hashes_B=ids + 1,
            labels_B=labels.astype(np.int64),
            images_BCHW=image_BHWC.transpose(0, 3, 1, 2),
            received_B=np.zeros(BATCH),
            origins_B=[Origin("robot", "left", str(number), 0.0) for number in ids],
            offset=Offset(self.record, 0),
            rejected={"image": 1} if self.record % 5 == 0 else {},
        )

    def lag(self) -> float:
        return 1.5


def build(
    start: Offset = START,
    images: bool = True,
    stream: Any = None,
    wrap: Callable[[Method], Method] = lambda method: method,
    kind: str = "moco",
    loss: Loss | None = None,
    slots: int = SLOTS,
    views: Views | None = None,
    descriptor: Descriptor | None = None,
    **options: Any,
) -> Learner:
    """Return a learner. `options` are of `LearnerSettings`, or arguments of `Learner`."""
    seed_everything(seed=3, threads=1)
    encoder = ResNet(width=4, depths=(1, 1, 0, 0), channels=1)
    method = wrap(network(kind, encoder, loss))
    shape = (1, SIZE, SIZE) if images else None
    memory = WorkingMemory(
        capacity=slots,
        dim=DIM,
        image_shape=shape,
        device=options.get("device", "cpu"),
        descriptor=descriptor,
    )
    return Learner(
        method,
        memory,
        Views(SIZE, channels=1) if views is None else views,
        Repeatable(start) if stream is None else stream,
        **with_settings(options),
    )


def with_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `Learner`, with all options of `LearnerSettings` in one such object."""
    names = {field.name for field in fields(LearnerSettings)}
    settings = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return rest | {"settings": LearnerSettings(**{"threads": 1, **settings})}


def network(kind: str, encoder: ResNet, loss: Loss | None = None) -> Method:
    """Return the method of this name with a suitable loss and projector."""
    chosen = METHODS[kind]
    usual: Loss = InfoNCE(0.2) if chosen.contrasts else NegativeCosine()
    if kind == "self-labeling":
        usual = SelfLabeling(0.2, rise=20)
    heads = {"simsiam": {"batchnorm": "all"}, "byol": {"hidden": 8, "batchnorm": "hidden"}}
    projector = Projector(encoder.dim, DIM, **heads.get(kind, {}))
    settings = {"momentum": 0.9} if issubclass(chosen, Momentum) else {}
    return chosen(encoder, projector, usual if loss is None else loss, **settings)


def steps(learner: Learner, count: int) -> list[StepRecord]:
    """Return the step records among the next `count` records."""
    records: Iterator[StepRecord | Idle] = learner.run(threading.Event())
    return [r for r in islice(records, count) if isinstance(r, StepRecord)]


def state_of(learner: Learner) -> dict[str, Tensor]:
    """Return all state that two equal runs share, as a flat dict."""
    captured = learner.capture()
    flat = {
        f"{file}/{name}": tensor.clone()
        for file, tensors in captured.tensors.items()
        for name, tensor in tensors.items()
    }
    flat["counts"] = learner.memory.counts()
    return flat


def differing(one: Learner, other: Learner) -> list[str]:
    """Return the names of state that is not bit-equal."""
    ours, theirs = state_of(one), state_of(other)
    assert set(ours) == set(theirs)
    names = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    if one.capture().facts != other.capture().facts:
        names.append("facts")
    return names
