"""Fetches images over HTTP, with limits that protect the hosts and the local network."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import email.utils
import errno
import ipaddress
import logging
import math
import random
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore
import httpx
from protego import Protego

from stream_ssl.producers.sources.fields import check_above_0, codec_of, without_secrets
from stream_ssl.producers.sources.public_addresses import embedded, is_public, special_row
from stream_ssl.rate_limited_logger import printable

log = logging.getLogger(__name__)

ROBOTS_BYTES = 512 * 1024  # RFC 9309 requires at least 500 KiB; the rest is ignored
ROBOTS_KEPT = 4 * 1024 * 1024  # characters of all robots.txt in memory; rules take 36 bytes each
EMPTY_ROBOTS = 100  # characters that cost as much as rules without content
ROBOTS_REDIRECTS = 5  # RFC 9309 requires at least five
ROBOTS_SECONDS = 24 * 3600.0  # RFC 9309: a cached robots.txt must not be used for longer
HEAD_BYTES = 16  # bytes that identify a codec
MAX_HOSTS = 20_000  # kept in memory at a time
REDIRECTS = {301, 302, 303, 307, 308}
BUSY = {429, 503}
RETRIED = BUSY | {408, 500, 502, 504}
PASSING = {"unreachable", "too slow", "no HTTP"}  # "no HTTP" includes a connection that breaks
UNSAFE = {"private address", "unresolved host", "bad URL"}
ADDRESSES = 4  # of a host that are tried
CONNECT_SECONDS = 4.0  # to connect to an address, if the host has another address
PROBED_HOSTS = 4  # that answered last, and show whether the network is up
ANSWER_SECONDS = 1.0  # after a failure, to wait for the answer of another host
PROBE_SECONDS = 5.0  # to connect to a host that answered before
OFFLINE = {errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL}
REPEAT_SECONDS = 60.0  # between two log lines, and the longest pause, while the network is down
RETRY_SECONDS = 600.0  # before a failed robots.txt is requested again
OPT_OUTS = {"noai", "noimageai"}
VALUED = {"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"}
"""Rules of X-Robots-Tag with a value after a colon, where other colons follow an agent's name."""
CONTROL = re.compile(r"[\0-\x08\x0e-\x1f]")  # not allowed in a text by RFC 9309
PADDING = "\0\x1a"  # that some programs append to a text
USER_AGENT = re.compile(r"^\s*user[- ]?agent\s*:", re.IGNORECASE | re.MULTILINE)
PLAIN = {"", "identity"}  # values of Content-Encoding
GZIP = b"\x1f\x8b"


class Skip(Exception):
    """A URL gives no image. `reason` names its counter, and the message has the details.

    Attributes:
        silent: whether the host did not answer at all, so that the network may be down.
        offline: whether the error shows that this machine has no network, or no name server.
        at: when it was raised, in monotonic seconds.
    """

    def __init__(self, reason: str, why: str, silent: bool = False, offline: bool = False) -> None:
        super().__init__(why)
        self.reason, self.silent, self.offline = reason, silent, offline
        self.at = time.monotonic()


@dataclass(eq=False)
class Host:
    """The state of an origin, such as https://a.example:8443."""

    turns: asyncio.Semaphore
    pool: httpcore.AsyncConnectionPool | None = None  # exists while there are users
    robots: asyncio.Task[Protego | None] | None = None
    robots_at: float = 0.0
    next_start: float = 0.0  # in the loop's time
    users: int = 0


