"""All figures of a demo run by name, for summary.json and for a table in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from stream_ssl.demo.data import CLASSES
from stream_ssl.demo.measures import (
    HOLDERS,
    Holder,
    entropy_classes,
    expected_collisions,
    losses,
    near_duplicates,
    newest_counts,
    shares,
    true_collisions,
)
from stream_ssl.learning.records import PHASES
from stream_ssl.observe.scrape import History, Points

if TYPE_CHECKING:  # these import torch, which the live display does not need
    from stream_ssl.demo.evaluation import DemoEvaluation
    from stream_ssl.demo.stream import Replay

Figures = dict[str, float]

TAIL_SECONDS = 10.0

ENOUGH_UPDATES = 200
"""Below this number of updates an encoder has hardly begun to learn."""

NAMES: Mapping[Holder, str] = {"stream": "stream", "queue": "queue", "working": "memory"}


def figures(history: History, evaluation: DemoEvaluation, sent: Replay) -> Figures:
    """Return all figures. Shares, probabilities and accuracies are in [0, 1]."""
    held = [sent.originals[key] for key in evaluation.key_K.tolist()]
    return {
        "memory_near_duplicates": near_duplicates(held),
        "queue_near_duplicates": near_duplicates(sent.newest_originals),
        "memory_pictures": float(len(set(held))),
        "queue_pictures": float(len(set(sent.newest_originals))),
        **_flow(history),
        **_learning(history, evaluation),
        "memory_slots": float(len(held)),  # of the checkpoint, like the pictures
        **_balance(history),
        **_resources(history),
        **_accuracy(evaluation),
    }


def too_few_updates(found: Mapping[str, float]) -> str:
    """Return a warning if the run was too short to judge its encoder, else an empty string."""
    if found["updates"] >= ENOUGH_UPDATES:
        return ""
    return (
        f"{found['updates']:.0f} updates are too few to judge the encoder: a network that "
        "has just begun to learn is often worse than a random one. Use more --seconds."
    )


def write(path: Path, found: Figures) -> None:
    """Write summary.json."""
    path.write_text(json.dumps(found, indent=2) + "\n")


def _flow(history: History) -> Figures:
    received = history.series("stream_ssl_received_samples_total")
    amount = history.series("stream_ssl_received_bytes_total")
    lags = [lag for _, lag in history.series("stream_ssl_lag_seconds")] or [0.0]
    fsyncs = history.total("stream_ssl_journal_fsync_seconds_count")
    return {
        "received_samples": history.total("stream_ssl_received_samples_total"),
        "received_bytes": history.total("stream_ssl_received_bytes_total"),
        "received_samples_per_second": mean_rate(received),
        "received_megabytes_per_second": mean_rate(amount) / 1e6,
        "acked_samples": history.total("stream_ssl_acked_samples_total"),
        "repeated_samples": history.total("stream_ssl_duplicate_samples_total"),
        "missing_packets": history.total("stream_ssl_missing_packets_total"),
        "journal_peak_bytes": max(
            (held for _, held in history.series("stream_ssl_journal_bytes")), default=0.0
        ),
        "journal_fsync_mean_seconds": (
            history.total("stream_ssl_journal_fsync_seconds_sum") / fsyncs if fsyncs else 0.0
        ),
        "lag_median_seconds": median(lags),
        "lag_largest_seconds": max(lags),
    }


def _learning(history: History, evaluation: DemoEvaluation) -> Figures:
    found: Figures = {
        "updates": float(evaluation.updates),
        "read_samples": float(evaluation.samples),
        "queue_updates": float(evaluation.queue_updates),
        "queue_read_samples": float(evaluation.queue_samples),
        "dropped_samples": history.total("stream_ssl_near_duplicates_total"),
        "steps_per_second": mean_rate(history.series("stream_ssl_steps_total")),
        "skipped_updates": sum(
            history.total("stream_ssl_skipped_updates_total", reason=reason)
            for reason in ("loss", "gradient", "keys", "other")
        ),
        "loss_last_nats": tail_mean(losses(history)),
    }
    for phase in PHASES:
        count = history.total("stream_ssl_step_seconds_count", phase=phase)
        total = history.total("stream_ssl_step_seconds_sum", phase=phase)
        found[f"step_{phase}_mean_seconds"] = total / count if count else 0.0
    return found


def _balance(history: History) -> Figures:
    found: Figures = {
        name: history.last(f"stream_ssl_{metric}", memory="working")
        for name, metric in (
            ("memory_capacity_slots", "memory_capacity_slots"),
            ("evicted_samples", "memory_evictions_total"),
        )
    }
    for holder in HOLDERS:
        held = newest_counts(history, holder)
        found[f"{NAMES[holder]}_largest_class_share"] = max(shares(held))
        found[f"{NAMES[holder]}_effective_classes"] = entropy_classes(held)
        if holder != "stream":
            name = NAMES[holder]
            found[f"{name}_true_collision_probability"] = tail_mean(
                true_collisions(history, holder)
            )
            found[f"{name}_expected_collision_probability"] = tail_mean(
                expected_collisions(history, holder)
            )
    return found


def _resources(history: History) -> Figures:
    return {
        f"{job}_largest_resident_bytes": max(
            (held for _, held in history.series("process_resident_memory_bytes", job=job)),
            default=0.0,
        )
        for job in ("receiver", "learner")
    }


def _accuracy(evaluation: DemoEvaluation) -> Figures:
    found: Figures = {}
    for name, probe in evaluation.probes.items():
        found[f"knn_{name}_accuracy"] = probe.accuracy
        for label, accuracy in probe.per_class.items():
            word = CLASSES[label].lower().replace("-", "_").replace("/", "_").replace(" ", "_")
            found[f"knn_{name}_{word}_accuracy"] = accuracy
    return found


def mean_rate(points: Points) -> float:
    """Return a counter's rise per second between its first and its last change."""
    rises = [
        (before[0], after[0], after[1] - before[1])
        for before, after in pairwise(points)
        if after[1] > before[1]
    ]
    if not rises:
        return 0.0
    return sum(rise for _, _, rise in rises) / (rises[-1][1] - rises[0][0])


