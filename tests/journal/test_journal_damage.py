"""The records that a journal keeps when its writer is killed or its files are damaged."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import lmdb
import pytest
from journal_of_packets import body, build, checked, packet, read_all
from table import table

from stream_ssl.journal import recovery, segment
from stream_ssl.journal.errors import JournalError, JournalFull
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import (
    JournalEntry,
    ProducerState,
    create_segment,
    list_segments,
)
from stream_ssl.journal.writer_lock import LOCK_FILE

WRITER = Path(__file__).with_name("journal_writer.py")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_killed_writer_loses_and_repeats_no_committed_record(tmp_path):
    draw = random.Random(7)
    committed, positions = {}, {}
    for kill in range(8):
        command = [sys.executable, str(WRITER), str(tmp_path), str(kill)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout.readline() == "open\n"
            timer = threading.Timer(draw.uniform(0, 0.6), writer.kill)
            timer.start()
            for line in writer.stdout:
                if line.endswith("\n") and len(fields := line.split()) == 3:
                    name, sequence, position = fields[0], int(fields[1]), int(fields[2])
                    assert position not in positions
                    positions[position] = (name, sequence)
                    committed[name] = sequence
            timer.join()
        finally:
            writer.kill()
            writer.stdout.close()
            writer.wait()

        journal = Journal(tmp_path, budget=8 << 20, segment_bytes=256 << 10)
        assert journal.damaged == 0
        for name, sequence in committed.items():
            assert journal.state(name).sequence >= sequence
        reader = JournalReader(tmp_path)
        held, position = {}, journal.first
        while found := reader.read(position):
            held |= {record.position: (record.producer, record.sequence) for record in found}
            position = found[-1].position + 1
        assert list(held) == list(range(journal.first, journal.last + 1))
        assert len(set(held.values())) == len(held)
        kept = {p: names for p, names in positions.items() if p >= journal.first}
        assert kept.items() <= held.items()
        positions |= held
        reader.close()
        journal.close()
    assert len(positions) > 100


def test_a_flipped_bit_damages_only_one_record(tmp_path):
    build(tmp_path)
    data = list_segments(tmp_path)[0][1] / "data.mdb"
    flip(data, data.read_bytes().index(body(3)) + 777)

    journal = Journal(tmp_path)
    records, corrupt = read_all(tmp_path)
    assert [r.sequence for r in records] == [n for n in range(1, 61) if n != 3]
    assert corrupt == 1
    journal.append([packet(61)])
    assert journal.damaged == 0
    journal.close()


def test_a_reader_frees_salvaged_records_when_it_reads_the_next_segment(tmp_path):
    build(tmp_path)
    data = list_segments(tmp_path)[0][1] / "data.mdb"
    with data.open("r+b") as file:
        file.write(bytes(2 * segment.PAGE))  # LMDB's head; the records stay
    tracemalloc.start()
    with closing(JournalReader(tmp_path)) as reader:
        last = reader.read(1)[-1].position
        assert tracemalloc.get_traced_memory()[0] > 60_000
        assert reader.read(last + 1)[0].position == last + 1
        assert tracemalloc.get_traced_memory()[0] < 60_000
    tracemalloc.stop()


def test_a_reader_finds_no_damage_in_a_segment_that_grows_meanwhile(tmp_path, monkeypatch):
    """A writer may add pages after a reader has looked at the file's size."""
    build(tmp_path)
    whole, sizes = segment.file_bytes, [2 * segment.PAGE]

    def growing(path):
        return sizes.pop() if sizes else whole(path)

    monkeypatch.setattr(segment, "file_bytes", growing)
    records, corrupt = read_all(tmp_path)
    assert not sizes, "the size was asked for"
    assert [r.sequence for r in records] == list(range(1, 61))
    assert corrupt == 0


@table("which", [0, 1, -1])
def test_a_journal_salvages_the_intact_records_of_a_truncated_segment(tmp_path, which):
    folder = tmp_path / "journal"
    build(folder)
    first, path = list_segments(folder)[which]
    data = path / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[: content.index(body(first + 3)) + 100])

    journal = checked(folder)
    assert journal.damaged == 1
    assert len(list(tmp_path.glob("journal.damaged-*"))) == 1
    records, corrupt = read_all(folder)
    held = [r.sequence for r in records]
    assert corrupt == 0
    assert {first, first + 1, first + 2} <= set(held)
    assert first + 3 not in held
    segments = [start for start, _ in list_segments(folder)]
    assert set(held) >= set(range(1, 61)) - set(range(first, first + 20))
    assert segments[0] == 1

    before = journal.state("robot").sequence
    assert before == max(held)
    commit = journal.append([packet(before + 1)])
    assert commit.first > 60  # no position is given out twice
    journal.close()