@dataclass
class Response:
    """A response, with as much of its body as was read."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = field(default=b"", repr=False)

    def header(self, name: str) -> str:
        """Return the value of a header, or an empty string."""
        return next((value for key, value in self.headers if key == name), "")


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """A network backend that connects only to public or allowed addresses.

    A host name is resolved once per connection, and the connection uses the checked address. This
    prevents DNS rebinding, in which a second lookup returns another address.

    Args:
        allowed: non-public networks that may be contacted.
        seconds: timeout of one request, which includes the connection.
    """

    def __init__(self, allowed: Iterable[str], seconds: float = 30.0) -> None:
        self._seconds = seconds
        self._allowed = [ipaddress.ip_network(network) for network in allowed]
        self._inner = httpcore.AnyIOBackend()
        self.resolve: Callable[[str, int], Awaitable[list[str]]] = resolve

    def check(self, host: str, address: str) -> None:
        """Check one address of a host.

        Raises:
            Skip: the address is neither public nor allowed.
        """
        ip = ipaddress.ip_address(address.partition("%")[0])
        ip = (isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped) or ip
        if any(ip in network for network in self._allowed if network.version == ip.version):
            return
        if not is_public(ip):
            row = special_row(embedded(ip) or ip) or special_row(ip)
            raise Skip(
                "private address",
                f"{host} is at {address}, which is not of the public internet"
                f"{f' ({row[0]}, {row[1]})' if row else ''}; "
                "--source.allow_networks names networks that may be asked all the same",
            )

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of the host that answers.

        Raises:
            Skip: one of the addresses is neither public nor allowed.
        """
        addresses = await self.resolve(host, port)
        for address in addresses:
            self.check(host, address)
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        tried = addresses[:ADDRESSES]
        # An address may never answer, such as an IPv6 address behind a router without IPv6.
        patience = min(CONNECT_SECONDS, self._seconds / len(tried)) if tried else None
        for address in tried:
            limit = timeout if address == tried[-1] else patience
            try:
                return await self._inner.connect_tcp(
                    address, port, limit, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed

    async def sleep(self, seconds: float) -> None:
        """Sleep; a method of httpcore's interface."""
        await asyncio.sleep(seconds)


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host from the system's resolver."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str], error: OSError | None) -> None:
        if not answer.done():
            if error is None:
                answer.set_result(found)
            else:
                # The name server itself may be out of reach, which says nothing about the host.
                passing = error.errno == socket.EAI_AGAIN
                reason = "unreachable" if passing else "unresolved host"
                why = f"{host}: {error.strerror}"
                answer.set_exception(Skip(reason, why, silent=passing, offline=passing))

    def ask() -> None:
        found, failed = [], None
        try:
            named = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(address[0]) for *_, address in named))
        except (OSError, UnicodeError) as error:
            failed = error if isinstance(error, OSError) else OSError(0, str(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, found, failed)

    # Use a daemon thread, because a resolver that does not answer must not delay the exit.
    threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    return await answer


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
        check_least(
            ("per_host", self.per_host, 1),
            ("delay", self.delay, 0),
            ("retries", self.retries, 0),
            ("max_wait", self.max_wait, 0),
        )


def check_least(*values: tuple[str, float, int]) -> None:
    """Raise ValueError if an argument is below its least value: (name, value, least)."""
    for what, value, least in values:
        if value < least:
            raise ValueError(f"{what} {value}: must be {least} or more")


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
        ValueError: an argument is out of range.
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
        check_least(("max_bytes", max_bytes, 1), ("redirects", redirects, 0))
        check_above_0(seconds=seconds)
        if not agent.isascii() or not agent.isprintable() or not agent.strip():
            raise ValueError(f"agent {agent!r}: must be printable ASCII")
        self.backend = GuardedBackend(allow_networks or [], seconds)
        self._agent, self._token = agent, agent.split()[0].partition("/")[0].lower()
        self._max_bytes, self._seconds, self._redirects = max_bytes, seconds, redirects
        self._robots = robots
        self._hosts: dict[str, Host] = {}
        self._kept: dict[Host, int] = {}  # characters of robots.txt; the rules used last come last
        self._answering: dict[tuple[str, int], None] = {}  # hosts and ports, the last one last
        # When the last answered request and the last successful probe started, and the time of
        # the end of the last outage.
        self._answered_at = self._probed_at = self._back_at = -math.inf
        self._told_at, self._pause = -math.inf, 1.0
        self._trust = (
            ssl.create_default_context(cafile=authorities)
            if authorities
            else httpcore.default_ssl_context()
        )

    async def open(self, connections: int) -> None:
        """Prepare for `connections` concurrent requests; call this in the loop that fetches."""
        self._hosts = {}  # hosts of an earlier crawl belong to another loop
        self._kept = {}
        self._probing = asyncio.Lock()
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
            if rules is not None and not rules.can_fetch(str(url), self._agent):
                raise Skip("robots.txt", f"{url.host} does not want it fetched")
            delay = max(self._patience.delay, (rules and rules.crawl_delay(self._agent)) or 0.0)
            del rules  # a request may take long
            if delay > self._patience.max_wait:
                raise Skip("busy", f"{url.host} asks for {delay:g} s between two requests")
            return self._checked(await self._insistently(host, url, self._max_bytes, delay))

    async def _insistently(
        self, host: Host, url: httpx.URL, limit: int, delay: float, image: bool = True
    ) -> Response:
        """Return the response, after the retries that a busy host or a lost connection requires.

        Raises:
            Skip: the last attempt failed, or the host requires a longer wait than `max_wait`.
        """
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
            # One pool per host, because the cost of a request grows with the connections in its
            # pool.
            host.pool = httpcore.AsyncConnectionPool(
                ssl_context=self._trust,
                max_connections=self._patience.per_host,
                http2=True,
                network_backend=self.backend,
            )
        try:
            async with host.turns:
                yield host
        finally:
            host.users -= 1
            if not host.users:
                pool, host.pool = host.pool, None
                await pool.aclose()

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
        """Fetch the host's robots.txt, and return its rules or None (RFC 9309, section 2.3.1).

        Raises:
            Skip: robots.txt is unavailable, so nothing may be fetched.
        """
        here = url.copy_with(raw_path=b"/robots.txt", fragment=None)
        for _ in range(ROBOTS_REDIRECTS + 1):
            try:
                response = await self._insistently(host, here, ROBOTS_BYTES, 0.0, image=False)
                if response.status in REDIRECTS:
                    here = location(response, here)
                    continue
            except Skip as skip:
                reason = skip.reason if skip.reason in UNSAFE else "no robots.txt"
                why = f"{url.host}: {skip}"
                raise Skip(reason, why, skip.silent, skip.offline) from skip
            if response.status >= 500:
                raise Skip("no robots.txt", f"{url.host}: HTTP {response.status}")
            if response.status != 200:
                return None
            text = robots_text(response.body)
            if not is_robots_text(text):  # Protego would find no rule in it, and allow all
                raise Skip("no robots.txt", f"{url.host}: robots.txt is no text")
            self._keep(host, len(text) + EMPTY_ROBOTS)
            return Protego.parse(text)
        return None

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
        """Send one request, and read as much of the answer as may be an image of `limit` bytes.

        Raises:
            Skip: there is no answer, or the answer is too long or too slow.
        """
        assert host.pool is not None  # `_turn` sets it
        # Pass the parts: httpcore would cut a whole URL at ";" and drop an empty query.
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = {
            "host": url.netloc.decode(),
            "user-agent": self._agent,
            "accept-encoding": "identity",
        }
        answered = False
        try:
            async with self._slots:
                await self.flowing.wait()
                started = time.monotonic()
                async with (
                    asyncio.timeout(self._seconds),
                    host.pool.stream("GET", target, headers=list(headers.items())) as answer,
                ):
                    answered = True
                    self._on_answer(url, started)
                    named = [(k.decode().lower(), v.decode("latin-1")) for k, v in answer.headers]
                    response = Response(answer.status, named)
                    if answer.status == 200:
                        coding = response.header("content-encoding").strip().lower()
                        response.body = await body(answer, limit, image, coding)
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

    def _on_answer(self, url: httpx.URL, started: float) -> None:
        place = (url.host, url.port or (443 if url.scheme == "https" else 80))
        self._answered_at, self._pause = max(started, self._answered_at), 1.0
        self._answering.pop(place, None)
        self._answering[place] = None
        if len(self._answering) > PROBED_HOSTS:
            del self._answering[next(iter(self._answering))]

    async def waited_for_network(self, skip: Skip, name: str) -> bool:
        """Return whether the network was down when a request failed, after it is up again.

        The network is up if a host answers or lets itself be connected to. Before the first answer
        of any host, only the error shows that the network is down.

        Args:
            skip: the failure of the request.
            name: the source's name, used in the log.
        """
        await asyncio.sleep(ANSWER_SECONDS)
        async with self._probing:
            if skip.at <= self._back_at:
                return True
            # A connection may outlive the name server.
            up = self._probed_at if skip.offline else max(self._probed_at, self._answered_at)
            if up > skip.at or await self._probe(skip):
                return False
            while not await self._probe(skip):
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
            self._back_at = time.monotonic()
            for host in self._hosts.values():
                if host.robots is not None and host.robots.done() and host.robots.exception():
                    host.robots = None
            return True

    async def _probe(self, skip: Skip) -> bool:
        """Return whether the network is up: a host that answered before can be connected to."""
        if not self._answering:
            return not skip.offline
        started = time.monotonic()

        async def connects(host: str, port: int) -> bool:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    stream = await self.backend.connect_tcp(host, port, PROBE_SECONDS)
                    await stream.aclose()
            except Exception as error:  # resolvers and connections raise errors of many types
                return error_number(error) == errno.ECONNREFUSED
            return True

        up = any(await asyncio.gather(*(connects(*place) for place in self._answering)))
        if up:
            self._probed_at = started
        return up

    def _checked(self, response: Response) -> Response:
        if response.status in REDIRECTS:
            return response
        if response.status != 200:
            raise Skip(f"HTTP {response.status}", "no image")
        if self._robots and (said := opted_out(response.headers, self._token)):
            raise Skip("X-Robots-Tag", said)
        return response


async def body(answer: httpcore.Response, limit: int, image: bool, coding: str) -> bytes:
    """Return a whole image, or the first `limit` bytes of another file.

    Raises:
        Skip: the image is too long, or its first bytes are not those of an image.
    """
    parts, size, known = [], 0, not image or coding not in PLAIN
    async for part in answer.aiter_stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
        if not known and size >= HEAD_BYTES:
            known = codec_of(b"".join(parts)) is not None
            if not known:
                break
    whole = b"".join(parts)
    if coding not in PLAIN or (not image and whole.startswith(GZIP)):
        whole = unpacked(whole, coding, limit + 1)
    if not image:
        return whole[:limit]
    if size > limit or len(whole) > limit:
        raise Skip("too large", f"more than {limit} bytes")
    if codec_of(whole) is None:
        raise Skip("no image", f"it begins with {whole[:HEAD_BYTES]!r}: no JPEG, PNG or WebP")
    return whole


def unpacked(data: bytes, coding: str, limit: int) -> bytes:
    """Return up to `limit` bytes of a body that was compressed although identity was requested.

    Raises:
        Skip: the coding is unknown, or the body is damaged.
    """
    if data.startswith(GZIP):
        form = 16 + zlib.MAX_WBITS
    elif coding == "deflate":  # some hosts send deflate with a zlib header, some without
        form = zlib.MAX_WBITS if data[:1] == b"x" else -zlib.MAX_WBITS
    elif coding in ("gzip", "x-gzip"):
        return data[:limit]  # some hosts declare gzip but send plain bytes
    else:
        raise Skip("no image", f"sent as {coding[:80]!r}, though identity was asked for")
    state = zlib.decompressobj(form)
    try:
        plain = state.decompress(data, limit)
    except zlib.error as error:
        raise Skip("no image", f"sent as {coding[:80]!r}, which is damaged: {error}") from error
    if not state.eof and len(plain) < limit:
        raise Skip("no image", f"sent as {coding[:80]!r}, whose end is missing")
    return plain


def error_number(error: BaseException | None) -> int | None:
    """Return the number of the operating system's error behind an error; None: there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def robots_text(data: bytes) -> str:
    """Return the text of a robots.txt: UTF-8, or UTF-16 if it begins with a byte-order mark."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8", errors="replace")
    return text.replace("\ufeff", "")  # concatenated files contain several marks


