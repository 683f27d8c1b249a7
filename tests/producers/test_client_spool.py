"""The spool: packets on disk, numbered, loaded and deleted in order, also after a restart."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from spool_files import ids, packet, reopen

from stream_ssl.producers import Producer, _io_thread
from stream_ssl.producers import _spool as spool_module
from stream_ssl.producers import _spool_records as spool_records
from stream_ssl.producers import _spool_segments as spool_segments
from stream_ssl.producers._spool import Spool


def test_a_spool_returns_its_packets_in_order_after_a_restart(spool: Spool) -> None:
    assert spool.append([packet("1", "2", position=7), packet("3")], 0, None) == 2
    assert spool.append([packet("4", position=[9])], 0, None) == 1
    again = reopen(spool)
    assert (again.samples, again.position) == (4, [9])
    assert ids(again) == ["1", "2", "3", "4"]
    again.ack(3)
    assert ids(reopen(again)) == ["1", "2", "3", "4"]  # no mark says that the receiver has them


def test_a_spool_returns_a_packet_byte_for_byte(spool: Spool) -> None:
    before = packet("1", "2", position=[1])
    spool.append([before], 0, None)
    after = reopen(spool).load()
    assert after is not None
    assert (after.data.header, after.data.payload) == (before.data.header, before.data.payload)
    assert (after.positions, after.count, after.size) == (before.positions, 2, before.size)


@pytest.mark.parametrize("durable", range(7))
def test_a_mark_lets_a_restart_skip_the_packets_that_the_receiver_has(
    spool: Spool, durable: int
) -> None:
    packets = [packet("1", "2"), packet("3"), packet("4")]
    spool.append(packets, 3, (3, [(0, 2), (2, 1), (3, 1)]))  # sequences 3, 4 and 5
    spool.append([packet("5")], 0, None)
    again = reopen(spool)
    had = [0, 2, 3, 4][min(max(0, durable - 2), 3)]  # samples
    assert again.resume(durable) == had
    assert ids(again) == ["1", "2", "3", "4", "5"][had:]
    again.close()


def test_a_mark_discards_earlier_samples_although_its_own_are_torn_off(
    spool: Spool,
) -> None:
    spool.append([packet("1", "2")], 0, None)
    spool.mark(5, [(2, 3)])  # a power cut has removed these three samples
    again = reopen(spool)
    assert ids(again) == []
    again.close()


def test_a_restart_cuts_a_packet_into_the_same_parts(spool: Spool) -> None:
    spool.append([packet("1", "2", "3", "4", "5")], 0, None)
    spool.mark(1, [(0, 1), (1, 3), (4, 1)])
    again = reopen(spool)
    assert again.resume(1) == 1
    parts = [again.load() for _ in range(2)]
    assert [part and part.ids for part in parts] == [("2", "3", "4"), ("5",)]
    again.close()


def test_parts_that_leave_memory_are_loaded_again_unchanged(spool: Spool) -> None:
    spool.append([packet("1", "2", "3", "4", "5")], 0, None)
    spool.mark(1, [(0, 1), (1, 3), (4, 1)])
    again = reopen(spool)
    again.resume(0)
    parts = [part for _ in range(3) if (part := again.load()) is not None]
    for part in parts[:0:-1]:
        assert part.spooled is not None
        again.unload((part.spooled, part.count))
    assert again.unloaded
    after = [again.load() for _ in range(2)]
    assert [part and part.ids for part in after] == [("2", "3", "4"), ("5",)]
    again.close()


@pytest.mark.parametrize(("durable", "settled"), [(0, 2), (1, 3), (2, 4), (3, 5)])
def test_a_restart_skips_and_counts_rejected_samples(
    spool: Spool, durable: int, settled: int
) -> None:
    spool.append([packet("1", "2", "3"), packet("4"), packet("5")], 0, None)
    spool.mark(1, [(0, 1), (2, 1), (4, 1)])  # "2" and "4" were too large for the receiver
    again = reopen(spool)
    assert again.resume(durable) == settled
    assert ids(again) == ["1", "3", "5"][durable:]
    again.ack(5)
    assert again.samples == 0
    again.close()


def test_a_segment_is_deleted_when_all_its_packets_are_acknowledged(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_segments, "SEGMENT_BYTES", 200)
    for number in range(20):
        spool.append([packet(str(number))], 0, None)
    before = len(list(spool.folder.glob("*.spool")))
    assert before > 5
    spool.ack(10)
    assert 1 < len(list(spool.folder.glob("*.spool"))) <= before - 4
    assert spool.stored_bytes == sum(p.stat().st_size for p in spool.folder.glob("*.spool"))
    assert (spool.samples, ids(spool)) == (10, [str(n) for n in range(10, 20)])
    spool.ack(20)
    assert (spool.samples, spool.stored_bytes, list(spool.folder.glob("*.spool"))) == (0, 0, [])
    spool.append([packet("20")], 0, None)
    assert ids(reopen(spool)) == ["20"]


def test_a_full_spool_accepts_packets_only_after_an_acknowledgement(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "a", max_bytes=600)
    packets = [packet(str(number)) for number in range(9)]
    taken = spool.append(packets, 0, None)
    assert 1 < taken < 9
    assert spool.full
    assert spool.stored_bytes <= 600
    spool.ack(taken)
    assert not spool.full
    assert spool.append(packets[taken:], 0, None) > 0
    spool.close()


def test_a_spool_survives_the_removal_of_its_files(spool: Spool) -> None:
    spool.append([packet("1"), packet("2")], 2, None)
    for path in spool.folder.iterdir():
        path.unlink()
    spool.append([packet("3")], 0, None)  # in a segment of its own
    assert ids(spool) == ["3"]
    for path in spool.folder.iterdir():
        path.unlink()
    spool.folder.rmdir()
    spool.append([packet("4")], 0, None)
    (last,) = spool.folder.iterdir()
    assert ids(spool) == ["4"]
    spool.append([packet("5")], 0, None)
    last.unlink()
    assert ids(spool) == []
    assert spool.lost == 1
    spool.ack(spool.end)
    assert (spool.samples, spool.stored_bytes) == (0, 0)
    spool.close()


def test_a_spool_has_one_owner(spool: Spool) -> None:
    with pytest.raises(ValueError, match="another producer uses it; close that producer, or"):
        Spool(spool.folder, "a", 1 << 20)
    spool.close()
    with pytest.raises(ValueError, match="belongs to producer 'a', not 'b'"):
        Spool(spool.folder, "b", 1 << 20)


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ValueError, match=r"spool .*cannot be locked \(Function not implemented\)"):
        Spool(tmp_path / "spool", "a", 1 << 20)


def test_a_closed_spool_is_free_although_a_child_process_holds_its_lock_file(spool: Spool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[spool._lock]
    ) as child:
        spool.close()
        Spool(spool.folder, "a", 1 << 20).close()
        child.communicate(b"\n")


def test_a_forked_child_does_not_hold_the_spool_of_its_dead_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from stream_ssl.producers import Producer\n"
        "made = Producer('tcp://127.0.0.1:1', 'a', on_full='spool', spool=sys.argv[1])\n"
        "os.write(1, f'{os.fork()}\\n'.encode())\n"  # in one piece: both processes write
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "s"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = max(int(parent.stdout.readline()) for _ in range(2))  # the child writes 0
    try:
        with pytest.raises(ValueError, match="another producer"):
            Spool(tmp_path / "s", "a", 1 << 20)
        parent.kill()
        parent.wait()
        Spool(tmp_path / "s", "a", 1 << 20).close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_a_refused_argument_leaves_the_spool_free(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_state"):
        Producer("tcp://127.0.0.1:1", "a", on_full="spool", spool=tmp_path, on_state=5)  # type: ignore[arg-type]
    Spool(tmp_path, "a", 1 << 20).close()


def test_a_producer_that_cannot_start_leaves_the_spool_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", busy)
    with pytest.raises(OSError, match="Too many open files"):
        Producer("tcp://127.0.0.1:1", "a", on_full="spool", spool=tmp_path)
    Spool(tmp_path, "a", 1 << 20).close()


def test_a_producer_that_cannot_start_a_thread_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", busy)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Producer("tcp://127.0.0.1:1", "a", on_full="spool", spool=tmp_path)
    Spool(tmp_path, "a", 1 << 20).close()
    assert not _io_thread._running  # the end of the interpreter waits for these


def test_the_epoch_grows_although_the_clock_stepped_back(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    again = reopen(spool)
    assert again.epoch == spool.epoch + 1
    again.close()


def test_a_spool_keeps_its_packets_on_a_full_disk(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet("1")], 0, None)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert spool.append([packet("2")], 0, None) == 0
    assert spool.full
    assert "No space left" in caplog.text
    assert spool.append([packet("3")], 0, None) == 0  # for some seconds
    spool._retry_at = 0.0
    assert spool.append([packet("3")], 0, None) == 1
    assert ids(reopen(spool)) == ["1", "3"]


def test_a_lack_of_file_descriptors_loses_no_spooled_packet(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.append([packet("1"), packet("2")], 0, None)

    def full(_path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spool_module, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(spool_records, "open_binary", full)
        assert ids(spool) == []
    assert ids(spool) == ["1", "2"]
    assert spool.lost == 0
    spool.close()
