"""A producer with a spool: samples wait on disk while the network is away, and are sent once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from client_peer import Peer, arrived, image
from waiting import until

from stream_ssl.producers import DeadlineError, Delivery, DeliveryError, Producer
from stream_ssl.wire import Ack, Data


def spooling(peer: Peer, folder: Path, **settings: object) -> Producer:
    settings = {"packet_samples": 1, "linger": 0.01, **settings}
    return Producer(peer.address, "a", on_full="spool", spool=folder, **settings)  # type: ignore[arg-type]


def test_samples_without_a_receiver_are_spooled_and_sent_by_the_next_run(
    peer: Peer, tmp_path: Path
) -> None:
    peer.drop()
    deliveries = []
    with spooling(peer, tmp_path) as producer:
        for number in range(20):
            producer.send(image(), id=str(number), position=number, on_delivery=deliveries.append)
        until(lambda: producer.stats.spooled.samples == 20)
        began = time.monotonic()
    assert time.monotonic() - began < 15.0  # close() does not wait 30 s for an absent receiver
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


def test_a_producer_spools_during_a_short_absence_of_the_receiver(
    peer: Peer, tmp_path: Path
) -> None:
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


def test_the_buffer_keeps_its_limit_while_the_spool_grows(peer: Peer, tmp_path: Path) -> None:
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


def test_a_full_spool_drops_and_counts_the_newest_samples(peer: Peer, tmp_path: Path) -> None:
    peer.drop()
    with spooling(peer, tmp_path, buffer_bytes=4000, spool_bytes=8000) as producer:
        taken = [producer.send(image(side=20), id=str(n), timeout=10.0) for n in range(60)]
        stats = producer.stats
        assert taken.count(False) == stats.dropped_by_reason["spool_full"].samples > 0
        assert sorted(taken, reverse=True) == taken
        with pytest.raises(DeliveryError, match="sample 'late' was dropped: the spool is full"):
            producer.submit(image(side=20), id="late", timeout=10.0).result(1)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert arrived(journal) == [str(n) for n, kept in enumerate(taken) if kept]


def test_a_sample_that_exceeds_the_spool_delays_no_other_sample(peer: Peer, tmp_path: Path) -> None:
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


def test_a_producer_on_a_full_disk_still_sends_all_samples_in_order(
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

        monkeypatch.setattr(os, "fsync", full)
        for name in names[10:]:
            assert producer.send(image(side=20), id=name)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
        monkeypatch.undo()
    assert arrived(journal) == names


def test_close_reports_the_samples_that_a_full_spool_could_not_take(
    peer: Peer, tmp_path: Path
) -> None:
    peer.drop()
    producer = spooling(peer, tmp_path, spool_bytes=2000, exit_timeout=0.1)
    for number in range(20):
        producer.send(image(side=20), id=str(number))
    with pytest.raises(DeadlineError, match="the spool could not take them; raise spool_bytes"):
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


def test_a_robot_that_is_killed_repeatedly_loses_no_spooled_sample(
    peer: Peer, tmp_path: Path
) -> None:
    """SIGKILL comes while the robot spools, and while the receiver takes the spooled samples."""
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


def test_spooled_packets_are_cut_to_the_limits_of_a_new_receiver(
    peer: Peer, tmp_path: Path
) -> None:
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
