"""For all tests: the numeric libraries share the cores with the processes that tests start."""

import os

import pytest

from stream_ssl.app.threads import share_cores

share_cores()


@pytest.hookimpl(optionalhook=True)  # `make mutations` goes without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Of `pytest -n auto`: two more than cores, for tests wait a third of their time."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (ours or 1) + 2
