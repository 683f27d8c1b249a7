"""The HTTP server of a process: /metrics, /healthz, /readyz and the page."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import quote

import h11
import uvicorn
from jinja2 import Environment, FileSystemLoader
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from stream_ssl.background import Background
from stream_ssl.observe.facts import Facts
from stream_ssl.observe.health import Health, Status
from stream_ssl.observe.http_access import Guard, log_in, read_form
from stream_ssl.observe.json_response import JsonResponse
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.page import runbooks
from stream_ssl.observe.page.api import Api, Sources
from stream_ssl.observe.page.history import HELP, POINT_SECONDS
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.version import version
from stream_ssl.wire.address import is_loopback_host

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""The most connections that are open at once.

One more connection closes the connection that has been idle for the longest time."""

BACKLOG = 128
"""The length of the kernel's queue of connections that the server has not accepted yet."""

REQUEST_SECONDS = 10.0
"""Seconds that a client has to send a whole request, body included."""

ANSWER_SECONDS = 60.0
"""Seconds after REQUEST_SECONDS in which the server must make and send the response."""

LOG_IN_SECONDS = 1.0
"""Delay in seconds before the server answers a wrong token. It slows down guessing."""

PAGE = Path(__file__).parent / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""The content types of the page's files. The types that a system knows may differ."""


class Server:
    """An HTTP server for the metrics, the health and the page of one process.

    The server runs in a daemon thread. It is a context manager.

    Args:
        health: the state that /healthz and /readyz report.
        port: the port to listen on. 0 chooses a free port; `address` holds the actual port.
        public: allow an address other than loopback without a token. Everybody who reaches the
            port can then read the metrics, the names of the producers and the images.
        sources: the data that the page shows beside the metrics. If its `token` is set, clients
            must send the token, and `host` may be any address.

    Raises:
        ValueError: `host` is not loopback, `public` is false and there is no token. Or `port` is
            above 65535.
        OSError: the server cannot listen on the address.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Health,
        role: Role,
        host: str = "127.0.0.1",
        port: int = 0,
        public: bool = False,
        sources: Sources | None = None,
    ) -> None:
        self.health = health
        self.sources = Sources() if sources is None else sources
        check_public(host, public or self.sources.token is not None)
        self._facts = Facts(registry, role)
        self._sampling = Background("history", self._facts.sample, POINT_SECONDS)
        self._socket = _listen(host, port)
        shown = reachable(host)
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server = BoundedServer(
            uvicorn.Config(
                application(registry, health, role, self._facts, self.sources, public),
                http=BoundedProtocol,
                backlog=1,  # the connections accepted in one turn: see BoundedServer
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                workers=1,  # otherwise WEB_CONCURRENCY is read, which may be no number
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )

    def start(self) -> str:
        """Serve until `close` is called. Return the address, such as `http://127.0.0.1:43121`.

        The constructor already listens. The server answers waiting connections from now on.
        """
        self._facts.sample()
        self._sampling.start()
        self._thread.start()
        return self.address

    def close(self) -> None:
        """Stop serving and close the port."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
        self._sampling.close()
        self._socket.close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BoundedServer(uvicorn.Server):
    """A uvicorn server that accepts few connections at a time.

    asyncio accepts up to `backlog` connections in one turn. All of them are open before the server
    counts the first one. If file descriptors run out, asyncio logs an error for each connection.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept `Config.backlog` connections a turn, and give the kernel a queue of BACKLOG."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and close the connections that outlasted the time that uvicorn gives them."""
        await super().shutdown(sockets)
        for connection in [*self.server_state.connections]:
            cast(BoundedProtocol, connection).abort()
        await asyncio.sleep(0)  # an aborted connection closes its socket in the next turn


_requests_log = RateLimitedLogger(log, seconds=60.0, lines=3)
_UNHELPFUL = (
    "Invalid HTTP request received.",  # `send_400_response` logs it with the address
    "Unsupported upgrade request.",  # a client that also speaks HTTP/2 gets its answer
    "No supported WebSocket library",  # the page needs none
)
logging.getLogger("uvicorn.error").addFilter(
    lambda record: not record.getMessage().startswith(_UNHELPFUL)
)


