"""The HTTP server: its answers, its addresses, and its limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from table import table
from waiting import until

from stream_ssl.observe import server as http
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.server import Server
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.address import is_loopback_host


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    health = Health(clock)
    health.expect("train", 5.0)
    return health


@pytest.fixture
def server(health: Health) -> Iterator[Server]:
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    with Server(registry, health, "learner") as server:
        yield server


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    return httpx.get(
        server.address + path, headers=headers, timeout=10, trust_env=False, verify=False
    )


def test_the_server_exports_the_given_registry(server: Server) -> None:
    reply = get(server, "/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert reply.text == "# HELP answer The answer.\n# TYPE answer gauge\nanswer 42.0\n"


def test_openmetrics_is_negotiated(server: Server) -> None:
    reply = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert reply.text.endswith("# EOF\n")


@table("version", ["abc", "1.x", "1.0.0, text/html"])
def test_metrics_are_served_to_a_client_that_asks_for_an_invalid_version(
    server: Server, version: str
) -> None:
    reply = get(server, "/metrics", accept=f"application/openmetrics-text; version={version}")
    assert reply.status_code == 200
    assert "answer 42.0" in reply.text


def test_healthz_fails_when_a_loop_stops(server: Server, health: Health, clock: Clock) -> None:
    assert get(server, "/healthz").status_code == 200
    clock.now += 5.1
    reply = get(server, "/healthz")
    assert reply.status_code == 503
    assert reply.json()["failing"] == ["train"]
    assert reply.json()["parts"]["train"] == {
        "ok": False,
        "seconds_since_tick": 5.1,
        "patience_seconds": 5.0,
    }
    health.tick("train")
    assert get(server, "/healthz").status_code == 200


def test_readyz_names_the_check_that_fails(server: Server, health: Health, clock: Clock) -> None:
    health.set("journal", False, "no room: 0 bytes left")
    health.set("keys", True)
    reply = get(server, "/readyz")
    assert reply.status_code == 503
    assert reply.json()["failing"] == ["journal"]
    assert reply.json()["parts"]["journal"]["detail"] == "no room: 0 bytes left"
    assert get(server, "/healthz").status_code == 200  # alive all the same
    health.set("journal", True)
    assert get(server, "/readyz").status_code == 200
    clock.now += 6
    assert get(server, "/readyz").json()["failing"] == ["train"]  # what is not alive is not ready


def test_answers_can_name_a_folder_that_is_not_utf_8(
    server: Server, health: Health, tmp_path: Path
) -> None:
    folder = tmp_path / "caf\udce9"  # the name has the byte E9 alone
    health.folders["quarantine"] = str(folder)
    reply = get(server, "/api/learner/quarantine")
    assert reply.status_code == 200
    assert reply.json()["folder"] == str(folder)
    health.tick("train")
    health.set("journal", False, f"cannot write to {folder}")
    assert get(server, "/readyz").json()["parts"]["journal"]["detail"].endswith(str(folder))


def test_the_page_links_the_other_pages_and_escapes_names(health: Health, tmp_path: Path) -> None:
    sources = Sources(run=tmp_path / "<script>alert(1)")
    with Server(CollectorRegistry(), health, "learner", sources=sources) as server:
        reply = get(server, "/")
        assert reply.status_code == 200
        for path in ("metrics", "healthz", "readyz"):
            assert f'href="{path}"' in reply.text  # relative: there may be a prefix
        assert "<script>alert" not in reply.text
        assert "&lt;script&gt;alert" in reply.text
        assert get(server, "/nothing").status_code == 404


def test_a_page_is_shown_on_a_host_whose_name_is_not_utf_8(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "caf\udce9")
    reply = get(server, "/")
    assert reply.status_code == 200
    assert "caf?" in reply.text


def test_a_browser_gets_changed_files_that_have_the_same_date(
    health: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PAGE", shutil.copytree(http.PAGE, tmp_path / "page"))
    script = http.PAGE / "static" / "page.js"
    os.utime(script, (1, 1))  # some systems install all files with one date
    with Server(CollectorRegistry(), health, "learner") as server:
        first = get(server, "/static/page.js")
        assert first.content == script.read_bytes()
        assert first.headers["content-type"] == "text/javascript; charset=utf-8"
        known = {
            "if-none-match": f"W/{first.headers['etag']}",
            "if-modified-since": "Sat, 01 Jan 2050 00:00:00 GMT",
        }
        assert get(server, "/static/page.js", **known).status_code == 304
        script.write_text(script.read_text().replace("a", "b", 1))
        os.utime(script, (1, 1))
        assert get(server, "/static/page.js", **known).content == script.read_bytes()


def test_the_server_ignores_the_environment_of_web_servers(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "auto")
    with Server(CollectorRegistry(), health, "learner") as server:
        assert get(server, "/metrics").status_code == 200


@table(
    ("path", "location"),
    [
        ("/metrics/", "../metrics"),
        ("/metrics/?name=a%20b", "../metrics?name=a%20b"),
        ("/runbooks/lag/", "../lag"),
        ("/%E2%82%AC/", "../%E2%82%AC"),
    ],
)
def test_a_last_slash_redirects_below_the_prefix_of_a_proxy(
    server: Server, path: str, location: str
) -> None:
    reply = get(server, path, host="localhost")
    assert (reply.status_code, reply.headers["location"]) == (307, location)


@table("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_public_addresses_are_refused(host: str, health: Health) -> None:
    assert not is_loopback_host(host)
    with pytest.raises(ValueError, match="is not loopback"):
        Server(CollectorRegistry(), health, "learner", host)


@table("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_addresses_are_recognised(host: str) -> None:
    assert is_loopback_host(host)


def test_a_public_address_is_allowed_with_public_true(health: Health) -> None:
    with Server(CollectorRegistry(), health, "learner", "0.0.0.0", public=True) as server:
        port = server.address.rsplit(":", 1)[1]
        assert (
            httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, verify=False).status_code
            == 200
        )


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_server_at_all_ipv6_addresses_also_answers_at_ipv4(health: Health) -> None:
    with Server(CollectorRegistry(), health, "learner", "::", public=True) as server:
        port = server.address.rsplit(":", 1)[1]
        for address in (server.address, f"http://127.0.0.1:{port}", f"http://[::1]:{port}"):
            assert httpx.get(f"{address}/healthz", trust_env=False).status_code == 200


@table(
    ("host", "known", "reached"),
    [
        ("::", {socket.AF_INET6: "::1"}, "[::1]"),
        ("::", {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}, "127.0.0.1"),
        ("::", {}, "127.0.0.1"),
        ("0.0.0.0", {socket.AF_INET6: "::1"}, "127.0.0.1"),
        ("::1", {}, "[::1]"),
    ],
)
def test_reachable_returns_an_address_of_this_machine(
    host: str, known: dict[int, str], reached: str
) -> None:
    def addresses(_: str, __: None, family: int) -> list[Any]:
        if family not in known:
            raise socket.gaierror
        return [(family, 0, 0, "", (known[family], 0))]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", addresses)
        assert http.reachable(host) == reached


def test_the_error_names_a_port_in_use(server: Server, health: Health) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(OSError, match=f"port {port} for metrics .*choose another"):
        Server(CollectorRegistry(), health, "learner", port=port)


@table("host", ["192.0.2.1", "no-such-host.invalid"])
def test_the_error_names_an_address_that_this_machine_lacks(host: str, health: Health) -> None:
    """The address 192.0.2.1 is for documentation alone."""
    told = (
        rf"cannot listen on {host} port 0 for metrics \([\w ]+\); give an address of this machine"
    )
    with pytest.raises(OSError, match=told):
        Server(CollectorRegistry(), health, "learner", host, public=True)


def test_the_error_names_a_port_above_65535(health: Health) -> None:
    with pytest.raises(ValueError, match="port 65536 for metrics is above 65535: choose a lower"):
        Server(CollectorRegistry(), health, "learner", port=65_536)


def test_close_frees_the_port_and_may_be_repeated(health: Health) -> None:
    server = Server(CollectorRegistry(), health, "learner")
    port = int(server.start().rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)):  # an idle client does not hold it up
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 5
    server.close()
    Server(CollectorRegistry(), health, "learner", port=port).close()


def test_idle_connections_do_not_stop_scrapes(server: Server) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        idle = []
        for number in range(3 * http.MOST_CONNECTIONS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            if number % 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\n")  # a head that never ends
            idle.append(client)
        assert get(server, "/metrics").status_code == 200
        assert idle[0].recv(1) == b""  # the oldest were closed; the newest are still held
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch, health: Health) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    with Server(CollectorRegistry(), health, "learner") as server:
        port = int(server.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            assert client.recv(1) == b""
        with httpx.Client(base_url=server.address, trust_env=False, verify=False) as keep_alive:
            assert keep_alive.get("/healthz").status_code == 200
            deadline = time.monotonic() + 0.8
            while time.monotonic() < deadline:  # one that has asked is left to keep-alive
                assert keep_alive.get("/healthz").status_code == 200


def test_many_waiting_connections_never_exceed_the_limit_together(
    monkeypatch: pytest.MonkeyPatch, health: Health
) -> None:
    """The kernel's queue is full when the server begins to accept."""
    seen: list[int] = []
    made = http.BoundedProtocol.connection_made

    def count(protocol: http.BoundedProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        seen.append(descriptors())

    monkeypatch.setattr(http.BoundedProtocol, "connection_made", count)
    server = Server(CollectorRegistry(), health, "learner")
    port = int(server.address.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        for _ in range(http.BACKLOG):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        before = descriptors()
        stack.enter_context(server)
        until(lambda: len(seen) == http.BACKLOG)
        assert max(seen) - before < http.MOST_CONNECTIONS + 16
        assert get(server, "/healthz").status_code == 200


@pytest.mark.parametrize(
    "second",
    [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\ntoken",
    ],
    ids=["head", "body"],
)
def test_an_endless_request_is_closed_even_after_a_whole_request(
    second: bytes, monkeypatch: pytest.MonkeyPatch, health: Health
) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.3)
    with Server(CollectorRegistry(), health, "learner") as server:
        port = int(server.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 4) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            client.sendall(second)
            while client.recv(4096):  # the time-out of the socket is 4 s
                pass


@pytest.mark.parametrize("header", ["close", "keep-alive"])
def test_the_server_ends_an_answer_that_nobody_reads(
    header: str, monkeypatch: pytest.MonkeyPatch, health: Health
) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    registry = CollectorRegistry()
    Gauge("answer", "x" * (16 << 20), registry=registry).set(42)
    with Server(registry, health, "learner") as server:
        port = int(server.address.rsplit(":", 1)[1])
        connections = server._server.server_state.connections
        with socket.create_connection(("127.0.0.1", port), 4) as client:
            request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: {header}\r\n\r\n"
            client.sendall(request.encode())
            assert client.recv(12) == b"HTTP/1.1 200"
            until(lambda: not connections)


def test_close_also_closes_a_connection_that_outlasts_the_server(health: Health) -> None:
    """uvicorn leaves it open. A socket that is never closed is an error in these tests."""
    registry = CollectorRegistry()
    Gauge("answer", "x" * (16 << 20), registry=registry).set(42)
    server = Server(registry, health, "learner")
    server._server.config.timeout_graceful_shutdown = 0.1  # type: ignore[assignment]
    port = int(server.start().rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 4) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        (connection,) = server._server.server_state.connections
        transport = cast(http.BoundedProtocol, connection).transport
        server.close()
        assert transport.get_extra_info("socket").fileno() == -1


def test_pipelined_requests_do_not_keep_healthz_waiting(health: Health) -> None:
    """60 connections that send 50 requests each get one answer each."""
    asked: list[float] = []
    registry = CollectorRegistry()
    gauge = Gauge("answer", "A figure that takes a while.", registry=registry)
    gauge.set_function(lambda: (time.sleep(0.005), asked.append(1.0), 1.0)[2])
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Server(registry, health, "learner") as server, contextlib.ExitStack() as stack:
        port = int(server.address.rsplit(":", 1)[1])
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            for _ in range(60)
        ]
        for client in clients:
            client.sendall(50 * request)
        start = time.monotonic()
        assert get(server, "/healthz").status_code == 200
        assert time.monotonic() - start < 8  # 3,000 answers would take 15
        answer = b""
        while part := clients[0].recv(4096):
            answer += part
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"connection: close") == 1
        until(lambda: not server._server.server_state.connections)
        assert len(asked) == 60


