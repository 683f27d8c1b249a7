"""Batches against its naive twin, and its reactions to failures."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from batches_naive import (
    SIZE,
    FakeReader,
    FakeRecord,
    assert_equal,
    collect,
    journal,
    naive_batches,
    png_bomb,
    raw,
    record,
    sample,
)
from waiting import until

from stream_ssl.batch import START, Offset
from stream_ssl.feed import batches as module
from stream_ssl.feed import decode_process, journal_tasks
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import REASONS, Decoder, decode_chunk
from stream_ssl.feed.journal_tasks import JournalReplaced, JournalShare
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.journal.reader import JournalReader

BAD = ({"codec": "png"}, b"no image")


@pytest.fixture
def quarantine(tmp_path: Path) -> Quarantine:
    return Quarantine(tmp_path / "quarantine", max_files=20, rate=0)


def good(rng: np.random.Generator, count: int) -> list[tuple[dict[str, Any], bytes]]:
    return [raw(rng, SIZE, SIZE, 3) for _ in range(count)]


def plain(records: int, samples: int, **facts: Any) -> list[FakeRecord]:
    rng = np.random.default_rng(records * 1000 + samples)
    return [record(position, good(rng, samples), **facts) for position in range(1, records + 1)]


def test_batches_equal_the_naive_twin(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(30):
        compare(seed, quarantine, monkeypatch)


def compare(seed: int, quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    bad = float(rng.choice([0.0, 0.1, 0.5, 0.95]))
    gaps = float(rng.choice([0.0, 0.0, 0.2]))
    records = journal(rng, int(rng.integers(2, 25)), bad, gaps)
    monkeypatch.setattr(journal_tasks, "CHUNK", int(rng.choice([1, 3, 5, 64])))
    decoder = Decoder(SIZE)
    size, workers, prefetch = (int(n) for n in rng.integers(1, (18, 4, 4)))
    monkeypatch.setattr(module, "PREFETCH", prefetch)
    start = START
    if seed % 2 and records:
        at = records[rng.integers(len(records))].position
        start = Offset(at, int(rng.integers(0, 13)))
    expected = list(naive_batches(records, decoder, size, start))

    reader = FakeReader(records, chunk=int(rng.integers(1, 5)))
    with Batches(reader, decoder, quarantine, size, start, workers) as batches:
        for batch, wanted in zip(collect(batches, len(expected)), expected, strict=True):
            assert_equal(batch, wanted)
        assert batches.next(0) is None
        if expected:
            assert batches.offset >= expected[-1].offset
    assert {reason for reason, _ in quarantine.counts} <= set(REASONS)


@pytest.mark.parametrize("seed", range(4))
def test_batches_resume_after_any_batch(seed: int, quarantine: Quarantine) -> None:
    rng = np.random.default_rng(1000 + seed)
    records, decoder = journal(rng, 15, bad=0.3, gaps=0.1), Decoder(SIZE)
    expected = list(naive_batches(records, decoder, 4, START))
    stop = int(rng.integers(len(expected)))
    with Batches(FakeReader(records), decoder, quarantine, 4) as batches:
        killed_at = collect(batches, stop + 1)[-1].offset
    rest = expected[stop + 1 :]
    with Batches(FakeReader(records), decoder, quarantine, 4, killed_at) as batches:
        for batch, wanted in zip(collect(batches, len(rest)), rest, strict=True):
            assert_equal(batch, wanted)


def test_a_batch_counts_samples_of_every_bad_kind_and_holds_none(quarantine: Quarantine) -> None:
    rng = np.random.default_rng(5)
    records = journal(rng, 120, bad=1.0)
    kinds = list(naive_batches([*records, record(999, good(rng, 1))], Decoder(SIZE), 1, START))
    with Batches(
        FakeReader([*records, record(999, good(rng, 1))]), Decoder(SIZE), quarantine, 1
    ) as batches:
        (batch,) = collect(batches, 1)
    assert batch.rejected == kinds[0].rejected
    assert set(batch.rejected) == set(REASONS)
    assert sum(batch.rejected.values()) == sum(quarantine.counts.values())


WRITER = """
import sys, msgpack
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import JournalEntry
path, trim = sys.argv[1], int(sys.argv[2])
journal = Journal(path, budget=8 << 20, segment_bytes=256 << 10)
for fields in msgpack.unpackb(sys.stdin.buffer.read()):
    journal.append([JournalEntry(*fields)])
