"""The base class of sources that wrap another source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from stream_ssl.producers.sources.base import (
    Facts,
    Source,
    SourceError,
    place,
    stop_source,
    wrong_position,
)
from stream_ssl.producers.sources.fields import digest
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.wire.sample import Position, Sample

Pairs = Iterator[tuple[Sample, Position]]
"""Samples, each with the position after it."""


class Shaping:
    """A source that reshapes the samples of another source and has its name.

    `samples` opens the other source at once, so that its errors do not wait for the first sample.

    Args:
        source: the source to reshape.
        facts: the settings that a position depends on. Other settings make a position invalid.
    """

    def __init__(self, source: Source, **facts: str | int | float | None) -> None:
        self.source, self.name = source, source.name
        self._facts: Facts = {"source": source.name, **facts}

    def stop(self) -> None:
        """Stop a blocked source, if it supports stopping. Any thread may call this."""
        stop_source(self.source)

    def _mark(self, at: list[int], inner: Position, **more: str) -> dict[str, Any]:
        """Return a position of integers, the other source's own position, and further facts."""
        return {"at": at, "inner": inner, **more, "of": self._facts}

    def _place(self, position: Position, count: int) -> tuple[tuple[int, ...], Position]:
        """Return the `count` integers of a position, and the other source's own position."""
        at = place(position, self._facts, self.name, (ENDLESS,) * count)
        return at, None if position is None else position.get("inner")

    def _first(
        self, images: Pairs, count: int, option: str, seen: str | None
    ) -> tuple[list[tuple[Sample, Position]], str]:
        """Return the first images, and their digest.

        Args:
            images: the images of the other source.
            count: the number of first images.
            option: the option that sets `count`, for the error.
            seen: the digest in a position, which the images must have; None: there is no position.

        Raises:
            SourceError: there are fewer images, or they have changed since the position was taken.
        """
        first = list(itertools.islice(images, count))
        if len(first) < count:
            raise SourceError(
                f"source {self.name!r} has {len(first)} images, and {option} is {count}: set "
                f"{option} to fewer, or give it more"
            )
        found = digest(bytes(sample.data) for sample, _ in first)
        if seen not in (None, found):
            raise wrong_position(self.name, "its first images, which it repeats, have changed")
        return first, found


def in_turn(number: int, count: int, *key: int) -> int:
    """Return item `number` of a sequence that repeats 0 to `count` - 1, each round in a new order.

    The orders are a function of the key.
    """
    turn, at = divmod(number, count)
    return int(np.random.default_rng([*key, turn]).permutation(count)[at])
