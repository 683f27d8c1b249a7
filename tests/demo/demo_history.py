"""A made-up run in the form in which the scraper records a run."""

import math

import numpy as np

from stream_ssl.demo import data
from stream_ssl.demo.evaluation import DemoEvaluation
from stream_ssl.demo.report import DemoFacts
from stream_ssl.demo.stream import Replay
from stream_ssl.evaluation.scores import ProbeResult
from stream_ssl.observe.scrape import History, Snapshot, key

DOMINANT = 0
RATIO = 27


def made_up_history(seconds: int = 120, slots: int = 1024) -> History:
    """Stream x27 in one class; the queue follows the stream, the memory flattens."""
    history = History()
    for tick in range(seconds * 2 + 1):
        now = tick / 2
        history.append(Snapshot(now, _values(now, slots), ("receiver", "learner")))
    return history


def _values(now: float, slots: int) -> dict[str, float]:
    trained = 380 * now
    share = [RATIO / 36 if c == DOMINANT else 1 / 36 for c in range(10)]
    settled = math.exp(-now / 15)
    filled = min(trained, slots)
    values = {
        "stream_ssl_received_samples_total": 400 * now,
        "stream_ssl_acked_samples_total": 400 * now,
        "stream_ssl_received_bytes_total": 400 * 784 * now,
        "stream_ssl_journal_bytes": 400 * 800 * now,
        "stream_ssl_lag_seconds": 0.4 + 0.2 * math.sin(now / 3),
        "stream_ssl_steps_total": now * 6,
        "stream_ssl_near_duplicates_total": 100 * now,
        "stream_ssl_trained_samples_total": trained,
        "stream_ssl_loss": 3.2 + 3.5 * math.exp(-now / 20) + 0.1 * math.sin(now * 5),
        "stream_ssl_learning_rate": 0.03,
        key("stream_ssl_memory_similarity", {"memory": "working"}): 0.5 + 0.2 * settled,
        key("stream_ssl_memory_similarity", {"memory": "queue"}): 0.72,
        key("process_resident_memory_bytes", {"job": "receiver"}): 6e7,
        key("process_resident_memory_bytes", {"job": "learner"}): 6e8,
        "stream_ssl_duplicate_samples_total": 0.0,
        "stream_ssl_journal_fsync_seconds_sum": 0.003 * now,
        "stream_ssl_journal_fsync_seconds_count": 2 * now,
        key("stream_ssl_memory_slots", {"memory": "working"}): filled,
        key("stream_ssl_memory_capacity_slots", {"memory": "working"}): slots,
        key("stream_ssl_memory_evictions_total", {"memory": "working"}): max(0.0, trained - slots),
    }
    for c in range(10):
        label = {"class": str(c)}
        values[key("stream_ssl_stream_class_samples_total", label)] = round(trained * share[c])
        flat = settled * share[c] + (1 - settled) * (0.19 if c == DOMINANT else 0.09)
        for memory, part in (("queue", share[c]), ("working", flat)):
            values[key("stream_ssl_memory_class_slots", {**label, "memory": memory})] = round(
                filled * part
            )
    return values


def made_up_evaluation(slots: int = 640) -> DemoEvaluation:
    """The embedded images as if the memory held them, and plausible accuracies."""
    image_NHW, label_N = data.load()
    rows = data.split(label_N).streamed[:slots]
    probes = {
        name: ProbeResult(overall, {c: overall + 0.02 * (c - 4.5) for c in range(10)}, 1000)
        for name, overall in (
            ("memory", 0.78),
            ("queue", 0.66),
            ("untrained", 0.70),
            ("pixels", 0.79),
        )
    }
    key_K = np.arange(slots)
    done = {"updates": 720, "samples": 45_600, "queue_updates": 750, "queue_samples": 48_000}
    return DemoEvaluation(probes, image_NHW[rows], label_N[rows], key_K, **done)


def made_up_replay(slots: int = 640) -> Replay:
    """A queue of four scenes. Every tenth picture of the memory shows the first one again."""
    image_NHW, label_N = data.load()
    rows = np.resize(data.split(label_N).streamed[:4], slots)
    originals = {key: str(key if key % 10 else 0) for key in range(slots)}
    return Replay(image_NHW[rows], label_N[rows], [str(row) for row in rows], originals)


def made_up_facts() -> DemoFacts:
    return DemoFacts(
        created="2026-01-02 03:04 UTC",
        seconds=120,
        parked=0.9,
        scenes=16,
        stretch=200,
        run=[("stream-ssl", "0.1.0"), ("processor", "a <quick> one")],
        commands=["stream-ssl run demo-out/config.yaml"],
        places=[("metrics over time", "demo-out/history.jsonl")],
        addresses={"receiver": "http://127.0.0.1:4001", "learner": "http://127.0.0.1:4002"},
        config="learner:\n  seed: 0\n",
    )
