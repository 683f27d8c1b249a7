"""Detection of hung processes: each process of a run asks the others whether they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http.client import HTTPException

from stream_ssl.observe.ask import ask
from stream_ssl.observe.conditions import HUNG_SECONDS

ASK_EVERY, ASK_SECONDS = 10.0, 3.0
"""Seconds between two rounds of questions, and seconds that a peer has for its answer."""

Found = Mapping[str, tuple[str, int]]
"""The HTTP address and the process id of each living peer, by role."""


def hangs(role: str, pid: int, address: str) -> str:
    """Return the sentence that reports a process that exists and does not answer."""
    return f"the {role} (pid {pid}) exists and does not answer at {address}"


def answers(address: str) -> bool:
    """Return whether a process answers at all. An answer with an error status counts, too."""
    try:
        ask(address, "/healthz", ASK_SECONDS)
    except (OSError, HTTPException):
        return False
    return True


class Peers:
    """A record of how long each peer has not answered.

    Call `ask` every ASK_EVERY seconds.
    """

    def __init__(
        self, find: Callable[[], Found], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find, self._clock = find, clock
        self._silent: dict[tuple[str, str, int], float] = {}  # silent since, seconds

    def ask(self) -> None:
        """Ask each peer once."""
        silent = [
            (role, address, pid)
            for role, (address, pid) in self._find().items()
            if not answers(address)
        ]
        now = self._clock()
        self._silent = {peer: self._silent.get(peer, now) for peer in silent}

    def hung(self) -> list[str]:
        """Return a sentence for each peer that has not answered for HUNG_SECONDS."""
        return list(self._sentences().values())

    def why(self, address: str) -> str:
        """Return the sentence about the peer at this address; empty if the peer does not hang."""
        return self._sentences().get(address, "")

    def _sentences(self) -> dict[str, str]:
        now = self._clock()
        return {
            address: f"{hangs(role, pid, address)}: no answer for {now - since:.0f} s"
            for (role, address, pid), since in self._silent.items()
            if now - since >= HUNG_SECONDS
        }
