"""HTTP connections with a bound, so that idle ones neither stop scrapes nor use up descriptors."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

LIMIT = 64
"""Connections held open at once; one more closes the one that has been quiet for longest."""

PATIENCE = 10.0
"""Seconds in which a connection must send its request."""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol waits for ever for a first request; this one does not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self.timer = self.loop.call_later(PATIENCE, self._close_if_silent)
        if len(self.connections) > LIMIT:
            others = [
                cast(BoundedProtocol, other) for other in self.connections if other is not self
            ]
            min(others, key=lambda other: (other.busy, other.since)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._asked:  # from here on keep-alive has its own time-out
            self.since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    @property
    def _asked(self) -> bool:
        """The head of a request was read."""
        return hasattr(self.cycle, "response_complete")

    @property
    def busy(self) -> bool:
        """An answer is being made or sent."""
        return self._asked and not self.cycle.response_complete

    def _close_if_silent(self) -> None:
        if not self._asked:
            self.transport.abort()
