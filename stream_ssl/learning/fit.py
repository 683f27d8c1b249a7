"""Whether the parts of a learner fit each other."""

from __future__ import annotations

from memory import WorkingMemory
from stream_ssl.learning.pace import Pace
from stream_ssl.methods import Method


class Unfit(ValueError):
    """The parts of a learner, or the samples it is given, do not go together as they are set."""


def check_parts(method: Method, memory: WorkingMemory, precision: str) -> None:
    """ValueError unless the method can work with the memory, and the precision is one."""
    method.check(memory)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}: choose "float32" or "bfloat16"')


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
    """Unfit if the loss reads labels and there are none."""
    if method.needs_labels and not labelled:
        raise Unfit(
            f"{type(method.loss).__name__} reads labels, as it is set, and there are none: stream "
            "labelled samples and set `classes` to their number, or choose a loss without an oracle"
        )


def check_images(memory: WorkingMemory, pace: Pace, reencode: int, anchors: str, draw: str) -> None:
    """ValueError unless the memory keeps the images that these settings need."""
    if reencode < 0:
        raise ValueError(f"reencode is {reencode}: it is a number of slots, 0 or more")
    if draw not in ("uniform", "inverse-count"):
        raise ValueError(f'draw is {draw!r}: choose "uniform" or "inverse-count"')
    if memory.images is not None:
        return
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
