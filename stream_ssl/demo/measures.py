"""Figures that the demo computes from metrics: class shares, collisions, effective classes.

Shapes: C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from stream_ssl.demo.data import CLASSES
from stream_ssl.observe.scrape import History, Snapshot, key

Holder = Literal["stream", "queue", "working"]
HOLDERS: tuple[Holder, ...] = ("stream", "queue", "working")
MEMORIES: tuple[Holder, ...] = ("queue", "working")
TITLES: Mapping[Holder, str] = {"stream": "stream", "queue": "queue", "working": "DUEL memory"}
"""Titles for readers. "working" is the metrics' label of the memory that trains the encoder."""


def side_by_side(ours: Snapshot, theirs: Snapshot) -> Snapshot:
    """Return the daemon's values, with the other daemon's memory as "queue".

    The stream's classes are counted by the other daemon, because ours drops most samples before it
    counts their classes.
    """
    queue = {
        name.replace('memory="working"', 'memory="queue"'): value
        for name, value in theirs.values.items()
        if 'memory="working"' in name or name.startswith("stream_ssl_stream_class_samples_total")
    }
    return replace(ours, values={**ours.values, **queue})


def counts(values: Mapping[str, float], holder: Holder) -> list[float]:
    """Return samples of each class [C]: seen in the stream so far, or now held in a memory."""
    if holder == "stream":
        return [
            values.get(key("stream_ssl_stream_class_samples_total", {"class": str(c)}), 0.0)
            for c in range(len(CLASSES))
        ]
    return [
        values.get(key("stream_ssl_memory_class_slots", {"class": str(c), "memory": holder}), 0.0)
        for c in range(len(CLASSES))
    ]


def shares(amounts: Sequence[float]) -> list[float]:
    """Return the parts of the whole; zeros if the whole is 0."""
    whole = sum(amounts)
    return [amount / whole if whole else 0.0 for amount in amounts]


def newest_counts(history: History, holder: Holder) -> list[float]:
    """Return the newest counts [C] that are not all zero, else zeros."""
    for snapshot in reversed(history.snapshots):
        found = counts(snapshot.values, holder)
        if sum(found):
            return found
    return [0.0] * len(CLASSES)


def same_class_probability(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the probability that a draw from `a` and a draw from `b` have the same class.

    This is the sum of the products of their shares.
    """
    return sum(p * q for p, q in zip(shares(a), shares(b), strict=True))


def true_collisions(history: History, holder: Holder) -> list[tuple[float, float]]:
    """Return (time, probability that a sample of the stream and a slot share their class)."""
    points = []
    for snapshot in history.snapshots:
        held, streamed = counts(snapshot.values, holder), counts(snapshot.values, "stream")
        if sum(held) and sum(streamed):
            points.append((snapshot.time, same_class_probability(streamed, held)))
    return points


def expected_collisions(history: History, holder: Holder) -> list[tuple[float, float]]:
    """Return (time, mean score between two slots of the memory). It needs no labels."""
    points = history.series("stream_ssl_memory_similarity", memory=holder)
    return [point for point in points if point[1] > 0]  # 0 until the memory holds two slots


def near_duplicates(originals: Sequence[str]) -> float:
    """Return the share of samples whose picture another of these samples already shows."""
    return 1 - len(set(originals)) / len(originals) if originals else 0.0


def losses(history: History) -> list[tuple[float, float]]:
    """Return (time, loss) from the first step on. Before that step the gauge is 0."""
    return [
        (snapshot.time, snapshot.values["stream_ssl_loss"])
        for snapshot in history.snapshots
        if snapshot.values.get("stream_ssl_steps_total") and "stream_ssl_loss" in snapshot.values
    ]


def entropy_classes(amounts: Sequence[float]) -> float:
    """Return the effective number of classes: exp of the entropy of the shares, 0 if empty."""
    parts = [p for p in shares(amounts) if p > 0]
    return math.exp(-sum(p * math.log(p) for p in parts)) if parts else 0.0
