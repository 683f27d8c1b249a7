"""A spool on a full disk: its samples are sent, and none of them twice."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from client_peer import Peer, arrived, image
from other_disk import on_another_disk
from spool_files import ids, packet, reopen
from waiting import until

from stream_ssl import durable
from stream_ssl.producers import Producer, _spool
from stream_ssl.producers._spool import Spool
from stream_ssl.producers._spool_segments import Segments

FullDisk = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def full_disk() -> FullDisk:
    """A disk that accepts writes only over bytes that it already holds."""

    def full(*_arguments: Any, **_settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def filled() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "write", full)
            patch.setattr(Segments, "append", full)
            yield

    return filled


def test_a_producer_starts_on_a_full_disk_and_drains_its_spool(
    tmp_path: Path, full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"on_full": "spool", "spool": tmp_path, "packet_samples": 1}
    with Peer() as peer:
        peer.drop()
        with Producer(peer.address, "a", **settings) as producer:
            for number in range(9):
                producer.send(image(), id=str(number))
        peer.open()
        with (
            full_disk(),
            peer.serving() as journal,
            Producer(peer.address, "a", **settings) as producer,
        ):
            producer.flush()
    found = arrived(journal)
    assert found == [str(number) for number in range(9)]
    assert f"spool {tmp_path}/spool.json: No space left on device; the samples" in caplog.text


def test_runs_on_a_full_disk_get_different_epochs_although_the_clock_stands_still(
    spool: Spool, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each boot of a robot without a battery begins at the same time of 1970."""
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    epochs = [spool.epoch]
    for _ in range(4):
        with full_disk():
            spool = reopen(spool)
        epochs.append(spool.epoch)
    spool = reopen(spool)  # the disk has room again
    epochs.append(spool.epoch)
    spool.close()
    assert len(set(epochs)) == 6
    assert min(epochs) == epochs[0]


@pytest.mark.parametrize("torn", [False, True])
def test_a_full_disk_keeps_the_newest_whole_mark_in_the_reserve(
    spool: Spool, full_disk: FullDisk, torn: bool
) -> None:
    """A run that ends on a full disk sends nothing twice after its next start."""
    spool.append([packet("1"), packet("2"), packet("3")], 0, None)
    with full_disk():
        spool = reopen(spool)
        assert spool.mark(1, [(0, 1)])
        assert spool.mark(1, [(0, 1), (1, 1)])
        if torn:  # the write of the newest mark did not end
            with (spool.folder / "reserve").open("r+b") as file:
                file.seek(30)
                file.write(b"\xff" * 20)
        spool = reopen(spool)
        assert spool.resume(2) == (1 if torn else 2)
    assert ids(spool) == (["2", "3"] if torn else ["3"])
    spool.close()


def test_a_mark_in_the_reserve_does_not_cover_new_packets(
    spool: Spool, full_disk: FullDisk
) -> None:
    spool.append([packet("1"), packet("2")], 0, None)
    with full_disk():
        spool.mark(1, [(0, 1), (1, 1)])
    spool.ack(2)
    spool = reopen(spool)  # numbers begin at 0 again
    assert spool.append([packet("3"), packet("4")], 0, None) == 2
    spool = reopen(spool)
    assert spool.resume(2) == 0
    assert ids(spool) == ["3", "4"]
    spool.close()


def test_a_mark_that_exceeds_the_reserve_is_refused(spool: Spool, full_disk: FullDisk) -> None:
    with full_disk():
        assert not spool.mark(1, [(number, 1) for number in range(20_000)])
    spool.close()


