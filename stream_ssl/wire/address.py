"""Which addresses are valid, and which are on loopback, where the wire may be in plain text."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence


def is_loopback(address: str) -> bool:
    """Whether a ZeroMQ address stays on this machine: ipc, inproc, or TCP at a loopback host."""
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc"):
        return bool(rest)
    if transport != "tcp":
        return False
    return is_loopback_host(rest.rpartition(":")[0].removeprefix("[").removesuffix("]"))


def is_loopback_host(host: str) -> bool:
    """Whether a host can be reached from this machine alone: 127.0.0.0/8, ::1, localhost.

    A name other than "localhost" does not count: what it resolves to can change.
    """
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return bool((mapped or ip).is_loopback)


def check_address(address: str) -> str:
    """Returns a valid address to connect to.

    Raises:
        ValueError: neither tcp://HOST:PORT nor ipc://PATH.
    """
    transport, _, rest = str(address).partition("://")
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and host not in ("", "*") and port.isdecimal():
        if 1 <= int(port) <= 65_535:
            return address
    elif transport == "ipc" and rest:
        return address
    raise ValueError(
        f"address {address!r}: must be tcp://HOST:PORT, port 1 to 65535, or ipc://PATH"
    )


def receiver_of(name: str, addresses: Sequence[str]) -> str:
    """The address that a producer of this name stays with, by rendezvous hashing.

    One that joins the list takes over its share of the names, and moves no other; one that leaves
    it gives its own away.

    >>> receiver_of("robot", ["tcp://a:1", "tcp://b:1", "tcp://c:1"])
    'tcp://c:1'
    """
    return max(addresses, key=lambda one: hashlib.sha256(f"{name} {one}".encode()).digest())


def check_bind(address: str) -> str:
    """Returns a valid address to listen at; port 0 is a free one.

    Raises:
        ValueError: no transport, or a port above 65535, which ZeroMQ would take modulo 65536.
    """
    transport, scheme, rest = address.partition("://")
    if not scheme:
        raise ValueError(
            f"bind {address!r}: the transport is missing; write tcp://{address}, or ipc://PATH"
        )
    port = rest.rpartition(":")[2]
    if transport == "tcp" and port.isdecimal() and int(port) > 65_535:
        raise ValueError(f"bind {address!r}: the port must be 1 to 65535, or 0 for a free one")
    return address


def require_loopback(address: str, remedy: str) -> None:
    """Refuses plain text to or at an address that other machines can reach.

    Raises:
        ValueError: the address is not on loopback; the message ends with `remedy`.
    """
    if not is_loopback(address):
        raise ValueError(
            f"{address}: plain text is allowed only on loopback "
            f"(tcp://127.0.0.1:PORT, ipc://PATH); {remedy}"
        )