class BoundedProtocol(H11Protocol):
    """A uvicorn connection with time limits and without pipelining.

    The client must send each request within REQUEST_SECONDS, and read the response within
    ANSWER_SECONDS. If a client sends its next request before it has the response, the server sends
    only that response, with `Connection: close`.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self.timer = self.loop.call_later(REQUEST_SECONDS, self._end_request)
        if len(self.connections) > MOST_CONNECTIONS:
            others = [
                cast(BoundedProtocol, other) for other in self.connections if other is not self
            ]
            min(others, key=lambda other: (other.busy, other.since)).abort()

    def data_received(self, data: bytes) -> None:
        """Close the connection after a response if the client pipelines requests.

        Pipelined requests would make other connections wait.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0] and self.busy:
            scope = self.cycle.scope  # uvicorn closes a connection whose client asks for it
            scope["headers"] = [*scope["headers"], (b"connection", b"close")]
            self.cycle.keep_alive = False  # also if the response has begun

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not an HTTP request, and log the address that sent them."""
        peer = self.client[0] if self.client else "an unknown address"
        _requests_log.warning("invalid", f"{peer} sent an invalid HTTP request to the page's port")
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Start the timer for the next request, or for sending the last bytes of the response."""
        self.timer.cancel()
        self.since = self.loop.time()
        if self.transport.is_closing():
            self.timer = self.loop.call_later(ANSWER_SECONDS, self.abort)
        else:
            self.timer = self.loop.call_later(REQUEST_SECONDS, self._end_request)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once and remove it from the count."""
        self.connections.discard(self)
        self.transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a whole request has arrived and its response is not complete yet."""
        cycle = cast(RequestResponseCycle | None, self.cycle)
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _end_request(self) -> None:
        if self.busy:
            self.timer = self.loop.call_later(ANSWER_SECONDS, self.abort)
        else:
            self.abort()


class PageFiles(StaticFiles):
    """The page's files, whose ETag is a digest of their content.

    The size and the date may stay the same in another version of a file, because some systems
    install all files with one date. A browser would then keep the file of the other version.
    """

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,  # noqa: ARG002
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Return the file, or status 304 if the browser has this content already."""
        content = Path(full_path).read_bytes()
        headers = {"etag": f'"{sha256(content).hexdigest()}"'}
        if headers["etag"] in Headers(scope=scope).get("if-none-match", ""):
            return Response(None, 304, headers)
        return Response(content, status_code, headers, TYPES.get(Path(full_path).suffix))


def application(
    registry: CollectorRegistry,
    health: Health,
    role: Role,
    facts: Facts | None = None,
    sources: Sources | None = None,
    public: bool = False,
) -> Guard:
    """Return the ASGI application, for tests and for other servers.

    See `Server` for the arguments.
    """
    sources = Sources() if sources is None else sources
    api = Api(role, health, Facts(registry, role) if facts is None else facts, sources)
    routes = [*Pages(registry, health, role, sources).routes(), *api.routes()]
    starlette = Starlette(routes=routes)
    starlette.router.redirect_slashes = False  # the address would lack a proxy's prefix
    starlette.add_exception_handler(HTTPStatus.NOT_FOUND, _not_found)
    # The client is gone, and does not read this answer.
    starlette.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
    return Guard(starlette, sources.token, public)


class Pages:
    """The pages, the probes and the metrics of one process, by address."""

    def __init__(
        self, registry: CollectorRegistry, health: Health, role: Role, sources: Sources
    ) -> None:
        self._registry, self._health, self._role = registry, health, role
        self._token, self._run = sources.token, sources.run
        self._templates = Environment(loader=FileSystemLoader(PAGE / "templates"), autoescape=True)

    def routes(self) -> list[BaseRoute]:
        """Return the addresses and their handlers."""
        return [
            Route("/", self.page),
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/runbooks/{name}", self.runbook),
            Route("/docs/metrics", self.metrics_page),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Mount("/static", PageFiles(directory=PAGE / "static")),
        ]

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in the format that the client accepts."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # the client asks for a version that is not a number
            encode, content_type = choose_encoder("")
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def healthz(self, request: Request) -> Response:
        """Say whether the process lives."""
        return _reply(self._health.live(), request.state.admitted)

    async def readyz(self, request: Request) -> Response:
        """Say whether the process does its work, and which conditions hold."""
        health = self._health
        return _reply(health.ready(), request.state.admitted, health.problems())

    async def page(self, _: Request) -> Response:
        """Return the status page, whose figures its own script asks for."""
        run = None if self._run is None else self._run.name
        log_out = self._token is not None
        return self._render(
            "page.html.j2", run=run, log_out=log_out, down="runbooks/down", help=HELP
        )

    async def metrics_page(self, _: Request) -> Response:
        """Return docs/metrics.md as a page."""
        return self._render("runbook.html.j2", name="metrics", html=runbooks.render_metrics())

    async def runbook(self, request: Request) -> Response:
        """Return the runbook of a condition."""
        name = request.path_params["name"]
        try:
            return self._render("runbook.html.j2", name=name, html=runbooks.render(name))
        except LookupError as error:
            return JsonResponse({"error": str(error.args[0])}, 404)

    async def login(self, request: Request) -> Response:
        """Show the form that asks for the token, or check the token that it sends."""
        if self._token is None:
            return RedirectResponse("./", 303)
        if request.method != "POST":
            return self._render("login.html.j2", wrong="")
        try:
            given = (await read_form(request)).get("token", "")
        except ValueError as error:
            return self._render("login.html.j2", 400, wrong=f"The log-in form is invalid: {error}.")
        if not self._token.matches(given.strip()):
            await asyncio.sleep(LOG_IN_SECONDS)
            return self._render("login.html.j2", 403, wrong="This token is wrong.")
        return log_in(RedirectResponse("./", 303), self._token, request.url.scheme == "https")

    async def logout(self, _: Request) -> Response:
        """Log this browser out."""
        answer = RedirectResponse("login", 303)
        if self._token is not None:
            answer.delete_cookie(self._token.cookie, path=None)  # type: ignore[arg-type]
        return answer

    def _render(self, template: str, status: int = 200, **values: object) -> HTMLResponse:
        html = self._templates.get_template(template).render(
            role=self._role, version=version(), host=socket.gethostname(), **values
        )
        # The names of a host and of a folder may hold bytes that are not UTF-8.
        return HTMLResponse(html.encode(errors="replace"), status, {"cache-control": "no-store"})


def _not_found(request: Request, _: Exception) -> Response:
    """Redirect a path with a last slash to the path without it, also below a proxy's prefix."""
    path: str = request.scope["path"]
    if (name := path.rstrip("/").rpartition("/")[2]) and path.endswith("/"):
        query = request.scope["query_string"].decode("latin-1")
        return RedirectResponse(f"../{quote(name)}?{query}".rstrip("?"), 307)
    return Response("Not Found", 404, media_type="text/plain")


