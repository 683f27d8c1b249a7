"""The clients that may read over HTTP, and the headers of every answer."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from page_world import serving
from prometheus_client import CollectorRegistry
from table import table

from stream_ssl.observe import server as http
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import SESSION_SECONDS, Token
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.server import Server

SECRET = "0123456789abcdef-secret"
PAGES = ("/", "/metrics", "/api/learner/state")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http, "LOG_IN_SECONDS", 0.0)
    with serving(None, sources=Sources(token=Token(SECRET))) as (server, _):
        yield server


def client(server: Server, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.address, headers=headers, trust_env=False)


def test_clients_without_the_token_read_nothing(guarded: Server) -> None:
    with client(guarded) as anyone:
        for path in PAGES:
            reply = anyone.get(path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for wrong in ("Bearer x", "Bearer", f"Basic {SECRET}", f"Bearer {SECRET}x"):
            assert anyone.get("/metrics", headers={"authorization": wrong}).status_code == 401
        for path, place in (("/", "login"), ("/metrics", "login"), ("/runbooks/lag", "../login")):
            reply = anyone.get(path, headers={"accept": "text/html"})
            assert (reply.status_code, reply.headers["location"]) == (303, place)
        for path in ("/readyz", "/healthz"):  # probes carry no token, and learn yes or no
            assert anyone.get(path).json() == {"ok": True}


def test_the_token_gives_access_to_all_pages(guarded: Server) -> None:
    with client(guarded, authorization=f"Bearer {SECRET}") as prometheus:
        for path in PAGES:
            assert prometheus.get(path).status_code == 200
        assert "parts" in prometheus.get("/readyz").json()


def test_a_browser_logs_in_and_out(guarded: Server) -> None:
    with client(guarded, accept="text/html") as browser:
        assert browser.post("/login", data={"token": "wrong"}).status_code == 403
        assert browser.post("/login", data={"token": "x" * 5000}).status_code == 400
        assert not browser.cookies
        reply = browser.post("/login", data={"token": SECRET})
        assert (reply.status_code, reply.headers["location"]) == (303, "./")
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        assert "path=" not in cookie.lower()  # the default path keeps a proxy's prefix
        assert SECRET not in cookie
        assert browser.get("/api/learner/state").status_code == 200
        browser.post("/logout")
        assert browser.get("/api/learner/state").status_code == 401


def test_one_browser_can_be_logged_in_at_two_runs_of_a_host(guarded: Server) -> None:
    """A browser keeps one set of cookies for all ports of a host."""
    secret = "another-secret-0123"
    with serving(None, sources=Sources(token=Token(secret))) as (other, _), httpx.Client() as one:
        runs = {guarded.address: SECRET, other.address: secret}
        for address, token in runs.items():
            one.post(f"{address}/login", data={"token": token})
        assert [one.get(f"{address}/metrics").status_code for address in runs] == [200, 200]
        one.post(f"{other.address}/logout")
        assert [one.get(f"{address}/metrics").status_code for address in runs] == [200, 401]


def test_a_log_in_that_breaks_off_is_not_logged_as_an_error(
    guarded: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone can open the form, so nobody may fill the log with it."""
    address = ("127.0.0.1", int(guarded.address.rpartition(":")[2]))
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(address, 10) as browser:
        browser.sendall(head + b"token=")
        browser.shutdown(socket.SHUT_WR)
        while browser.recv(4096):
            pass
    with client(guarded) as anyone:
        assert anyone.get("/login").status_code == 200
    assert not caplog.records