def test_a_request_that_comes_before_the_answer_is_not_answered(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a wrong token is made when the next request has come."""
    received: list[bytes] = []
    receive = http.BoundedProtocol.data_received

    def note(protocol: http.BoundedProtocol, data: bytes) -> None:
        receive(protocol, data)
        received.append(data)

    async def wait(_: float) -> None:
        while len(received) < 2:
            await asyncio.sleep(0.005)

    monkeypatch.setattr(http.BoundedProtocol, "data_received", note)
    monkeypatch.setattr(http, "asyncio", SimpleNamespace(sleep=wait))
    request = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\ntoken=x"
    sources = Sources(token=Token("0123456789abcdef"))
    with Server(CollectorRegistry(), health, "learner", sources=sources) as server:
        port = int(server.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(request)
            until(lambda: received)
            client.sendall(request)
            answer = b""
            while part := client.recv(4096):
                answer += part
    assert answer.count(b"HTTP/1.1 403") == answer.count(b"connection: close") == 1


def test_an_unknown_loop_cannot_tick_and_a_forgotten_loop_cannot_fail() -> None:
    health = Health()
    with pytest.raises(KeyError):
        health.tick("train")
    health.expect("train", 1e-9)
    health.forget("train")
    assert health.live().ok


def test_a_client_that_offers_another_protocol_is_answered_and_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """curl --http2 offers one, and uvicorn would advise to install libraries without need."""
    for offered in ("h2c", "websocket"):
        reply = get(server, "/healthz", connection="Upgrade", upgrade=offered)
        assert reply.status_code == 200
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]


def test_the_sender_of_an_invalid_request_is_logged_at_a_bounded_rate(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_requests_log", RateLimitedLogger(http.log, 60.0, 3))
    port = int(server.address.rpartition(":")[2])
    for _ in range(9):
        with socket.create_connection(("127.0.0.1", port), 4) as client:
            client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert client.recv(99).startswith(b"HTTP/1.1 400")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["127.0.0.1 sent an invalid HTTP request to the page's port"] * 3
