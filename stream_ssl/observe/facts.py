"""The facts of one process behind the five answers: trends, and the use of each producer.

`answers.py` makes sentences of the facts of all processes of a run.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.families import OTHER
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.page.history import LATELY, FigureHistory
from stream_ssl.observe.receiver_checks import only_sporadic
from stream_ssl.observe.trends import Figures, Rise
from stream_ssl.receiver.records import SOURCE_ENDED

WINDOW = 600.0
"""Seconds that the counts by producer cover."""
TREND_SECONDS = 3600.0
"""Seconds over which the change of an accuracy is given."""
MOST_WORST = 64
"""The most producers of the least use that the facts name."""
LEAST_SAMPLES = 20
"""A producer with fewer samples within WINDOW is not judged."""

USES = ("producer_admitted_samples_total", "dropped_samples_total", "quarantined_samples_total")
"""The counters by producer that tell what became of its samples."""


class Facts:
    """The facts of one process, from its metrics. Call `sample` every two seconds."""

    def __init__(
        self,
        registry: CollectorRegistry,
        role: Role,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = FigureHistory(registry, role, clock)
        self._role, self._clock = role, clock
        self._registry = registry
        self._rises = {name: Rise(WINDOW, clock) for name in USES}
        self._usual = Rise(WINDOW, clock)
        self._lock = threading.Lock()
        self._next = -math.inf
        self._begun: float | None = None  # the step at which this process continued the run

    def sample(self) -> None:
        """Take the figures, and at most once in WINDOW / 24 seconds the counters."""
        self.history.sample()
        if self._clock() >= self._next:
            self._next = self._clock() + WINDOW / 24
            self.read()

    def read(self) -> dict[str, Any]:
        """Return the facts as plain values, for JSON."""
        figures = Figures(self._registry)
        return _of_receiver(figures) if self._role == "receiver" else self._of_learner(figures)

    def _of_learner(self, figures: Figures) -> dict[str, Any]:
        with self._lock:
            counts = {
                name: rise(figures.by(name, "producer")) for name, rise in self._rises.items()
            }
            done = figures.get("steps_total")
            usually, span = self._usual({"": done})[""], self._usual.span
        idle = self.history.unchanged("steps")
        updates, waited = self.history.rise("steps", LATELY)
        covered = figures.get("prequential_covered_samples")
        return {
            "span": span,
            "age": self.history.age,
            "updates": updates,
            "updates_span": waited,
            "updates_done": _known(done) or 0.0,
            "updates_at_most": self._updates_at_most(done, figures),
            "update_gap": max(0.0, span - idle) / usually if usually > 1 else None,
            "idle": idle,
            "pending": _known(figures.get("pending_samples")) or 0.0,
            "unread": _known(figures.get("lag_records")),
            "checkpoint": _checkpoint(figures),
            "lag": self._trend("lag", LATELY),
            "chance": _chance(figures),
            "held_out": self._trend("held_out"),
            "held_out_first": _known(figures.get("held_out_first_accuracy")),
            "held_out_error": _known(figures.get("held_out_rise_error")),
            "held_out_since": figures.get("held_out_step") > 0,
            "held_out_classes": len(figures.by("held_out_class_accuracy", "class")),
            "stream_knn": (knn := self._trend("knn")),
            "stream_knn_error": _stream_error(knn, covered),
            "stream_kappa": _known(figures.get("prequential_kappa", classifier="knn")),
            "labelled": _known(figures.get("prequential_samples_total")),
            "classes": _classes(figures),
            "producers": _uses(counts, figures.by("producer_slots", "producer")),
            "shards": list(figures.by("rank_shard_slots", "rank").values()),
        }

    def _updates_at_most(self, done: float, figures: Figures) -> float:
        """Return the updates of this process, and the steps of the run before it.

        Not each of those steps made an update, but nothing counts them over a restart. From the
        end of the start to the first update, the newest checkpoint is the one with which this
        process began.
        """
        done = _known(done) or 0.0
        if not done:
            begun = _known(figures.get("checkpoint_step")) or 0.0
            self._begun = None if figures.get("starting") else begun
        elif self._begun is None:
            self._begun = max(0.0, (_known(figures.get("step")) or 0.0) - done)
        return done + (self._begun or 0.0)

    def uses(self) -> dict[str, dict[str, Any]]:
        """Return what became of each producer's samples since the learner's start, by producer.

        Producers beyond the metrics' limit count together as "other".
        """
        figures = Figures(self._registry)
        found: dict[str, dict[str, Any]] = defaultdict(lambda: {"dropped": {}, "bad": {}})
        for key, metric in (
            ("dropped", "dropped_samples_total"),
            ("bad", "quarantined_samples_total"),
        ):
            for labels, value in figures.each(metric):
                if value:
                    found[labels["producer"]][key][labels["reason"]] = value
        for key, metric in (
            ("admitted", "producer_admitted_samples_total"),
            ("slots", "producer_slots"),
            ("guaranteed", "producer_guaranteed_slots"),
        ):
            for producer, value in figures.by(metric, "producer").items():
                found[producer][key] = value
        return dict(found)

    def _trend(self, series: str, window: float = TREND_SECONDS) -> dict[str, float] | None:
        """Return the newest value of a series, its rise, and the seconds that the rise covers."""
        points = self.history.values(series, window)
        if not points:
            return None
        (began, first), (ended, last) = points[0], points[-1]
        return {"value": last, "rise": last - first, "seconds": ended - began}


def _known(value: float) -> float | None:
    """Return a figure, or None for a figure that nothing has measured."""
    return value if math.isfinite(value) else None


def _of_receiver(figures: Figures) -> dict[str, Any]:
    known = figures.by("producer_samples_total", "producer")
    came = {*known, *figures.by("producer_finished", "producer")}  # some sent nothing
    waits = figures.get("producers_connected") > 0 and only_sporadic(figures)
    return {"known": len(came), "ended": _ended(figures, known), "waits": waits}


def _ended(figures: Figures, known: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the last producer and when its last sample came; None unless all sources ended."""
    finished = figures.by("producer_finished", "producer")
    if figures.get("producers_connected") != 0 or not known:
        return None
    # A producer may have connected, and have sent nothing because it got no credit.
    if any(finished.get(who) != SOURCE_ENDED for who in {*known, *finished}):
        return None
    received = figures.by("producer_last_received_timestamp_seconds", "producer")
    last = max(known, key=lambda who: received.get(who, 0.0))
    return {"last": last, "received": received.get(last)}


