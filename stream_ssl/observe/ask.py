"""Questions to a process of a run over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from stream_ssl.bounded_files import parse_json

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
        seconds: the time-out of each wait, and of the whole body.
        body: bytes to post; None: ask by GET.

    Raises:
        OSError, HTTPException: there is no answer, it takes too long or has more than MOST_BODY
            bytes, or the address is invalid.
    """
    content = bytearray()
    try:
        parts = urlsplit(address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.netloc, timeout=seconds)) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, parts.path.rstrip("/") + path, body, headers or {})
            reply = connection.getresponse()
            ends = time.monotonic() + seconds
            while len(content) <= MOST_BODY and (part := reply.read1(1 << 20)):
                content += part
                if time.monotonic() > ends:  # such as a stream of events, which never ends
                    raise TimeoutError(f"the answer takes longer than {seconds:g} s")
    except ValueError as error:  # such as a host name that no name server could know
        raise HTTPException(f"the address is invalid: {error}") from None
    if len(content) > MOST_BODY:
        raise HTTPException(f"the answer has more than {MOST_BODY} bytes")
    return reply.status, bytes(content)


def map_in(body: bytes) -> dict[str, Any]:
    """Return the JSON map of an answer. Another program may have sent it.

    Raises:
        ValueError: the body is not JSON, is nested too deeply, or is not a map.
    """
    found = parse_json(body.decode())
    if not isinstance(found, dict):
        raise ValueError(f"is a JSON {type(found).__name__}, and must be a map")
    return found


def other_token(role: str) -> str:
    """Return the sentence about a process that rejects the token in the run's token file."""
    return (
        f"the {role} rejects the token in http.token_file: restart it, because it started with "
        "another token"
    )


def state_in(role: str, where: str, status: int, body: bytes) -> dict[str, Any]:
    """Return the state of a process from its answer to the question `state` of `page/api.py`.

    Args:
        where: the place of the process, for an error, such as "at its address".
        status, body: the answer, as `ask` returns it.

    Raises:
        ValueError: the process refuses the question, or another program answers at its address.
    """
    try:
        reply = map_in(body)
    except ValueError:
        reply = {}
    if status == HTTPStatus.UNAUTHORIZED:
        raise ValueError(other_token(role))
    if status != HTTPStatus.OK:
        why = reply.get("error", f"status {status}")
        raise ValueError(f"the {role} {where} gives no state: {why}")
    if reply.get("role") != role or not isinstance(reply.get("figures"), Mapping):
        raise ValueError(f"another program than the {role} answers {where}")
    return reply
