"""Is the process alive, is it ready: what its loops and checks last said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stream_ssl.observe.conditions import CONDITIONS, OF_CHECK, Lit

STARTING = "starting"
"""The detail of the check "started" until the loop runs."""


@dataclass(frozen=True, slots=True)
class Status:
    """Whether all is well, and the state of each part."""

    ok: bool
    parts: dict[str, dict[str, object]]


class Health:
    """Loops tick, checks are set; the server asks. All methods may be called from any thread.

    A loop that is expected counts as alive for its `patience` from the moment it is announced.

    Args:
        clock: monotonic seconds.

    Attributes:
        conditions: those that `watch.py` found lit at its last look, the worst first.
        refused: of a receiver: whose message was refused last, by reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.conditions: tuple[Lit, ...] = ()
        self.refused: Mapping[str, str] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: dict[str, tuple[float, float]] = {}
        self._checks: dict[str, tuple[bool, str]] = {}

    def expect(self, loop: str, patience: float) -> None:
        """Announce a loop that ticks at least every `patience` seconds.

        Raises:
            ValueError: patience is not positive.
        """
        if not patience > 0:
            raise ValueError(f"patience of loop {loop!r} must be more than 0 s; got {patience}")
        with self._lock:
            self._loops[loop] = (self._clock(), patience)

    def tick(self, loop: str) -> None:
        """The loop has gone round once.

        Raises:
            KeyError: a loop that was not announced by `expect`.
        """
        with self._lock:
            self._loops[loop] = (self._clock(), self._loops[loop][1])

    def forget(self, loop: str) -> None:
        """The loop has ended as it should; it is not missed."""
        with self._lock:
            self._loops.pop(loop, None)

    def set(self, check: str, ready: bool, detail: str = "") -> None:
        """Record a readiness check by name, such as "journal" or "room"."""
        with self._lock:
            self._checks[check] = (ready, detail)

    def live(self) -> Status:
        """Every loop has ticked within its patience."""
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
        """Alive, every check holds, and no condition is lit that makes the process unready."""
        with self._lock:
            parts: dict[str, dict[str, object]] = {
                name: {"ok": ok, "detail": detail} for name, (ok, detail) in self._checks.items()
            }
        unready: dict[str, dict[str, object]] = {
            lit.condition.name: {"ok": False, "detail": lit.says}
            for lit in self.conditions
            if lit.condition.unready
        }
        return _status({**self.live().parts, **parts, **unready})

    @property
    def starting(self) -> bool:
        """The process has not reached its loop yet."""
        with self._lock:
            return self._checks.get("started") == (False, STARTING)

    def problems(self) -> list[dict[str, object]]:
        """All that needs attention, the worst first, as plain values: the lit conditions, and
        failing checks whose condition is not lit yet."""
        told = [lit.told() for lit in self.conditions]
        known = {lit.condition.name for lit in self.conditions}
        for name, part in self.ready().parts.items():
            condition = CONDITIONS.get(OF_CHECK.get(name, ""))
            if part["ok"] or name in known or (condition and condition.name in known):
                continue
            if name == "started":
                continue  # it is starting or stopping, which is no fault
            detail = part.get("detail") or (
                f"the {name}'s loop last went round {part.get('seconds_since_tick')} s ago"
            )
            told.append(
                {
                    "name": condition.name if condition else name,
                    "producer": "",
                    "severity": condition.severity if condition else "warning",
                    "says": f"{name}: {detail}",
                    "remedy": condition.remedy if condition else "",
                    "since": None,
                    "runbook": f"runbooks/{condition.name}" if condition else None,
                }
            )
        return told


def _status(parts: dict[str, dict[str, object]]) -> Status:
    return Status(all(bool(part["ok"]) for part in parts.values()), parts)
