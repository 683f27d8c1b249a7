"""Checks that the parts of a learner, its settings and its samples fit each other."""

from __future__ import annotations

from stream_ssl.learning.pace import Pace
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import Method


class IncompatibleConfig(ValueError):
    """The parts of a learner, or the samples that it receives, do not fit each other."""


def check_parts(method: Method, memory: WorkingMemory, settings: LearnerSettings) -> None:
    """Raise ValueError unless method and memory fit each other and support the settings."""
    method.check(memory)
    if memory.images is not None:
        return
    if settings.reencode:
        raise ValueError(
            f"reencode={settings.reencode} encodes images of the memory again, and this one keeps "
            "none: give it image_shape, or set reencode to 0"
        )
    if settings.anchors != "stream":
        raise ValueError(
            f'anchors="{settings.anchors}" trains on images of the memory, and this one keeps '
            'none: give it image_shape, or choose "stream"'
        )


def check_batch(
    method: Method, memory: WorkingMemory, pace: Pace, anchors: str, batch: int
) -> None:
    """Raise ValueError unless batches of this size fit the method, the memory and the pace."""
    method.check(memory, batch)
    if memory.capacity < batch and anchors != "stream":
        raise ValueError(
            f"anchors={anchors!r} draws training batches from the memory, whose {memory.capacity} "
            f"slots are fewer than the {batch} samples of a batch: raise its capacity, or make the "
            "batches smaller"
        )
    if pace.replays(batch) and memory.images is None:
        raise ValueError(
            f"the pace asks for more updates than batches of {batch} samples: a memory "
            "that keeps images is needed to train on again. Give it image_shape"
        )


def check_labels(method: Method, labelled: bool) -> None:
    """Raise IncompatibleConfig if the loss reads labels and there are none."""
    if method.needs_labels and not labelled:
        raise IncompatibleConfig(
            f"{type(method.loss).__name__} reads labels, as it is set, and there are none: stream "
            "labelled samples and set `classes` to their number, or choose a loss without an oracle"
        )
