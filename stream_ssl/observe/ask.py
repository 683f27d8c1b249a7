"""Questions to a process of a run over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

MOST_BODY = 16 << 20
"""The maximum size of an answer, in bytes."""


def bearer(token: str | None) -> dict[str, str]:
    """Return the header with a token; no header without a token."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def ask(
    address: str,
    path: str,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of an answer.

    Args:
        address: the HTTP address of the process.
        path: the path of the question below the address.
        seconds: the time-out.
        headers: further headers.
        body: bytes to post; None: ask by GET.

    Raises:
        OSError, HTTPException: there is no answer, it has more than MOST_BODY bytes, or the
            address is invalid.
    """
    try:
        parts = urlsplit(address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.netloc, timeout=seconds)) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, parts.path.rstrip("/") + path, body, headers or {})
            reply = connection.getresponse()
            told = reply.read(MOST_BODY + 1)
    except ValueError as error:  # such as a host name that no name server could know
        raise HTTPException(f"the address is invalid: {error}") from None
    if len(told) > MOST_BODY:
        raise HTTPException(f"the answer has more than {MOST_BODY} bytes")
    return reply.status, told