def test_one_zeroed_page_damages_at_most_one_record(tmp_path):
    build(tmp_path / "good", groups=2)
    (_, good), *_ = list_segments(tmp_path / "good")
    content = (good / "data.mdb").read_bytes()
    for page in range(len(content) // 4096):
        folder = tmp_path / f"page-{page}"
        (path := folder / good.name).mkdir(parents=True)
        start = page * 4096
        (path / "data.mdb").write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])

        journal = Journal(folder, budget=8 << 20)
        records, corrupt = read_all(folder)
        assert len(records) >= 9, f"page {page}: {[r.sequence for r in records]}"
        assert corrupt + journal.damaged >= (len(records) < 10)
        commit = journal.append([packet(journal.state("robot").sequence + 1)])
        assert commit.first >= 11
        journal.close()


@table("content", [None, b"", b"nonsense" * 4096])
def test_a_segment_with_missing_or_invalid_data_counts_as_damaged(tmp_path, content):
    folder = tmp_path / "journal"
    build(folder)
    first, path = list_segments(folder)[-1]
    (path / "data.mdb").unlink()
    if content is not None:
        (path / "data.mdb").write_bytes(content)

    journal = Journal(folder, budget=8 << 20)
    assert journal.damaged == 1
    records, _ = read_all(folder)
    assert [r.sequence for r in records] == list(range(1, first))
    assert journal.state("robot").sequence == first - 1
    assert journal.append([packet(first)]).first > 60
    journal.close()


def test_salvage_returns_only_the_positions_of_the_segment(tmp_path):
    """LMDB's free pages may hold intact records that a failed commit left."""
    build(tmp_path, groups=2)
    (_, path), *_ = list_segments(tmp_path)
    assert list(recovery.salvage(path, 1, None)) == list(range(1, 11))
    assert list(recovery.salvage(path, 3, 6)) == [3, 4, 5]


def test_a_journal_finishes_an_interrupted_replacement_of_a_segment(tmp_path):
    journal = Journal(tmp_path)
    journal.append([JournalEntry("robot", 7)])  # an advance: its segment holds no record
    states = journal.producers()
    journal.close()
    (_, path), *_ = list_segments(tmp_path)
    create_segment(path, states, 1 << 20)
    path.rename(tmp_path / f".old-{path.name}")

    journal = Journal(tmp_path)
    assert journal.producers() == states
    journal.append([packet(8)])
    assert [r.position for r in read_all(tmp_path)[0]] == [1]
    assert not list(tmp_path.glob(".*"))
    journal.close()


def test_a_reader_finds_no_damage_in_a_segment_that_is_just_created(tmp_path, monkeypatch):
    folder = tmp_path / "journal"
    build(folder, groups=1)
    (_, path), *_ = list_segments(folder)
    path.rename(fresh := path.with_name(f".new-{path.name}"))

    def publish(_):  # between the reader's look at the folder and the look at its name
        fresh.rename(path)
        return False

    monkeypatch.setattr("stream_ssl.journal.reader.is_coming", publish)
    reader = JournalReader(folder)
    assert reader.read(1) == []
    assert (len(reader.read(1)), reader.corrupt) == (5, 0)
    reader.close()


def test_a_journal_appends_again_after_errors_of_the_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path, budget=8 << 20)
    journal.append([packet(1)])
    journal._active.env.close()
    with pytest.raises(JournalError):
        journal.append([packet(2)])
    assert (journal.last, journal.state("robot").sequence) == (1, 1)

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("stream_ssl.journal.journal.create_segment", no_space)
        with pytest.raises(JournalFull, match="No space left"):
            journal.append([packet(2)])
    assert journal.last == 1

    journal.append([packet(2)])
    assert [r.sequence for r in read_all(tmp_path)[0]] == [1, 2]
    journal.close()


