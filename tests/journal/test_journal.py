"""The journal returns its records, stays within its budget, and serves readers meanwhile."""

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import lmdb
import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_entries import entry

from stream_ssl.journal.errors import JournalError, JournalFull
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import (
    JournalEntry,
    NewerFormat,
    ProducerState,
    Record,
    Segment,
    list_segments,
    pack_record,
    unpack_record,
)

MIB = 1 << 20
SEGMENT = 256 << 10

# Hundreds of fsyncs take minutes on a busy disk. Tests of the journal's content, unlike tests of
# crashes, use a file system in memory, if there is one.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def memory_path():
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


def fill(journal, sequence=1, size=9000):
    """Append entries until the journal is full, and return the next sequence."""
    while True:
        try:
            journal.append([entry(sequence, size)])
        except JournalFull:
            return sequence
        sequence += 1


def read_all(reader, position=1):
    records = []
    while found := reader.read(position):
        records += found
        position = found[-1].position + 1
    return records


def test_a_reopened_journal_returns_the_appended_packets(tmp_path):
    journal = Journal(tmp_path / "journal")
    commit = journal.append([entry(1), entry(1, producer="b"), entry(2)])
    journal.close()

    journal = Journal(tmp_path / "journal")
    reader = JournalReader(tmp_path / "journal")
    records = reader.read(1)

    assert (commit.first, commit.last) == (1, 3)
    assert [(r.position, r.producer, r.sequence) for r in records] == [
        (1, "robot/1", 1),
        (2, "b", 1),
        (3, "robot/1", 2),
    ]
    assert records[0].payload == bytes([1]) * 1000
    assert (records[0].header, records[0].received) == (b"header", 1.5)
    assert journal.producers() == {
        "robot/1": ProducerState(2, ["file", 2]),
        "b": ProducerState(1, ["file", 1]),
    }
    assert (reader.first, reader.last, reader.corrupt) == (1, 3, 0)
    reader.close()
    journal.close()


def test_a_reader_can_open_a_folder_before_the_journal_exists(tmp_path):
    reader = JournalReader(tmp_path / "journal")
    assert (reader.read(1), reader.first, reader.last) == ([], 1, 0)
    with pytest.raises(ValueError, match="positions start at 1"):
        reader.read(0)


def test_read_returns_at_least_one_record_and_about_max_bytes(tmp_path):
    journal = Journal(tmp_path)
    journal.append([entry(n) for n in range(1, 11)])
    reader = JournalReader(tmp_path)
    assert len(reader.read(1, max_bytes=1)) == 1
    assert len(reader.read(1, max_bytes=2500)) == 3
    assert [r.position for r in reader.read(8)] == [8, 9, 10]
    reader.close()
    journal.close()


def test_an_advance_moves_the_sequence_but_makes_no_record(tmp_path):
    journal = Journal(tmp_path)
    journal.append([entry(1), JournalEntry("robot/1", 2), JournalEntry("new", 1)])
    journal.close()
    journal = Journal(tmp_path)
    assert journal.last == 1
    assert journal.state("robot/1") == ProducerState(2, ["file", 1])
    assert journal.state("new") == ProducerState(1, None)
    journal.close()


def test_append_refuses_a_sequence_that_does_not_grow(tmp_path):
    journal = Journal(tmp_path)
    journal.append([entry(5)])
    with pytest.raises(ValueError, match="sequence 5 after 5"):
        journal.append([entry(5)])
    with pytest.raises(ValueError, match="sequence 7 after 7"):
        journal.append([entry(7), entry(7)])
    assert journal.last == 1
    journal.close()


def test_a_full_journal_raises_and_accepts_entries_after_a_trim(memory_path):
    journal = Journal(memory_path, budget=MIB)
    sequence = fill(journal)
    assert journal.bytes <= MIB
    states, last = journal.producers(), journal.last

    with pytest.raises(JournalFull, match=r"journal\.budget"):
        journal.append([entry(sequence, 9000)])
    assert (journal.producers(), journal.last) == (states, last)
    journal.append([JournalEntry("robot/1", sequence)])  # an advance needs no room

    freed = journal.trim(last + 1)
    assert freed > MIB // 2
    assert journal.room > freed // 2
    journal.append([entry(sequence + 1, 9000)])
    assert journal.last == last + 1
    journal.close()


