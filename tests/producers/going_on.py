"""Checks that a stream resumes from its positions, and that `stop` ends the stream."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator

import msgpack
from waiting import until

from stream_ssl.producers.sources import Source
from stream_ssl.wire.sample import Position, Sample, check_position

MANY = 1 << 16  # more samples than any stream of the tests has to its end


def check_goes_on(
    build: Callable[[], Source], every: int | None = None, starts: int = MANY, ahead: int = MANY
) -> list[tuple[Sample, Position]]:
    """Check that positions of a stream lead to the rest of it, and return the stream.

    Args:
        build: returns a new source.
        every: samples from one checked position to the next; None: more for longer streams.
        starts: the number of first samples among which positions are checked.
        ahead: samples that are compared after each position.
    """
    stream = list(itertools.islice(build().samples(), starts + ahead))
    if every is None:
        every = 1 if len(stream) < 50 else 5 if len(stream) < 100 else 29
    for at in range(0, min(starts, len(stream)), every):
        position = stream[at][1]
        check_position(position)
        travelled = json.loads(json.dumps(position))
        assert travelled == msgpack.unpackb(msgpack.packb(position))
        rest = list(itertools.islice(build().samples(travelled), ahead))
        ours = stream[at + 1 : at + 1 + ahead]
        assert [said(sample) for sample, _ in rest] == [said(sample) for sample, _ in ours]
        assert [after for _, after in rest] == [after for _, after in ours]
    return stream


def check_stop_ends(
    source: Source,
    stream: Iterator[tuple[Sample, Position]] | None = None,
    waits: Callable[[], object] = lambda: True,
) -> None:
    """Check that `stop` ends a waiting source, or a waiting stream of its samples."""
    ended = threading.Thread(target=list, args=(stream or source.samples(),))
    ended.start()
    until(waits)
    source.stop()
    ended.join(60)
    assert not ended.is_alive()


def said(sample: Sample) -> tuple:
    """Return all fields of a sample except its time, because a replay takes place later."""
    meta = tuple(sorted((sample.meta or {}).items()))
    shape = sample.shape
    return sample.id, sample.source, sample.label, sample.codec, shape, bytes(sample.data), meta
