"""Checks of addresses: their syntax, and whether they are on loopback and allow plain text."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

HOST = re.compile(r"[A-Za-z0-9\[:][A-Za-z0-9.:%;\[\]_*-]*")
"""The hosts that ZeroMQ accepts. A local address to connect from may come first, before a ";"."""


def is_loopback(address: str) -> bool:
    """Return whether a ZeroMQ address is local: ipc, inproc, or TCP at a loopback host."""
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc"):
        return bool(rest)
    if transport != "tcp":
        return False
    return is_loopback_host(rest.rpartition(":")[0].removeprefix("[").removesuffix("]"))


def is_loopback_host(host: str) -> bool:
    """Return whether a host is on loopback: 127.0.0.0/8, ::1 or localhost.

    The result is False for every other name, because the address of a name can change.
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
    """Return an address to connect to if it is valid.

    Raises:
        ValueError: the address is neither tcp://HOST:PORT nor ipc://PATH, or ZeroMQ does not take
            its host.
    """
    transport, _, rest = str(address).partition("://")
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and host not in ("", "*") and port.isascii() and port.isdecimal():
        if not HOST.fullmatch(host):
            raise ValueError(
                f"address {address!r}: the host may consist of the letters A to Z, digits and "
                ".-_:%[] only; write a name with other letters in its form xn--..., and no user "
                "name"
            )
        if 1 <= int(port) <= 65_535:
            return address
    elif transport == "ipc" and rest:
        return address
    raise ValueError(
        f"address {address!r}: must be tcp://HOST:PORT, port 1 to 65535, or ipc://PATH"
    )


def receiver_of(name: str, addresses: Sequence[str]) -> str:
    """Return the address that a producer of this name uses, by rendezvous hashing.

    A new address takes over its share of the names, and no other name moves. If an address is
    removed, only its own names move.

    >>> receiver_of("robot", ["tcp://a:1", "tcp://b:1", "tcp://c:1"])
    'tcp://c:1'
    """
    return max(addresses, key=lambda one: hashlib.sha256(f"{name} {one}".encode()).digest())


def check_bind(address: str) -> str:
    """Return an address to listen on if it is valid; port 0 or * selects a free port.

    Raises:
        ValueError: the transport or the port is missing or invalid, or ZeroMQ would delete the file
            at the path. ZeroMQ would take ports modulo 65536.
    """
    transport, scheme, rest = address.partition("://")
    if not scheme:
        raise ValueError(
            f"bind {address!r}: the transport is missing; write tcp://{address}, or ipc://PATH"
        )
    if transport not in ("tcp", "ipc", "inproc"):
        raise ValueError(f"bind {address!r}: must be tcp://HOST:PORT or ipc://PATH")
    port = rest.rpartition(":")[2]
    if transport == "tcp" and port != "*" and not (port.isdecimal() and int(port) <= 65_535):
        raise ValueError(f"bind {address!r}: the port must be 1 to 65535, or 0 for a free one")
    if transport == "ipc" and os.access(rest, os.F_OK) and not Path(rest).is_socket():
        raise ValueError(f"bind {address!r}: {rest} exists and is no socket; choose another path")
    return address


def require_loopback(address: str, remedy: str) -> None:
    """Check that an address is on loopback, where plain text is allowed.

    Raises:
        ValueError: other machines can reach the address. The message ends with `remedy`.
    """
    if not is_loopback(address):
        raise ValueError(
            f"{address}: plain text is allowed only on loopback "
            f"(tcp://127.0.0.1:PORT, ipc://PATH); {remedy}"
        )
