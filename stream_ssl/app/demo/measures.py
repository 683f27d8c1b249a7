"""What the demo reads out of the metrics: shares of classes, collisions, effective classes.

C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from stream_ssl.app.demo.data import CLASSES
from stream_ssl.observe.scrape import History, Snapshot, key

Holder = Literal["stream", "queue", "working"]
HOLDERS: tuple[Holder, ...] = ("stream", "queue", "working")
MEMORIES: tuple[Holder, ...] = ("queue", "working")
TITLES: Mapping[Holder, str] = {"stream": "stream", "queue": "queue", "working": "DUEL memory"}
"""What a reader calls them; "working" is the label of the memory that trains the encoder."""


def side_by_side(ours: Snapshot, theirs: Snapshot) -> Snapshot:
    """Our daemon's values, with the other's memory as "queue", and the stream's classes as the
    other counts them: ours turns most samples away uncounted."""
    queue = {
        name.replace('memory="working"', 'memory="queue"'): value
        for name, value in theirs.values.items()
        if 'memory="working"' in name or name.startswith("stream_ssl_stream_class_samples_total")
    }
    return replace(ours, values={**ours.values, **queue})


def counts(values: Mapping[str, float], holder: Holder) -> list[float]:
    """Samples of each class: seen so far in the stream, or held now in a memory; [C]."""
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
    """Parts of the whole; zeros of an empty one."""
    whole = sum(amounts)
    return [amount / whole if whole else 0.0 for amount in amounts]


def newest_counts(history: History, holder: Holder) -> list[float]:
    """The newest counts that are not all zero, or zeros; [C]."""
    for snapshot in reversed(history.snapshots):
        found = counts(snapshot.values, holder)
        if sum(found):
            return found
    return [0.0] * len(CLASSES)


def meeting(a: Sequence[float], b: Sequence[float]) -> float:
    """Chance that one drawn from each share the class: sum of products of their shares."""
    return sum(p * q for p, q in zip(shares(a), shares(b), strict=True))


def true_collisions(history: History, holder: Holder) -> list[tuple[float, float]]:
    """(time, chance that a sample of the stream and a slot of the memory share their class)."""
    points = []
    for snapshot in history.snapshots:
        held, streamed = counts(snapshot.values, holder), counts(snapshot.values, "stream")
        if sum(held) and sum(streamed):
            points.append((snapshot.time, meeting(streamed, held)))
    return points


def expected_collisions(history: History, holder: Holder) -> list[tuple[float, float]]:
    """(time, mean score between two slots of the memory); what can be seen without labels."""
    points = history.series("stream_ssl_memory_similarity", memory=holder)
    return [point for point in points if point[1] > 0]  # 0 until the memory holds two slots


def near_copies(originals: Sequence[str]) -> float:
    """Part of these samples that show a picture which another of them shows already."""
    return 1 - len(set(originals)) / len(originals) if originals else 0.0


def losses(history: History) -> list[tuple[float, float]]:
    """(time, loss) from the first step on; before it the gauge says 0."""
    return [
        (snapshot.time, snapshot.values["stream_ssl_loss"])
        for snapshot in history.snapshots
        if snapshot.values.get("stream_ssl_steps_total") and "stream_ssl_loss" in snapshot.values
    ]


def entropy_classes(amounts: Sequence[float]) -> float:
    """Effective number of classes: exponential of the entropy of the shares, 0 when empty."""
    parts = [p for p in shares(amounts) if p > 0]
    return math.exp(-sum(p * math.log(p) for p in parts)) if parts else 0.0
