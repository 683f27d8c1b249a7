"""The connections to one host, without those that an answer left unread would slow down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpcore

from stream_ssl.producers.sources.web.skip import Skip

REST_BYTES = 64 * 1024  # read to the end of an answer, so that its connection stays usable
REST_SECONDS = 1.0


@dataclass(eq=False)
class Pool:
    """Connections that requests share, and the number of requests that use them now."""

    connections: httpcore.AsyncConnectionPool
    requests: int = 0


class Connections:
    """The connections to one host.

    httpcore does not tell an HTTP/2 host that nobody reads an answer any more. The host goes on
    sending it, until the window for all answers of the connection is full. Such a connection
    therefore gets no new requests, and is closed when its last request has ended.

    Args:
        make: a function that returns a new pool of connections.
    """

    def __init__(self, make: Callable[[], httpcore.AsyncConnectionPool]) -> None:
        self._make = make
        self._pool: Pool | None = None

    @contextlib.asynccontextmanager
    async def get(
        self, target: httpcore.URL, headers: dict[str, str]
    ) -> AsyncIterator[tuple[httpcore.Response, AsyncIterator[bytes]]]:
        """Request the target, and yield the answer and the parts of its body."""
        if self._pool is None:
            self._pool = Pool(self._make())
        pool, usable = self._pool, False
        pool.requests += 1
        try:
            sent = list(headers.items())
            async with pool.connections.stream("GET", target, headers=sent) as answer:
                parts = answer.aiter_stream()
                alone = answer.extensions.get("http_version") != b"HTTP/2"
                try:
                    yield answer, parts
                except Skip:
                    usable = alone or await is_short(parts)
                    raise
                usable = alone or await is_short(parts)
        finally:
            pool.requests -= 1
            if not usable and self._pool is pool:
                self._pool = None
            if not pool.requests and self._pool is not pool:
                await pool.connections.aclose()

    async def aclose(self) -> None:
        """End the connections that no request uses; the others end with their last request."""
        pool, self._pool = self._pool, None
        if pool is not None and not pool.requests:
            await pool.connections.aclose()


async def is_short(parts: AsyncIterator[bytes]) -> bool:
    """Read the rest of an answer, and return whether it was short and came at once."""
    size = 0
    with contextlib.suppress(httpcore.NetworkError, httpcore.ProtocolError, TimeoutError):
        async with asyncio.timeout(REST_SECONDS):
            async for part in parts:
                size += len(part)
                if size > REST_BYTES:
                    return False
            return True
    return False
