"""Fetches images over HTTP, with limits that protect the hosts and the local network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore
import httpx
from protego import Protego

from stream_ssl.producers.sources.ranges import check_above_0, check_ranges
from stream_ssl.producers.sources.tls import tls_context
from stream_ssl.producers.sources.web.connections import Connections
from stream_ssl.producers.sources.web.network import GuardedBackend, error_number
from stream_ssl.producers.sources.web.outage import Outage
from stream_ssl.producers.sources.web.response import (
    Response,
    authorization,
    body,
    host_of,
    location,
    parsed,
    retry_after,
)
from stream_ssl.producers.sources.web.robots import (
    is_robots_text,
    opted_out,
    product_token,
    robots_text,
)
from stream_ssl.producers.sources.web.skip import Skip

ROBOTS_BYTES = 512 * 1024  # RFC 9309 requires at least 500 KiB; the rest is ignored
ROBOTS_KEPT = 4 * 1024 * 1024  # characters of all robots.txt in memory; rules take 36 bytes each
EMPTY_ROBOTS = 100  # characters that cost as much as rules without content
ROBOTS_REDIRECTS = 5  # RFC 9309 requires at least five
ROBOTS_SECONDS = 24 * 3600.0  # RFC 9309: a cached robots.txt must not be used for longer
MAX_HOSTS = 20_000  # kept in memory at a time
REDIRECTS = {301, 302, 303, 307, 308}
BUSY = {429, 503}
RETRIED = BUSY | {408, 500, 502, 504}
PASSING = {"unreachable", "too slow", "no HTTP"}  # "no HTTP" includes a connection that breaks
UNSAFE = {"private address", "unresolved host", "bad URL"}
OFFLINE = {errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL}
RETRY_SECONDS = 600.0  # before a failed robots.txt is requested again


@dataclass(eq=False)
class Host:
    """The state of an origin, such as https://a.example:8443."""

    turns: asyncio.Semaphore
    pool: Connections | None = None  # exists while there are users
    robots: asyncio.Task[Protego | None] | None = None
    robots_at: float = 0.0
    next_start: float = 0.0  # in the loop's time
    users: int = 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How a `Fetcher` treats one host.

    Args:
        per_host: number of concurrent requests to one host.
        delay: minimum seconds between the starts of two requests to one host. robots.txt may
            require more.
        retries: number of retries if a host is busy, does not answer, or breaks the connection.
        max_wait: longest wait for a host in seconds. If a host requires more, its URL is skipped.

    Raises:
        ValueError: an argument is out of range.
    """

    per_host: int = 4
    delay: float = 0.0
    retries: int = 2
    max_wait: float = 120.0

    def __post_init__(self) -> None:
        check_ranges(
            ("per_host", self.per_host, 1, math.inf),
            ("delay", self.delay, 0, math.inf),
            ("retries", self.retries, 0, math.inf),
            ("max_wait", self.max_wait, 0, math.inf),
        )


class Fetcher:
    """A downloader of images that respects robots.txt, crawl delays and opt-outs.

    - robots.txt: it is fetched before any URL of a host. If it stays unavailable (5xx or no answer)
      after the retries, nothing is fetched from the host, as RFC 9309 requires.
    - Opt-outs: responses with `X-Robots-Tag: noai` or `noimageai` are left out.
    - Busy hosts: after 429, 503 and other passing failures of a server or a bucket, the request is
      retried, at the time in Retry-After if there is one.
    - Addresses: a host is resolved once per connection. Private, loopback, link-local and other
      non-public addresses are rejected, even after redirects.

    Args:
        agent: the name of this crawler in requests and for robots.txt, preferably with a contact
            address: "my-crawler (+https://...)".
        max_bytes: maximum size of an image in bytes. No more is read.
        seconds: timeout of one request, from its start to its last byte.
        redirects: maximum number of redirects per URL.
        robots: whether to respect robots.txt and X-Robots-Tag.
        allow_networks: non-public networks that may be contacted, such as 10.0.0.0/8.
        authorities: file of trusted certificates, instead of the default; null: the default.
        patience: the arguments of `Patience`: `per_host`, `delay`, `retries` and `max_wait`.

    Raises:
        ValueError: an argument is out of range, or the file cannot be used.
    """

    def __init__(
        self,
        agent: str = "stream-ssl",
        max_bytes: int = 8_000_000,
        seconds: float = 30.0,
        redirects: int = 5,
        robots: bool = True,
        allow_networks: list[str] | None = None,
        authorities: Path | None = None,
        **patience: Any,
    ) -> None:
        self._patience = Patience(**patience)
        check_ranges(("max_bytes", max_bytes, 1, math.inf), ("redirects", redirects, 0, math.inf))
        check_above_0(seconds=seconds)
        if not agent.isascii() or not agent.isprintable() or not agent.strip():
            raise ValueError(f"agent {agent!r}: must be printable ASCII")
        self.backend = GuardedBackend(allow_networks or [], seconds)
        self._agent, self._token = agent, product_token(agent)
        self._max_bytes, self._seconds, self._redirects = max_bytes, seconds, redirects
        self._robots = robots
        self._hosts: dict[str, Host] = {}
        self._kept: dict[Host, int] = {}  # characters of robots.txt; the rules used last come last
        self._trust = (
            tls_context("authorities", authorities)
            if authorities
            else httpcore.default_ssl_context()
        )

    async def open(self, connections: int) -> None:
        """Prepare for `connections` concurrent requests; call this in the loop that fetches."""
        self._hosts = {}  # hosts of an earlier crawl belong to another loop
        self._kept = {}
        self.outage = Outage(self.backend, self._forget_failed_robots)
        self._slots = asyncio.Semaphore(connections)
        self.flowing = asyncio.Event()  # while cleared, no request starts
        self.flowing.set()

    async def fetch(self, url: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            Skip: the URL gives no image.
        """
        here = parsed(url)
        for _ in range(self._redirects + 1):
            response = await self._patiently(here)
            if response.status not in REDIRECTS:
                return response.body
            here = location(response, here)
        raise Skip("redirects", f"more than {self._redirects}, the last to {str(here)[:200]}")

    async def _patiently(self, url: httpx.URL) -> Response:
        """Return the response, with the waits and retries that the host requires."""
        async with self._turn(url) as host:
            rules = await self._rules(host, url)
            if rules is not None and not rules.can_fetch(str(url), self._token):
                raise Skip("robots.txt", f"{host_of(url)} does not want it fetched")
            delay = max(self._patience.delay, (rules and rules.crawl_delay(self._token)) or 0.0)
            del rules  # a request may take long
            if delay > self._patience.max_wait:
                raise Skip("busy", f"{host_of(url)} asks for {delay:g} s between two requests")
            return self._checked(await self._insistently(host, url, self._max_bytes, delay))

    async def _insistently(
        self, host: Host, url: httpx.URL, limit: int, delay: float, image: bool = True
    ) -> Response:
        """Return the response, after the retries that a busy host or a lost connection requires."""
        for attempt in range(self._patience.retries + 1):
            await self._start(host, delay)
            try:
                response = await self._request(host, url, limit, image)
            except Skip as skip:
                if skip.reason not in PASSING:
                    raise
                wait, failure = pause(attempt), skip
            else:
                if response.status not in RETRIED:
                    return response
                date = response.header("date")
                wait = retry_after(response.header("retry-after"), pause(attempt), date)
                reason = "busy" if response.status in BUSY else f"HTTP {response.status}"
                failure = Skip(reason, f"HTTP {response.status}, wait {wait:.0f} s")
            if wait > self._patience.max_wait:
                raise failure
            host.next_start = max(host.next_start, asyncio.get_running_loop().time() + wait)
        raise failure

    @contextlib.asynccontextmanager
    async def _turn(self, url: httpx.URL) -> AsyncIterator[Host]:
        """Hold one of a host's `per_host` slots."""
        origin = str(url.copy_with(raw_path=b"/", userinfo=b"", fragment=None))
        if origin not in self._hosts and len(self._hosts) >= MAX_HOSTS:
            self._hosts = {name: host for name, host in self._hosts.items() if host.users}
        host = self._hosts.setdefault(origin, Host(asyncio.Semaphore(self._patience.per_host)))
        host.users += 1
        if host.pool is None:
            # One per host, because the cost of a request grows with the connections in its pool.
            host.pool = Connections(self._pool)
        try:
            async with host.turns:
                yield host
        finally:
            host.users -= 1
            if not host.users:
                pool, host.pool = host.pool, None
                await pool.aclose()

    def _pool(self) -> httpcore.AsyncConnectionPool:
        return httpcore.AsyncConnectionPool(
            ssl_context=self._trust,
            max_connections=self._patience.per_host,
            http2=True,
            network_backend=self.backend,
        )

    async def _start(self, host: Host, delay: float) -> None:
        """Wait until a request to the host may start."""
        loop = asyncio.get_running_loop()
        while (rest := host.next_start - loop.time()) > 0:
            await asyncio.sleep(rest)
        host.next_start = loop.time() + delay

    async def _rules(self, host: Host, url: httpx.URL) -> Protego | None:
        """Return the host's robots.txt rules, or None if there are none."""
        if not self._robots:
            return None
        age = time.monotonic() - host.robots_at
        failed = host.robots is not None and host.robots.done() and host.robots.exception()
        if host.robots is None or age > (RETRY_SECONDS if failed else ROBOTS_SECONDS):
            host.robots_at = time.monotonic()
            host.robots = asyncio.ensure_future(self._read_robots(host, url))
            host.robots.add_done_callback(retrieve_exception)
        if host in self._kept:
            self._kept[host] = self._kept.pop(host)
        return await asyncio.shield(host.robots)

    async def _read_robots(self, host: Host, url: httpx.URL) -> Protego | None:
        """Fetch the host's robots.txt, and return its rules or None (RFC 9309, section 2.3.1)."""
        here = url.copy_with(raw_path=b"/robots.txt", fragment=None)
        for _ in range(ROBOTS_REDIRECTS + 1):
            try:
                response = await self._insistently(host, here, ROBOTS_BYTES, 0.0, image=False)
                if response.status in REDIRECTS:
                    here = location(response, here)
                    continue
            except Skip as skip:
                reason = skip.reason if skip.reason in UNSAFE else "no robots.txt"
                why = f"{host_of(url)}: {skip}"
                raise Skip(reason, why, skip.silent, skip.offline) from skip
            if response.status >= 500:
                raise Skip("no robots.txt", f"{host_of(url)}: HTTP {response.status}")
            if response.status != 200:
                return None
            text = robots_text(response.body)
            if not is_robots_text(text):  # Protego would find no rule in it, and allow all
                raise Skip("no robots.txt", f"{host_of(url)}: robots.txt is no text")
            self._keep(host, len(text) + EMPTY_ROBOTS)
            return Protego.parse(text)
        return None

    def _forget_failed_robots(self) -> None:
        for host in self._hosts.values():
            if host.robots is not None and host.robots.done() and host.robots.exception():
                host.robots = None

    def _keep(self, host: Host, size: int) -> None:
        """Record the size of a host's robots.txt, and forget others that were not used for long.

        A forgotten robots.txt is fetched again.
        """
        self._kept[host] = size
        while sum(self._kept.values()) > ROBOTS_KEPT and len(self._kept) > 1:
            longest_unused = next(iter(self._kept))
            del self._kept[longest_unused]
            longest_unused.robots = None

    async def _request(
        self, host: Host, url: httpx.URL, limit: int, image: bool = True
    ) -> Response:
        """Send one request, and read as much of the answer as may be an image of `limit` bytes."""
        assert host.pool is not None  # `_turn` sets it
        # Pass the parts: httpcore would cut a whole URL at ";" and drop an empty query.
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = {
            "host": url.netloc.decode(),
            "user-agent": self._agent,
            "accept-encoding": "identity",
            **authorization(url),
        }
        answered = False
        try:
            async with self._slots:
                await self.flowing.wait()
                started = time.monotonic()
                async with (
                    asyncio.timeout(self._seconds),
                    host.pool.get(target, headers) as (answer, parts),
                ):
                    answered = True
                    self.outage.answered(url, started)
                    named = [(k.decode().lower(), v.decode("latin-1")) for k, v in answer.headers]
                    response = Response(answer.status, named)
                    if answer.status == 200:
                        coding = response.header("content-encoding").strip().lower()
                        response.body = await body(parts, limit, image, coding)
                    return response
        except TimeoutError:
            why = f"not there after {self._seconds:g} s"
            raise Skip("too slow", why, silent=not answered) from None
        except (httpcore.NetworkError, httpcore.TimeoutException, OSError) as error:
            code = error_number(error)
            silent = not answered and code != errno.ECONNREFUSED
            why = str(error) or type(error).__name__
            raise Skip("unreachable", why, silent, code in OFFLINE) from error
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, ValueError) as error:
            raise Skip("no HTTP", str(error) or type(error).__name__) from error

    def _checked(self, response: Response) -> Response:
        if response.status in REDIRECTS:
            return response
        if response.status != 200:
            raise Skip(f"HTTP {response.status}", "no image")
        if self._robots and (said := opted_out(response.headers, self._token)):
            raise Skip("X-Robots-Tag", said)
        return response


def retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's exception, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


def pause(attempt: int) -> float:
    """Return seconds before the next attempt: 1, 2, 4, ..., times a random factor of 0.5 to 1."""
    return float(2**attempt * random.uniform(0.5, 1.0))
