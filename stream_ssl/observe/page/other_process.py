"""Questions that a process forwards to the other process of its run."""

from __future__ import annotations

from http.client import HTTPException

from stream_ssl.observe.ask import ask, bearer
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.page.questions import Refused

PEER_SECONDS, STATE_SECONDS = 15.0, 4.0
"""Time-outs in seconds for questions to the other process, and for its `state` alone."""
BYTES = "application/octet-stream"
"""The content type of a posted picture."""
ASKED_BY_PEER = "x-stream-ssl-asked-by"
"""The header of a forwarded question, which is not forwarded again."""


def ask_other(
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
    headers = {ASKED_BY_PEER: asked_by, **bearer(None if token is None else token.secret)}
    if body is not None:
        headers["content-type"] = BYTES
    seconds = STATE_SECONDS if question == "state" else PEER_SECONDS
    try:
        return ask(address, f"/api/{role}/{question}?{query}", seconds, headers, body)
    except (OSError, HTTPException) as error:
        why = str(error) or type(error).__name__
        if isinstance(error, ConnectionRefusedError):
            why = "nothing listens there, so the process has stopped"
        raise Refused(502, f"the {role} does not answer at {address}: {why}") from None
