"""What containers rest on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
FIRST = """
import os, signal, sys
from stream_ssl.app.first_process import leave_first_process
leave_first_process()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
if sys.argv[1] == "wait":
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


def namespaces() -> bool:
    """Whether this user may make a PID namespace."""
    done = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not namespaces(), reason="this user may make no PID namespace")
def test_a_learner_that_is_process_1_takes_another_id() -> None:
    words = [*NAMESPACE, sys.executable, "-c", FIRST]
    with subprocess.Popen([*words, "wait"], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert int(waiting.stdout.readline()) > 1
        children = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert waiting.wait(30) == 7
    killed = subprocess.run([*words, "die"], capture_output=True, timeout=30)
    assert killed.returncode == 128 + signal.SIGKILL
