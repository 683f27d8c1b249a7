"""The bytecode of the test modules, stored once before the workers start.

pytest rewrites the assertions of each test module and stores the result beside it. For all modules
this takes 25 seconds of a core. On a fresh checkout, workers that start together would all do it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # no public function stores a module without running it

TESTS = Path(__file__).parent


def begin(config: pytest.Config, processes: int) -> list[int]:
    """Start processes that store the bytecode, and return their ids, for `os.waitpid`."""
    if sys.dont_write_bytecode or config.getoption("assertmode") != "rewrite":
        return []
    paths = [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]
    paths.sort(key=lambda path: path.stat().st_size)
    found = []
    for number in range(processes):
        if (pid := os.fork()) == 0:
            try:
                store(config, paths[number::processes])
            finally:
                os._exit(0)
        found.append(pid)
    return found


def store(config: pytest.Config, paths: list[Path]) -> None:
    """Store the bytecode of modules that have none, or changed since."""
    state = config.stash[rewrite.assertstate_key]
    for path in paths:
        folder = rewrite.get_cache_dir(path)
        stored = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, stored) is None:
            facts, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, facts, stored)
