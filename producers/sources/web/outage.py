"""Finds out whether the network of this machine is down, and waits until it is up again."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable

import httpx

from stream_ssl.producers.sources.url_secrets import without_secrets
from stream_ssl.producers.sources.web.network import GuardedBackend, error_number
from stream_ssl.producers.sources.web.response import host_of
from stream_ssl.producers.sources.web.skip import Skip
from stream_ssl.rate_limited_logger import printable

log = logging.getLogger(__name__)

PROBED_HOSTS = 4  # number of hosts to probe the network with: those that answered last
ANSWER_SECONDS = 1.0  # to wait for the answer of another host after a failure
PROBE_SECONDS = 5.0  # to connect to a probed host
REPEAT_SECONDS = 60.0  # between two log lines, and the longest pause, while the network is down


class Outage:
    """A watch over the network of this machine, made in the loop that fetches.

    Args:
        backend: makes the connections that probe the network.
        on_return: called when the network is up again, and before a failed request is repeated, to
            forget the failures that the fetcher remembers, such as a robots.txt that did not come.
    """

    def __init__(self, backend: GuardedBackend, on_return: Callable[[], None]) -> None:
        self._backend, self._on_return = backend, on_return
        self._probing = asyncio.Lock()
        self._answering: dict[tuple[str, int], None] = {}  # hosts and ports, the last one last
        # When the last answered request and the last successful probe started, and the time until
        # which requests may have failed by the last outage.
        self._answered_at = self._probed_at = self._back_at = -math.inf
        self._told_at, self._pause = -math.inf, 1.0
        self._down = False  # whether no host has answered since an outage began

    def answered(self, url: httpx.URL, started: float) -> None:
        """Record that the host of a URL answers a request that started at this time."""
        place = (host_of(url), url.port or (443 if url.scheme == "https" else 80))
        self._answered_at, self._pause = max(started, self._answered_at), 1.0
        self._answering.pop(place, None)
        self._answering[place] = None
        if self._down:  # requests that failed until now may have failed by the outage
            self._down, self._back_at = False, time.monotonic()
        if len(self._answering) > PROBED_HOSTS:
            del self._answering[next(iter(self._answering))]

    async def waited(self, skip: Skip, name: str) -> bool:
        """Wait while the network is down. Return whether it was down when a request failed.

        The network is up if a host answers a request or accepts a connection. Before the first
        answer of any host, only the error shows that the network is down.

        Args:
            skip: the failure of the request.
            name: the source's name, used in the log.
        """
        await asyncio.sleep(ANSWER_SECONDS)
        async with self._probing:
            if skip.at <= self._back_at:
                self._on_return()  # a failure during the outage may still be remembered
                return True
            # An open connection still gets answers when the name server cannot be reached.
            up = self._probed_at if skip.offline else max(self._probed_at, self._answered_at)
            if up > skip.at or await self._probe(skip):
                return False
            while not await self._probe(skip):
                self._down = True
                if time.monotonic() - self._told_at >= REPEAT_SECONDS:
                    hosts = ", ".join(host for host, _ in self._answering) or "any host"
                    log.warning(
                        "source %s: the network seems down: %s; cannot connect to %s. The crawl "
                        "waits and goes on by itself",
                        *(name, printable(without_secrets(str(skip))), printable(hosts)),
                    )
                    self._told_at = time.monotonic()
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, REPEAT_SECONDS)
                if not self._answering:
                    break  # only another attempt shows whether the network is up
            else:
                self._down = False
            self._back_at = time.monotonic()
            self._on_return()
            return True

    async def _probe(self, skip: Skip) -> bool:
        """Return whether the network is up: a host that answered before can be connected to."""
        if not self._answering:
            return not skip.offline
        started = time.monotonic()

        async def connects(host: str, port: int) -> bool:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    stream = await self._backend.connect_tcp(host, port, PROBE_SECONDS)
                    await stream.aclose()
            except Exception as error:  # resolvers and connections raise errors of many types
                return error_number(error) == errno.ECONNREFUSED
            return True

        up = any(await asyncio.gather(*(connects(*place) for place in self._answering)))
        if up:
            self._probed_at = started
        return up
