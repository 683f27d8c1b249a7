"""A run of two processes whose records a test feeds, and whose states are asked over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from condition_world import World, received
from observe_records import step

from stream_ssl.batch import Origin
from stream_ssl.evaluation.scores import ProbeResult
from stream_ssl.memory import MemoryStats
from stream_ssl.memory.shares import Holding
from stream_ssl.observe.answer import Answer
from stream_ssl.observe.answers import answers
from stream_ssl.observe.facts import Facts
from stream_ssl.observe.health import STARTING
from stream_ssl.observe.held_out import HeldOutRecord
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.server import application
from stream_ssl.receiver.records import ReceiverRecord

QUESTIONS = ["Learning", "Health", "Producers", "Memory", "To do"]
NEGATIVES = 256
STATS = MemoryStats(
    occupancy=1000, capacity=1024, added=2000, inserted=1500, evicted=500, refused=0,
    duplicates=7, merged=0, age_p50=5.0, age_p90=9.0, age_max=20.0, stale_p50=4.0,
    stale_p90=8.0, stale_max=19.0, turnover=0.5, effective_rank=37.6, expected_collisions=0.3,
    count_mean=1.5, count_p50=1.0, count_p90=2.0, count_max=6.0, counted=1000,
    multiplicity_mean=1.0, drift_mean=0.9, drift_min=0.8,
)  # fmt: skip


class Run:
    """A receiver and a learner with one clock. Time passes in looks of `every` seconds."""

    def __init__(self) -> None:
        self.receiver, self.learner = World("receiver"), World("learner")
        self.worlds = {"receiver": self.receiver, "learner": self.learner}
        self.facts = {
            role: Facts(world.registry, role, clock=lambda world=world: world.now)
            for role, world in self.worlds.items()
        }
        self.steps = 0
        self.receiver.receiver.started()
        self.learner.learner.started()

    def pass_(self, seconds: float, *work: Callable[[], None], every: float = 10.0) -> None:
        """Let time pass in both processes; `work` is done before each look."""
        for _ in range(max(1, round(seconds / every))):
            for one in work:
                one()
            for role, world in self.worlds.items():
                world.pass_(every, every=every)
                self.facts[role].sample()

    def states(self) -> dict[str, Any]:
        """Return the state of each process, as the page and `stream-ssl status` read it."""
        return {role: self.ask(role, f"{role}/state") for role in self.worlds}

    def ask(self, role: Any, question: str) -> Any:
        """Return one process's answer. It knows no address of the other process."""
        world = self.worlds[role]
        sources = Sources(run=Path("runs/yard"))
        app = application(world.registry, world.health, role, self.facts[role], sources)

        async def ask() -> Any:
            wire = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=wire, base_url="http://127.0.0.1") as client:
                return (await client.get(f"/api/{question}")).json()

        return asyncio.run(ask())

    # -- records of ten seconds each

    def sends(self, samples: int = 20, **fields: Any) -> Callable[[], None]:
        half = {"yard": samples // 2, "gate": samples // 2}
        usual = {"samples": samples, "producer_samples": half}
        return lambda: self.receiver.receiver.consume(received(**{**usual, **fields}))

    def nothing(self, **fields: Any) -> Callable[[], None]:
        record = ReceiverRecord(**{"producers": 2, "credit": 1000, **fields})
        return lambda: self.receiver.receiver.consume(record)

    def learns(self, loss: float = 4.0, **fields: Any) -> Callable[[], None]:
        """Return work that makes an update on ten samples of each producer."""

        def work() -> None:
            self.steps += 1
            usual = {
                "origins_B": origins("yard", 10) + origins("gate", 10),
                "diagnostics": {"negatives": float(NEGATIVES)},
            }
            record = step(step=self.steps, loss=loss, **{**usual, **fields})
            self.learner.learner.consume(record)

        return work

    def drops(self, *who: str) -> Callable[[], None]:
        """Return work that drops every sample of a batch."""
        away = [origin for name in who for origin in origins(name, 30)]
        empty: dict[str, Any] = {"batch": 0, "keys_BD": torch.empty(0, 3), "origins_B": []}
        record = step(**empty, skipped="novelty", dropped_origins=away)
        return lambda: self.learner.learner.consume(record)

    def probes(
        self,
        accuracy: float,
        first: float | None = None,
        error: float | None = None,
        at: int | None = None,
    ) -> None:
        """Export a probe of ten held-out classes, in a run that began with accuracy `first`."""
        self.learner.learner.started_at(first)
        per_class = dict.fromkeys(range(10), accuracy)
        result = ProbeResult(accuracy, per_class, 300)
        step = max(1, self.steps) if at is None else at
        self.learner.learner.observe_held_out(HeldOutRecord(step, result, 0.5, 0.1, error))

    def fills(self, classes: dict[int, int] | None = None, alike: float = 0.02) -> None:
        """Export a first survey: the memory is nearly full, and the journal is read."""
        metrics = self.learner.learner
        metrics.observe_journal(0, 0, 0, {}, {})
        metrics.of_memories.observe("working", STATS, classes)
        metrics.observe_collisions(None, alike)
        metrics.of_memories.observe_producers(
            {"yard": Holding(300, 170), "gate": Holding(700, 170)}
        )

    def starts(self) -> None:
        for world in self.worlds.values():
            world.health.set("started", False, STARTING)


def origins(producer: str, count: int) -> list[Origin]:
    return [Origin(producer, "lens", str(number), 0.0) for number in range(count)]


def asked(run: Run, **states: Any) -> dict[str, Answer]:
    """Return the answers by question."""
    found = answers({**run.states(), **states})
    assert [one.question for one in found] == QUESTIONS
    assert all(any(letter.isdigit() for letter in one.says) or one.level != "good" for one in found)
    return {one.question: one for one in found}


def healthy_run() -> Run:
    """Return a run of 20 minutes with accuracies from 43 % to 46 %, after 300 earlier updates."""
    run = Run()
    run.steps = 300
    run.fills({0: 400, 1: 350, 2: 250})
    run.probes(0.43)
    run.pass_(600, run.sends(), run.learns())
    run.probes(0.46)
    run.pass_(600, run.sends(), run.learns())
    return run


def garbage(run: Run) -> None:
    def work() -> None:
        counts[0] += 30
        bad = {("damaged", "yard"): counts[0]}
        run.learner.learner.observe_journal(0, 0, 0, bad, {"yard": 10 * run.steps})

    counts = [0]
    run.pass_(120, run.sends(), run.learns(), work)
