"""The HTTP side of a process: /metrics, /healthz, /readyz and a page that links them."""

from __future__ import annotations

import asyncio
import socket
import threading
from html import escape
from typing import cast

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from stream_ssl import __version__
from stream_ssl.observe.health import Health, Status
from stream_ssl.wire.address import is_loopback_host

MOST_CONNECTIONS = 64
"""Connections held open at once; one more closes the one that has been quiet for longest."""

REQUEST_SECONDS = 10.0
"""Seconds in which a connection must send its request."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>stream-ssl {role}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem;
  color: #222; background: #fff }}
h1 {{ font-size: 1.5rem }} code {{ font-size: 1rem }}
td, th {{ padding: .25rem 1.5rem .25rem 0; text-align: left; vertical-align: top }}
.ok {{ color: #17692f }} .bad {{ color: #a3121f; font-weight: 600 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #161616 }}
  a {{ color: #8ab4f8 }} .ok {{ color: #7bd88f }} .bad {{ color: #ff8a80 }} }}
</style></head><body>
<h1>stream-ssl {role}</h1>
<p>Version {version}. {state}</p>
<table><tr><th>Part</th><th>State</th><th></th></tr>{rows}</table>
<ul>
<li><a href="/metrics"><code>/metrics</code></a> what Prometheus reads</li>
<li><a href="/healthz"><code>/healthz</code></a> alive: 200, or 503 with the loop that stopped</li>
<li><a href="/readyz"><code>/readyz</code></a> at work: 200, or 503 with what is missing</li>
</ul></body></html>
"""


class Server:
    """Serves one process's registry and health from a daemon thread; a context manager.

    Args:
        registry: the metrics to expose.
        health: what /healthz and /readyz ask.
        role: shown on the page.
        host: address to listen on.
        port: 0 takes a free one; `address` has the actual one.
        public: allow an address other than loopback. There is no log-in: whoever reaches the port
            reads the metrics.

    Raises:
        ValueError: an address other than loopback without `public`.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Health,
        role: str,
        host: str = "127.0.0.1",
        port: int = 0,
        public: bool = False,
    ) -> None:
        check_public(host, public)
        self._socket = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(registry, health, role),
                http=BoundedProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )

    def start(self) -> str:
        """Serve until `close`; returns the address, such as `http://127.0.0.1:43121`.

        Connections are taken from the moment of construction; they are answered from now on.
        """
        self._thread.start()
        return self.address

    def close(self) -> None:
        """Stop serving, and wait until the port is free."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol waits for ever for a first request; this one does not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self.timer = self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)
        if len(self.connections) > MOST_CONNECTIONS:
            others = [
                cast(BoundedProtocol, other) for other in self.connections if other is not self
            ]
            min(others, key=lambda other: (other.busy, other.since)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._asked:  # from here on keep-alive has its own time-out
            self.since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    @property
    def _asked(self) -> bool:
        """The head of a request was read."""
        return hasattr(self.cycle, "response_complete")

    @property
    def busy(self) -> bool:
        """An answer is being made or sent."""
        return self._asked and not self.cycle.response_complete

    def _close_if_silent(self) -> None:
        if not self._asked:
            self.transport.abort()


def application(registry: CollectorRegistry, health: Health, role: str) -> Starlette:
    """The ASGI application, for tests and for those who bring their own server."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    async def healthz(_: Request) -> Response:
        return _reply(health.live())

    async def readyz(_: Request) -> Response:
        return _reply(health.ready())

    async def page(_: Request) -> Response:
        return HTMLResponse(
            _page(role, health.ready()),
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    routes = {"/": page, "/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


def check_public(host: str, public: bool) -> None:
    """ValueError if metrics would leave the machine and nobody said `public`."""
    if not public and not is_loopback_host(host):
        raise ValueError(
            f"metrics address {host!r} is not loopback, and metrics have no log-in: whoever "
            f"reaches the port reads them. Use 127.0.0.1 behind a proxy or tunnel, or set "
            f"public to true if the network is trusted."
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot listen on {host} port {port} for metrics ({error.strerror}); choose another "
            f"port, or 0 for a free one (http.receiver, http.learner)",
        ) from None


def _reply(status: Status) -> JSONResponse:
    failing = [name for name, part in status.parts.items() if not part["ok"]]
    body = {"ok": status.ok, "failing": failing, "parts": status.parts}
    return JSONResponse(
        body, status_code=200 if status.ok else 503, headers={"cache-control": "no-store"}
    )


def _page(role: str, status: Status) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class={'ok' if part['ok'] else 'bad'}>"
        f"{'ok' if part['ok'] else 'failing'}</td><td>{escape(_detail(part))}</td></tr>"
        for name, part in status.parts.items()
    )
    state = "<b class=ok>Ready.</b>" if status.ok else "<b class=bad>Not ready.</b>"
    return PAGE.format(role=escape(role), version=escape(__version__), state=state, rows=rows)


def _detail(part: dict[str, object]) -> str:
    if "seconds_since_tick" in part:
        return f"last tick {part['seconds_since_tick']} s ago, {part['patience_seconds']} s allowed"
    return str(part["detail"])