def test_a_trimmed_journal_stays_within_its_budget_while_records_pass_through(memory_path):
    journal = Journal(memory_path, budget=MIB)
    largest = 0
    for n in range(1, 1001, 10):
        journal.append([entry(n + k, 9000) for k in range(10)])
        journal.trim(n - 10)
        largest = max(largest, journal.bytes)
        on_disk = sum(f.stat().st_size for f in memory_path.glob("segment-*/data.mdb"))
        assert on_disk <= MIB
    assert largest < 3 * MIB // 4
    assert journal.first > 900
    assert [r.sequence for r in read_all(JournalReader(memory_path), 990)] == list(range(990, 1001))
    journal.close()


def test_bytes_after_counts_headers_and_payloads(memory_path):
    journal = Journal(memory_path, budget=8 * MIB, segment_bytes=SEGMENT)
    for start in range(1, 1001, 100):
        journal.append([entry(n) for n in range(start, start + 100)])
    assert len(list_segments(memory_path)) > 1
    each = 1000 + len(b"header")
    assert journal.bytes_after(1001) == 0
    assert journal.bytes_after(1000) == each
    assert journal.bytes_after(51) == 950 * each
    assert journal.bytes_after(1) == 1000 * each
    journal.close()


def test_a_trim_deletes_only_segments_wholly_below_its_position(memory_path):
    with closing(Journal(memory_path, budget=8 * MIB, segment_bytes=SEGMENT)) as journal:
        for n in range(1, 101):
            journal.append([entry(n, 9000)])
        first, second, third, *_ = (start for start, _ in list_segments(memory_path))
        for before, oldest in ((second - 1, first), (second, second), (third - 1, second)):
            journal.trim(before)
            assert journal.first == oldest == list_segments(memory_path)[0][0]


def test_skip_to_moves_the_next_position_forward_and_never_back(tmp_path):
    journal = Journal(tmp_path)
    journal.skip_to(500)
    assert (journal.first, journal.last) == (500, 499)
    journal.append([entry(1)])
    assert journal.first == 500
    journal.skip_to(100)
    journal.close()
    journal = Journal(tmp_path)
    journal.append([entry(2)])
    reader = JournalReader(tmp_path)
    assert [r.position for r in read_all(reader)] == [500, 501]
    assert [r.position for r in reader.read(501)] == [501]
    reader.close()
    journal.close()


def test_a_journal_keeps_its_id_when_it_is_opened_again(tmp_path):
    def identified(path, known=None):
        with closing(Journal(path)) as journal:
            journal.identify(known)
            return journal.id

    path, told = tmp_path / "journal", "0123456789abcdef"
    first = identified(path, told)
    assert first not in (None, told)  # a new journal is not the journal that the learner has read
    assert identified(tmp_path / "other") != first
    with closing(Journal(path)) as journal:
        journal.append([entry(1)])
    assert first == identified(path) == JournalReader(path).id
    for damage in (first.replace(first[0], "x") + f"\n{first}\n", ""):
        (path / "id").write_text(damage)
        assert JournalReader(path).id is None
        assert identified(path, first) == first  # the learner knows it, and its records are there
    (path / "id").unlink()
    (path / "id.part").mkdir()  # stands for a full disk
    assert identified(path) is None


def test_a_journal_folder_may_be_a_link_to_another_folder(tmp_path):
    """The journal writes and deletes only its own files there, and the folder keeps its mode."""
    other = tmp_path / "disk"
    other.mkdir(mode=0o755)
    (other / "theirs").write_text("kept")
    (tmp_path / "journal").symlink_to(other)
    for number in (1, 2):
        with closing(Journal(tmp_path / "journal")) as journal:
            journal.append([entry(number)])
    assert other.stat().st_mode & 0o777 == 0o755
    assert (other / "theirs").read_text() == "kept"
    assert len(list_segments(other)) >= 1


