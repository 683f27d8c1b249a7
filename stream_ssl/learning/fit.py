"""Whether the parts of a learner fit each other."""

from __future__ import annotations

from memory import WorkingMemory
from stream_ssl.learning.pace import Pace
from stream_ssl.methods import Method


def check_parts(method: Method, memory: WorkingMemory, precision: str) -> None:
    """ValueError unless they share their dimension, and the precision is one."""
    if method.dim != memory.dim:
        raise ValueError(
            f"the method embeds in {method.dim} dimensions, the memory holds {memory.dim}: "
            "give both the same dim"
        )
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}: choose "float32" or "bfloat16"')


def check_images(memory: WorkingMemory, pace: Pace, reencode: int, anchors: str, draw: str) -> None:
    """ValueError unless the memory keeps the images that these settings need."""
    if reencode < 0:
        raise ValueError(f"reencode is {reencode}: it is a number of slots, 0 or more")
    if anchors not in ("stream", "memory"):
        raise ValueError(f'anchors is {anchors!r}: choose "stream" or "memory"')
    if draw not in ("uniform", "inverse-count"):
        raise ValueError(f'draw is {draw!r}: choose "uniform" or "inverse-count"')
    if memory.images is not None:
        return
    if pace.band or reencode:
        raise ValueError(
            f"band={pace.band} and reencode={reencode} train on or encode images of the memory "
            "again, and this one keeps none: give it image_shape, or set both to 0"
        )
    if anchors == "memory":
        raise ValueError(
            'anchors="memory" trains on images of the memory, and this one keeps none: give it '
            'image_shape, or choose "stream"'
        )