@contextmanager
def few_descriptors(left):
    """Leave this process only `left` free file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_a_reader_without_file_descriptors_finds_no_damage(tmp_path, caplog):
    build(tmp_path)
    reader = JournalReader(tmp_path)
    with few_descriptors(left=1):
        assert reader.read(1) == []
        assert reader.last == list_segments(tmp_path)[-1][0] - 1
    with few_descriptors(left=0):
        assert (reader.read(1), reader.first, reader.last) == ([], 1, 0)
    assert "Too many open files" in caplog.text
    assert reader.read(1)[0].position == 1
    assert reader.last == 60
    assert reader.corrupt == 0
    reader.close()


def test_a_damaged_segment_that_cannot_be_opened_is_not_set_aside(tmp_path, monkeypatch):
    build(tmp_path)
    (_, path), *_ = list_segments(tmp_path)

    def full(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="Too many open files"):
            recovery.replace_damaged(path, 1, None, 0, {}, "damage")
    assert len(recovery.salvage(path, 1, None)) > 0


def test_a_missing_segment_counts_as_damaged_until_a_trim_passes_its_records(tmp_path, caplog):
    journal = Journal(tmp_path, budget=8 << 20, segment_bytes=256 << 10)
    for sequence in range(1, 200):
        journal.append([JournalEntry("robot", sequence, None, 1.5, b"header", bytes(9000))])
    states, last = journal.producers(), journal.last
    journal.close()
    segments = list_segments(tmp_path)
    assert len(segments) > 4
    shutil.rmtree(segments[2][1])

    journal = checked(tmp_path)
    assert journal.damaged == 1
    assert f"the segment that began at record {segments[2][0]} is missing" in caplog.text
    assert (journal.producers(), journal.last) == (states, last)
    journal.append([JournalEntry("robot", 200, None, 1.5, b"header", bytes(9000))])
    journal.trim(segments[3][0])  # the loss is behind what anybody needs
    journal.close()
    journal = checked(tmp_path)
    assert journal.damaged == 0
    journal.close()


SEQUENCE_10 = bytes([0x92, 10, 0xC0])
DAMAGED_STATES = {
    "no msgpack": (3, b"\xc1"),
    "cut off": (3, SEQUENCE_10[:2]),
    "too long": (3, SEQUENCE_10 + b"\x00"),
    "no list": (3, b"\x07"),
    "no text": (3, b"\x92\x01\xa1\xff"),
    "no checksum": (4, SEQUENCE_10),
    "another sequence": (4, b"\x92\x1a" + ProducerState(10).pack(b"robot")[2:]),
    "another name": (4, ProducerState(10).pack(b"rohot")),
    "empty": (4, b""),
}


@pytest.mark.parametrize(("version", "value"), DAMAGED_STATES.values(), ids=DAMAGED_STATES)
def test_a_damaged_state_of_a_producer_is_restored_from_earlier_records(tmp_path, version, value):
    """The receiver must start, and must know all producers of earlier segments."""
    folder = tmp_path / "journal"
    with closing(Journal(folder)) as journal:
        journal.append([JournalEntry("camera", 7, "at 7", 1.5, b"head", b"body")])
    build(folder, groups=2)
    _, path = list_segments(folder)[-1]
    with lmdb.open(str(path), max_dbs=3) as env:
        meta, producers = env.open_db(b"meta"), env.open_db(b"producers")
        with env.begin(write=True) as txn:
            txn.put(b"format", str(version).encode(), db=meta)
            txn.delete(b"camera", db=producers)  # format 3 has no checksums
            txn.put(b"robot", value, db=producers)
    before = read_all_of(folder)
    with closing(checked(folder)) as journal:
        assert journal.damaged == 1
        assert {name: one.sequence for name, one in journal.producers().items()} == {
            "camera": 7,
            "robot": 10,
        }
        assert journal.state("camera").resume_token == "at 7"
    assert read_all_of(folder) == before


def read_all_of(folder):
    with closing(JournalReader(folder)) as reader:
        return [(record.producer, record.sequence) for record in reader.read(1)]


def test_a_reader_returns_intact_records_before_their_segment_is_replaced(tmp_path):
    folder = tmp_path / "journal"
    build(folder)
    first, path = list_segments(folder)[1]
    content = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(content[: content.index(body(first + 3)) + 100])
    before, corrupt = read_all(folder)
    assert corrupt == 1
    assert {first, first + 1, first + 2} <= {r.sequence for r in before}
    checked(folder).close()
    assert read_all(folder)[0] == before


def test_a_damaged_segment_that_cannot_be_replaced_waits_for_the_next_start(
    tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "journal"
    build(folder)
    (_, path), *_ = list_segments(folder)
    (path / "data.mdb").write_bytes((path / "data.mdb").read_bytes()[:-4096])

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "create_segment", no_space)
        journal = checked(folder)
        assert journal.damaged == 1
        assert "cannot be replaced now" in caplog.text
        assert journal.bytes_after(1) > 0
        journal.close()
    journal = checked(folder)
    assert journal.damaged == 1
    journal.close()
    journal = checked(folder)
    assert journal.damaged == 0
    journal.close()


class Killed(BaseException):
    pass


@contextmanager
def killed_at(patched, name, number):
    """End the process at call `number` of the method `name` of Path, and yield the calls."""
    calls, real = [], getattr(Path, name)

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise Killed
        return real(*arguments)

    patched.setattr(Path, name, call)
    with suppress(Killed):
        yield calls


def test_a_kill_while_a_segment_is_replaced_loses_no_intact_record(tmp_path, monkeypatch):
    for number in range(1, 10):
        folder = tmp_path / f"{number}" / "journal"
        build(folder, groups=8)
        (_, path), *_ = list_segments(folder)
        (path / "data.mdb").write_bytes((path / "data.mdb").read_bytes()[:-8192])
        intact = read_all(folder)[0]
        journal = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
        with monkeypatch.context() as patched, killed_at(patched, "rename", number) as renames:
            journal.take_checked(wait=True)
        journal.close()
        with closing(JournalReader(folder)) as reader:  # goes on meanwhile
            assert [record.position for record in reader.read(1)[:1]] in ([1], [])
        checked(folder).close()
        assert read_all(folder)[0] == intact
        assert not list(folder.glob(".*"))
        if len(renames) < number:
            break
    assert number > 3


def test_salvage_keeps_all_records_outside_a_bad_sector(tmp_path, monkeypatch):
    build(tmp_path, groups=2)
    (_, path), *_ = list_segments(tmp_path)
    bad = (path / "data.mdb").read_bytes().index(body(4)) + 5000
    read = os.preadv

    def preadv(handle, buffers, at):
        if at <= bad < at + len(buffers[0]):
            if bad // 4096 * 4096 <= at:
                raise OSError(errno.EIO, "Input/output error")
            buffers = [buffers[0][: bad // 4096 * 4096 - at]]
        return read(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert list(recovery.salvage(path, 1, None)) == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_journal_keeps_only_the_newest_damaged_segments(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recovery, "_MOST_ASIDE", 2)
    folder = tmp_path / "journal"
    build(folder)
    segments = list_segments(folder)
    assert len(segments) > 2
    for _, path in segments:
        (path / "data.mdb").write_bytes(b"nonsense" * 4096)
    mine = tmp_path / "journal.damages"
    mine.write_text("somebody's notes")
    checked(folder).close()
    kept = sorted(one.name for one in tmp_path.glob("journal.damaged-*"))
    assert [name[-20:] for name in kept] == [path.name[-20:] for _, path in segments[-2:]]
    assert caplog.text.count("was removed; 2 newer damaged segments stay") == len(segments) - 2
    assert mine.exists()


def test_a_damaged_segment_stays_in_a_journal_folder_that_is_a_separate_disk(tmp_path, monkeypatch):
    """Otherwise no receiver could start with such a folder."""
    folder = tmp_path / "journal"
    build(folder)
    (_, path), *_ = list_segments(folder)
    (path / "data.mdb").write_bytes(b"nonsense" * 4096)
    rename = Path.rename

    def within(source, target):
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", within)
    checked(folder).close()
    (aside,) = folder.glob("damaged-*")
    assert (aside / "data.mdb").read_bytes() == b"nonsense" * 4096
    assert list(tmp_path.iterdir()) == [folder]


TRUNCATED = """
import os, sys
from pathlib import Path
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import list_segments
reader = JournalReader(sys.argv[1])
assert [record.position for record in reader.read(1, 1)] == [1]
(_, path), *_ = list_segments(Path(sys.argv[1]))
os.truncate(path / "data.mdb", int(sys.argv[2]))
print([record.position for record in reader.read(2)])
"""


@table("size", [0, 30_000])
def test_a_reader_survives_the_truncation_of_its_open_segment(tmp_path, size):
    build(tmp_path)
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert str([2, 20][size == 0]) in done.stdout


def test_append_raises_an_error_in_a_deleted_segment_or_folder(tmp_path):
    """A deleted file that is still open accepts data, which is lost when the file is closed."""
    journal = Journal(tmp_path)
    journal.append([packet(1)])
    shutil.rmtree(list_segments(tmp_path)[0][1])
    with pytest.raises(JournalError, match="has no data file"):
        journal.append([packet(2)])
    assert journal.state("robot").sequence == 1
    journal.append([packet(2)])
    assert [record.sequence for record in read_all(tmp_path)[0]] == [2]

    assert journal.lock.is_in_place()
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    assert not journal.lock.is_in_place()
    away.rename(tmp_path)
    assert journal.lock.is_in_place()

    shutil.rmtree(tmp_path)
    tmp_path.mkdir()  # where another receiver may have begun by now
    for _ in range(2):
        with pytest.raises(JournalError):
            journal.append([packet(3)])
    assert not list_segments(tmp_path)
    (tmp_path / LOCK_FILE).touch()  # the other's
    assert not journal.lock.is_in_place()
    with pytest.raises(JournalError, match="start the receiver again"):
        journal.append([packet(3)])
    journal.close()


def test_the_next_trim_deletes_segments_that_an_earlier_trim_could_not_delete(
    tmp_path, monkeypatch
):
    build(tmp_path)
    journal = checked(tmp_path)

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails)
        with pytest.raises(JournalError):
            journal.trim(journal.last)
    assert journal.trim(journal.last) > 0
    assert not list(tmp_path.glob(".*"))
    journal.close()
