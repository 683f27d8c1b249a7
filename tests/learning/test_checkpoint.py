"""Tests that checkpoints are whole or absent, and that runs fall back from damaged checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learning_world import build, differing, steps
from other_disk import on_another_disk
from overlay import as_image
from table import table

from stream_ssl.batch import Offset
from stream_ssl.learning import checkpoint, checkpoint_folder, checkpoint_layout, checkpoint_writer
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.checkpoint_folder import CheckpointError
from stream_ssl.learning.checkpoint_layout import facts_in, steps_in
from stream_ssl.learning.checkpoint_writer import abandon
from stream_ssl.learning.records import Idle
from stream_ssl.observe.checkpoint_metrics import set_aside

CONFIG = {"memory": {"capacity": 24}, "loss": "infonce"}


def saved(folder: Path, count: int = 3, **settings):
    """Return the checkpointer, learner and records of a run that saved after each of its steps."""
    checkpointer, learner = Checkpointer(folder, **settings), build()
    records = []
    for _ in range(count):
        steps(learner, 1)
        records.append(checkpointer.save(learner, CONFIG))
    return checkpointer, learner, records


def test_a_checkpoint_restores_everything(tmp_path: Path) -> None:
    _, learner, records = saved(tmp_path)
    found = Checkpointer(tmp_path).newest()
    assert found.step == 3
    assert found.offset == records[-1].offset == Offset(4, 0)
    assert found.config == CONFIG
    other = build(found.offset)
    found.restore(other)
    assert differing(learner, other) == []


def test_the_folder_of_a_checkpoint_has_the_documented_files_and_facts(tmp_path: Path) -> None:
    _, _, records = saved(tmp_path)
    folder = tmp_path / "step-000000003"
    names = {"model", "optimiser", "memory", "rng", "origins"}
    expected = {f"{name}.safetensors" for name in names} | {"state.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == expected
    assert (tmp_path / "latest").readlink() == Path("step-000000003")
    assert records[-1].path == folder
    assert records[-1].bytes == sum(path.stat().st_size for path in folder.iterdir())
    state = json.loads((folder / "state.json").read_text())
    assert state["version"] == 1
    assert state["samples"] == 24
    assert abs(state["created"] - time.time()) < 60
    assert state["offset"] == {"record": 4, "sample": 0}


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpointer, _, records = saved(tmp_path, count=5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000000004",
        "step-000000005",
    ]
    assert records[-1].needed == Offset(5, 0) == checkpointer.needed()
    assert records[0].needed == Offset(2, 0)


def test_a_checkpoint_that_cannot_be_read_for_now_stays_with_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, learner, _ = saved(tmp_path, count=3, keep=2)

    def facts_of(path: Path) -> dict[str, Any]:
        if path.name == "step-000000002":
            raise OSError(errno.EMFILE, "Too many open files")
        return facts_in(path)

    def damage_of(path: Path) -> str | None:
        facts_of(path)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "facts_in", facts_of)
        patch.setattr(checkpoint_folder, "checkpoint_damage", damage_of)
        assert checkpointer.needed() is None  # and the journal is not trimmed
        steps(learner, 1)
        checkpointer.save(learner, CONFIG)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-000000002",
        "step-000000003",
        "step-000000004",
    ]


def test_a_new_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "new")
    assert checkpointer.newest() is None
    assert checkpointer.needed() is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


PARTS = ["model.safetensors", "optimiser.safetensors", "memory.safetensors", "rng.safetensors"]
FILES = ["manifest.json", "state.json", *PARTS]


HARMS = [  # every other file is compared with the manifest in the same way
    *((name, harm) for name in FILES[:2] for harm in (flip, cut, zero, Path.unlink)),
    *((name, flip) for name in FILES[2:]),
]


@table(("name", "harm"), HARMS)
def test_a_run_falls_back_from_a_damaged_checkpoint_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: Path, name: str, harm
) -> None:
    copy(whole, tmp_path)
    harm(tmp_path / "step-000000003" / name)
    checkpointer = Checkpointer(tmp_path)
    with caplog.at_level(logging.ERROR):
        found = checkpointer.newest()
    assert found.step == 2
    assert checkpointer.damaged == 1
    assert "step-000000003 is damaged" in caplog.text
    assert (tmp_path / checkpoint_layout.LATEST).resolve() == found.path, "others go by it"
    learner = build(found.offset)
    found.restore(learner)
    steps(learner, 1)
    again = checkpointer.save(learner, CONFIG)
    assert Checkpointer(tmp_path).newest().path == again.path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    saved(folder)
    return folder


def copy(source: Path, target: Path) -> None:
    for folder in source.glob("step-*"):
        (target / folder.name).mkdir()
        for path in folder.iterdir():
            (target / folder.name / path.name).write_bytes(path.read_bytes())


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(file=st.sampled_from(["state.json", "manifest.json", "rng.safetensors"]), data=st.data())
def test_any_flipped_bit_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, file: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bits")
    copy(whole, folder)
    path = folder / "step-000000003" / file
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    found = Checkpointer(folder).newest()
    assert found.step in ((2, 3) if file == "manifest.json" else (2,))
    found.restore(build(found.offset))


def forged(folder: Path, change) -> None:
    """Replace the manifest with a forged one."""
    content = json.loads((folder / "manifest.json").read_text())
    change(folder, content["files"])
    (folder / "manifest.json").write_text(json.dumps(content))


def nested(folder: Path, _: dict[str, Any]) -> None:
    content = b"[" * 100_000
    (folder / "state.json").write_bytes(content)
    listed(folder, _, "state.json", content)


def listed(folder: Path, files: dict[str, Any], name: str, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    files[name] = {"bytes": len(content), "sha256": digest}
    (folder / name).write_bytes(content)


def telling(**changes: object) -> Callable[[Path, dict[str, Any]], None]:
    """Return a forgery of the state with other facts; None leaves a fact out."""

    def forge(folder: Path, files: dict[str, Any]) -> None:
        facts = facts_in(folder) | changes
        told = {name: value for name, value in facts.items() if value is not None}
        listed(folder, files, "state.json", json.dumps(told).encode())

    return forge


FORGERIES = {
    "empty": lambda _, files: files.clear(),
    "without the state": lambda _, files: files.pop("state.json"),
    "without the weights": lambda _, files: files.pop("model.safetensors"),
    "endless": lambda _, files: files.update({"/dev/zero": {"bytes": 0, "sha256": ""}}),
    "outside": lambda _, files: files.update({"../x": {"bytes": 0, "sha256": ""}}),
    "state of nothing": lambda at, files: listed(at, files, "state.json", b"{}"),
    "state of another": lambda at, files: listed(
        at, files, "state.json", (at.parent / "step-000000002" / "state.json").read_bytes()
    ),
    "state without an end": nested,
    "ranks without an end": telling(ranks=10**9),
    "ranks of less than one": telling(ranks=0),
    "version as text": telling(version="1"),
    "step as text": telling(step="3"),
    "no step": telling(step=None),
    "no samples": telling(samples=None),
    "weights of no step": telling(updated="none"),
    "no tensors": lambda at, files: listed(at, files, "model.safetensors", b"no tensors"),
}


@table("name", FORGERIES)
def test_a_run_falls_back_from_a_checkpoint_with_a_forged_manifest(
    tmp_path: Path, whole: Path, name: str
) -> None:
    copy(whole, tmp_path)
    forged(tmp_path / "step-000000003", FORGERIES[name])
    checkpointer = Checkpointer(tmp_path)
    found = checkpointer.newest()
    assert (found.step, checkpointer.damaged) == (2, 1)
    found.restore(build(found.offset))


def test_a_damaged_checkpoint_does_not_push_out_whole_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, keep=2)
    flip(tmp_path / "step-000000003" / "model.safetensors")
    checkpointer = Checkpointer(tmp_path, keep=2)
    found = checkpointer.newest()
    learner = build(found.offset)
    found.restore(learner)
    for _ in range(2):
        steps(learner, 1)
        checkpointer.save(learner, CONFIG)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == [
        "damaged-step-000000003",
        "step-000000003",
        "step-000000004",
    ]


def test_each_damaged_checkpoint_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, count=5, keep=5)
    for folder in tmp_path.glob("step-*"):
        flip(folder / "model.safetensors")
    assert Checkpointer(tmp_path).newest() is None
    assert set_aside(tmp_path) == 5
    assert all(any(path.iterdir()) for path in tmp_path.glob("damaged-*")), "one may be repaired"
    saved(tmp_path, count=5, keep=5)
    flip(tmp_path / "step-000000005" / "model.safetensors")
    assert Checkpointer(tmp_path).newest().step == 4
    assert set_aside(tmp_path) == 6
    held = sorted(path.name for path in tmp_path.glob("damaged-*") if any(path.iterdir()))
    assert held == [f"damaged-step-00000000{step}" for step in ("4", "5", "5-again")]
    removed = [line for line in caplog.messages if "its files were removed; 3 newer stay" in line]
    assert len(removed) == 3


def test_a_checkpoint_is_abandoned_though_another_rank_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes meanwhile keeps the folder from being deleted."""
    scratch = tmp_path / ".incomplete-step-000000003"
    scratch.mkdir()
    (scratch / "memory.safetensors").touch()
    with monkeypatch.context() as patched:
        patched.setattr("stream_ssl.durable.shutil.rmtree", lambda *_, **__: None)
        abandon(scratch)
    assert not scratch.exists()
    abandon(scratch)  # another rank does the same
    Checkpointer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_starts_from_scratch_if_all_checkpoints_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    for folder in tmp_path.glob("step-*"):
        flip(folder / "model.safetensors")
    checkpointer = Checkpointer(tmp_path)
    with caplog.at_level(logging.ERROR):
        assert checkpointer.newest() is None
    assert checkpointer.damaged == 3
    assert "the run starts from scratch" in caplog.text


