"""Questions that a process forwards to the other process of its run."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.page.questions import Refused

MOST_ANSWER = 8 << 20
"""The maximum size of the other process's answer, in bytes."""
PEER_SECONDS, STATE_SECONDS = 15.0, 4.0
"""Time-outs in seconds for questions to the other process, and for its `state` alone."""
BYTES = "application/octet-stream"
"""The content type of a posted picture."""
ASKED_BY_PEER = "x-stream-ssl-asked-by"
"""The header of a forwarded question, which is not forwarded again."""


def ask(
    role: Role,
    address: str,
    question: str,
    query: str,
    asked_by: Role,
    token: Token | None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of the other process's answer.

    Args:
        role: the role of the other process.
        address: the HTTP address of the other process.
        question: the question below `api/ROLE/`.
        query: the arguments of the question, as in a URL.
        asked_by: the role of this process.
        token: the token of both processes; None: they have none.
        body: bytes to post; None: ask by GET.

    Raises:
        Refused: the other process does not answer.
    """
    headers: dict[str, str] = {ASKED_BY_PEER: asked_by}
    if token is not None:
        headers["authorization"] = f"Bearer {token.secret}"
    parts = urlsplit(address)
    seconds = STATE_SECONDS if question == "state" else PEER_SECONDS
    connection = http.client.HTTPConnection(parts.netloc, timeout=seconds)
    try:
        method = "GET" if body is None else "POST"
        if body is not None:
            headers["content-type"] = BYTES
        connection.request(method, f"/api/{role}/{question}?{query}", body, headers)
        reply = connection.getresponse()
        told = reply.read(MOST_ANSWER + 1)
    except (OSError, http.client.HTTPException) as error:
        why = _why(error)
        raise Refused(502, f"the {role} does not answer at {address}: {why}") from None
    finally:
        connection.close()
    if len(told) > MOST_ANSWER:
        raise Refused(502, f"the {role} answered with more than {MOST_ANSWER} bytes")
    return reply.status, told


def _why(error: Exception) -> str:
    """Return the reason of a failed question without the number of the system's error."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there, so the process has stopped"
    return str(error) or type(error).__name__
