"""Several receivers: a producer's name chooses its receiver, and only the list moves it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from client_peer import MANY, Peer, image
from receiver_peer import receiver
from table import table
from test_receiver_kills import held
from waiting import until

from stream_ssl.producers import CannotConnectError, Producer
from stream_ssl.wire import Ack, Bye, Data, Hello
from stream_ssl.wire.address import receiver_of

NAMES = [f"robot-{number}" for number in range(1000)]
FOUR = [f"tcp://host-{number}:5555" for number in range(4)]


def test_a_new_receiver_takes_its_share_and_moves_no_other_producer() -> None:
    before = {name: receiver_of(name, FOUR[:3]) for name in NAMES}
    after = {name: receiver_of(name, list(reversed(FOUR))) for name in NAMES}
    moved = [name for name in NAMES if before[name] != after[name]]
    assert {after[name] for name in moved} == {FOUR[3]}
    assert 200 < len(moved) < 300
    assert min(Counter(before.values()).values()) > 270


class Fleet:
    """Producers that send numbered samples, with their positions, to the receivers of a list."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def open(self, name: str, to: list[str], before: list[str] | None = None) -> Producer:
        """Return a connected producer. Its receiver must know its last position."""
        producer = Producer(to, name, linger=0.01, packet_samples=4, before=before or [])
        position = producer.connect(60).position
        assert (position or 0) == self.sent[name], name
        return producer

    def send(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            self.sent[producer.name] += 1
            number = self.sent[producer.name]
            producer.send(image(side=4), f"{producer.name}-{number}", position=number)


def test_receivers_that_die_join_and_leave_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    """The others continue; no acknowledged sample is lost, and none is counted twice."""
    fleet, folders = Fleet(), [tmp_path / str(number) for number in range(4)]
    with ExitStack() as stack:
        started = [stack.enter_context(receiver(folder)) for folder in folders]
        processes, addresses = zip(*started, strict=True)
        three, four = list(addresses[:3]), list(addresses)
        # The ports are random. Three producers of each of four receivers ensure that some move.
        names = [n for one in four for n in [n for n in NAMES if receiver_of(n, four) == one][:3]]
        lost = receiver_of(names[0], three)
        producers = [fleet.open(name, three) for name in names]
        for producer in producers:
            fleet.send(producer, 20)
        processes[four.index(lost)].kill()
        processes[four.index(lost)].wait()
        for producer in producers:
            fleet.send(producer, 20)
        for producer in producers:
            if producer.address != lost:
                producer.flush(60)
        waiting = [producer for producer in producers if producer.address == lost]
        assert all(producer.stats.acked.samples <= 20 for producer in waiting)
        stack.enter_context(receiver(folders[four.index(lost)], lost))
        for producer in producers:
            producer.close(60)

        for to, before in ((four, three), (four, three), (three, four)):
            for name in names:
                with fleet.open(name, to, before) as producer:
                    assert producer.address == receiver_of(name, to)
                    fleet.send(producer, 10)
    ids = [one for folder in folders for one in held(folder)]
    assert Counter(ids) == Counter(f"{name}-{n + 1}" for name in names for n in range(70))
    assert held(folders[3]), "nobody moved"


def test_a_moved_producer_sends_no_packet_that_is_on_the_old_receivers_disk(
    tmp_path: Path,
) -> None:
    """The old receiver says which packets are on its disk. The new one gets the rest."""
    settings = {"on_full": "spool", "spool": tmp_path, "linger": 0.0, "packet_samples": 1}
    with Peer() as old, Peer() as new:
        producer = Producer(old.address, "robot", **settings)  # type: ignore[arg-type]
        old.welcome()
        for number in range(4):
            producer.send(image(number), f"{number}", position=number)
        taken = [next(old.expect(Data).samples()).id for _ in range(4)]
        assert taken == ["0", "1", "2", "3"]
        old.drop()  # two of them are on its disk, and no acknowledgement says so
        producer.close(0.1)

        old.open()
        moved = Producer([new.address], "robot", **settings)  # type: ignore[arg-type]
        old.welcome(resume=2)
        old.expect(Bye)
        new.welcome(resume=7)  # its own sequences, from an earlier run
        for number in (2, 3):
            data = new.expect(Data)
            assert (data.sequence, next(data.samples()).id) == (6 + number, f"{number}")
        assert old.quiet(0.1)
        new.drop()
        moved.close(0.1)

        new.open()  # a restart asks no other receiver: `new` has numbered these packets
        again = Producer([new.address], "robot", before=[old.address], **settings)  # type: ignore[arg-type]
        new.welcome(resume=8)
        assert next(new.expect(Data).samples()).id == "3"
        new.say(Ack(9, MANY))
        again.close(10)


def test_a_moved_producer_waits_for_its_old_receiver_unless_abandon_is_set() -> None:
    with Peer() as old, Peer() as new:
        old.drop()
        producer = Producer(new.address, "robot", before=[old.address])
        until(lambda: "nobody listens" in producer.stats.last_error)
        with pytest.raises(CannotConnectError, match=r"asked first what it has .* see abandon"):
            producer.connect(0.0)
        producer.close(0.0)
        producer = Producer(new.address, "robot", before=[old.address], abandon=True)
        assert new.expect(Hello).producer == "robot"
        producer.close(0.0)


@table(
    ("addresses", "message"),
    [
        ([], "an empty list"),
        (FOUR[:1] * 2, "it names a receiver twice"),
        (["host:1"], "must be tcp://"),
    ],
)
def test_an_invalid_list_of_receivers_is_refused(addresses: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Producer(addresses, "robot")
