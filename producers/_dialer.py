"""The choice of the receiver to connect to, the pauses between connections, and their diagnosis."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import zmq

from stream_ssl.producers._connection import Connection, Curve, diagnose

BACKOFF = (0.05, 1.0)  # seconds between connections: first pause and maximum
DIAGNOSE_SECONDS = (0.5, 10.0)  # without a handshake: before the first diagnosis, between others


class Dialer:
    """Opens one connection after the other, to the earlier receiver until it has sent WELCOME.

    Args:
        address: the receiver's address.
        curve: the keys of the connections. None: plain text.
        ask_first: the address of the earlier receiver, which is asked first which packets it has.
    """

    def __init__(self, address: str, curve: Curve | None, ask_first: str | None = None) -> None:
        self._address, self._curve, self._ask_first = address, curve, ask_first
        self._backoff = BACKOFF[0]
        self._diagnosis: str | None = None  # why the last connections had no handshake
        self._over_ipv6: set[str] = set()  # addresses whose receiver answers over IPv6 only
        self._opened = self._diagnose_at = 0.0

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Connection:
        """Return a new connection."""
        self._opened = time.monotonic()
        address = self._now_asked
        return Connection(context, address, self._curve, address in self._over_ipv6)

    @property
    def _now_asked(self) -> str:
        return self._ask_first or self._address

    def pause(self) -> float:
        """Return the seconds before the next connection.

        The pause doubles each time. It is random, so that producers do not reconnect in step.
        """
        pause, self._backoff = self._backoff, min(2 * self._backoff, BACKOFF[1])
        return pause * random.uniform(0.5, 1.0)

    def on_handshake(self) -> None:
        """Record that a connection is up."""
        self._diagnosis = None

    def on_welcome(self) -> bool:
        """Record a WELCOME. Return whether it came from the earlier receiver, which is left now."""
        self._backoff = BACKOFF[0]
        earlier, self._ask_first = self._ask_first is not None, None
        if earlier:
            self._diagnosis = None
        return earlier

    def explain(self, reason: str) -> str:
        """Return why there is no connection. A diagnosis is more precise than `reason`."""
        reason = self._diagnosis or reason
        if self._ask_first is not None:
            reason += (
                f" ({self._ask_first} is asked first what it has of this producer: see abandon)"
            )
        return reason

    def diagnose(self, connection: Connection, found: Callable[[str], None]) -> None:
        """Probe a peer without a handshake in the background, because name resolution is slow.

        Args:
            connection: the connection to the peer. It is lost if it uses the wrong kind of address.
            found: called in another thread with the reason, if the probe has found one.
        """
        address = self._now_asked
        if address in self._over_ipv6 and not connection.ipv6:
            connection.lost = True
            return
        now = time.monotonic()
        if now - self._opened <= DIAGNOSE_SECONDS[0] or now < self._diagnose_at:
            return
        self._diagnose_at = now + DIAGNOSE_SECONDS[1]

        def look() -> None:
            diagnosis = diagnose(address)
            self._diagnosis = diagnosis.reason
            if diagnosis.ipv6:
                self._over_ipv6.add(address)
            if diagnosis.reason is not None:
                found(diagnosis.reason)

        threading.Thread(target=look, name="producer diagnosis", daemon=True).start()
