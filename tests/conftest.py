"""Settings of all tests: the numeric libraries share the cores with the processes of tests."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import parsers
import pytest
import rewritten
import warm

from stream_ssl.process.threads import share_cores

NOBODY = 65534

share_cores()

# A process may wait for a busy core, so the time of an example says nothing about the code.
hypothesis.settings.register_profile("without a deadline", deadline=None)
hypothesis.settings.load_profile("without a deadline")


@pytest.hookimpl(optionalhook=True)  # `make mutations` goes without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `pytest -n auto`: five more than cores.

    Tests spend a third of their time waiting.
    """
    return _cores() + 5


def _cores() -> int:
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ours or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    """Start xdist's workers, and the processes that they start, by a fork of a warm interpreter."""
    import execnet

    storing = rewritten.begin(config, _cores())
    stack = ExitStack()
    config.add_cleanup(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stream-ssl-tests-"))
    program = stack.enter_context(warm.interpreter(Path(folder)))
    os.environ[warm.PROGRAM] = str(program)
    specs[:] = [execnet.XSpec(f"{spec}//python={program}") for spec in specs]
    for pid in storing:
        os.waitpid(pid, 0)


WAITING = ("chaos", "daemon", "demo", "feed", "ranks", "receiver")
"""Folders of tests that wait for processes most of their time."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each of xdist's workers as many waiting tests, and let it begin with them.

    Otherwise the last tests would be waiting ones, and leave the cores idle.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    files = sorted(by_file, key=lambda file: file.parent.name not in WAITING)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    dealt = [file for worker in range(workers) for file in files[worker::workers]]
    items[:] = [item for file in dealt for item in by_file[file]]


def pytest_collection_finish() -> None:
    """Let tests copy the parsers of configurations."""
    if options := sys.modules.get("stream_ssl.config.options"):
        parsers.share(options, *parsers.OF_ROLES)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Yield a folder of a non-root account, because root may read all files. Run as this
    account.
    """
    with tempfile.TemporaryDirectory() as name:
        if root := os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
