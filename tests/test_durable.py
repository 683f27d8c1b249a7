"""Tests of small durable files: a power cut leaves either the old or the new file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from overlay import as_image

from stream_ssl import durable


def test_write_flushes_the_file_then_renames_it_then_flushes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    durable.write(tmp_path / "a.json", "new")
    assert done == ["fsync a.json.part", "rename a.json.part a.json", f"fsync {tmp_path.name}"]
    done.clear()
    durable.write(tmp_path / "a.json", b"newer", wait=False)
    assert done == ["rename a.json.part a.json"]


def test_a_failed_write_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    durable.write(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.write(path, "new")
    assert path.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


def test_write_works_on_a_file_system_that_cannot_flush_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux answers so on some Windows shares; a failed flush of a file is an error there, too."""

    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refused)
    durable.make_folder(tmp_path / "run" / "journal")
    durable.write(tmp_path / "run" / "a.json", "new")
    assert (tmp_path / "run" / "a.json").read_text() == "new"
    monkeypatch.setattr(os, "fsync", lambda handle: os.read(handle, -1))  # EINVAL of a file, too
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync(tmp_path / "run" / "a.json")


def test_sync_raises_an_error_if_the_disk_cannot_flush_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        durable.sync(tmp_path)


def test_entries_raises_an_error_if_a_folder_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step-2", "step-10", ".step-3", "other"):
        (tmp_path / name).touch()
    assert {path.name for path in durable.entries(tmp_path, "step-*")} == {"step-2", "step-10"}
    assert durable.entries(tmp_path / "none", "*") == []
    assert durable.entries(tmp_path / "other", "*") == []

    def failing(folder: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr(Path, "iterdir", failing)
    with pytest.raises(OSError, match="Input/output error"):
        durable.entries(tmp_path, "step-*")


def test_write_replaces_a_part_file_that_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / "a.json.part").write_text("half")
    (tmp_path / "a.json.part").chmod(0o666)
    durable.write(tmp_path / "a.json", memoryview(b"whole"), mode=0o600)
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


def test_a_writer_never_publishes_the_unfinished_file_of_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "a.json", os.fsync
    begun = iter([True])

    def synced(handle: int) -> None:
        fsync(handle)
        if next(begun, False):  # another process begins to write the same file
            path.with_name("a.json.part").unlink()
            path.with_name("a.json.part").write_text("ha")

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(OSError, match="another process writes it at the same time"):
        durable.write(path, "first")
    assert not path.exists()
    assert path.with_name("a.json.part").read_text() == "ha"


def test_a_second_writer_leaves_the_file_of_the_first_writer_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.json", os.open

    def open_second(part: Path, *arguments: int) -> int:
        part.write_text("ha")  # another process opens the file first
        return opened(part, *arguments)

    monkeypatch.setattr(os, "open", open_second)
    with pytest.raises(FileExistsError):
        durable.write(path, "second")
    assert path.with_name("a.json.part").read_text() == "ha"


def test_a_folder_of_a_container_image_can_be_moved_and_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir(mode=0o700)
        for file in ("manifest.json", "data"):
            (tmp_path / name / file).write_text(file)
    as_image(tmp_path, monkeypatch)
    assert durable.move(tmp_path / "a", tmp_path / "c") == tmp_path / "c"
    assert {path.name: path.read_text() for path in (tmp_path / "c").iterdir()} == {
        name: name for name in ("manifest.json", "data")
    }
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    durable.discard(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failed_move_to_another_disk_leaves_the_folder_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data").write_text("kept")
    monkeypatch.setattr(Path, "rename", other_disk)
    with pytest.raises(OSError, match="cross-device"):
        durable.move(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "data").read_text() == "kept"
