"""Errors of a process reach a Sentry server, and nothing else does."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stream_ssl import __version__
from stream_ssl.process.logs import report_errors

SCRIPT = """
import logging
from stream_ssl.process import logs
logs.configure()
logs.report_errors()
log = logging.getLogger("stream_ssl.learner")
log.info("a step")
def decode(pixels):
    try:
        raise ValueError("broken picture")
    except ValueError:
        log.exception("cannot decode %s", "a.jpg")
decode("secret" * 3)
raise RuntimeError("uncaught")
"""


class Sentry(HTTPServer):
    """Keeps the events that clients send."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Envelopes)
        self.events: list[dict] = []

    @property
    def address(self) -> str:
        return f"http://key@127.0.0.1:{self.server_port}/7"


class Envelopes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = gzip.decompress(body).splitlines()
        kinds = [json.loads(line) for line in lines if line.startswith(b'{"type"')]
        if any(kind["type"] == "event" for kind in kinds):
            self.server.events.append(json.loads(lines[2]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    with Sentry() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_errors_are_sent_without_the_values_of_variables(sentry: Sentry) -> None:
    environment = {**os.environ, "SENTRY_DSN": sentry.address, "SENTRY_ENVIRONMENT": "lab"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--source.url", "rtsp://user:hidden@camera/"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "RuntimeError: uncaught" in done.stderr
    logged, uncaught = sentry.events
    assert logged["logentry"]["message"] == "cannot decode %s"
    assert logged["exception"]["values"][0]["value"] == "broken picture"
    assert uncaught["exception"]["values"][0]["value"] == "uncaught"
    assert (logged["release"], logged["environment"]) == (f"stream-ssl@{__version__}", "lab")
    assert "secretsecret" not in json.dumps([event["exception"] for event in sentry.events]), (
        "a variable's value"
    )
    assert "hidden" not in json.dumps(sentry.events), "a password on the command line"


def test_report_errors_warns_if_the_sentry_client_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with caplog.at_level(logging.WARNING):
        report_errors({"SENTRY_DSN": "https://key@sentry.example/1"})
    assert "pip install 'stream-ssl[sentry]'" in caplog.text


def test_report_errors_loads_no_client_without_an_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    report_errors({})
    report_errors({"SENTRY_DSN": ""})
    assert not caplog.records, "an attempt to load the missing client is logged"


def test_a_command_refuses_a_wrong_address_of_sentry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stream_ssl", "receiver", "--help"],
        env={**os.environ, "SENTRY_DSN": "sentry.example"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "SENTRY_DSN is not the address of a Sentry project" in done.stderr
