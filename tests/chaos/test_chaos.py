"""Short forms of `make chaos`. The figures of the long forms are in benchmarks/reports/chaos."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chaos import (
    bad_disk,
    connections,
    damage,
    elastic,
    foreign,
    fuzz,
    kills,
    power_cuts,
    powercut,
    ranks,
    receivers,
    silence,
    soak,
)
from chaos.__main__ import _is_of
from stream_ssl.app.commands import check

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "settings",
    [
        *(elastic.SETTINGS, ranks.SETTINGS, receivers.GROUP, soak.SETTINGS),
        *(bad_disk.SMALL, bad_disk.OF_LITTLE),
    ],
)
def test_the_configurations_of_all_gates_are_valid(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The gates take minutes, so most of them run rarely."""
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings | {"run": str(tmp_path / "run")}))
    assert check.main([str(config)]) == 0


def test_a_run_is_ready_soon_after_a_burst_of_kills(tmp_path: Path) -> None:
    found = kills.burst(tmp_path, 6, whole=False)
    assert (found["kills"], found["seconds"] < kills.HEALTHY_SECONDS) == (6, True)


def test_a_power_cut_loses_no_acknowledged_sample(tmp_path: Path) -> None:
    found = power_cuts.receiver(tmp_path, cuts := 12, samples=200)
    assert (found["cuts"], found["lost"], found["twice"]) == (cuts, 0, 0)
    assert found["samples"] > 100


def test_a_power_cut_loses_no_checkpoint(tmp_path: Path) -> None:
    assert power_cuts.learner(tmp_path, 12, last=9) == {"cuts": 12, "gone": 0, "unequal": 0}


def test_a_simulated_power_cut_drops_tears_and_reorders_unsynced_changes(tmp_path: Path) -> None:
    """Otherwise no simulated power cut could show a fault."""
    change = powercut.Change
    log = [
        change("c", "/disk/a", b"", 1, 1),
        change("w", "/disk/a", b"old " * 512, 0, 2),
        change("s", "/disk/a", b"", 1, 3),
        change("s", "/disk", b"", 0, 4),
        change("w", "/disk/a", b"new " * 512, 0, 5),
        change("c", "/disk/b.part", b"", 2, 6),
        change("r", "/disk/b.part", b"/disk/b", 0, 7),
    ]
    seen, draw = set(), random.Random(0)
    for number in range(60):
        powercut.Disk(Path("/disk"), log).left_by_a_cut(tmp_path / str(number), draw)
        names = tuple(sorted(path.name for path in (tmp_path / str(number)).iterdir()))
        content = (tmp_path / str(number) / "a").read_bytes()
        kinds = {content[at : at + 4] for at in range(0, len(content), 4)}
        assert kinds <= {b"old ", b"new "}
        seen.add((names, len(kinds), content[:3]))
    assert {names for names, _, _ in seen} == {("a",), ("a", "b.part"), ("a", "b")}
    assert {(kinds, first) for _, kinds, first in seen} >= {(1, b"old"), (1, b"new"), (2, b"new")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_the_receiver_acknowledges_nothing_on_a_bad_disk_and_loses_no_sample(
    tmp_path: Path, number: int
) -> None:
    found = bad_disk.run(tmp_path, number, seconds=0.2)
    assert (found["acked_meanwhile"], found["lost"], found["twice"]) == (0, 0, 0)


def test_damaged_journals_and_checkpoints_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    found = damage.journal(tmp_path / "j", 10)
    assert (found["wrong"], found["failed"], found["uncounted"]) == (0, 0, 0)
    (tmp_path / "c").mkdir()
    assert damage.checkpoints(tmp_path / "c", 10)["failed"] == 0


def test_a_connection_that_fails_repeatedly_loses_no_sample(tmp_path: Path) -> None:
    found = silence.relayed(tmp_path, 400, harms=3)
    assert found["harms"] > 0
    assert (found["lost"], found["twice"]) == (0, 0)


def test_a_stopped_receiver_or_producer_resumes_without_a_loss(tmp_path: Path) -> None:
    found = silence.stopped(tmp_path, 4.0)  # beyond a heartbeat's time
    assert (found["lost"], found["twice"], found["told_lost"]) == (0, 0, 0)


def test_a_check_of_ranks_runs_in_a_separate_program() -> None:
    assert ranks.checked("turns") == [""]


def test_the_receiver_needs_little_memory_under_a_fuzzer(tmp_path: Path) -> None:
    found = fuzz.run(tmp_path, seconds=3.0)
    assert found["messages"] > 10
    assert found["rss_mb"] < 300


def test_idle_connections_and_bad_requests_exhaust_neither_descriptors_nor_log(
    tmp_path: Path,
) -> None:
    found = connections.run(tmp_path, idle=150, bad=60)
    assert found["descriptors"] < 128
    assert found["answered"] == found["asked"]
    assert found["log_lines"] < 20
    assert found["tracebacks"] == 0


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_the_receiver_survives_bytes_of_other_protocols(tmp_path: Path, plain: bool) -> None:
    found = foreign.run(tmp_path / "run", seconds=2.0, plain=plain, roles=["receiver"])
    assert foreign.holds(found), found


def test_theil_sen_ignores_outliers() -> None:
    hours = np.linspace(0, 1, 60)
    level = 100 + 2 * hours
    level[::15] += 500  # a checkpoint's moment
    assert soak.theil_sen(hours, level) == pytest.approx(2, abs=0.2)


def test_every_fault_names_tests_that_exist() -> None:
    kinds = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text()) or {}
    ids = [one for named in kinds.values() for one in named]
    for one in ids:
        file, _, rest = one.partition("::")
        source = Path(__file__).parents[1] / file
        name = rest.split("::")[-1].partition("[")[0]
        assert source.is_file(), one
        assert not name or f"def {name}(" in source.read_text(), one


def test_the_faults_gate_finds_the_results_of_an_id() -> None:
    case = "tests.process.test_logs.test_a_line[of one]"
    assert _is_of(case, "process/test_logs.py::test_a_line")
    assert _is_of(case, "process/test_logs.py")
    assert not _is_of(case, "process/test_logs.py::test_a")
    assert not _is_of(case, "learning/test_logs.py")
