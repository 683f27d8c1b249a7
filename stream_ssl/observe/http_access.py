"""Access control for HTTP: only this machine, or every client that has the token.

Without a token, the Host header must be a loopback name. This check stops DNS rebinding: another
website could point its own name at loopback. With a token, a request must carry the token or the
cookie of a log-in. A browser without either is redirected to the log-in form.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stream_ssl.bounded_files import named, private_remedy, read_bytes
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.address import is_loopback_host

_limited_log = RateLimitedLogger(logging.getLogger(__name__), seconds=60.0)

COOKIE = "stream-ssl-session"
"""The beginning of the name of a session's cookie."""
SESSION_SECONDS = 7 * 24 * 3600
"""Seconds that a browser stays logged in."""
MOST_BYTES = 4096
"""The maximum size of a token file, in bytes."""
LEAST_TOKEN = 16
"""The minimum length of a token, in characters."""
MOST_BODY = 4096
"""The maximum size of a log-in form, in bytes."""

OPEN = ("/healthz", "/readyz", "/login", "/static/")
"""Paths that need no token: the probes, the log-in form and the static files.

Without a token, the probes only answer yes or no."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every response that does not set them itself."""


class Token:
    """A shared secret: programs send it as a bearer token, people log in with it.

    A secret that `load` has read from a file changes with the file.

    Args:
        secret: at least LEAST_TOKEN printable ASCII characters without blanks.

    Raises:
        ValueError: the secret is too short or has other characters.
    """

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < LEAST_TOKEN or not all("!" <= one <= "~" for one in secret):
            raise ValueError(
                f"an HTTP token has {len(secret)} characters: must have at least "
                f"{LEAST_TOKEN}, all printable ASCII without spaces; make one with: "
                "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self._secret, self._clock = secret, clock
        self._file: Path | None = None
        self._facts = (0, 0, 0)

    @property
    def secret(self) -> str:
        """The secret; if it comes from a file, the newest one there that is valid."""
        if self._file is not None:
            try:
                if (facts := _facts(self._file)) != self._facts:
                    self._secret, self._facts = Token.load(self._file)._secret, facts
            except (OSError, ValueError) as error:
                _limited_log.warning("token", f"{error}; the previous token stays in force")
        return self._secret

    @property
    def cookie(self) -> str:
        """The name of a session's cookie.

        A browser sends the cookies of a host to all its ports, so each token needs another name.
        """
        return f"{COOKIE}-{self._mark('name')[:8]}"

    @classmethod
    def load(cls, path: Path) -> Token:
        """Load a token from a file that holds nothing else and is private, or raise ValueError."""
        remedy = (
            "make one with: (umask 077; "
            f"python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {path})"
        )
        with named("http.token_file", path, remedy):
            facts, mode = _facts(path), path.stat().st_mode
            content = read_bytes(path, MOST_BYTES, links=True)
            if not content.isascii():
                raise ValueError(f"{path}: the file is not ASCII text")
            secret = content.decode("ascii").strip()
        try:
            token = cls(secret)
        except ValueError as error:
            raise ValueError(f"http.token_file {path}: {error}") from None
        if mode & 0o007:  # only now, because the remedy would harm a file of the system
            raise ValueError(
                f"http.token_file {path}: other users may read the file (mode "
                f"{mode & 0o777:04o}); {private_remedy(path)}"
            )
        token._file, token._facts = path, facts
        return token

    def admits(self, headers: Headers, cookies: Mapping[str, str]) -> bool:
        """Return whether a request has the token or the cookie of a session that is valid."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.matches(given.strip()):
            return True
        until, _, mark = cookies.get(self.cookie, "").partition(".")
        if not until.isdecimal() or len(until) > 12 or int(until) < self._clock():
            return False
        return hmac.compare_digest(mark.encode(), self._mark(until).encode())

    def matches(self, given: str) -> bool:
        """Return whether `given` is the token. The comparison takes constant time."""
        return hmac.compare_digest(given.encode(), self.secret.encode())

    def session(self) -> str:
        """Return a cookie value that `admits` accepts for SESSION_SECONDS.

        The value does not contain the token.
        """
        until = str(int(self._clock()) + SESSION_SECONDS)
        return f"{until}.{self._mark(until)}"

    def _mark(self, until: str) -> str:
        return hmac.new(
            self.secret.encode(), b"session until " + until.encode(), sha256
        ).hexdigest()


def _facts(path: Path) -> tuple[int, int, int]:
    """Return numbers that a change of the file changes. A file may be replaced, or a link to it."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class Guard:
    """An ASGI middleware that rejects requests without permission and adds HEADERS.

    Args:
        app: the application that answers accepted requests. `scope["state"]["admitted"]` is true
            if the request may read everything.
        token: the token that requests must have. None accepts only requests whose Host is a
            loopback name.
        public: accept any Host if there is no token.
    """

    def __init__(self, app: ASGIApp, token: Token | None, public: bool) -> None:
        self._app, self._token, self._public = app, token, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message["headers"]
                names = {name for name, _ in given}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = given + [pair for pair in more if pair[0] not in names]
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        state = scope.setdefault("state", {})
        if self._token is None:
            state["admitted"] = self._public or is_loopback_host(_host(request.headers))
            if state["admitted"] or path in ("/healthz", "/readyz"):
                return None
            return JSONResponse(
                {
                    "error": (
                        "without a token, this server only accepts requests with a "
                        "loopback name as Host: set http.token_file to use another name, "
                        "or let your proxy send Host: localhost"
                    )
                },
                403,
            )
        state["admitted"] = self._token.admits(request.headers, request.cookies)
        if state["admitted"] or path.startswith(OPEN):
            return None
        of_person = "text/html" in request.headers.get("accept", "")
        if of_person and not path.startswith("/api/"):  # such as a runbook, the link of an alert
            return RedirectResponse("../" * (path.count("/") - 1) + "login", 303)
        return JSONResponse(
            {
                "error": (
                    "a token is required: send it as `Authorization: Bearer TOKEN`, or "
                    "log in with a browser at /login"
                )
            },
            401,
            {"www-authenticate": 'Bearer realm="stream-ssl"'},
        )


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a posted form. If a field occurs twice, the last value counts.

    Raises:
        ValueError: the form is longer than MOST_BODY, has more than 8 fields, or is not UTF-8.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise ValueError(f"the form has more than {MOST_BODY} bytes")
    fields = parse_qs(body.decode("utf-8"), max_num_fields=8, errors="strict")
    return {name: values[-1] for name, values in fields.items()}


def log_in(response: Response, token: Token, https: bool) -> Response:
    """Add the cookie that `Token.admits` accepts to a response, and return the response.

    The cookie has no Path, so the browser sends it only below the folder of the log-in form. Behind
    a proxy, this folder is the prefix of this server.
    """
    response.set_cookie(
        token.cookie,
        token.session(),
        max_age=SESSION_SECONDS,
        path=None,
        secure=https,
        httponly=True,
        samesite="lax",  # with "strict", a link in a chat would ask for the token again
    )
    return response


def _host(headers: Headers) -> str:
    try:
        return urlsplit("//" + headers.get("host", "")).hostname or ""
    except ValueError:
        return ""
