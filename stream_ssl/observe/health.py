"""Is the process alive, is it ready: what its loops and checks last said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


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
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
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
        """Alive, and every check holds."""
        with self._lock:
            parts: dict[str, dict[str, object]] = {
                name: {"ok": ok, "detail": detail} for name, (ok, detail) in self._checks.items()
            }
        return _status({**self.live().parts, **parts})


def _status(parts: dict[str, dict[str, object]]) -> Status:
    return Status(all(bool(part["ok"]) for part in parts.values()), parts)