def test_a_second_writer_is_refused(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="another process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_journal_refuses_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(JournalError, match=r"cannot be locked \(No locks available\): choose"):
        Journal(tmp_path)


def test_a_reader_reports_that_another_container_uses_its_process_id(tmp_path):
    """LMDB locks the byte with the number of a reader's process. Here, all bytes are locked."""
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(1)])
    ((_, segment),) = list_segments(tmp_path)
    code = f"from stream_ssl.journal.reader import *; JournalReader({str(tmp_path)!r}).read(1)"
    with (segment / "lock.mdb").open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX, 0, 1)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert b"is read by another process that has this one's id" in done.stderr
    assert len(JournalReader(tmp_path).read(1)) == 1


def test_bytes_after_counts_the_whole_journal_when_a_segment_cannot_be_read(
    tmp_path, monkeypatch, caplog
):
    """A receiver continues, because the packets on its disk are durable all the same."""

    def no_descriptors(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(1)])
        monkeypatch.setattr(Segment, "total_before", no_descriptors)
        assert journal.bytes_after(1) == journal._total
        assert "Too many open files" in caplog.text


def test_a_journal_refuses_a_newer_format(tmp_path):
    journal = Journal(tmp_path)
    journal.append([entry(1)])
    journal.close()
    (_, path), *_ = list_segments(tmp_path)
    env = lmdb.open(str(path), max_dbs=3)
    with env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"format", b"99")
    env.close()
    with pytest.raises(NewerFormat, match="format 99"):
        Journal(tmp_path)


def test_an_error_names_the_file_in_the_place_of_the_journal(tmp_path):
    (tmp_path / "file").write_text("not a journal")
    for path in (tmp_path / "file", tmp_path / "file" / "journal"):
        with pytest.raises(JournalError, match=f"journal {path}: "):
            Journal(path)
    assert (tmp_path / "file").read_text() == "not a journal"


def test_a_journal_refuses_budgets_and_segments_of_wrong_sizes(tmp_path):
    for budget, segment in ((1000, None), (MIB, 1000), (MIB, MIB)):
        with pytest.raises(ValueError, match=r"must (be at least|lie between)"):
            Journal(tmp_path, budget=budget, segment_bytes=segment)


def test_records_and_states_have_the_same_bytes_as_in_earlier_versions():
    golden = (
        "53534a31d3ea484f0000000000000007000000000000000a00000000000000033ff80000000000005a40760000070000"
        "000400000004726f626f742f3168656164626f6479"
    )
    value = pack_record(7, 10, JournalEntry("robot/1", 3, ["file", 3], 1.5, b"head", b"body"))
    assert value.hex() == golden
    assert unpack_record(memoryview(value)) == Record(7, "robot/1", 3, 1.5, b"head", b"body")
    state = "0392a466696c6503cb3ff8000000000000"
    fresh = ProducerState(3, ["file", 3], 1.5, 2.5)
    packed = f"94{state}cb4004000000000000"
    assert fresh.pack(b"robot/1").hex() == f"{packed}435b4868"
    for value, version, active in (
        (fresh.pack(b"robot/1"), 4, 2.5),
        (bytes.fromhex(packed), 3, 2.5),
        (bytes.fromhex(f"93{state}"), 2, 0.0),
    ):
        found = ProducerState.unpack(b"robot/1", value, version)
        assert (found, found.written, found.active) == (fresh, 1.5, active)