def tail_mean(points: Points) -> float:
    """Return the mean of the last TAIL_SECONDS; 0 without points."""
    if not points:
        return 0.0
    end = points[-1][0]
    return fmean(value for time, value in points if time >= end - TAIL_SECONDS)


def table(found: Figures) -> Table:
    """Return the main figures as a table for the terminal."""
    rows = Table(box=box.SIMPLE, show_header=False, title="Summary", title_justify="left")
    rows.add_column("what")
    rows.add_column("figure", justify="right", no_wrap=True)
    rows.add_column("beside it", style="dim")
    for row in _rows(found):
        rows.add_row(*row)
    return rows


def _rows(f: Figures) -> Sequence[tuple[str, str, str]]:
    memory, queue = "memory_true_collision_probability", "queue_true_collision_probability"
    return (
        (
            "received for the DUEL memory",
            f"{f['received_samples']:,.0f} samples",
            (
                f"{f['received_samples_per_second']:,.0f}/s, "
                f"{f['received_megabytes_per_second']:.2f} MB/s, "
                f"{f['acked_samples']:,.0f} durable and acknowledged"
            ),
        ),
        (
            "the DUEL memory's learner",
            f"{f['updates']:,.0f} updates",
            (
                f"{f['read_samples']:,.0f} samples read; {f['dropped_samples']:,.0f} dropped as "
                "near-duplicates before the stop; "
                f"lag {f['lag_median_seconds']:.1f} s (median)"
            ),
        ),
        (
            "the queue's learner",
            f"{f['queue_updates']:,.0f} updates",
            (
                f"{f['queue_read_samples']:,.0f} samples read in the same time, from its own "
                "receiver and producer"
            ),
        ),
        ("loss at the end", f"{f['loss_last_nats']:.3f} nats", ""),
        (
            "near-duplicates of another slot",
            f"{f['memory_near_duplicates']:.1%} of the DUEL memory",
            f"{f['queue_near_duplicates']:.1%} of a queue of the same size",
        ),
        (
            "different pictures held",
            f"{f['memory_pictures']:,.0f} in the DUEL memory",
            f"{f['queue_pictures']:,.0f} in a queue of the same size",
        ),
        (
            "negatives of the sample's own class",
            f"{f[memory]:.1%} in the DUEL memory",
            f"{f[queue]:.1%} in a queue of the same size",
        ),
        (
            "effective classes",
            f"{f['memory_effective_classes']:.1f} of {len(CLASSES)} in the DUEL memory",
            (
                f"{f['queue_effective_classes']:.1f} in the queue, "
                f"{f['stream_effective_classes']:.1f} in the stream"
            ),
        ),
        (
            "kNN accuracy, held-out images",
            f"{f['knn_memory_accuracy']:.1%} trained from the DUEL memory",
            (
                f"{f['knn_queue_accuracy']:.1%} trained with a queue, "
                f"{f['knn_untrained_accuracy']:.1%} untrained, "
                f"{f['knn_pixels_accuracy']:.1%} pixels"
            ),
        ),
        (
            "memory of the processes",
            f"{f['receiver_largest_resident_bytes'] / 1e6:,.0f} MB receiver",
            f"{f['learner_largest_resident_bytes'] / 1e6:,.0f} MB learner",
        ),
    )
