"""Whether the parts and settings of a learner fit each other."""

from __future__ import annotations

from memory import WorkingMemory
from memory.draws import ORDERS
from stream_ssl.learning.pace import Pace
from stream_ssl.methods import Method


class IncompatibleConfig(ValueError):
    """The parts of a learner, or the samples it gets, do not fit each other as configured."""


def check_parts(
    method: Method,
    memory: WorkingMemory,
    pace: Pace,
    precision: str,
    anchors: str,
    stream_share: float,
    keys: str,
    draw: str,
    reencode: int,
) -> None:
    """ValueError unless each setting is in its range, and method and memory can work with it."""
    method.check(memory)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}: choose "float32" or "bfloat16"')
    if anchors not in ("stream", "memory", "mixed"):
        raise ValueError(f'anchors is {anchors!r}: choose "stream", "memory" or "mixed"')
    if not 0 < stream_share < 1:
        raise ValueError(
            f"stream_share is {stream_share}: the part of a mixed batch that is of the stream lies "
            'within (0, 1). For all of one choose anchors "stream" or "memory"'
        )
    if reencode < 0:
        raise ValueError(f"reencode is {reencode}: it is a number of slots, 0 or more")
    if draw not in ORDERS:
        raise ValueError(f"draw is {draw!r}: choose one of {', '.join(ORDERS)}")
    if keys not in ("before", "after"):
        raise ValueError(f'keys is {keys!r}: choose "before" or "after" the update')
    if memory.images is None:
        _check_without_images(pace, reencode, anchors)


def _check_without_images(pace: Pace, reencode: int, anchors: str) -> None:
    if pace.band or reencode:
        raise ValueError(
            f"band={pace.band} and reencode={reencode} train on or encode images of the memory "
            "again, and this one keeps none: give it image_shape, or set both to 0"
        )
    if anchors != "stream":
        raise ValueError(
            f'anchors="{anchors}" trains on images of the memory, and this one keeps none: give it '
            'image_shape, or choose "stream"'
        )


def check_batch(
    method: Method, memory: WorkingMemory, pace: Pace, anchors: str, batch: int
) -> None:
    """ValueError unless batches of so many samples go with the method, the memory and the pace."""
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
    """IncompatibleConfig if the loss reads labels and there are none."""
    if method.needs_labels and not labelled:
        raise IncompatibleConfig(
            f"{type(method.loss).__name__} reads labels, as it is set, and there are none: stream "
            "labelled samples and set `classes` to their number, or choose a loss without an oracle"
        )
