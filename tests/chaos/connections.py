"""A server with many idle connections, few descriptors and invalid requests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
from prometheus_client import CollectorRegistry
from stream_ssl.process import logs
from stream_ssl.observe.health import Health
from stream_ssl.observe.server import Server
logs.configure()
with Server(CollectorRegistry(), Health(), "receiver") as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""
INVALID = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"


@contextlib.contextmanager
def serving(log: Path, descriptors: int) -> Iterator[tuple[str, int]]:
    """Yield the address and the process id of a server with a limit of descriptors."""
    command = [sys.executable, "-c", PROGRAM, str(descriptors)]
    with log.open("wb") as errors:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().decode().strip(), server.pid
    finally:
        server.communicate()


def run(
    scratch: Path, idle: int, bad: int, ask_every: int = 50, descriptors: int = 1024
) -> dict[str, Any]:
    """Open `idle` connections that say nothing or never end a request, then send bad requests.

    Returns:
        the most descriptors that the server had, how often the page was asked for meanwhile and
        answered, the slowest answer, the lines logged, and the tracebacks among them.
    """
    log = scratch / "server.log"
    most, asked, answered, slowest = 0, 0, 0, 0.0
    with serving(log, descriptors) as (address, pid), contextlib.ExitStack() as stack:
        port = int(address.rsplit(":", 1)[1])
        for number in range(idle):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            if number % 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\n")
            most = max(most, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))
            if number % ask_every == 0:
                began, asked = time.monotonic(), asked + 1
                answered += httpx.get(address, trust_env=False, timeout=10).status_code == 200
                slowest = max(slowest, time.monotonic() - began)
        for number in range(bad):
            with socket.create_connection(("127.0.0.1", port), 10) as client:
                client.sendall(UPGRADE if number % 2 else INVALID)
                client.recv(1)
    lines = log.read_text(errors="replace").splitlines()
    return {
        "idle": idle,
        "descriptors": most,
        "asked": asked,
        "answered": answered,
        "slowest_seconds": round(slowest, 3),
        "bad_requests": bad,
        "log_lines": len(lines),
        "tracebacks": sum(line.startswith("Traceback") for line in lines),
    }