def _chance(figures: Figures) -> float | None:
    """Return the contrastive loss of an encoder that distinguishes nothing: log(N + 1).

    The result is None for a loss without negatives.
    """
    negatives = figures.by("loss_diagnostic", "name").get("negatives", 0.0)
    return math.log(negatives + 1) if negatives > 0 else None


def _stream_error(trend: Mapping[str, float] | None, samples: float) -> float | None:
    """Return the standard error of the change of an accuracy between two windows of samples.

    It assumes independent samples. Neighbours on a stream are alike, so the true error is
    larger.
    """
    if trend is None or not samples > 0:
        return None
    ends = trend["value"], trend["value"] - trend["rise"]
    return math.sqrt(sum(p * (1 - p) for p in ends) / samples)


def _checkpoint(figures: Figures) -> dict[str, float] | None:
    """Return the step and the age of the newest checkpoint; None without one."""
    if (step := _known(figures.get("checkpoint_step"))) is None:
        return None
    return {"step": step, "age": figures.get("checkpoint_age_seconds")}


def _classes(figures: Figures) -> dict[str, Any] | None:
    """Return the number of classes in the memory and the largest class; None without labels."""
    held = figures.by("memory_class_slots", "class", memory=WORKING)
    slots = {name: count for name, count in held.items() if count > 0}
    if not slots:
        return None
    largest = max(slots, key=lambda name: slots[name])
    return {
        "count": len(slots),
        "more": OTHER in slots,
        "largest": largest,
        "share": slots[largest] / sum(slots.values()),
    }


def _uses(counts: Mapping[str, Mapping[str, float]], slots: Mapping[str, float]) -> dict[str, Any]:
    """Return what became of the producers' samples, with the best producer, and the worst first.

    The use of a producer is the share of its samples that were new and could be decoded. Samples
    that the near-duplicate test has not seen yet do not count.
    """
    admitted, dropped, bad = (counts[name] for name in USES)
    rows: list[dict[str, Any]] = []
    for name in {*admitted, *dropped, *bad}:
        parts = [one.get(name, 0.0) for one in (admitted, dropped, bad)]
        if (samples := sum(parts)) >= LEAST_SAMPLES:
            used, away, broken = (part / samples for part in parts)
            rows.append(
                {"name": name, "samples": samples, "used": used, "dropped": away, "bad": broken}
            )
    rows.sort(key=lambda row: (-row["used"], -row["samples"], row["name"]))
    held, total = max(slots.values(), default=0.0), sum(slots.values())
    return {
        "best": rows[0] if rows else None,
        "worst": rows[:0:-1][:MOST_WORST],
        "samples": sum(admitted.values()) + sum(dropped.values()) + sum(bad.values()),
        "dropped": sum(dropped.values()),
        "most_slots": max(slots, key=lambda name: (slots[name], name)) if held else None,
        "most_slots_share": held / total if held else None,
    }
