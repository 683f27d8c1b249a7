"""Tests of which checkpoints are kept, against a naive rule, with a clock that is set by hand."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_world import build, steps

from stream_ssl.batch import Offset
from stream_ssl.learning import checkpoint_folder, checkpoint_writer
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.retention import StoredCheckpoint, history, newest_kept, within

HOUR, DAY = 3600, 86_400
SIZE = 10


def pruned(entries: list[StoredCheckpoint], keep: int, budget: float) -> list[StoredCheckpoint]:
    """Return the checkpoints that a checkpointer keeps on the disk."""
    kept = newest_kept(entries, keep)
    kept |= {entry.path for entry in within(budget, history(entries, kept))}
    return [entry for entry in entries if entry.path in kept]


def written(
    every: float, seconds: float, keep: int = 3, budget: float = 1e9
) -> list[StoredCheckpoint]:
    """Return the kept checkpoints of a run that saved every `every` seconds for `seconds`."""
    held: list[StoredCheckpoint] = []
    for number in range(int(seconds / every) + 1):
        entry = StoredCheckpoint(Path(f"step-{number:09d}"), 1e9 + number * every, number, SIZE)
        held = pruned([*held, entry], keep, budget)
    return held


def test_a_long_run_keeps_hourly_checkpoints_for_a_day_and_daily_ones_for_a_week() -> None:
    held = written(every=600, seconds=10 * DAY)
    now = held[-1].created
    for ago in range(1, 24):
        hour = now // HOUR - ago
        assert max(entry.created for entry in held if entry.created // HOUR == hour) == (
            (hour + 1) * HOUR - (600 - (1e9 % 600))
        ), "the last of each hour"
    assert {int(entry.created // DAY) for entry in held} == set(
        range(int(now // DAY) - 6, int(now // DAY) + 1)
    )
    assert len(held) <= 3 + 24 + 7


def test_the_newest_checkpoints_stay_under_any_budget() -> None:
    for budget, count in ((0, 3), (SIZE - 1, 3), (2 * SIZE, 5), (5.5 * SIZE, 8)):
        held = written(every=HOUR, seconds=DAY, budget=budget)
        assert len(held) == count
        newest = held[-3:]
        assert [entry.updated for entry in newest] == [22, 23, 24]


class Step(SimpleNamespace):
    """One checkpoint of the model test: seconds and updates since the previous one, and its
    size.
    """


STEPS = st.lists(
    st.builds(
        Step,
        seconds=st.sampled_from([0, 60, 1700, HOUR, 5 * HOUR, 30 * HOUR, -40 * DAY, 40 * DAY]),
        updates=st.sampled_from([0, 1, 5]),
        bytes=st.sampled_from([1, SIZE, 100]),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(made=STEPS, keep=st.integers(1, 4), budget=st.sampled_from([0, 25, 300, 10**9]))
def test_pruning_keeps_the_checkpoints_of_a_naive_rule(
    made: list[Step], keep: int, budget: int
) -> None:
    held: list[StoredCheckpoint] = []
    now, updated = 2e9, 0
    for number, one in enumerate(made):
        now, updated = now + one.seconds, updated + one.updates
        held.append(StoredCheckpoint(Path(str(number)), now, updated, one.bytes))
        before, held = held, pruned(held, keep, budget)
        assert held[-keep:] == before[-keep:], "the newest"
        good = [entry for entry in before if entry.updated < updated]
        assert good[-1:] == [entry for entry in held if entry.updated < updated][-1:]
        rest = [entry for entry in held if entry not in before[-keep:] and entry not in good[-1:]]
        assert sum(entry.bytes for entry in rest) <= budget
        assert len(rest) <= 24 + 7
        for entry in rest:
            later = before[before.index(entry) + 1 :]
            last_of_hour = all(int(e.created // HOUR) != int(entry.created // HOUR) for e in later)
            last_of_day = all(int(e.created // DAY) != int(entry.created // DAY) for e in later)
            assert last_of_hour or last_of_day


# On the disk.


@pytest.fixture
def hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that saves a checkpoint one hour after the previous one."""
    clock = SimpleNamespace(now=1e9)
    fake = SimpleNamespace(time=lambda: clock.now, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(checkpoint_writer, "time", fake)
    learner = build()

    def save(checkpointer: Checkpointer, count: int):
        for _ in range(count):
            clock.now += HOUR
            steps(learner, 1)
            record = checkpointer.save(learner, {"a": 1})
        return record

    return save


@pytest.fixture
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "HISTORY_SHARE", 0.0)


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_the_history_of_checkpoints_needs_no_journal(tmp_path: Path, hours) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    record = hours(checkpointer, 6)
    assert names(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert record.needed == checkpointer.needed() == Offset(6, 0), "of the newest two"


def test_the_newest_checkpoints_stay_without_room_for_a_history(
    tmp_path: Path, hours, no_history
) -> None:
    hours(Checkpointer(tmp_path, keep=1), 3)
    assert names(tmp_path) == [2, 3], "the newest, and one whose weights took another update"


def test_the_history_takes_a_quarter_of_the_space(
    tmp_path: Path, hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    size = hours(checkpointer, 5).bytes
    disk = SimpleNamespace(free=5 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    hours(checkpointer, 1)
    assert names(tmp_path) == [3, 4, 5, 6], "(5 + 4) / 4 checkpoints of history"
    disk.free = size // 2
    seen, make = [], checkpointer._held.make_scratch
    monkeypatch.setattr(
        checkpointer._held, "make_scratch", lambda path: (make(path), seen.append(names(tmp_path)))
    )
    hours(checkpointer, 1)
    assert seen == [[5, 6]], "the history made room before the newest was written"
    assert names(tmp_path) == [6, 7]


def test_a_checkpoint_that_cannot_be_read_is_not_removed(tmp_path: Path, hours, no_history) -> None:
    """A disk that fails for a moment must not cost the newest checkpoints."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    hours(checkpointer, 2)
    (tmp_path / "step-000000002" / "state.json").write_text("{")
    hours(checkpointer, 1)
    assert names(tmp_path) == [1, 2, 3]


def test_a_checkpoint_restored_from_the_history_is_whole(tmp_path: Path, hours) -> None:
    hours(Checkpointer(tmp_path, keep=1), 4)
    for newer in (4, 3):  # as docs/restart.md instructs
        shutil.move(tmp_path / f"step-{newer:09d}", tmp_path / f"later-{newer}")
    found = Checkpointer(tmp_path).newest()
    assert found.step == 2
    assert json.loads((found.path / "state.json").read_text())["updated"] == 2
