"""A made-up run, as the scraper would have recorded it."""

import math

from stream_ssl.app.demo.scrape import History, Snapshot, key

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
        "stream_ssl_trained_samples_total": trained,
        "stream_ssl_loss": 3.2 + 3.5 * math.exp(-now / 20) + 0.1 * math.sin(now * 5),
        "stream_ssl_learning_rate": 0.03,
        key("stream_ssl_collision_probability", {"kind": "expected", "memory": "working"}): 0.5
        + 0.2 * settled,
        key("stream_ssl_collision_probability", {"kind": "expected", "memory": "queue"}): 0.72,
        key("process_resident_memory_bytes", {"job": "receiver"}): 6e7,
        key("process_resident_memory_bytes", {"job": "learner"}): 6e8,
        "stream_ssl_duplicate_samples_total": 0.0,
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
