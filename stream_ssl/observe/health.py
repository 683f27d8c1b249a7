"""The health of a process: whether it is alive and ready, from its loops and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stream_ssl.observe.conditions import CONDITIONS, OF_CHECK, PresentCondition, problem

STARTING = "starting"
"""The detail of the check "started" until the main loop runs."""


@dataclass(frozen=True, slots=True)
class Status:
    """A summary of the health: whether all parts are OK, and the state of each part."""

    ok: bool
    parts: dict[str, dict[str, object]]


class Health:
    """The state of a process's loops and readiness checks, which the HTTP server reads.

    All methods may be called from any thread. After `expect`, a loop counts as alive for its
    `patience`, even before its first tick.

    Attributes:
        conditions: the conditions that `watch.py` found at its last look, the worst first.
        folders: the folders that the process writes, by the names of FOLDERS in `conditions.py`.
        refused: for a receiver, the peer whose message was refused last, by reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.conditions: tuple[PresentCondition, ...] = ()
        self.folders: Mapping[str, object] = {}
        self.refused: Mapping[str, str] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: dict[str, tuple[float, float]] = {}
        self._checks: dict[str, tuple[bool, str]] = {}

    def expect(self, loop: str, patience: float) -> None:
        """Announce a loop that ticks at least every `patience` seconds."""
        with self._lock:
            self._loops[loop] = (self._clock(), patience)

    def tick(self, loop: str) -> None:
        """Record that the loop, which `expect` announced, has completed one turn."""
        with self._lock:
            self._loops[loop] = (self._clock(), self._loops[loop][1])

    def forget(self, loop: str) -> None:
        """Stop expecting a loop that has ended normally."""
        with self._lock:
            self._loops.pop(loop, None)

    def set(self, check: str, ready: bool, detail: str = "") -> None:
        """Record the result of a readiness check, such as "journal" or "credit"."""
        with self._lock:
            self._checks[check] = (ready, detail)

    def live(self) -> Status:
        """Return whether every loop has ticked within its patience."""
        with self._lock:
            now = self._clock()
            parts: dict[str, dict[str, object]] = {
                name: {
                    "ok": now - last <= patience,
                    "seconds_since_tick": round(now - last, 3),
                    "patience_seconds": patience,
                }
                for name, (last, patience) in self._loops.items()
            }
        return _status(parts)

    def ready(self) -> Status:
        """Return whether the process is ready.

        A process is ready if it is alive, every check passes, and no condition with `unready` is
        present.
        """
        with self._lock:
            parts: dict[str, dict[str, object]] = {
                name: {"ok": ok, "detail": detail} for name, (ok, detail) in self._checks.items()
            }
        unready: dict[str, dict[str, object]] = {
            present.condition.name: {"ok": False, "detail": present.says}
            for present in self.conditions
            if present.condition.unready
        }
        return _status({**self.live().parts, **parts, **unready})

    @property
    def starting(self) -> bool:
        """Whether the process has not reached its main loop yet."""
        with self._lock:
            return self._checks.get("started") == (False, STARTING)

    def problems(self) -> list[dict[str, object]]:
        """Return everything that needs attention, as plain values for JSON.

        The list has the present conditions, the worst first. The failing checks follow, if their
        condition is not present yet.
        """
        problems = [present.facts() for present in self.conditions]
        known = {present.condition.name for present in self.conditions}
        for name, part in self.ready().parts.items():
            condition = CONDITIONS.get(OF_CHECK.get(name, ""))
            if part["ok"] or name in known or (condition and condition.name in known):
                continue
            if name == "started":
                continue  # the process is starting or stopping, which is not a fault
            detail = part.get("detail") or (
                f"the {name}'s main loop has made no round for {part.get('seconds_since_tick')} s"
            )
            says = f"{name}: {detail}"
            if condition is None:
                problems.append({**problem(name, says, "warning", ""), "runbook": None})
                continue
            advice, where = condition.advice(self.folders), condition.where(self.folders)
            found = problem(condition.name, says, condition.severity, advice)
            problems.append({**found, "where": where})
        return problems


def _status(parts: dict[str, dict[str, object]]) -> Status:
    return Status(all(bool(part["ok"]) for part in parts.values()), parts)