def test_the_error_of_a_new_spool_on_a_full_disk_names_its_file(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    with full_disk(), pytest.raises(OSError, match=r"spool\.json: No space .*; free space there"):
        Spool(tmp_path / "new", "a", 1 << 20)
    Spool(tmp_path / "new", "a", 1 << 20).close()


def test_a_spool_refuses_a_file_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "gen.py"
    file.write_text("pass")
    with pytest.raises(OSError, match=r"spool .*gen\.py: is a file; choose another folder"):
        Spool(file, "a", 1 << 20)
    with pytest.raises(OSError, match=r"spool /proc/x: cannot be made or read: .*; choose"):
        Spool(Path("/proc/x"), "a", 1 << 20)


def test_a_spool_refuses_a_folder_of_other_files_and_leaves_them(tmp_path: Path) -> None:
    """A spool deletes its file `mark`, and the user may have one of this name."""
    (tmp_path / "mark").write_text("mine")
    (tmp_path / "photo.jpg").write_text("mine, too")
    with pytest.raises(ValueError, match=r"holds 'photo\.jpg', which no spool has written"):
        Spool(tmp_path, "a", 1 << 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "photo.jpg"]


def test_a_spool_accepts_the_root_folder_of_a_disk(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    Spool(tmp_path, "a", 1 << 20).close()


def test_the_error_names_a_spool_that_cannot_be_written(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became read-only before a reboot is an example."""
    spool.close()

    def refused(path: Path, *_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def denied(path: Path, *_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(_spool, "open_file", refused)
    with pytest.raises(OSError, match=r"spool .*: lock cannot be written: Read-only file system;"):
        Spool(spool.folder, "a", 1 << 20)
    monkeypatch.undo()
    monkeypatch.setattr(durable, "write", denied)
    with pytest.raises(OSError, match=r"spool\.json: Permission denied; let this user write"):
        Spool(spool.folder, "a", 1 << 20)


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make the disk read-only, as Linux does after an error of the disk, or writable again."""
    unlink, append, write = Path.unlink, Segments.append, durable.write

    def refused(*_arguments: Any, **_settings: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def change(on: bool) -> None:
        monkeypatch.setattr(Path, "unlink", refused if on else unlink)
        monkeypatch.setattr(Segments, "append", refused if on else append)
        monkeypatch.setattr(durable, "write", refused if on else write)

    return change


def test_a_producer_continues_when_its_disk_becomes_read_only(
    tmp_path: Path, read_only: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"on_full": "spool", "spool": tmp_path, "packet_samples": 1}
    with Peer() as peer:
        peer.drop()
        with Producer(peer.address, "a", **settings) as producer:
            for number in range(3):
                producer.send(image(), id=str(number))
            until(lambda: producer.stats.spooled.samples == 3)
            read_only(True)
            peer.open()
            with peer.serving() as journal:
                producer.flush()
                for number in range(3, 6):
                    producer.send(image(), id=str(number))
                producer.flush()
                assert list(tmp_path.glob("*.spool"))
                read_only(False)
                producer.close()
    assert arrived(journal) == [str(number) for number in range(6)]
    assert "Read-only file system; its samples are delivered, and it stays" in caplog.text
    assert not list(tmp_path.glob("*.spool"))


def test_a_segment_that_cannot_be_deleted_is_deleted_later(
    spool: Spool, read_only: Callable[[bool], None]
) -> None:
    spool.append([packet("1"), packet("2")], 0, None)
    spool.mark(1, [(0, 1), (1, 1)])
    read_only(True)
    spool.ack(2)
    held = spool.stored_bytes
    assert held > 0
    read_only(False)
    spool.append([packet("3")], 0, None)
    assert spool.stored_bytes > held
    spool = reopen(spool)
    assert spool.resume(2) == 2  # the mark says what the receiver has
    assert ids(spool) == ["3"]
    spool.ack(3)
    assert spool.stored_bytes == 0
    assert not list(spool.folder.glob("*.spool"))
    spool.close()


def test_a_spool_writes_nothing_to_the_mount_point_of_an_unmounted_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "s"
    with on_another_disk(tmp_path) as disk:
        folder.symlink_to(disk)
        spool = Spool(folder, "a", 1 << 20)
        assert spool.append([packet("1")], 0, None) == 1
        folder.unlink()
        folder.mkdir()  # the disk is not mounted any more
        assert spool.append([packet("2")], 0, None) == 0
        assert "its disk is not mounted here; mount it again; it is tried again" in caplog.text
        assert list(folder.iterdir()) == []
        folder.rmdir()
        folder.symlink_to(disk)
        spool._retry_at = 0.0
        assert spool.append([packet("2")], 0, None) == 1
        spool = reopen(spool)
        assert ids(spool) == ["1", "2"]
        spool.close()
