"""Which addresses never leave this machine: only there may the wire be in plain text."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether a ZeroMQ address stays on this machine: 127.0.0.0/8, [::1], localhost, ipc, inproc.

    A name other than "localhost" does not count: what it resolves to can change.
    """
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc"):
        return bool(rest)
    if transport != "tcp":
        return False
    host = rest.rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def check_address(address: str) -> str:
    """An address to connect to, as it is.

    Raises:
        ValueError: neither tcp://HOST:PORT nor ipc://PATH.
    """
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and host not in ("", "*") and port.isdecimal():
        if 1 <= int(port) <= 65_535:
            return address
    elif transport == "ipc" and rest:
        return address
    raise ValueError(
        f"address {address!r}: must be tcp://HOST:PORT, port 1 to 65535, or ipc://PATH"
    )


def check_bind(address: str) -> str:
    """An address to listen at, as it is; port 0 is a free one.

    Raises:
        ValueError: a port that there is none of: ZeroMQ would listen at another, its remainder.
    """
    transport, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    if transport == "tcp" and port.isdecimal() and int(port) > 65_535:
        raise ValueError(f"bind {address!r}: the port must be 1 to 65535, or 0 for a free one")
    return address


def require_loopback(address: str, remedy: str) -> None:
    """Refuse to speak in plain text to or on an address that others can reach.

    Raises:
        ValueError: the address is not on loopback; the message ends with the remedy.
    """
    if not is_loopback(address):
        raise ValueError(
            f"{address}: plain text is allowed only on loopback "
            f"(tcp://127.0.0.1:PORT, ipc://PATH); {remedy}"
        )
