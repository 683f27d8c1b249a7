"""Separate processes check segments for damage. Other causes that end them are not damage."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from journal_of_packets import build, checked, packet, read_all

from stream_ssl.journal import recovery
from stream_ssl.journal.errors import JournalError
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import list_segments
from stream_ssl.journal.writer_lock import LOCK_FILE

SLOW = """
import os, sys, time
for n in range(len(sys.argv) - 1):
    time.sleep(0.3)
    os.write(1, f"begin {n}\\ngood {n} 0\\n".encode())
"""


def test_a_slow_check_is_logged_and_not_taken_for_damage(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "journal"
    build(folder)
    count = len(list_segments(folder))
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    monkeypatch.setattr(recovery.segment_check, "__file__", str(slow))
    monkeypatch.setattr(recovery, "_PROGRESS_SECONDS", 0.0)
    journal = Journal(folder)
    journal.take_checked(wait=True)
    assert journal.damaged == 0
    assert f"{count - 1} of {count - 1} segments checked for damage" in caplog.text
    journal.close()


KILLED = """
import os, runpy, signal, sys
from pathlib import Path
seen = Path(__file__).with_suffix(".seen")
if not seen.exists():
    seen.touch()
    os.kill(os.getpid(), signal.{name})
sys.argv[0] = {check!r}
runpy.run_path({check!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_killed_check_is_not_taken_for_damage(tmp_path, monkeypatch, name):
    """Ctrl-C, the stop of a service and a lack of memory send these signals."""
    folder = tmp_path / "journal"
    build(folder, groups=3)
    killed = tmp_path / "killed.py"
    killed.write_text(KILLED.format(name=name, check=recovery.segment_check.__file__))
    monkeypatch.setattr(recovery.segment_check, "__file__", str(killed))
    found = list(recovery.Check([path for _, path in list_segments(folder)]))
    assert [one.fault for one in found] == [None, None]


def test_a_failed_import_of_the_check_is_not_taken_for_damage(tmp_path, monkeypatch):
    """The check imports modules from the same places as the receiver."""
    folder = tmp_path / "journal"
    build(folder, groups=2)
    before = sorted(path.name for path in folder.iterdir())
    (tmp_path / "lmdb.py").write_text("raise ImportError('another lmdb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JournalError, match=r"cannot be checked for damage: .*another lmdb; check"):
        Journal(folder)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir() if "damaged" in path.name] == []
    checked(folder).close()


def test_a_lack_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch):
    folder = tmp_path / "journal"
    build(folder, groups=1)
    short = tmp_path / "short.py"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))"
    begin = "if __name__ =="
    script = Path(recovery.segment_check.__file__).read_text()
    short.write_text(script.replace(begin, f"{limit}\n{begin}"))
    monkeypatch.setattr(recovery.segment_check, "__file__", str(short))
    with pytest.raises(OSError, match=r"cannot be checked for damage: .*the free memory"):
        list(recovery.Check([path for _, path in list_segments(folder)]))


def test_a_missing_permission_to_read_is_not_taken_for_damage(tmp_path, monkeypatch):
    folder = tmp_path / "journal"
    build(folder, groups=1)
    denied = tmp_path / "denied.py"
    script = Path(recovery.segment_check.__file__).read_text()
    denied.write_text(
        script.replace("read(folder)\n", "raise PermissionError(13, os.strerror(13))\n")
    )
    monkeypatch.setattr(recovery.segment_check, "__file__", str(denied))
    with pytest.raises(JournalError, match=r"Permission denied; let the receiver's user read it"):
        Journal(folder)


@pytest.mark.parametrize(("at", "bit"), [(38, 64), (141, 8)], ids=["size of the map", "last page"])
def test_a_segment_with_an_impossible_size_counts_as_damaged(tmp_path, at, bit):
    """LMDB maps as many bytes as its pages say, so that it seems to lack memory."""
    folder = tmp_path / "journal"
    build(folder, groups=4)
    (_, path) = list_segments(folder)[-1]
    data = bytearray((path / "data.mdb").read_bytes())
    for page in (0, 4096):
        data[page + at] |= bit
    (path / "data.mdb").write_bytes(data)
    journal = checked(folder)
    assert journal.damaged == 1
    assert journal.state("robot").sequence == 20
    journal.close()


STUCK = """
import os, sys, time
if len(sys.argv) == 2:  # the newest
    os.write(1, b"good 0 0\\n")
else:
    time.sleep(600)
"""


def test_a_journal_accepts_entries_while_its_old_segments_are_checked(tmp_path, monkeypatch):
    folder = tmp_path / "journal"
    build(folder)
    stuck = tmp_path / "stuck.py"
    stuck.write_text(STUCK)
    monkeypatch.setattr(recovery.segment_check, "__file__", str(stuck))
    journal = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
    journal.append([packet(61)])
    assert journal.state("robot").sequence == 61
    assert journal.bytes_after(1) > 0  # at most: what is not checked is not opened
    journal.trim(30)
    journal.take_checked()
    assert [r.sequence for r in read_all(folder)[0]] == list(range(list_segments(folder)[0][0], 62))
    journal.close()  # ends the check too


def test_a_check_covers_more_segments_than_one_command_can_name(tmp_path):
    """The system limits the length of a command; Linux to 2 MiB by default."""
    folder = tmp_path.joinpath(*["x" * 250] * 4)
    build(folder)
    path = list_segments(folder)[0][1]
    checked = list(recovery.Check([path] * 2400))
    assert [one.fault for one in checked] == [None] * 2400


def test_a_check_that_cannot_start_waits_for_the_next_start_of_the_journal(
    tmp_path, monkeypatch, caplog
):
    build(tmp_path, groups=2)

    def no_process(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    check = recovery.BackgroundCheck([path for _, path in list_segments(tmp_path)])
    assert check.take(wait=True) == []
    assert "not checked before the next start" in caplog.text
    check.stop()


def test_the_system_kills_a_check_that_uses_too_much_processor_time():
    """Damaged pages may name each other in a circle. The limit counts processor time."""
    code = (
        "from stream_ssl.journal import segment_check as check\n"
        "check.CPU_SECONDS, check.read = 0.2, lambda folder: None\n"
        "def walk(folder):\n    while True: pass\n"
        "check.walk = walk\n"
        "check.main(['one'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGPROF


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOLCK, errno.EINVAL])
def test_an_error_explains_that_a_file_system_cannot_map_or_lock_files(
    tmp_path, monkeypatch, number
):
    """A folder that a virtual machine shares with its host is an example."""
    build(tmp_path, groups=2)
    held = sorted(tmp_path.iterdir())

    def refused(path, **_):
        raise lmdb.Error(f"{path}: {os.strerror(number)}")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", refused)
        with pytest.raises(JournalError, match="cannot map or lock files; choose a folder on a"):
            Journal(tmp_path, check=False)
        fresh = closing(Journal(tmp_path / "new", check=False))
        with fresh as journal, pytest.raises(JournalError, match=r"; choose a folder on a local"):
            journal.append([packet(1)])
    (tmp_path / "new" / LOCK_FILE).unlink()
    (tmp_path / "new").rmdir()
    assert sorted(tmp_path.iterdir()) == held  # no segment was moved aside