@pytest.mark.parametrize("of_it", [".", "step-000000003", "step-000000003/manifest.json"])
def test_a_checkpoint_that_may_not_be_read_is_an_error_and_not_damaged(
    unprivileged: Path, of_it: str
) -> None:
    """After another account restores a backup, the run must not begin anew."""
    saved(unprivileged)
    (unprivileged / of_it).chmod(0)
    with pytest.raises(CheckpointError, match=r"may not be read by this user.*chown -R"):
        Checkpointer(unprivileged).newest()
    (unprivileged / of_it).chmod(0o700)
    assert Checkpointer(unprivileged).newest().step == 3


def test_a_checkpoint_of_a_newer_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = checkpoint_layout.FORMAT + 1
    monkeypatch.setattr(checkpoint_layout, "ALONE", newer)
    saved(tmp_path, count=1)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=f"has format {newer}, this program reads up to {newer - 1}: upgrade"
    ):
        Checkpointer(tmp_path).newest()
    assert (tmp_path / "step-000000001").exists()


def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, learner, _ = saved(tmp_path, every_steps=1)
    record = steps(learner, 1)[0]
    assert checkpointer.due(record)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "seal", refuse)
    with pytest.raises(OSError, match="No space left"):
        checkpointer.save(learner, CONFIG)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    assert not checkpointer.due(record), "the next attempt waits its turn"
    assert Checkpointer(tmp_path).newest().step == 3