journal.trim(trim)
print(journal.first)
journal.close()
"""


def write(path: Path, records: Sequence[FakeRecord], trim: int = 0) -> int:
    """Append to a journal from a process of its own, as the receiver does, and return its first
    position. LMDB forbids that one process opens a file twice.
    """
    packed = msgpack.packb(
        [(r.producer, r.sequence, None, r.received, r.header, r.payload) for r in records]
    )
    command = [sys.executable, "-c", WRITER, str(path), str(trim)]
    return int(subprocess.run(command, input=packed, stdout=-1, check=True, timeout=60).stdout)


def test_batches_read_a_real_journal_that_grows_and_is_trimmed(
    tmp_path: Path, quarantine: Quarantine
) -> None:
    rng, decoder, path = np.random.default_rng(7), Decoder(SIZE), tmp_path / "journal"
    records = [
        record(place, [sample(rng, 0.3), raw(rng, 80, 80, 3), sample(rng, 0.3)])
        for place in range(1, 61)
    ]
    expected = list(naive_batches(records, decoder, 16, START))
    reader = JournalReader(path)
    write(path, records[:20])
    with Batches(reader, decoder, quarantine, 16) as batches:
        assert_equal(batches.next(20), expected[0])
        write(path, records[20:])
        for batch, wanted in zip(collect(batches, len(expected) - 1), expected[1:], strict=True):
            assert_equal(batch, wanted)
        until(lambda: batches.waiting() == 61 - expected[-1].offset.record)
    reader.close()
    assert write(path, [], trim=expected[-2].offset.record) > 1
    with Batches(reader, decoder, quarantine, 16, expected[-2].offset) as batches:
        assert_equal(batches.next(20), expected[-1])
    reader.close()


def test_batches_start_at_the_first_record_that_the_journal_still_has(
    quarantine: Quarantine, caplog: pytest.LogCaptureFixture
) -> None:
    records = plain(9, 4)[5:]  # positions 6 to 9
    with (
        caplog.at_level(logging.ERROR),
        Batches(FakeReader(records), Decoder(SIZE), quarantine, 4, Offset(2, 3)) as batches,
    ):
        assert_equal(batches.next(20), next(naive_batches(records, Decoder(SIZE), 4, START)))
    assert "journal records 2 to 5 cannot be read" in caplog.text


def test_a_gap_that_is_seen_only_once_skips_no_record(quarantine: Quarantine) -> None:
    records = plain(4, 4)

    class Blinking(FakeReader):
        def read(self, position: int, max_bytes: int = 0) -> list[FakeRecord]:
            found = super().read(position, max_bytes)
            return found[1:] if self.asked.count(position) == 1 else found

    with Batches(Blinking(records), Decoder(SIZE), quarantine, 4) as batches:
        collect(batches, 4)


def test_batches_read_another_journal_whole_even_if_it_is_longer(
    quarantine: Quarantine, caplog: pytest.LogCaptureFixture
) -> None:
    reader = FakeReader(plain(9, 4), id="b" * 16)
    behind = Offset(5, 2)
    same = JournalShare(journal="b" * 16)
    with Batches(reader, Decoder(SIZE), quarantine, 4, behind, share=same) as batches:
        assert collect(batches, 1)[0].offset == Offset(6, 2)
    ended = JournalShare(before=[[behind]], journal="a" * 16)  # other ranks read the other one
    with Batches(reader, Decoder(SIZE), quarantine, 4, behind, share=ended) as batches:
        assert [batch.offset.record for batch in collect(batches, 9)] == [*range(2, 11)]
        assert batches.journal == "b" * 16
    assert f"goes on in journal {'a' * 16}, and this is journal {'b' * 16}" in caplog.text


def test_batches_raise_if_the_journal_is_replaced_while_they_read(quarantine: Quarantine) -> None:
    """Otherwise, the records of the new journal up to the old position would be skipped."""
    reader = FakeReader(plain(3, 4), id="a" * 16)
    with Batches(reader, Decoder(SIZE), quarantine, 4) as batches:
        assert len(collect(batches, 3)) == 3
        reader.id = "b" * 16
        with pytest.raises(JournalReplaced, match=f"{'a' * 16} was replaced by {'b' * 16}"):
            collect(batches, 1)


def test_a_new_journal_is_read_from_its_beginning(
    quarantine: Quarantine, caplog: pytest.LogCaptureFixture
) -> None:
    records = plain(3, 4)
    reader = FakeReader(records[:1])
    with Batches(reader, Decoder(SIZE), quarantine, 4, Offset(500, 2)) as batches:
        assert batches.next(0.1) is None  # a journal with a damaged end may continue after 500
        reader.records = records[:2]
        first, second = collect(batches, 2)
    assert (first.offset, second.offset) == (Offset(2, 0), Offset(3, 0))
    assert "the journal is a new one" in caplog.text


def test_batches_continue_with_new_records_after_a_journal_lost_its_end(
    quarantine: Quarantine, caplog: pytest.LogCaptureFixture
) -> None:
    records = plain(1, 4)
    reader = FakeReader(list(records))
    with Batches(reader, Decoder(SIZE), quarantine, 4, Offset(500, 2)) as batches:
        assert batches.next(0.1) is None
        late = record(600, good(np.random.default_rng(1), 4))
        reader.records = [*records, late]
        batch = batches.next(20)
        assert batch is not None
        assert batch.offset == Offset(601, 0)
    assert "journal records 500 to 599 cannot be read" in caplog.text


def test_prefetch_is_bounded(quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFETCH", 3)
    reader = FakeReader(plain(200, 4), chunk=1)
    with Batches(reader, Decoder(SIZE), quarantine, 4, workers=2) as batches:
        until(lambda: len(reader.asked) >= 4)
        collect(batches, 1)
        until(lambda: batches.pending() >= 4 * 3)
        # three ready, one waiting for room, three being decoded, one handed out
        assert max(reader.asked) <= 8
        assert batches.waiting() == 199


def test_batches_report_their_lag_and_the_samples_that_wait(quarantine: Quarantine) -> None:
    records = [
        record(position, good(np.random.default_rng(position), 4), received=100.0 * position)
        for position in (1, 2, 3)
    ]
    reader = FakeReader([])
    with Batches(reader, Decoder(SIZE), quarantine, 6, clock=lambda: 1000.0) as batches:
        assert (batches.lag(), batches.waiting(), batches.pending()) == (0.0, 0, 0)
        reader.records = records
        until(lambda: 800 <= batches.lag() < 830)  # since its last sample came
        assert (batches.waiting(), batches.pending()) == (3, 12)
        collect(batches, 1)
        until(lambda: 700 <= batches.lag() < 730)
        assert (batches.waiting(), batches.pending()) == (2, 6)
        collect(batches, 1)
        until(lambda: batches.lag() == 0.0)  # the last record is noted as decoded
        assert (batches.waiting(), batches.pending()) == (0, 0)
        assert batches.offset == Offset(4, 0)


def test_a_record_received_in_the_future_causes_no_negative_lag(quarantine: Quarantine) -> None:
    reader = FakeReader(plain(1, 4, received=9.0))
    with Batches(reader, Decoder(SIZE), quarantine, 4, clock=lambda: 5.0) as batches:
        until(lambda: batches.offset == START and batches._ready)
        assert 0 <= batches.lag() < 30


@pytest.mark.parametrize("jump", [1e8, -1e8])
def test_a_jump_of_the_clock_does_not_change_the_lag(quarantine: Quarantine, jump: float) -> None:
    now = [1000.0]
    reader = FakeReader(plain(2, 4, received=990.0))
    with Batches(reader, Decoder(SIZE), quarantine, 8, clock=lambda: now[0]) as batches:
        until(lambda: batches._ready)
        now[0] += jump
        assert 10 <= batches.lag() < 40
        reader.records = [record(3, good(np.random.default_rng(0), 8), received=now[0] - 60)]
        collect(batches, 1)
        until(lambda: 60 <= batches.lag() < 90)


def test_samples_of_an_unfilled_batch_are_pending_and_cause_no_lag(quarantine: Quarantine) -> None:
    """The stream ends; an hour later comes one more sample, which the learner does not take."""
    now = [0.0]
    records = [record(p, good(np.random.default_rng(p), 4), received=10.0 * p) for p in (1, 2)]
    reader = FakeReader(records)
    with Batches(reader, Decoder(SIZE), quarantine, 3, clock=lambda: now[0]) as batches:
        collect(batches, 2)
        now[0] = 3700.0
        until(lambda: batches.waiting() == 0)
        assert (batches.lag(), batches.pending(), batches.offset) == (0.0, 2, Offset(2, 2))
        assert batches.unread == 3
        reader.records = [*records, record(3, good(np.random.default_rng(3), 1), received=3600.0)]
        until(lambda: batches._ready)
        assert 100 <= batches.lag() < 130
        assert (batches.waiting(), batches.pending()) == (2, 3)
        assert batches.unread == 2


def test_records_that_wait_for_decoding_count_as_lag(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(decoder: Decoder, task: Any, keep: None) -> Any:
        assert gate.wait(20)
        return decode_chunk(decoder, task)

    monkeypatch.setattr(decode_process, "decode_chunk", slow)
    reader = FakeReader(plain(1, 2, received=40.0))
    with Batches(reader, Decoder(SIZE), quarantine, 4, clock=lambda: 100.0) as batches:
        until(lambda: 60 <= batches.lag() < 90)
        assert batches.waiting() == 1
        gate.set()
        until(lambda: (batches.lag(), batches.waiting(), batches.pending()) == (0.0, 0, 2))


def test_bad_samples_alone_move_the_offset_and_cause_no_lag(quarantine: Quarantine) -> None:
    rng = np.random.default_rng(0)
    reader = FakeReader([record(1, [*good(rng, 4), BAD, BAD]), record(2, [BAD]), record(3, [BAD])])
    with Batches(reader, Decoder(SIZE), quarantine, 4) as batches:
        (batch,) = collect(batches, 1)
        assert (batch.offset, batch.rejected) == (Offset(1, 4), {})
        until(lambda: batches.offset == Offset(4, 0))
        assert (batches.lag(), batches.pending()) == (0.0, 0)
        reader.records.append(record(4, good(rng, 3)))
        until(lambda: (batches.waiting(), batches.pending()) == (0, 3))
        assert batches.offset == Offset(4, 0)
        reader.records.append(record(5, good(rng, 3)))
        (batch,) = collect(batches, 1)
        assert (batch.offset, batch.rejected) == (Offset(5, 1), {"format": 4})
        assert batches.pending() == 2


def test_bad_samples_after_a_waiting_sample_do_not_move_the_offset(quarantine: Quarantine) -> None:
    rng = np.random.default_rng(0)
    reader = FakeReader([record(1, [BAD]), record(2, good(rng, 2)), record(3, [BAD, BAD])])
    with Batches(reader, Decoder(SIZE), quarantine, 4) as batches:
        until(lambda: quarantine.counts["format", "robot"] == 3)
        reader.records.append(record(4, [BAD]))
        until(lambda: quarantine.counts["format", "robot"] == 4)
        assert batches.offset == Offset(2, 0)
        assert batches.rejected() == {("format", "robot"): 4}, "no batch has reported them"
        until(lambda: batches.pending() == 2)


def test_an_unreadable_packet_counts_once(quarantine: Quarantine) -> None:
    broken = FakeRecord(1, "robot", 1, 1.0, b"\xc1", b"x")
    reader = FakeReader([broken, record(2, good(np.random.default_rng(0), 2))])
    for start, rejected in ((Offset(1, 0), {"packet": 1}), (Offset(1, 1), {})):
        with Batches(reader, Decoder(SIZE), quarantine, 2, start) as batches:
            assert collect(batches, 1)[0].rejected == rejected


def test_a_packet_with_a_deeply_nested_field_is_rejected(quarantine: Quarantine) -> None:
    """Python cannot print such a value."""
    (fields, data), *others = good(np.random.default_rng(0), 3)
    for name in ("label", "shape", "later"):
        deep = record(1, [({**fields, name: None}, data)])
        packed = msgpack.packb(name) + b"\x91" * 1000 + b"\x01"
        header = deep.header.replace(msgpack.packb(name) + b"\xc0", packed)
        reader = FakeReader([replace(deep, header=header), record(2, others)])
        with Batches(reader, Decoder(2 * SIZE), quarantine, 2) as batches:
            assert collect(batches, 1)[0].rejected == {"packet": 1}, name


def test_every_sample_is_trained_rejected_or_pending(quarantine: Quarantine) -> None:
    records = [r for r in journal(np.random.default_rng(3), 40, bad=0.4) if r.header != b"\xc1"]
    sent = sum(len(r.header) and len(_rows(r)) for r in records)
    expected = list(naive_batches(records, Decoder(SIZE), 8, START))
    with Batches(FakeReader(records), Decoder(SIZE), quarantine, 8) as batches:
        taken = collect(batches, len(expected))
        trained = sum(map(len, taken))
        until(lambda: trained + sum(batches.rejected().values()) + batches.pending() == sent)
        decoded = sum(batches.decoded().values())
        assert decoded == trained + batches.pending(), "a sample counts before its batch is full"


def _rows(each: FakeRecord) -> list[Any]:
    from stream_ssl.wire import Data

    rows: list[Any] = Data(each.sequence, each.header, each.payload).fields["samples"]
    return rows


def test_batches_before_a_failure_are_returned_before_the_error(quarantine: Quarantine) -> None:
    class Failing(FakeReader):
        def read(self, position: int, max_bytes: int = 0) -> list[FakeRecord]:
            if position == 3:
                raise OSError("disk on fire")
            return super().read(position, max_bytes)

    with Batches(Failing(plain(4, 4), chunk=1), Decoder(SIZE), quarantine, 4) as batches:
        collect(batches, 2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"Offset\(record=3.*disk on fire") as caught:
                batches.next(20)
            assert isinstance(caught.value.__cause__, OSError)


def test_a_lack_of_memory_does_not_count_as_a_bad_sample(quarantine: Quarantine) -> None:
    class Starved(Decoder):
        def block(self, rows: Any, payload: Any) -> Any:
            raise MemoryError("no more")

    with (
        Batches(FakeReader(plain(1, 4)), Starved(SIZE), quarantine, 4) as batches,
        pytest.raises(RuntimeError, match="no more"),
    ):
        batches.next(20)
    assert not quarantine.counts


def test_close_ends_a_call_that_waits_for_a_batch(quarantine: Quarantine) -> None:
    before = threading.active_count()
    batches = Batches(FakeReader([]), Decoder(SIZE), quarantine, 4)
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(batches.next(60)))
    waiter.start()
    batches.close()
    waiter.join(10)
    assert not waiter.is_alive()
    assert found == [None]
    assert batches.next(60) is None
    batches.close()
    assert threading.active_count() == before


def test_close_ends_all_threads_while_batches_wait_for_room(quarantine: Quarantine) -> None:
    before = threading.active_count()
    batches = Batches(FakeReader(plain(100, 4)), Decoder(SIZE), quarantine, 2)
    until(lambda: batches.pending() >= 4)
    batches.close()
    assert threading.active_count() == before


def test_next_with_a_timeout_of_0_returns_none_without_a_batch(quarantine: Quarantine) -> None:
    with Batches(FakeReader([]), Decoder(SIZE), quarantine, 4) as batches:
        assert batches.next(0) is None


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"workers": 0}])
def test_batches_refuse_a_size_or_a_number_of_workers_of_0(
    quarantine: Quarantine, wrong: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        Batches(FakeReader([]), Decoder(SIZE), quarantine, **{"batch_size": 4, **wrong})


@pytest.mark.parametrize("wrong", [(0, 0), (1, -1)])
def test_an_offset_before_the_first_record_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="the journal begins at"):
        Offset(*wrong)


def test_bad_samples_land_in_the_quarantine_once(tmp_path: Path) -> None:
    bomb = ({"codec": "png", "id": "../../etc/x\0"}, png_bomb(12_000, 12_000))
    records = [record(1, [bomb, *good(np.random.default_rng(0), 4)], producer="../robot")]
    folder = tmp_path / "quarantine"
    for _ in range(3):  # as if after crashes
        with Batches(FakeReader(records), Decoder(SIZE), Quarantine(folder), 4) as batches:
            (batch,) = collect(batches, 1)
            assert batch.rejected == {"pixels": 1}
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quarantine"]
