"""The spool: packets on disk while the network is away, sent once each and in order afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from client_peer import Peer, image, until, welcome
from test_client_protocol import SIZE, Receiver, Simulation, pull, put

from stream_ssl.producers import DeadlineError, Delivery, Producer
from stream_ssl.producers import _spool as spool_module
from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import NOT_GIVEN, Packer, Packet, pack
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers._spool import Spool
from stream_ssl.wire import Ack, Data, Hello, Message, Sample


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def packet(*names: str, position: object = NOT_GIVEN) -> Packet:
    packer = Packer(1 << 20, 1 << 10)
    for name in names:
        sample = Sample.from_array(image(side=2), name, source="a", time=0.0)
        assert not list(packer.add(sample, 100, position, now=0.0))
    return packer.take()


def ids(spool: Spool) -> list[str]:
    """Of all samples that are on disk only."""
    found: list[str] = []
    while (packet := spool.load()) is not None:
        found += packet.ids
    return found


def reopen(spool: Spool, **settings: int) -> Spool:
    spool.close()
    return Spool(spool.folder, "a", settings.get("max_bytes", 1 << 20))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "a", 1 << 20)


def test_packets_come_back_in_order_also_after_a_restart(spool: Spool) -> None:
    assert spool.append([packet("1", "2", position=7), packet("3")], 0, None) == 2
    assert spool.append([packet("4", position=[9])], 0, None) == 1
    again = reopen(spool)
    assert (again.samples, again.position) == (4, [9])
    assert ids(again) == ["1", "2", "3", "4"]
    again.ack(3)
    assert ids(reopen(again)) == ["1", "2", "3", "4"]  # no mark says that the receiver has them
    again.close()


def test_a_packet_is_the_same_to_the_byte(spool: Spool) -> None:
    before = packet("1", "2", position=[1])
    spool.append([before], 0, None)
    after = reopen(spool).load()
    assert after is not None
    assert (after.data.header, after.data.payload) == (before.data.header, before.data.payload)
    assert (after.positions, after.count, after.size) == (before.positions, 2, before.size)


@pytest.mark.parametrize("durable", range(7))
def test_a_mark_tells_what_the_receiver_has(spool: Spool, durable: int) -> None:
    packets = [packet("1", "2"), packet("3"), packet("4")]
    spool.append(packets, 3, (3, [(0, 2), (2, 1), (3, 1)]))  # sequences 3, 4 and 5
    spool.append([packet("5")], 0, None)
    again = reopen(spool)
    had = [0, 2, 3, 4][min(max(0, durable - 2), 3)]  # samples
    assert again.resume(durable) == had
    assert ids(again) == ["1", "2", "3", "4", "5"][had:]
    again.close()


def test_what_a_mark_begins_behind_is_forgotten_even_if_all_it_names_is_torn_off(
    spool: Spool,
) -> None:
    spool.append([packet("1", "2")], 0, None)
    spool.mark(5, [(2, 3)])  # of three samples that a power cut has taken
    again = reopen(spool)
    assert ids(again) == []
    again.close()


def test_parts_of_a_packet_are_cut_in_the_same_way_again(spool: Spool) -> None:
    spool.append([packet("1", "2", "3", "4", "5")], 0, None)
    spool.mark(1, [(0, 1), (1, 3), (4, 1)])
    again = reopen(spool)
    assert again.resume(1) == 1
    parts = [again.load() for _ in range(2)]
    assert [part and part.ids for part in parts] == [("2", "3", "4"), ("5",)]
    again.close()


def test_what_leaves_memory_is_loaded_again_as_it_was_cut(spool: Spool) -> None:
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
def test_what_was_rejected_is_left_out_and_counted(
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


def test_segments_go_when_all_of_theirs_is_acknowledged(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 200)
    for number in range(20):
        spool.append([packet(str(number))], 0, None)
    before = len(list(spool.folder.glob("*.spool")))
    assert before > 5
    spool.ack(10)
    assert 1 < len(list(spool.folder.glob("*.spool"))) <= before - 4
    assert spool.bytes == sum(p.stat().st_size for p in spool.folder.glob("*.spool"))
    assert (spool.samples, ids(spool)) == (10, [str(n) for n in range(10, 20)])
    spool.ack(20)
    assert (spool.samples, spool.bytes, list(spool.folder.glob("*.spool"))) == (0, 0, [])
    spool.append([packet("20")], 0, None)
    assert ids(reopen(spool)) == ["20"]


def test_a_full_spool_takes_no_more_until_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "a", max_bytes=600)
    packets = [packet(str(number)) for number in range(9)]
    taken = spool.append(packets, 0, None)
    assert 1 < taken < 9
    assert spool.full
    assert spool.bytes <= 600
    spool.ack(taken)
    assert not spool.full
    assert spool.append(packets[taken:], 0, None) > 0
    spool.close()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_end_is_cut_off(spool: Spool, cut: int, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_mark_of_packets_that_were_torn_off_does_not_cover_others(spool: Spool) -> None:
    spool.append([packet("1"), packet("2")], 2, (5, [(0, 1), (1, 1)]))
    (segment,) = spool.folder.glob("*.spool")
    os.truncate(segment, segment.stat().st_size - 1)
    again = reopen(spool)
    again.append([packet("3")], 0, None)  # has the number that "2" had
    again = reopen(again)
    assert again.resume(6) == 1
    assert ids(again) == ["3"]
    again.close()


def test_damage_is_counted_and_left_out(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    for name in "123":
        spool.append([packet(name)], 0, None)
    (segment,) = spool.folder.glob("*.spool")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
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
        segment = spool._segments[-1]
        begin = spool._records[-1].offset
        assert begin is not None
        places[str(number)] = segment, begin, spool._size
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


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_damaged_whole_packets_come_once_and_the_others_are_counted(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive twin keeps the bytes of each record, and looks for them in the damaged files."""
    rng = Random(seed)
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", rng.choice([600, 3000, 1 << 20]))
    monkeypatch.setattr(spool_module, "_SCAN_BYTES", rng.choice([64, 300, 1 << 20]))
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
    assert (last.samples, last.bytes, list(tmp_path.glob("*.spool"))) == (0, 0, [])
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
    """What a producer does next whose receiver has the packets up to this sequence."""
    spool = Spool(folder, "a", 1 << 20)
    found = spool.resume(through), ids(spool), spool.lost
    spool.close()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_mark_makes_no_duplicate(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive twin is the spool before the damage."""
    rng = Random(seed)
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", rng.choice([600, 3000, 1 << 20]))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    spool = Spool(whole, "a", 1 << 20)
    marked(spool, rng)
    spool.close()
    marks = [
        (path, offset, size)
        for path in sorted(whole.glob("*.spool"))
        for kind, _, offset, size in spool_module._records_of(path)
        if kind == spool_module._MARK
    ]
    chosen = marks[-1:] if seed % 3 else marks  # the newest, or all
    if seed % 5 == 0:
        chosen = [(whole / "mark", 0, (whole / "mark").stat().st_size)]
    for through in range(16):
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


def test_a_mark_of_packets_that_are_gone_is_not_used_for_others(spool: Spool) -> None:
    spool.append([packet("1"), packet("2")], 0, None)
    spool.mark(1, [(0, 1), (1, 1)])
    spool.ack(2)
    again = reopen(spool)  # numbers begin at 0 again
    again.append([packet("3"), packet("4")], 0, None)
    last = reopen(again)
    assert last.resume(2) == 0
    assert ids(last) == ["3", "4"]
    (last.folder / "mark").write_bytes(spool_module._record(2, b"\x80", b"", b""))
    assert ids(reopen(last)) == ["3", "4"]


def test_a_payload_that_contains_a_record_adds_no_sample(spool: Spool) -> None:
    for number in (0, 1 << 60):
        inner = spool_module._packet_record(number, packet("inner"))
        sample = Sample.from_array(np.frombuffer(inner, np.uint8)[None], "outer", source="a")
        spool.append([packet("1"), pack([sample], (None,)), packet("2")], 0, None)
    (segment,) = spool.folder.glob("*.spool")
    content = bytearray(segment.read_bytes())
    content[:] = content.replace(b"outer", b"OUTER")
    segment.write_bytes(content)
    again = reopen(spool)
    assert (ids(again), again.lost) == (["1", "2", "1", "2"], 2)
    again.close()


def test_a_damaged_packet_that_the_receiver_has_is_not_lost(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet(*"123"), packet("4"), packet("5")], 0, None)
    spool.mark(1, [(0, 1), (2, 1), (3, 1), (4, 1)])  # "2" was rejected
    (segment,) = spool.folder.glob("*.spool")
    content = bytearray(segment.read_bytes())
    content[30] ^= 1
    segment.write_bytes(content)
    spool.close()
    for durable, lost, left in [(0, 2, "45"), (1, 1, "45"), (2, 0, "45"), (3, 0, "5")]:
        again = Spool(spool.folder, "a", 1 << 20)
        settled = again.resume(durable)
        assert (ids(again), again.lost) == (list(left), lost)
        assert settled + lost + len(left) == 5
        assert caplog.text.count("damaged and lost") == (lost > 0)
        caplog.clear()
        again.close()


def test_a_spool_whose_files_are_removed_goes_on(spool: Spool) -> None:
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
    assert (spool.samples, spool.bytes) == (0, 0)
    spool.close()


def test_a_spool_has_one_owner(spool: Spool) -> None:
    with pytest.raises(ValueError, match="another producer uses it"):
        Spool(spool.folder, "a", 1 << 20)
    spool.close()
    with pytest.raises(ValueError, match="belongs to producer 'a', not 'b'"):
        Spool(spool.folder, "b", 1 << 20)


def test_a_spool_is_free_once_closed_whatever_has_been_forked_meanwhile(spool: Spool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[spool._lock]
    ) as child:
        spool.close()
        Spool(spool.folder, "a", 1 << 20).close()
        child.communicate(b"\n")


def test_a_refused_argument_leaves_the_spool_free(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_state"):
        Producer("tcp://127.0.0.1:1", "a", on_full="spool", spool=tmp_path, on_state=5)  # type: ignore[arg-type]
    Spool(tmp_path, "a", 1 << 20).close()


def test_an_epoch_grows_whatever_the_clock_says(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module.time, "time_ns", lambda: 5)
    again = reopen(spool)
    assert again.epoch == spool.epoch + 1
    again.close()


def test_a_disk_that_refuses_keeps_what_it_has(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([packet("1")], 0, None)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_module.os, "fsync", fail)
        assert spool.append([packet("2")], 0, None) == 0
    assert spool.full
    assert "No space left" in caplog.text
    assert spool.append([packet("3")], 0, None) == 0  # for some seconds
    spool._retry_at = 0.0
    assert spool.append([packet("3")], 0, None) == 1
    assert ids(reopen(spool)) == ["1", "3"]


class Committing(Receiver):
    """A receiver that commits before it says WELCOME, so that `resume` is all that it has."""

    def take(self, message: Hello | Data, damaged: bool) -> Message | None:
        if isinstance(message, Hello):
            self.commit()
        return super().take(message, damaged)


def work_spool(protocol: ProducerProtocol) -> list[Packet]:
    """Do what the I/O thread does with the disk in each step. Return the packets written."""
    outbox, spool = protocol.outbox, protocol.outbox.spool
    assert spool is not None
    packets, loaded, mark = outbox.to_spool(protocol.active)
    written = 0
    if packets:
        written = spool.append(packets, loaded, mark)
        outbox.on_spooled(packets[:written], min(loaded, written), protocol.active)
    if outbox.load_spool(protocol.active) and (mark := outbox.sequences()) is not None:
        spool.mark(*mark)
    return packets[:written]


class Robot(Simulation):
    """The simulation of the protocol, with a spool, and with a power cut among the faults.

    With `rots`, packets on disk are damaged at any moment.
    """

    def __init__(self, rng: Random, folder: Path, rots: bool) -> None:
        super().__init__(rng, drops=False)
        self.rots = rots
        self.rotten: set[str] = set()  # damaged on disk
        self.folder = folder
        self.receiver = Committing()
        self.safe: set[str] = set()  # on the robot's disk once
        self.protocol = self.start()

    def start(self) -> ProducerProtocol:
        spool = Spool(self.folder, "a", 1 << 20)
        outbox = Outbox(Packer(1 << 20, 1), 0.2, spool, buffer_bytes=8 * SIZE)
        return ProducerProtocol(Hello("a", spool.epoch, 1), outbox, reason="")

    def step(self) -> None:
        self.work_spool()
        if self.rng.random() < 0.03:
            self.power_cut()
        if self.rots and self.rng.random() < 0.1:
            self.rot()
        super().step()

    def rot(self) -> None:
        spool = self.protocol.outbox.spool
        assert spool is not None
        if not spool._records:
            return
        if self.rng.random() < 0.5:
            self.rot_mark(spool)
        record = self.rng.choice(spool._records)
        damaged = spool_module._read_packet(record)
        if damaged is None or record.offset is None:
            return
        self.rotten |= set(damaged.ids)
        self.flip(record.segment, record.offset + self.rng.randrange(60))

    def rot_mark(self, spool: Spool) -> None:
        """Damage one of the two copies of the newest mark."""
        marks = [
            (path, offset + self.rng.randrange(size))
            for path in spool._segments
            for kind, _, offset, size in spool_module._records_of(path)
            if kind == spool_module._MARK
        ]
        if marks:
            self.flip(*marks[-1])

    def flip(self, path: Path, at: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1 << self.rng.randrange(8)]))

    def work_spool(self) -> None:
        self.safe |= {name for packet in work_spool(self.protocol) for name in packet.ids}

    def power_cut(self) -> None:
        rng = self.rng
        self.disconnect(restarted=rng.random() < 0.5)
        spool = self.protocol.outbox.spool
        assert spool is not None
        if rng.random() < 0.5:  # in the middle of a write
            packets, loaded, mark = self.protocol.outbox.to_spool(self.protocol.active)
            before = list(spool._segments), spool._size
            if packets and spool.append(packets, loaded, mark):
                last = spool._segments[-1]
                start = before[1] if before[0] and last == before[0][-1] else 0
                os.truncate(last, rng.randint(start, last.stat().st_size))
        spool.close()
        self.protocol = self.start()

    def check(self) -> None:
        taken = [int(name) for name in self.receiver.journal + self.receiver.group]
        assert taken == sorted(set(taken)), "twice, or out of order"
        window = list(self.protocol.window)
        on_disk = [packet.spooled is not None for packet in window]
        assert on_disk == sorted(on_disk, reverse=True), "what is on disk comes first"

    def heal(self) -> None:
        self.busy, self.receiver.credit = False, 3 * SIZE
        for _ in range(200 + 5 * self.count):
            self.work_spool()
            if not self.connected:
                self.connect()
            self.producer_speaks(6)
            self.receiver_hears(7, damaged=False)
            self.producer_hears(20)
            self.now += 0.1
            self.check()
            if self.protocol.outbox.done == self.protocol.outbox.taken and not self.receiver.group:
                break
        assert self.protocol.outbox.spool is not None
        self.protocol.outbox.spool.close()


@pytest.mark.parametrize("rots", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_on_disk_arrives_once_and_in_order(seed: int, rots: bool, tmp_path: Path) -> None:
    rng = Random(seed)
    for number in range(20):
        robot = Robot(rng, tmp_path / str(number), rots)
        for _ in range(120):
            robot.step()
            if robot.protocol.fatal is not None:
                break
        else:
            robot.heal()
            assert robot.protocol.fatal is None
            assert robot.safe - robot.rotten <= set(robot.receiver.journal)
            assert robot.protocol.outbox.done == robot.protocol.outbox.taken
            assert robot.protocol.outbox.spool is not None
            assert robot.protocol.outbox.spool.samples == 0
            continue
        assert robot.protocol.outbox.spool is not None
        robot.protocol.outbox.spool.close()
        assert "damaged 3 times" in str(robot.protocol.fatal)


def test_a_packet_damaged_after_it_was_sent_shifts_no_sequence(spool: Spool) -> None:
    """The receiver has "1" to "3" and could not acknowledge them. "2" is damaged on this disk."""
    outbox = Outbox(Packer(1 << 20, 1), 0.2, spool, buffer_bytes=4)
    protocol = ProducerProtocol(Hello("a", spool.epoch, 1), outbox, reason="")
    protocol.connected(0.0)
    pull(protocol, 0.0)
    protocol.received(welcome(credit=1 << 20), 0.0)
    outbox.window.limit = 1 << 20
    for number in range(1, 5):
        put(protocol, number)
    sent = [pull(protocol, 0.0) for _ in range(3)]
    assert [it[0] for it in sent if isinstance(it, tuple)] == [1, 2, 3]
    protocol.disconnected("away")
    packets, loaded, mark = outbox.to_spool(active=False)
    assert spool.append(packets, loaded, mark) == 4
    outbox.on_spooled(packets, loaded, active=False)
    assert len(outbox.window) == 0
    offset = spool._records[1].offset
    assert offset is not None
    with spool._segments[0].open("r+b") as file:
        file.seek(offset)
        file.write(b"?")
    protocol.connected(1.0)
    pull(protocol, 1.0)
    protocol.received(welcome(resume=3, credit=1 << 20), 1.0)
    while outbox.load_spool(active=True):
        pass
    last = pull(protocol, 1.0)
    assert isinstance(last, tuple)
    assert (last[0], last[1].ids) == (4, ("4",))
    protocol.received(Ack(4, 1 << 20), 1.0)
    assert (outbox.done, outbox.taken, spool.samples) == (4, 4, 0)
    assert outbox.stats.acked.samples == 4
    assert outbox.stats.dropped.samples == 0
    spool.close()


def spooling(peer: Peer, folder: Path, **settings: object) -> Producer:
    settings = {"packet_samples": 1, "linger": 0.01, **settings}
    return Producer(peer.address, "a", on_full="spool", spool=folder, **settings)  # type: ignore[arg-type]


def arrived(journal: list[Data]) -> list[str]:
    return [sample.id for data in journal for sample in data.samples()]


def test_what_is_sent_without_a_receiver_goes_to_the_next_run(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    deliveries = []
    with spooling(peer, tmp_path) as producer:
        for number in range(20):
            producer.send(image(), id=str(number), position=number, on_delivery=deliveries.append)
        until(lambda: producer.stats.spooled.samples == 20)
        began = time.monotonic()
    assert time.monotonic() - began < 15.0  # close() does not wait 30 s for nobody
    assert {delivery.outcome for delivery in deliveries} == {"spooled"}
    assert producer.stats.dropped.samples == 0
    peer.open()
    with peer.serving(resume=4) as journal, spooling(peer, tmp_path) as producer:
        assert producer.connect().position == 19
        producer.send(image(), id="20")
        producer.flush()
        assert producer.stats.spooled.samples == 0
    assert arrived(journal) == [str(n) for n in range(21)]
    assert journal[-1].position == 19  # not taken back


def test_a_short_absence_is_spooled_and_made_up_for(peer: Peer, tmp_path: Path) -> None:
    told: list[Delivery] = []
    with spooling(peer, tmp_path) as producer:
        peer.welcome()
        producer.connect()
        for name in "123":
            producer.send(image(), id=name, on_delivery=told.append)
        assert [next(peer.expect(Data).samples()).id for _ in range(3)] == ["1", "2", "3"]
        peer.say(Ack(1, 1 << 24))
        until(lambda: producer.stats.acked.samples == 1)
        assert producer.stats.spooled.samples == 0  # the disk is left alone while all is well
        peer.drop()
        until(lambda: producer.stats.spooled.samples == 2)
        producer.send(image(), id="4")
        until(lambda: producer.stats.spooled.samples == 3)
        peer.open()
        assert peer.welcome(resume=2, epoch=2).first == 2
        assert [next(peer.expect(Data).samples()).id for _ in range(2)] == ["3", "4"]
        peer.say(Ack(4, 1 << 24))
        producer.flush()
        assert producer.stats.spooled.samples == 0
    assert not list(tmp_path.glob("*.spool"))
    assert [(it.id, it.outcome) for it in told] == [  # once each
        *(("1", "acknowledged"), ("2", "spooled"), ("3", "spooled")),
    ]


def test_memory_is_bounded_while_the_spool_grows(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    with spooling(peer, tmp_path, buffer_bytes=4000) as producer:
        for number in range(200):
            assert producer.send(image(side=20), id=str(number), timeout=10.0)
            assert producer.stats.buffered.bytes <= 4000
        until(lambda: producer.stats.spooled.samples == 200)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert arrived(journal) == [str(n) for n in range(200)]


def test_a_full_spool_drops_the_newest_and_counts(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    with spooling(peer, tmp_path, buffer_bytes=4000, spool_bytes=8000) as producer:
        taken = [producer.send(image(side=20), id=str(n), timeout=10.0) for n in range(60)]
        stats = producer.stats
        assert taken.count(False) == stats.dropped_by_reason["spool_full"].samples > 0
        assert sorted(taken, reverse=True) == taken
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert arrived(journal) == [str(n) for n, kept in enumerate(taken) if kept]


def test_a_sample_that_exceeds_the_spool_holds_back_no_other(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    sides = {str(n): 90 if n == 9 else 20 for n in range(14)}
    with spooling(peer, tmp_path, buffer_bytes=16_000, spool_bytes=6000) as producer:
        for name, side in sides.items():
            assert producer.send(image(side=side), id=name)
            if name == "8":  # the spool is full, and memory does not hold all of it
                until(lambda: producer.stats.buffered.samples == 8)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert arrived(journal) == list(sides)


def test_a_disk_that_stays_full_does_not_hold_samples_back(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.drop()
    names = [str(n) for n in range(20)]
    with spooling(peer, tmp_path, buffer_bytes=16_000) as producer:
        for name in names[:10]:
            assert producer.send(image(side=20), id=name)
        until(lambda: producer.stats.spooled.samples == 10)

        def full(_file: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(spool_module.os, "fsync", full)
        for name in names[10:]:
            assert producer.send(image(side=20), id=name)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
        monkeypatch.undo()
    assert arrived(journal) == names


def test_too_many_open_files_lose_no_packet(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append([packet("1"), packet("2")], 0, None)

    def full(_path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spool_module, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "open_binary", full)
        assert ids(spool) == []
    assert ids(spool) == ["1", "2"]
    assert spool.lost == 0
    spool.close()


def test_packets_that_a_full_disk_kept_in_memory_come_first_once_it_has_room(spool: Spool) -> None:
    outbox = Outbox(Packer(1 << 20, 1), 0.2, spool, buffer_bytes=16 * packet("1").size)
    protocol = ProducerProtocol(Hello("a", spool.epoch, 1), outbox, reason="")
    arrived: list[str] = []

    def connect() -> None:
        protocol.connected(0.0)
        pull(protocol, 0.0)
        protocol.received(welcome(resume=len(arrived), credit=1 << 20), 0.0)

    def put_packets(*names: str) -> None:
        for name in names:
            outbox.taken += 1
            outbox.enqueue(packet(name))
        work_spool(protocol)

    def send(samples: int) -> None:
        for _ in range(samples):
            message = pull(protocol, 0.0)
            assert isinstance(message, tuple)
            arrived.extend(message[1].ids)
            protocol.received(Ack(message[0], 1 << 20), 0.0)
            work_spool(protocol)

    connect()
    protocol.disconnected("away")
    put_packets(*"abcdef")
    spool.max_bytes = 0
    put_packets(*"ghijk")
    connect()
    work_spool(protocol)
    send(4)
    assert [one.spooled is None for one in outbox.window] == [False, False, True, True]
    spool.max_bytes = 1 << 20
    work_spool(protocol)
    send(1)
    protocol.disconnected("away")
    work_spool(protocol)
    connect()
    work_spool(protocol)
    send(6)
    assert arrived == [*"abcdefghijk"]
    assert (outbox.done, spool.samples) == (11, 0)
    spool.close()


def test_what_a_full_spool_cannot_take_is_told(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    producer = spooling(peer, tmp_path, spool_bytes=2000, exit_timeout=0.1)
    for number in range(20):
        producer.send(image(side=20), id=str(number))
    with pytest.raises(DeadlineError, match="samples are lost: the spool could not take them"):
        producer.close(0.2)
    stats = producer.stats
    assert stats.spooled.samples + stats.dropped_by_reason["closed"].samples == 20


KILLED = """
import sys, time
import numpy as np
from stream_ssl.producers import Producer
address, folder, start = sys.argv[1], sys.argv[2], int(sys.argv[3])
producer = Producer(address, "a", on_full="spool", spool=folder, packet_samples=3, linger=0.01)
start = max(start, (producer._spooled_position or 0))
for number in range(start, 100_000):
    told = lambda it: print(it.id, flush=True) if it.outcome == "spooled" else None
    producer.send(np.zeros((8, 8), np.uint8), id=str(number), position=number + 1, on_delivery=told)
    time.sleep(0.002)
"""


def test_a_robot_that_is_killed_again_and_again_loses_nothing_spooled(
    peer: Peer, tmp_path: Path
) -> None:
    """SIGKILL while it spools, and while the receiver takes in what was spooled."""
    promised: set[str] = set()
    journal: list[Data] = []
    for turn in range(6):
        away = turn % 2 == 0
        peer.drop() if away else peer.open()
        start = str(max([int(name) for name in promised | set(arrived(journal))], default=-1) + 1)
        command = [sys.executable, "-c", KILLED, peer.address, str(tmp_path), start]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as robot:
            assert robot.stdout is not None
            if away:
                lines = [robot.stdout.readline() for _ in range(40)]
                robot.send_signal(signal.SIGKILL)
                lines += robot.stdout.readlines()
                promised |= {line.strip() for line in lines if line.endswith("\n")}
            else:
                before = len(journal)
                with peer.serving() as journal:
                    until(lambda before=before: len(journal) > before + 5)  # type: ignore[misc]
                    robot.send_signal(signal.SIGKILL)
    peer.socket.close(0)
    peer.open()
    with peer.serving() as journal, spooling(peer, tmp_path) as producer:
        producer.flush()
    names = [int(name) for name in arrived(journal)]
    assert names == sorted(set(names))
    assert promised <= set(arrived(journal))


def test_the_welcome_of_a_receiver_with_smaller_limits(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    with spooling(peer, tmp_path, packet_samples=16, linger=5) as producer:
        for number in range(32):
            producer.send(image(side=20), id=str(number))
    peer.open()
    limits = {"max_packet": 2000, "max_samples": 3, "credit": 2000}
    with peer.serving(**limits) as journal, spooling(peer, tmp_path) as producer:
        producer.flush()
    assert arrived(journal) == [str(n) for n in range(32)]
    assert max(len(data) for data in journal) <= 3


def test_the_spool_and_the_way_to_use_it_belong_together(tmp_path: Path) -> None:
    for arguments in ({"on_full": "spool"}, {"spool": tmp_path}):
        with pytest.raises(ValueError, match="belong together"):
            Producer("tcp://127.0.0.1:1", "a", **arguments)  # type: ignore[arg-type]
