"""A spool with damaged files: lost samples are counted, and no sample comes twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
from client_peer import image
from spool_files import flip, ids, packet, reopen
from table import table

from stream_ssl.producers import _spool_records as spool_records
from stream_ssl.producers import _spool_segments as spool_segments
from stream_ssl.producers._packer import pack
from stream_ssl.producers._spool import Spool
from stream_ssl.wire import Sample


@pytest.mark.parametrize("size", [0, 50])
def test_an_emptied_description_of_the_spool_costs_no_sample(
    spool: Spool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet("1"), packet("2")], 0, None)
    epoch = spool.epoch
    (spool.folder / "spool.json").write_bytes(bytes(size))
    again = reopen(spool)
    assert ids(again) == ["1", "2"]
    assert again.epoch > epoch
    again.close()
    assert "spool.json: has lost its content, as after a power cut" in caplog.text
    with pytest.raises(ValueError, match="belongs to producer 'a', not 'b'"):
        Spool(spool.folder, "b", 1 << 20)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_restart_cuts_off_a_torn_end(
    spool: Spool, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet("1")], 0, None)
    spool.append([packet("2")], 0, None)
    (segment,) = spool.folder.glob("*.spool")
    os.truncate(segment, segment.stat().st_size - cut)
    again = reopen(spool)
    assert again.append([packet("3")], 0, None) == 1
    last = reopen(again)
    assert ids(last) == ["1", "3"]
    last.close()
    assert "its end was torn" in caplog.text


def test_a_mark_of_torn_packets_does_not_cover_new_packets(spool: Spool) -> None:
    spool.append([packet("1"), packet("2")], 2, (5, [(0, 1), (1, 1)]))
    (segment,) = spool.folder.glob("*.spool")
    os.truncate(segment, segment.stat().st_size - 1)
    again = reopen(spool)
    again.append([packet("3")], 0, None)  # has the number that "2" had
    again = reopen(again)
    assert again.resume(6) == 1
    assert ids(again) == ["3"]
    again.close()


def test_a_spool_skips_and_counts_damaged_packets_and_segments(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "123":
        spool.append([packet(name)], 0, None)
    flip(spool, spool.stored_bytes // 2)
    assert ids(spool) == ["1", "3"]
    assert spool.lost == 1
    spool.close()
    (spool.folder / f"{7:020d}.spool").write_bytes(b"something else")
    (spool.folder / f"{8:020d}.spool").write_bytes(bytes(20))
    Spool(spool.folder, "a", 1 << 20).close()
    assert "is no segment" in caplog.text
    assert {p.suffix for p in spool.folder.glob(f"{7:020d}.*")} == {".damaged"}


Places = dict[str, tuple[Path, int, int]]
"""The segment, the first byte and the end of the record of each sample."""


def filled(spool: Spool, rng: Random, samples: int) -> Places:
    """Fill a spool with one sample a packet, and with marks that cover no sample."""
    places: Places = {}
    for number in range(samples):
        if rng.random() < 0.2:
            spool.mark(1, [])
        pixels = image(side=rng.randint(1, 12))
        sample = Sample.from_array(pixels, str(number), source="a", time=0.0)
        assert spool.append([pack([sample], (number,))], 0, None) == 1
        segment = spool._segments.paths[-1]
        begin = spool._records[-1].offset
        assert begin is not None
        places[str(number)] = segment, begin, spool._segments._end
    return places


def damage(rng: Random, content: bytearray) -> None:
    """Flip bits, zero a range, remove a range from the end, or put bytes in."""
    at = rng.randrange(len(content))
    match rng.choice(["flip", "flips", "zero", "truncate", "insert"]):
        case "flip":
            content[at] ^= 1 << rng.randrange(8)
        case "flips":
            for _ in range(rng.randint(2, 6)):
                content[rng.randrange(len(content))] ^= rng.randint(1, 255)
        case "zero":
            end = min(len(content), at + rng.randint(1, 1500))
            content[at:end] = bytes(end - at)
        case "truncate":
            del content[at:]
        case "insert":
            content[at:at] = rng.randbytes(rng.randint(1, 60))


@table("seed", range(60))
def test_a_damaged_spool_returns_each_whole_packet_once_and_counts_the_others(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive twin keeps the bytes of each record, and looks for them in the damaged files."""
    rng = Random(seed)
    monkeypatch.setattr(spool_segments, "SEGMENT_BYTES", rng.choice([600, 3000, 1 << 20]))
    monkeypatch.setattr(spool_records, "_SCAN_BYTES", rng.choice([64, 300, 1 << 20]))
    spool = Spool(tmp_path, "a", 1 << 20)
    places = filled(spool, rng, 40)
    spool.close()
    before = {path: path.read_bytes() for path in tmp_path.glob("*.spool")}
    for path in rng.sample(sorted(before), rng.randint(1, min(4, len(before)))):
        content = bytearray(before[path])
        damage(rng, content)
        path.write_bytes(content)
    after = {path: path.read_bytes() for path in before}
    whole = [
        name
        for name, (path, begin, end) in places.items()
        if before[path][begin:end] in after[path]
    ]
    again = Spool(tmp_path, "a", 1 << 20)
    known = again.end  # the samples behind the last whole record are a torn end
    assert again.samples == known
    assert ids(again) == whole
    assert again.lost == known - len(whole)
    assert known == 40 or after[max(after)] != before[max(before)]
    again.append([packet("new")], 0, None)
    last = reopen(again)
    assert ids(last) == [*whole, "new"]
    assert last.lost == known - len(whole)
    last.ack(last.end)
    assert (last.samples, last.stored_bytes, list(tmp_path.glob("*.spool"))) == (0, 0, [])
    last.close()


