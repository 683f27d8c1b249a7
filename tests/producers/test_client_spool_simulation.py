"""A simulated robot with a spool, power cuts and damage at any moment."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from client_peer import welcome
from spool_files import packet
from test_client_protocol import SIZE, Receiver, Simulation, pull, put

from stream_ssl.producers import _spool_records as spool_records
from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import Packer, Packet
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers._spool import Spool
from stream_ssl.wire import Ack, Data, Hello, Message


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
        self.safe: set[str] = set()  # were on the robot's disk
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
        damaged = spool_records.read_packet(record)
        if damaged is None or record.offset is None:
            return
        self.rotten |= set(damaged.ids)
        self.flip(record.segment, record.offset + self.rng.randrange(60))

    def rot_mark(self, spool: Spool) -> None:
        """Damage one of the two copies of the newest mark."""
        marks = [
            (path, offset + self.rng.randrange(record.size))
            for path in spool._segments.paths
            for offset, record in spool_records.records_of(path)
            if record.kind == spool_records.MARK
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
            before = list(spool._segments.paths), spool._segments._end
            if packets and spool.append(packets, loaded, mark):
                last = spool._segments.paths[-1]
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


@pytest.mark.parametrize("rots", [False, True])
def test_spooled_samples_arrive_once_and_in_order_after_power_cuts_and_damage(
    rots: bool, tmp_path: Path
) -> None:
    rng = Random(0)
    for number in range(20):
        robot = Robot(rng, tmp_path / str(number), rots)
        for _ in range(120):
            robot.step()
            if robot.protocol.fatal is not None:
                assert "damaged 3 times" in str(robot.protocol.fatal)
                break
        else:
            robot.heal()
            assert robot.protocol.fatal is None
            assert robot.safe - robot.rotten <= set(robot.receiver.journal)
            assert robot.protocol.outbox.done == robot.protocol.outbox.taken
        spool = robot.protocol.outbox.spool
        assert spool is not None
        assert robot.protocol.fatal is not None or spool.samples == 0
        spool.close()


def test_damage_of_a_sent_packet_in_the_spool_shifts_no_sequence(spool: Spool) -> None:
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
    with spool._segments.paths[0].open("r+b") as file:
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


def test_packets_arrive_in_order_when_a_full_spool_gets_room_again(spool: Spool) -> None:
    outbox = Outbox(Packer(1 << 20, 1), 0.2, spool, buffer_bytes=16 * packet("1").size)
    protocol = ProducerProtocol(Hello("a", spool.epoch, 1), outbox, reason="")
    arrived: list[str] = []

    def connect() -> None:
        protocol.connected(0.0)
        pull(protocol, 0.0)
        protocol.received(welcome(resume=len(arrived), credit=1 << 20), 0.0)

    def put_packets(*names: str) -> None:
        for name in names:
            outbox._packed += 1
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