def check_public(host: str, public: bool) -> None:
    """Raise ValueError if the page would be reachable from other machines without permission."""
    if not public and not is_loopback_host(host):
        raise ValueError(
            f"metrics address {host!r} is not loopback, and there is no token: everybody "
            "who can connect can read the metrics and the page. Use 127.0.0.1 behind a "
            "tunnel, set http.token_file, or set http.public to true if the network is "
            "trusted."
        )


def reachable(host: str) -> str:
    """Return the host that a URL needs to reach a server that listens on `host`.

    A URL cannot name "all addresses" (0.0.0.0 or ::). For these, return the address of this
    machine's own host name. If the name has no local address, return loopback.
    """
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    for family in (socket.AF_INET, socket.AF_INET6) if host == "::" else (socket.AF_INET,):
        try:
            address = str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))  # fails unless the address is local
        except (OSError, UnicodeError):  # a host name may be too long for a name server
            continue
        return f"[{address}]" if ":" in address else address
    return "127.0.0.1"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port > 65_535:  # the ranks of a host have ports in a row
        raise ValueError(
            f"port {port} for metrics is above 65535: choose a lower one (http.receiver, "
            "http.learner)"
        )
    try:
        # Most servers listen on all IPv4 addresses, too, if their address is "::".
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        remedy = "give an address of this machine, such as 127.0.0.1 or [::1]"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = "choose another port, or 0 for a free one"
        why = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise OSError(
            error.errno,
            f"cannot listen on {host} port {port} for metrics ({why}); {remedy} (http.receiver, "
            "http.learner)",
        ) from None


def _reply(
    status: Status, all_of_it: bool, problems: list[dict[str, object]] | None = None
) -> JsonResponse:
    """Return `ok` to every client, and the reasons only to clients that may read the metrics."""
    body: dict[str, object] = {"ok": status.ok}
    if all_of_it:
        body["failing"] = [name for name, part in status.parts.items() if not part["ok"]]
        body["parts"] = status.parts
        if problems is not None:
            body["conditions"] = problems
    return JsonResponse(
        body, status_code=200 if status.ok else 503, headers={"cache-control": "no-store"}
    )
