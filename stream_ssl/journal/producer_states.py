"""The durable states of the producers that a journal's writer knows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stream_ssl.journal.segment import JournalEntry, ProducerState, state_bytes

FORGET_SECONDS = 30 * 86_400
"""Idle time after which the journal deletes the state of a producer, when a new segment begins.

The state takes up to 13 KB in each segment. Only time while a writer has the journal open counts. A
connected producer is not idle.
"""

_CLOCK_SET = 1_577_836_800  # the year 2020; an earlier time comes from a clock that was not set


class ProducerStates:
    """The last durable sequence and resume token of each producer, with its idle time.

    Every new segment begins with a copy of these states. Idle time counts the time that a writer
    was running, because the wall clock may jump.

    Args:
        found: the states in the newest segment.

    Attributes:
        bytes: most bytes that the states take in a segment.
    """

    def __init__(self, found: Mapping[str, ProducerState]) -> None:
        self._opened = time.monotonic()
        self._active_before = max((state.active for state in found.values()), default=0.0) or 1.0
        wall = time.time()
        self._states = {  # format 1 has neither of the times, and format 2 has only `written`
            name: replace(
                state,
                written=state.written if state.written > _CLOCK_SET else wall,
                active=state.active or self._active_before,
            )
            for name, state in found.items()
        }
        self.bytes = sum(state_bytes(*item) for item in self._states.items())

    def all(self) -> dict[str, ProducerState]:
        """Return name -> state for every known producer."""
        return dict(self._states)

    def of(self, producer: str) -> ProducerState:
        """Return the state of one producer; its sequence is 0 if it is unknown."""
        return self._states.get(producer, ProducerState())

    def active_now(self) -> float:
        """Return the seconds for which writers have had the journal open, over all its runs."""
        return self._active_before + time.monotonic() - self._opened

    def keep(self, states: Mapping[str, ProducerState]) -> None:
        """Store producer states that have become durable."""
        for name, state in states.items():
            if name in self._states:
                self.bytes -= state_bytes(name, self._states[name])
            self._states[name] = state
            self.bytes += state_bytes(name, state)

    def forget_idle(self, connected: Mapping[str, float]) -> list[str]:
        """Forget the producers that were idle for FORGET_SECONDS; return their names.

        Args:
            connected: name -> time of time.monotonic when a producer was last connected.
        """
        for name, when in connected.items():
            if (state := self._states.get(name)) is not None:
                active = max(state.active, self._active_before + when - self._opened)
                self._states[name] = replace(state, active=active)
        oldest = self.active_now() - FORGET_SECONDS
        names = [name for name, state in self._states.items() if state.active < oldest]
        for name in names:
            self.bytes -= state_bytes(name, self._states.pop(name))
        return names

    def check_order(self, entries: Iterable[JournalEntry]) -> None:
        """Check that each entry continues the sequences of its producer.

        Raises:
            ValueError: the sequences of a producer do not increase.
        """
        seen: dict[str, int] = {}
        for entry in entries:
            last = seen.get(entry.producer, self.of(entry.producer).sequence)
            if entry.sequence <= last:
                raise ValueError(
                    f"producer {entry.producer!r}: sequence {entry.sequence} after {last}; "
                    "sequences only grow"
                )
            seen[entry.producer] = entry.sequence
