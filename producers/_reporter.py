"""Log lines and callbacks about a producer's connection and buffer, made in the I/O thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from stream_ssl.producers._packer import OnDelivery
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers.stats import Delivery, Rejection, State, StateChange, Stats
from stream_ssl.wire.messages import Verdict

LOG_SECONDS = 1.0  # minimum time between two log lines about the connection
SLOW_SECONDS = 5.0  # a handshake with WELCOME that takes longer is logged
LOOK_SECONDS = 0.25  # between two reports of the counters, while nothing else happens
REPEAT_SECONDS = 30.0  # between equal lines, while disconnected or while the buffer is full

logger = logging.getLogger("stream_ssl.producers")


class Reporter:
    """A logger of state changes that also calls the user's callbacks.

    A problem that lasts is logged again every `REPEAT_SECONDS`.

    Args:
        label: names the producer in log lines.
        on_state, on_stats, on_rejected, on_verdict: the user's callbacks. They are called without
            a lock. An exception in a callback is logged.
        stats_seconds: seconds between two calls of `on_stats`.

    Attributes:
        calling: the callback that runs now, and the monotonic time of its call.

    Raises:
        TypeError: a callback is not callable.
    """

    def __init__(
        self,
        label: str,
        on_state: Callable[[StateChange], None] | None,
        on_stats: Callable[[Stats], None] | None,
        on_rejected: Callable[[Rejection], None] | None,
        stats_seconds: float,
        on_verdict: Callable[[Verdict], None] | None = None,
    ) -> None:
        hooks: dict[str, object] = {
            "on_state": on_state,
            "on_stats": on_stats,
            "on_rejected": on_rejected,
            "on_verdict": on_verdict,
        }
        for name, hook in hooks.items():
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} is {hook!r}: pass a function of one argument, or None")
        self.on_state, self.on_stats, self.on_rejected = on_state, on_stats, on_rejected
        self.on_verdict = on_verdict
        self.calling: tuple[object, float] | None = None
        self._label = label
        self._stats_seconds = stats_seconds
        self._reported: tuple[State, str] = ("connecting", "")
        self._logged: tuple[State, str] = ("connecting", "")
        self._logged_at = self._full_logged_at = -REPEAT_SECONDS
        self._since = self._stats_at = time.monotonic()
        self._full_since: float | None = None
        self._acked = self._dropped = 0
        self._acked_at = -REPEAT_SECONDS
        self._seen: tuple[object, ...] = ()
        self._look_at = 0.0

    def is_due(self, seen: tuple[object, ...], now: float) -> bool:
        """Return whether to call `report` now; a change of `seen` is reported at once."""
        if seen == self._seen and now < self._look_at:
            return False
        self._seen, self._look_at = seen, now + LOOK_SECONDS
        return True

    def tell(
        self,
        rejections: Sequence[Rejection],
        deliveries: Sequence[tuple[OnDelivery, Delivery]],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Log rejections, and pass the outcomes of samples to the user's callbacks."""
        for rejection in rejections:
            text = "%s: %d samples rejected: %s: %s"
            logger.warning(
                text, self._label, len(rejection.ids), rejection.reason, rejection.detail
            )
            self.call(self.on_rejected, rejection)
        for callback, delivery in deliveries:
            self.call(callback, delivery)
        for verdict in verdicts:
            self.call(self.on_verdict, verdict)

    def report(self, protocol: ProducerProtocol, stats: Stats, full: bool, now: float) -> None:
        """Log and pass to the callbacks what has changed.

        `stats` is a copy of the counters. `full` says whether the user found the buffer full.
        """
        state = stats.state
        reason = "" if state in ("connected", "closed") else protocol.reason
        self._tell_state(state, reason, now)
        self._log_state(state, reason, stats, now)
        self._log_full(full, protocol, stats, now)
        if self.on_stats is not None and now - self._stats_at >= self._stats_seconds:
            self._stats_at = now
            self.call(self.on_stats, deepcopy(stats))

    def call(self, hook: Callable[[Any], None] | None, value: Any) -> None:
        """Call a callback of the user, if there is one, and log an exception that it raises."""
        if hook is None:
            return
        self.calling = (hook, time.monotonic())
        try:
            hook(value)
        except BaseException:  # sys.exit() would end this thread, which sends the samples
            logger.exception("%s: a callback failed", self._label)
        finally:
            self.calling = None

    def _tell_state(self, state: State, reason: str, now: float) -> None:
        previous = self._reported[0]
        if (state, reason) != self._reported:
            self._reported = (state, reason)
            if state != previous:
                self._since = now
            self.call(self.on_state, StateChange(state, reason, previous))

    def _log_state(self, state: State, reason: str, stats: Stats, now: float) -> None:
        changed = (state, reason) != self._logged
        if state in ("connecting", "disconnected"):
            # A connection needs some time, so the line about it waits longer than others.
            on_its_way = reason.startswith(("still connecting", "connected, but"))
            patience = SLOW_SECONDS if on_its_way else LOG_SECONDS if changed else REPEAT_SECONDS
            since = max(self._logged_at, self._since) if on_its_way else self._logged_at
            if now - since < patience:
                return
        elif not changed:
            return
        self._logged, self._logged_at = (state, reason), now
        waiting = f"{stats.waiting} samples wait, {stats.dropped.samples} were dropped"
        if state == "connected":
            logger.info("%s: connected; %s", self._label, waiting)
        elif state == "closed":
            logger.info("%s: closed; %d samples acknowledged", self._label, stats.acked.samples)
        elif state == "refused":
            logger.error("%s: refused: %s", self._label, reason)
        else:
            text = f"{state} for {now - self._since:.0f} s" if not changed else state
            logger.warning("%s: %s: %s; %s", self._label, text, reason, waiting)

    def _log_full(self, full: bool, protocol: ProducerProtocol, stats: Stats, now: float) -> None:
        if full:
            acked, dropped = stats.acked.samples, stats.dropped.samples
            if self._full_since is None:
                self._full_since = now
            if acked != self._acked:
                self._acked, self._acked_at = acked, now
            # While acknowledgements arrive, a full buffer only slows down a fast source.
            stuck = now - max(self._acked_at, self._full_since) >= LOG_SECONDS
            due = now - self._full_logged_at >= REPEAT_SECONDS
            if due and (stuck or dropped != self._dropped):
                self._full_logged_at, self._dropped = now, dropped
                text = "%s: the buffer is full, with %d samples: %s; %d samples were dropped so far"
                waiting = stats.buffered.samples
                logger.warning(text, self._label, waiting, protocol.why(), dropped)
        elif self._full_since is not None:
            if self._full_logged_at >= self._full_since:
                seconds = now - self._full_since
                logger.info("%s: the buffer has room again after %.1f s", self._label, seconds)
            self._full_since = None