def is_robots_text(text: str) -> bool:
    """Return whether `text` is text, and not an undeclared coding such as Brotli.

    A text in Latin-1 contains some undecodable characters, but its rules can be read.
    """
    if CONTROL.search(text.rstrip(PADDING)):
        return False
    return 8 * text.count("\ufffd") <= len(text) or USER_AGENT.search(text) is not None


def parsed(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Return the URL, relative to `base` if given. Percent-encoded parts stay unchanged.

    Raises:
        Skip: the URL is not a valid http or https URL.
    """
    try:
        found = httpx.URL(url)
        if base is not None:
            empty_query = "?" in url.partition("#")[0] and not found.query
            found = base.join(found)
            if empty_query:  # `join` drops an empty query
                found = found.copy_with(query=b"")
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise Skip("bad URL", f"{error}") from error
    if found.scheme not in ("http", "https") or not found.host or not url:
        raise Skip("bad URL", "must be http://HOST/... or https://HOST/...")
    return found


def location(response: Response, base: httpx.URL) -> httpx.URL:
    """Return the target of a redirect.

    Raises:
        Skip: the response contains no valid http or https URL.
    """
    # Some hosts send raw UTF-8, so percent-encode its bytes.
    raw = response.header("location").encode("latin-1")
    return parsed("".join(chr(byte) if byte < 128 else f"%{byte:02X}" for byte in raw), base)


def opted_out(headers: list[tuple[str, str]], agent: str) -> str:
    """Return the X-Robots-Tag that forbids all agents, or this agent, to learn from the image.

    The result is empty if there is no such header.
    """
    for name, value in headers:
        if name != "x-robots-tag":
            continue
        whom = ""
        for rule in value.lower().split(","):
            before, colon, after = (part.strip() for part in rule.partition(":"))
            if colon and before not in VALUED and " " not in before:  # dates contain spaces
                whom = before
            if (after if colon else before) in OPT_OUTS and whom in ("", "*", agent):
                return value[:200]
    return ""


def retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's exception, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


def retry_after(value: str, otherwise: float, date: str = "") -> float:
    """Return the seconds in a Retry-After value (number or date); `otherwise` if it is invalid.

    Args:
        value: the value of the header.
        otherwise: returned if the value is invalid.
        date: the response's Date, because this machine's clock may be wrong.
    """
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, float(value))
    until = seconds_of(value)
    if until is None:
        return otherwise
    now = seconds_of(date)
    return max(0.0, until - (time.time() if now is None else now))


def seconds_of(date: str) -> float | None:
    """Return an HTTP date in seconds since the Unix epoch; None if it is invalid."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return email.utils.parsedate_to_datetime(date).timestamp()
    return None


def pause(attempt: int) -> float:
    """Return seconds before the next attempt: 1, 2, 4, ..., times a random factor of 0.5 to 1."""
    return float(2**attempt * random.uniform(0.5, 1.0))