def test_a_failed_checkpoint_is_tried_again_although_the_stream_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, learner = Checkpointer(tmp_path, every_seconds=1e-9), build()
    steps(learner, 1)

    def attempt() -> int:
        checkpointer.begin(learner, CONFIG)
        return checkpointer.finished(wait=True).step

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(checkpoint_writer, "seal", refuse)
        with pytest.raises(OSError, match="No space left"):
            attempt()
    assert checkpointer.due(Idle(0.0)), "nothing came since, and nothing is durable"
    assert attempt() == 1
    assert not checkpointer.due(Idle(0.0))


def test_a_background_save_writes_the_state_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues while the files are written. The checkpoint has the state before this."""
    begun, go_on = threading.Event(), threading.Event()
    plain = checkpoint_writer.write_tensors

    def slow(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(60)
        plain(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", slow)
    checkpointer, learner, then = Checkpointer(tmp_path, every_steps=1), build(), build()
    assert checkpointer.finished(wait=True) is None
    for _ in range(2):  # the second copy goes to the buffers of the first
        go_on.clear()
        steps(learner, 2)
        steps(then, 2)
        checkpointer.begin(learner, CONFIG)
        assert begun.wait(60)
        (record,) = steps(learner, 1)
        assert checkpointer.finished() is None
        assert checkpointer.busy
        assert not checkpointer.due(record), "one at a time"
        go_on.set()
        done = checkpointer.finished(wait=True)
        assert (done.step, done.stalled < done.seconds) == (learner.step - 1, True)
        assert checkpointer.due(record), "a step was made since"
        found = Checkpointer(tmp_path).newest()
        restored = build(found.offset)
        found.restore(restored)
        assert differing(then, restored) == []
        steps(then, 1)
        steps(restored, 1)
        assert differing(learner, restored) == []


def test_finished_raises_the_error_of_a_background_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, learner, _ = saved(tmp_path, count=1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    steps(learner, 1)
    monkeypatch.setattr(checkpoint_writer, "seal", refuse)
    checkpointer.begin(learner, CONFIG)
    with pytest.raises(OSError, match="No space left"):
        checkpointer.finished(wait=True)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    checkpointer.begin(learner, CONFIG)
    assert checkpointer.finished(wait=True).step == 2


def test_an_unfinished_checkpoint_is_deleted_at_the_start(tmp_path: Path) -> None:
    saved(tmp_path, count=1)
    (tmp_path / ".incomplete-step-000000002").mkdir()
    (tmp_path / ".incomplete-step-000000002" / "model.safetensors").write_bytes(b"half")
    checkpointer = Checkpointer(tmp_path)
    assert not list(tmp_path.glob(".incomplete*"))
    assert checkpointer.newest().step == 1


@pytest.mark.parametrize("others", ["whole", "damaged", "none"])
def test_a_run_continues_from_a_backup_without_links(tmp_path: Path, others: str) -> None:
    learner, run, backup = build(), tmp_path / "run", tmp_path / "backup"
    checkpointer = Checkpointer(run)
    for _ in range(2):
        steps(learner, 1)
        checkpointer.save(learner, {})
    shutil.copytree(run, backup)  # follows links
    if others == "damaged":
        (backup / "step-000000002" / "state.json").write_text("{}")
    if others == "none":
        shutil.rmtree(backup / "step-000000002")
    restored = Checkpointer(backup)
    found = restored.newest()
    assert found is not None
    assert (found.step, (backup / "latest").readlink().name) == (2, "step-000000002")
    steps(learner, 1)
    restored.save(learner, {})
    assert (backup / "latest").readlink().name == "step-000000003"


def test_checkpoints_are_written_to_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_links(link: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", target, str(link))

    monkeypatch.setattr(checkpoint_folder, "point", no_links)
    saved(tmp_path, count=4, keep=1)
    assert [path.name for path in steps_in(tmp_path)] == ["step-000000003", "step-000000004"]
    found = Checkpointer(tmp_path).newest()
    assert found is not None
    assert found.step == 4
    assert caplog.text.count("has no symbolic links (Operation not permitted)") == 1


def test_a_damaged_copy_in_place_of_the_link_is_set_aside(tmp_path: Path) -> None:
    learner = build()
    steps(learner, 1)
    Checkpointer(tmp_path).save(learner, {})
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    found = Checkpointer(tmp_path).newest()
    assert found is not None
    assert found.step == 1
    assert (tmp_path / "damaged-latest").is_dir()
    assert (tmp_path / "latest").is_symlink()


def test_a_checkpoint_is_sealed_and_published_before_an_old_one_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for module, names in (
        (checkpoint_writer, ("write_tensors", "seal")),
        (checkpoint_folder, ("publish", "point", "discard")),
    ):
        for name in names:
            plain = getattr(module, name)
            monkeypatch.setattr(
                module, name, lambda *a, n=name, f=plain: (events.append(n), f(*a))[1]
            )
    saved(tmp_path, count=3, keep=1)
    once = ["write_tensors"] * 5 + ["seal", "publish", "point"]
    assert events == [*once, *once, *once, "discard"], "two stay: see newest_kept"


def test_checkpoints_of_a_containers_image_are_removed_and_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, count=3, keep=3)
    flip(tmp_path / "step-000000003" / "model.safetensors")
    as_image(tmp_path, monkeypatch)
    checkpointer = Checkpointer(tmp_path, keep=1)
    found = checkpointer.newest()
    assert found is not None
    assert found.step == 2
    assert (tmp_path / "damaged-step-000000003" / "manifest.json").is_file()
    learner = build(found.offset)
    found.restore(learner)
    for _ in range(2):
        steps(learner, 1)
        checkpointer.save(learner, CONFIG)
    assert [path.name for path in steps_in(tmp_path)] == ["step-000000003", "step-000000004"]


def test_a_checkpoint_is_written_although_an_old_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(folder))

    monkeypatch.setattr(checkpoint_folder, "discard", refused)
    _, _, records = saved(tmp_path, count=3, keep=1)
    assert [record.step for record in records] == [1, 2, 3]
    assert "step-000000001 cannot be removed, and stays: Operation not permitted" in caplog.text


def test_no_checkpoint_goes_to_the_mount_point_of_a_disk_that_is_away(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with on_another_disk(tmp_path) as disk:
        folder.symlink_to(disk)
        checkpointer, learner, _ = saved(folder, count=1)
        folder.unlink()
        folder.mkdir()  # the disk is not mounted any more
        steps(learner, 1)
        with pytest.raises(OSError, match=r"not mounted here: mount it again: .*checkpoints"):
            checkpointer.save(learner, CONFIG)
        assert list(folder.iterdir()) == []
        folder.rmdir()
        with pytest.raises(OSError, match="not mounted here"):
            checkpointer.save(learner, CONFIG)
        folder.symlink_to(disk)
        checkpointer.save(learner, CONFIG)
        assert [path.name for path in steps_in(folder)] == ["step-000000001", "step-000000002"]
        resumed = Checkpointer(folder)
        assert resumed.newest().step == 2
        folder.unlink()
        folder.mkdir()
        steps(learner, 1)
        with pytest.raises(OSError, match="not mounted here"):
            resumed.save(learner, CONFIG)


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Otherwise the last checkpoint of a run would fail like all before it."""
    folder = tmp_path / "checkpoints"
    checkpointer, learner, _ = saved(folder)
    shutil.rmtree(folder)
    steps(learner, 1)
    checkpointer.begin(learner, CONFIG)
    assert checkpointer.finished(wait=True).step == 4
    assert Checkpointer(folder).newest().step == 4