def marked(spool: Spool, rng: Random) -> None:
    """Fill a spool with packets of several samples, and with marks of all that are on disk."""
    sequence, parts = 1, list[tuple[int, int]]()
    for number in range(rng.randint(2, 12)):
        count = rng.randint(1, 3)
        name = packet(*(f"{number}.{n}" for n in range(count)))
        parts.append((spool.end, count))
        assert spool.append([name], 0, (sequence, parts) if rng.random() < 0.5 else None) == 1
        if len(parts) > 2 and rng.random() < 0.2:  # acknowledged
            spool.ack(parts[0][0] + parts[0][1])
            del parts[0]
            sequence += 1
        if rng.random() < 0.3:
            spool.mark(sequence, parts)
    spool.mark(sequence, parts)


def outcome(folder: Path, through: int) -> tuple[int, list[str], int]:
    """Return what a producer does next if its receiver has the packets up to a sequence."""
    spool = Spool(folder, "a", 1 << 20)
    found = spool.resume(through), ids(spool), spool.lost
    spool.close()
    return found


@table("seed", range(40))
def test_a_damaged_mark_makes_no_duplicate(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive twin is the spool before the damage."""
    rng = Random(seed)
    monkeypatch.setattr(spool_segments, "SEGMENT_BYTES", rng.choice([600, 3000, 1 << 20]))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    spool = Spool(whole, "a", 1 << 20)
    marked(spool, rng)
    spool.close()
    marks = [
        (path, offset, record.size)
        for path in sorted(whole.glob("*.spool"))
        for offset, record in spool_records.records_of(path)
        if record.kind == spool_records.MARK
    ]
    chosen = marks[-1:] if seed % 3 else marks  # the newest, or all
    if seed % 5 == 0:
        chosen = [(whole / "mark", 0, (whole / "mark").stat().st_size)]
    for through in rng.sample(range(16), 5):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, broken)
        for path, offset, size in chosen:
            content = bytearray((broken / path.name).read_bytes())
            for _ in range(rng.randint(1, 5)):
                content[offset + rng.randrange(size)] ^= rng.randint(1, 255)
            (broken / path.name).write_bytes(content)
        twin = tmp_path / "twin"
        shutil.rmtree(twin, ignore_errors=True)
        shutil.copytree(whole, twin)
        for _ in range(2):  # the first start writes the mark again
            assert outcome(broken, through) == outcome(twin, through)


def test_a_mark_of_deleted_packets_does_not_cover_new_packets(spool: Spool) -> None:
    spool.append([packet("1"), packet("2")], 0, None)
    spool.mark(1, [(0, 1), (1, 1)])
    spool.ack(2)
    again = reopen(spool)  # numbers begin at 0 again
    again.append([packet("3"), packet("4")], 0, None)
    last = reopen(again)
    assert last.resume(2) == 0
    assert ids(last) == ["3", "4"]
    (last.folder / "mark").write_bytes(spool_records.pack_record(spool_records.MARK, {}))
    assert ids(reopen(last)) == ["3", "4"]


def test_a_payload_that_contains_a_record_adds_no_sample(spool: Spool) -> None:
    for number in (0, 1 << 60):
        inner = spool_records.packet_record(number, packet("inner"))
        sample = Sample.from_array(np.frombuffer(inner, np.uint8)[None], "outer", source="a")
        spool.append([packet("1"), pack([sample], (None,)), packet("2")], 0, None)
    (segment,) = spool.folder.glob("*.spool")
    segment.write_bytes(segment.read_bytes().replace(b"outer", b"OUTER"))
    again = reopen(spool)
    assert (ids(again), again.lost) == (["1", "2", "1", "2"], 2)
    again.close()


def test_a_damaged_packet_that_the_receiver_has_is_not_counted_as_lost(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet(*"123"), packet("4"), packet("5")], 0, None)
    spool.mark(1, [(0, 1), (2, 1), (3, 1), (4, 1)])  # "2" was rejected
    flip(spool, 30)
    spool.close()
    for durable, lost, left in [(0, 2, "45"), (1, 1, "45"), (2, 0, "45"), (3, 0, "5")]:
        again = Spool(spool.folder, "a", 1 << 20)
        settled = again.resume(durable)
        assert (ids(again), again.lost) == (list(left), lost)
        assert settled + lost + len(left) == 5
        assert caplog.text.count("damaged and lost") == (lost > 0)
        caplog.clear()
        again.close()
