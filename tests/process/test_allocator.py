"""Tests of the C allocator's settings, in fresh processes because they cannot be undone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

PROBE = """
import resource, sys
from stream_ssl.process.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
size = 8 << 20
def step():
    blocks = [b"x" * size for _ in range(6)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def probe(how: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, how],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def test_freed_memory_of_a_step_is_used_again() -> None:
    kept, faults = probe("keep")
    assert kept == str(platform.libc_ver()[0] == "glibc")  # other libraries have no such settings
    if kept == "True":
        assert int(faults) < 1000 < int(probe("default")[1])


def test_keep_freed_memory_does_nothing_if_the_user_has_set_the_allocator() -> None:
    assert probe("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
