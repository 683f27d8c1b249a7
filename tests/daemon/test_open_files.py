"""Limits of the system that a receiver raises, or names if it may not."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from harness import processes


def test_a_receiver_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with processes(tmp_path / "run", whole=True) as run:
            receiver = run.role("receiver")
            raised = resource.prlimit(receiver.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == (min(hard, 65_536), hard)


def test_a_receiver_names_a_file_size_limit_below_a_segment(tmp_path: Path) -> None:
    """LMDB would report each write beyond the limit as an error of the disk."""
    command = [sys.executable, "-m", "stream_ssl", "receiver", "--run", str(tmp_path / "run")]
    ports = ["--receiver.bind", "tcp://127.0.0.1:0", "--http.receiver", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, *ports],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "journal: this process may write files of at most 1,048,576 bytes" in done.stderr
    assert "ulimit -f" in done.stderr
