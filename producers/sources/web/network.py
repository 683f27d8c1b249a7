"""Connections to public addresses alone, so that a crawl cannot reach the local network."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore

from stream_ssl.producers.sources.web.public_addresses import embedded, is_public, special_row
from stream_ssl.producers.sources.web.skip import Skip

ADDRESSES = 4  # of a host that are tried
CONNECT_SECONDS = 4.0  # to connect to an address, if the host has another address


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """A network backend that connects only to public or allowed addresses.

    A host name is resolved once per connection, and the connection uses the checked address. This
    prevents DNS rebinding, in which a second lookup returns another address.

    Args:
        allowed: non-public networks that may be contacted.
        seconds: timeout of one request, which includes the connection.

    Raises:
        ValueError: a text is not a network.
    """

    def __init__(self, allowed: Iterable[str], seconds: float = 30.0) -> None:
        self._seconds = seconds
        try:
            self._allowed = [ipaddress.ip_network(network) for network in allowed]
        except ValueError as error:
            why = f"allow_networks: {error}; give networks such as 10.0.0.0/8"
            raise ValueError(why) from None
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


def error_number(error: BaseException | None) -> int | None:
    """Return the number of the operating system's error behind an error; None: there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