def test_a_journal_of_format_1_is_read_and_continued(tmp_path, monkeypatch):
    """Its producer states have no time of writing, and its segments do not name the one before."""
    journal = Journal(tmp_path)
    journal.append([entry(1), entry(2)])
    journal.close()
    (_, path), *_ = list_segments(tmp_path)
    env = lmdb.open(str(path), max_dbs=3)
    meta, producers = env.open_db(b"meta"), env.open_db(b"producers")
    with env.begin(write=True) as txn:
        txn.put(b"format", b"1", db=meta)
        txn.delete(b"follows", db=meta)
        txn.put(b"robot/1", msgpack.packb((2, ["file", 2])), db=producers)
    env.close()

    monkeypatch.setattr("stream_ssl.journal.producer_states.FORGET_SECONDS", 86_400)
    with closing(Journal(tmp_path)) as journal:
        assert journal.damaged == 0
        assert journal.state("robot/1") == ProducerState(2, ["file", 2])
        journal.append([entry(3)])
        with closing(JournalReader(tmp_path)) as reader:
            assert [r.sequence for r in read_all(reader)] == [1, 2, 3]


READER = """
import sys
from stream_ssl.journal.reader import JournalReader
reader, position = JournalReader(sys.argv[1]), 1
for line in sys.stdin:
    found = reader.read(position)
    position = found[-1].position + 1 if found else position
    print(*(f"{r.position}:{r.sequence}:{len(r.payload)}" for r in found), flush=True)
"""


