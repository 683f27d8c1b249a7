"""A process whose records a test feeds, with a clock that the test turns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from stream_ssl.observe.health import Health
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.watch import Watch, Watched
from stream_ssl.receiver.records import ReceiverRecord


class World:
    """Metrics, health and watch of one role. Time passes in looks of `every` seconds.

    Args:
        role: "receiver" or "learner".
    """

    def __init__(self, role: Any, folders: dict[str, Path] | None = None, **options: Any) -> None:
        self.now, self.wall = 1000.0, 1_700_000_000.0
        clock = lambda: self.now  # noqa: E731
        self.health = Health(clock)
        with pytest.MonkeyPatch.context() as patch:
            # Each look collects all metrics. Those of the process are slow and in no condition.
            patch.setattr("stream_ssl.observe.families.ProcessCollector", lambda registry: None)
            self.receiver = ReceiverMetrics(CollectorRegistry(), folders=folders)
            self.learner = LearnerMetrics(
                CollectorRegistry(), folders=folders, clock=lambda: self.wall, monotonic=clock
            )
        metrics = self.receiver if role == "receiver" else self.learner
        self.registry = metrics.registry
        self.watch = Watch(
            role,
            metrics.registry,
            self.health,
            metrics.set_conditions,
            Watched(folders or {}, **options),
            clock=clock,
            wall=lambda: self.wall,
        )

    def pass_(
        self, seconds: float, work: Callable[[], None] = lambda: None, every: float = 10.0
    ) -> None:
        """Let time pass; `work` is done before each look."""
        for _ in range(max(1, round(seconds / every))):
            self.now += every
            self.wall += every
            work()
            self.watch.look()

    @property
    def present(self) -> dict[tuple[str, str], str]:
        """Return the sentences by condition and producer."""
        return {(one.condition.name, one.producer): one.says for one in self.health.conditions}

    def gauge(self, name: str, producer: str = "") -> float | None:
        """Return the value of the condition that Prometheus reads."""
        labels = {"name": name, "producer": producer}
        return self.registry.get_sample_value("stream_ssl_condition", labels)


def received(**fields: Any) -> ReceiverRecord:
    """Return a record of a second in which two producers sent, with changed fields."""
    usual: dict[str, Any] = {
        "packets": 2,
        "samples": 20,
        "producers": 2,
        "credit": 1000,
        "producer_samples": {"yard": 10, "gate": 10},
        "producer_received": {"yard": 50.0, "gate": 50.0},
        "producer_captured": {"yard": 49.0, "gate": 49.0},
    }
    return ReceiverRecord(**{**usual, **fields})


def quiet(**fields: Any) -> ReceiverRecord:
    """Return a record of a second in which nothing came."""
    nothing: dict[str, Any] = {
        "packets": 0,
        "samples": 0,
        "producer_samples": {},
        "producer_received": {},
        "producer_captured": {},
    }
    return received(**{**nothing, **fields})


def messages(caplog: Any, level: int = logging.WARNING) -> list[str]:
    """Return the lines of the log about conditions."""
    return [one.getMessage() for one in caplog.records if one.levelno == level]


def sent(world: World, **fields: Any) -> Callable[[], None]:
    """Return work that gives the receiver a record by `received`."""
    return lambda: world.receiver.consume(received(**fields))


def idle(world: World, **fields: Any) -> Callable[[], None]:
    """Return work that gives the receiver a record by `quiet`."""
    return lambda: world.receiver.consume(quiet(**fields))