def test_saving_a_step_again_writes_only_if_the_files_are_damaged(tmp_path: Path) -> None:
    checkpointer, learner, records = saved(tmp_path, count=1)
    before = (records[0].path / "state.json").stat().st_mtime_ns
    again = checkpointer.save(learner, CONFIG)
    assert again.bytes == records[0].bytes
    assert (again.path / "state.json").stat().st_mtime_ns == before
    flip(again.path / "model.safetensors")
    checkpointer.save(learner, CONFIG)
    assert Checkpointer(tmp_path).newest().step == 1


def test_a_checkpoint_stores_the_journal_of_its_offset(tmp_path: Path) -> None:
    checkpointer, learner, _ = saved(tmp_path, 1, keep=2)  # an earlier release stored no id
    assert not checkpointer.positions.follow("first")
    assert checkpointer.needed() == Offset(2, 0)
    steps(learner, 1)
    checkpointer.save(learner, CONFIG)
    checkpointer = Checkpointer(tmp_path, keep=2)
    found = checkpointer.newest()
    assert (found.journal, checkpointer.positions.journal) == ("first", "first")
    assert not checkpointer.positions.follow(None)  # a receiver of an earlier release has no id
    assert checkpointer.positions.follow("second")
    for needed in (Offset(1, 0), Offset(4, 0)):  # all, while one is of the first
        steps(learner, 1)
        assert checkpointer.save(learner, CONFIG).needed == needed
    assert Checkpointer(tmp_path).newest().journal == "second"