def test_a_reader_in_another_process_follows_the_writer_through_trims(memory_path):
    journal = Journal(memory_path, budget=MIB, segment_bytes=SEGMENT)
    command = [sys.executable, "-c", READER, str(memory_path)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    seen = []
    try:
        for n in range(1, 201):
            journal.append([entry(n, 4000)])
            reader.stdin.write("\n")
            reader.stdin.flush()
            seen += reader.stdout.readline().split()
            if n % 7 == 0:
                journal.trim(n)
    finally:
        reader.stdin.close()
        reader.stdout.close()
        reader.wait(10)
    assert seen == [f"{n}:{n}:4000" for n in range(1, 201)]
    assert journal.first > 1
    journal.close()


def test_readers_in_threads_follow_the_writer(memory_path):
    journal = Journal(memory_path, budget=8 * MIB, segment_bytes=SEGMENT)
    journal.append([entry(1)])
    seen = [0, 0]

    def follow(who):
        while seen[who] < 300:
            reader = JournalReader(memory_path)
            seen[who] = max(
                seen[who], *(record.sequence for record in reader.read(1 + seen[who])), 0
            )
            reader.close()

    readers = [threading.Thread(target=follow, args=(who,), daemon=True) for who in (0, 1)]
    for reader in readers:
        reader.start()
    for n in range(2, 301, 2):
        journal.append([entry(n, 4000), entry(n + 1, 4000)])
        assert journal.bytes_after(n) > 0
    for reader in readers:
        reader.join(60)
    assert min(seen) >= 300
    journal.close()


def test_clear_readers_frees_the_slot_of_a_killed_reader(tmp_path):
    journal = Journal(tmp_path)
    journal.append([entry(1)])
    hold = (
        "import sys, os, signal, lmdb\n"
        "env = lmdb.open(sys.argv[1], max_dbs=3); txn = env.begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    (_, path), *_ = list_segments(tmp_path)
    subprocess.run([sys.executable, "-c", hold, str(path)], check=False)
    reader = JournalReader(tmp_path)
    assert len(reader.read(1)) == 1
    for n in range(2, 5):
        journal.append([entry(n)])
    assert journal.clear_readers() == 1
    assert journal.clear_readers() == 0
    reader.close()
    journal.close()


class AgainstDict(RuleBasedStateMachine):
    """Random appends, advances, trims, reopenings and reads, against lists and dicts."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.journal = self.open()
        self.reader = JournalReader(self.folder.name)
        self.records = {}
        self.states = {}
        self.trimmed = 1

    def open(self):
        return Journal(self.folder.name, budget=MIB, segment_bytes=SEGMENT, check=False)

    @rule(
        packets=st.lists(
            st.tuples(
                st.sampled_from(["a", "b", "camera/1"]),
                st.integers(0, 3),
                st.sampled_from([None, 0, 10, 1900, 2100, 9000, 40_000]),
            ),
            max_size=8,
        )
    )
    def append(self, packets):
        sequences = {name: state.sequence for name, state in self.states.items()}
        entries = []
        for name, gap, size in packets:
            sequences[name] = sequence = sequences.get(name, 0) + 1 + gap
            if size is None:
                entries.append(JournalEntry(name, sequence))
            else:
                payload = bytes([sequence % 256]) * size
                entries.append(JournalEntry(name, sequence, sequence, 2.0, b"h" * gap, payload))
        try:
            commit = self.journal.append(entries)
        except JournalFull:
            return
        position = commit.first
        for item in entries:
            before = self.states.get(item.producer, ProducerState())
            if item.header is None:
                self.states[item.producer] = ProducerState(item.sequence, before.resume_token)
                continue
            self.states[item.producer] = ProducerState(item.sequence, item.resume_token)
            self.records[position] = item
            position += 1
        assert commit.last == position - 1

    @precondition(lambda self: self.records)
    @rule(part=st.floats(0, 1))
    def trim(self, part):
        before = int(part * (max(self.records) + 1))
        self.journal.trim(before)
        assert self.journal.first <= max(before, self.trimmed)
        self.trimmed = self.journal.first
        self.records = {p: e for p, e in self.records.items() if p >= self.trimmed}

    @rule()
    def reopen(self):
        self.journal.close()
        self.journal = self.open()
        assert self.journal.damaged == 0

    @rule(part=st.floats(0, 1), max_bytes=st.integers(1, 100_000))
    def read(self, part, max_bytes):
        start = 1 + int(part * (self.journal.last + 1))
        found = self.reader.read(start, max_bytes)
        due = [p for p in sorted(self.records) if p >= start]
        assert [r.position for r in found] == due[: len(found)]
        assert bool(found) == bool(due)
        for record in found:
            item = self.records[record.position]
            assert (record.producer, record.sequence) == (item.producer, item.sequence)
            assert (record.header, record.payload) == (item.header, item.payload)

    @invariant()
    def agrees(self):
        assert self.journal.producers() == self.states
        assert self.journal.bytes <= self.journal.budget
        assert self.reader.corrupt == 0
        held = [len(e.header) + len(e.payload) for e in self.records.values()]
        assert self.journal.bytes_after(1) == sum(held)
        if self.records:
            assert (self.journal.first, self.journal.last) == (
                min(self.records),
                max(self.records),
            )

    def teardown(self):
        self.reader.close()
        self.journal.close()
        self.folder.cleanup()


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(
    max_examples=int(os.environ.get("CHAOS_EXAMPLES", "40")),
    stateful_step_count=20,
    derandomize=True,
)


def far(producer, sequence):
    """A small packet of a source with a large position."""
    return JournalEntry(producer, sequence, "x" * 4000, 1.5, b"header", b"payload")


def test_a_budget_below_the_newest_segment_leaves_room_for_new_records(memory_path, caplog):
    """The newest segment can be deleted only after newer records exist."""
    with closing(Journal(memory_path, budget=64 * MIB)) as journal:
        for sequence in range(1, 6):
            journal.append([entry(sequence, MIB)])
    for restarts in range(2):
        with closing(Journal(memory_path, budget=4 * MIB)) as journal:
            assert "the segment of record 1 has" in caplog.text
            assert 2 * MIB < journal.room < 4 * MIB
            sequence = fill(journal, 6 + restarts, 500_000) if restarts else 6
            if not restarts:
                journal.append([entry(6, 1000)])
            assert journal.trim(5) == 0  # the learner needs a record of the first segment
            assert journal.bytes < 10 * MIB
            journal.trim(sequence if restarts else 5)
    caplog.clear()
    with closing(Journal(memory_path, budget=4 * MIB)) as journal:
        assert not caplog.text
        assert journal.first > 5
        assert journal.bytes <= journal.budget
        fill(journal, sequence, 100_000)
        assert journal.bytes <= journal.budget


def test_producer_states_count_against_the_budget(memory_path):
    """Each segment has the states of all producers, and a position may take two pages."""
    budget = 8 * MIB
    with closing(Journal(memory_path, budget=budget)) as journal:
        for sequence in (1, 2):
            for n in range(800):
                try:
                    journal.append([far(f"robot/{n}", sequence)])
                except JournalFull:
                    journal.trim(journal.last)
                assert journal.bytes <= budget
    with closing(Journal(memory_path, budget=budget)) as journal:
        assert journal.bytes <= budget


def test_the_states_of_new_producers_count_against_the_budget_before_they_are_written(memory_path):
    with closing(Journal(memory_path, budget=MIB)) as journal:
        with pytest.raises(JournalFull):
            journal.append([far(f"robot/{n}", 1) for n in range(300)])
        assert journal.producers() == {}
        assert journal.bytes <= MIB


def test_bytes_after_is_zero_when_a_trim_removed_every_record(memory_path):
    with closing(Journal(memory_path)) as journal:
        journal.append([entry(1)])
    with closing(Journal(memory_path)) as journal:
        journal.append([JournalEntry("robot/1", 2)])  # begins a segment, which stays empty
        journal.trim(2)
        assert journal.first > journal.last
        assert journal.bytes_after(1) == 0


def test_groups_of_random_sizes_never_exceed_the_budget(memory_path):
    """The largest group rarely begins a segment just when little room is left."""
    draw, sequence = random.Random(0), 0
    with closing(Journal(memory_path, budget=MIB, segment_bytes=SEGMENT, check=False)) as journal:
        for _ in range(600):
            group = []
            for _ in range(draw.randint(1, 8)):
                sequence += 1
                size = draw.choice([0, 10, 1900, 2100, 9000, 40_000])
                group.append(JournalEntry("robot/1", sequence, None, 1.5, b"", bytes(size)))
            try:
                journal.append(group)
            except JournalFull:
                journal.trim(journal.first + draw.randint(1, 40))
            assert journal.bytes <= journal.budget


def test_producer_states_leave_room_to_begin_a_segment(memory_path):
    """Otherwise the newest segment, which is never trimmed, would fill the budget for good."""
    with closing(Journal(memory_path, budget=8 * MIB)) as journal:
        for first in range(0, 550, 50):
            journal.append([far(f"robot/{n}", 1) for n in range(first, first + 50)])
        for sequence in range(2, 300):
            large = JournalEntry("robot/0", sequence, None, 1.5, b"header", bytes(60_000))
            try:
                journal.append([large])
            except JournalFull:  # as the receiver does, once the learner has read all
                journal.trim(journal.last + 1)
                journal.append([large])
            assert journal.bytes <= 8 * MIB


def test_a_journal_on_a_small_disk_uses_small_segments(tmp_path, monkeypatch):
    """Only whole segments are deleted, so a single one would keep the disk full for good."""
    free = 8 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, free))
    with closing(Journal(tmp_path / "new" / "journal")) as journal:
        assert journal.segment_bytes == MIB
        journal.append([entry(1, size=3 * MIB)])
    free -= 3 * MIB
    with closing(Journal(tmp_path / "new" / "journal")) as journal:
        assert MIB <= journal.segment_bytes < 1.1 * MIB


def test_trimming_stops_when_its_time_is_over(memory_path):
    with closing(Journal(memory_path, budget=8 * MIB, segment_bytes=SEGMENT)) as journal:
        last = fill(journal) - 1
        segments = len(list_segments(memory_path))
        freed = [journal.trim(last, seconds=0.0) for _ in range(3)]
        assert all(freed)
        assert len(list_segments(memory_path)) == segments - 3
        assert journal.trim(last) > max(freed)
        assert len(list_segments(memory_path)) < segments - 4


def test_a_journal_stores_many_producers_with_large_positions(tmp_path):
    with closing(Journal(tmp_path, budget=32 * MIB)) as journal:
        for first in range(0, 1200, 100):
            names = [f"robot/{n}" for n in range(first, first + 100)]
            journal.append([far(name, 1) for name in names])
    with closing(Journal(tmp_path, budget=32 * MIB)) as journal:  # a new segment, with all of them
        journal.append([far("robot/0", 2)])
        assert len(journal.producers()) == 1200
