"""A receiver allows itself more connections than a shell's usual limit of open files."""

from __future__ import annotations

import resource
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