def test_a_checkpoint_is_due_after_steps_or_after_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, now = build(), 100.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    by_steps = Checkpointer(tmp_path / "steps", every_seconds=None, every_steps=2)
    by_time = Checkpointer(tmp_path / "time", every_seconds=60)
    one, two = steps(learner, 2)
    assert [by_steps.due(one), by_steps.due(two)] == [False, True]
    assert not by_time.due(two)
    now = 161.0
    assert by_time.due(two)
    assert by_time.due(Idle(0.0))
    by_time.save(learner, CONFIG)
    now = 1000.0
    assert not by_time.due(Idle(0.0)), "nothing was learned since"


def test_a_checkpoint_is_due_when_the_stream_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    checkpointer, learner = Checkpointer(tmp_path, every_seconds=None), build()
    (record,) = steps(learner, 1)
    now[0] += checkpoint.IDLE_SECONDS
    assert not checkpointer.due(record), "by steps or on a pause alone"
    assert checkpointer.due(Idle(0.0))
    checkpointer.save(learner, CONFIG)
    now[0] += 10 * checkpoint.IDLE_SECONDS
    assert not checkpointer.due(Idle(0.0)), "the pause goes on, and nothing is new"


def test_the_interval_after_a_resume_begins_at_the_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    checkpointer = Checkpointer(tmp_path, every_seconds=None, every_steps=2)
    found = checkpointer.newest()
    learner = build(found.offset)
    found.restore(learner)
    assert [checkpointer.due(record) for record in steps(learner, 2)] == [False, True]


def test_the_error_of_restore_names_a_weight_that_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path, count=1)
    found = Checkpointer(tmp_path).newest()
    learner = build()
    learner.method.encoder.conv1 = type(learner.method.encoder.conv1)(1, 5, 3)
    with pytest.raises(ValueError, match=r"(?s)weights do not fit this model.*encoder\.conv1"):
        found.restore(learner)
    optimiser = safetensors.torch.load_file(found.path / "optimiser.safetensors")
    assert optimiser["0.exp_avg"].shape == (4, 1, 3, 3)


def test_a_config_with_nan_is_refused(tmp_path: Path) -> None:
    learner = build()
    steps(learner, 1)
    with pytest.raises(ValueError, match="JSON"):
        Checkpointer(tmp_path).save(learner, {"rate": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_the_checkpointer_rejects_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="every_steps is 0: must be above 0, or null"):
        Checkpointer(tmp_path, every_steps=0)


def test_folders_with_odd_numbers_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("step-2", "step-10", "step-²", "step-", "step-1x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in steps_in(tmp_path)] == ["step-2", "step-10"]
