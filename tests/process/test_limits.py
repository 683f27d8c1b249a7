"""The limits of containers and units, which the operating system's own numbers leave out."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from stream_ssl.process import limits
from stream_ssl.process.threads import cores, share_cores

WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a unit in a slice, as systemd makes them. Nothing limits it yet."""
    (tmp_path / "own").write_text("4:memory:/user\n0::/system.slice/learner.service\n")
    unit = tmp_path / "mounted" / "system.slice" / "learner.service"
    unit.mkdir(parents=True)
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return unit


def test_a_unit_without_limits_has_the_cores_and_the_memory_of_the_machine(groups: Path) -> None:
    assert (limits.cpu_quota(), limits.memory_limit()) == (math.inf, None)
    (groups / "cpu.max").write_text("max 100000\n")
    (groups / "memory.max").write_text("max\n")
    assert (limits.cpu_quota(), limits.memory_limit()) == (math.inf, None)
    assert limits.main_memory() == (WHOLE, "this machine has")
    assert cores() == 64


def test_a_system_without_control_groups_has_no_limit(groups: Path) -> None:
    limits.GROUPS.unlink()
    assert (limits.cpu_quota(), limits.memory_limit()) == (math.inf, None)
    limits.GROUPS.write_text("4:memory:/user\n")  # version 1
    (groups.parents[1] / "memory.max").write_text("4096\n")
    assert limits.memory_limit() is None


def test_the_smallest_limit_of_nested_groups_applies(groups: Path) -> None:
    (groups / "cpu.max").write_text("250000 100000\n")
    (groups.parent / "cpu.max").write_text("800000 100000\n")
    (groups / "memory.max").write_text("8589934592\n")
    (groups.parents[1] / "memory.max").write_text("6442450944\n")  # that of a container
    assert (limits.cpu_quota(), limits.memory_limit()) == (2.5, 6 << 30)
    assert cores() == 3
    (groups / "cpu.max").write_text("10000 100000\n")
    assert cores() == 1


def test_share_cores_limits_the_threads_of_libraries_to_the_quota(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share_cores()
    assert "OMP_NUM_THREADS" not in os.environ
    (groups / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    share_cores()
    assert os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    share_cores()
    assert os.environ["OMP_NUM_THREADS"] == "2"