def test_sessions_end_and_cannot_be_forged() -> None:
    now = [1000.0]
    token = Token(SECRET, clock=lambda: now[0])
    headers = httpx.Headers()
    cookie = token.session()

    def admitted(value: str) -> bool:
        return token.admits(headers, {token.cookie: value})  # type: ignore[arg-type]

    assert admitted(cookie)
    until, _, mark = cookie.partition(".")
    for wrong in (f"{int(until) + 1}.{mark}", until, f"{until}.", f"{until}.{mark}x", "²." + mark):
        assert not admitted(wrong)
    other = Token("another-secret-0123", clock=lambda: now[0])
    assert not other.admits(headers, {other.cookie: cookie})  # type: ignore[arg-type]
    now[0] += SESSION_SECONDS + 1
    assert not admitted(cookie)


def test_a_token_allows_addresses_beyond_loopback() -> None:
    with pytest.raises(ValueError, match=r"is not loopback, and there is no token"):
        Server(CollectorRegistry(), Health(), "learner", "0.0.0.0")
    sources = Sources(token=Token(SECRET))
    Server(CollectorRegistry(), Health(), "learner", "0.0.0.0", sources=sources).close()


def test_a_foreign_host_name_is_refused_without_a_token(guarded: Server) -> None:
    with serving(None) as (server, _), client(server) as browser:
        port = server.address.rsplit(":", 1)[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::"):
            reply = browser.get("/api/learner/state", headers={"host": host})
            assert reply.status_code in (400, 403), host
        for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80"):
            assert browser.get("/api/learner/state", headers={"host": host}).status_code == 200
    with client(guarded, authorization=f"Bearer {SECRET}", host="robots.example") as far:
        assert far.get("/api/learner/state").status_code == 200


def test_every_answer_has_strict_security_headers(guarded: Server) -> None:
    with client(guarded) as anyone:
        for path in ("/", "/login", "/nothing", "/static/page.js", "/healthz"):
            headers = anyone.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"


@table(
    ("content", "mode", "why"),
    [
        (None, 0o600, r"No such file.*make one with"),
        ("short", 0o600, "5 characters: must have at least 16"),
        ("with a blank in it, long", 0o600, "without spaces"),
        ("root:x:0:0:root:/root\nnobody:x:1", 0o644, "without spaces"),  # chmod would harm it
        ("ünicode-0123456789", 0o600, "not ASCII"),
        (SECRET, 0o644, r"other users may read .* \(mode 0644\); run: chmod 600.*keeps no modes"),
    ],
)
def test_an_invalid_token_file_is_refused_without_its_content_in_the_error(
    tmp_path: Path, content: str | None, mode: int, why: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(stat.S_IFREG | mode)
    with pytest.raises(ValueError, match=why) as error:
        Token.load(path)
    assert content is None or content not in str(error.value)


def test_a_token_file_may_be_readable_by_its_group(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o640)
    assert Token.load(path).secret == SECRET


def test_a_token_that_is_changed_in_its_file_holds_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, renewed = tmp_path / "token", "another-secret-0123"

    def write(secret: str) -> None:
        (tmp_path / "new").write_text(secret)
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").replace(path)

    write(SECRET)
    with serving(None, sources=Sources(token=Token.load(path))) as (server, _):

        def status(secret: str) -> int:
            with client(server, authorization=f"Bearer {secret}") as one:
                return one.get("/api/learner/state").status_code

        assert (status(SECRET), status(renewed)) == (200, 401)
        write(renewed)
        assert (status(SECRET), status(renewed)) == (401, 200)
        write("short")
        assert (status("short"), status(renewed)) == (401, 200)
    assert "must have at least 16" in caplog.text
    assert "the previous token stays in force" in caplog.text


@pytest.mark.parametrize(("proxy", "secure"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_only_a_proxy_at_a_trusted_address_makes_the_cookie_secure(
    proxy: str, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", proxy)
    sources = Sources(token=Token(SECRET))
    with Server(CollectorRegistry(), Health(), "learner", sources=sources) as server:
        with client(server) as person:
            https = {"x-forwarded-proto": "https"}
            answer = person.post("/login", data={"token": SECRET}, headers=https)
        assert ("Secure" in answer.headers["set-cookie"]) == secure
