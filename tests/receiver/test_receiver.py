"""The receiver over TCP: the packets that it accepts and refuses, and its answers."""

import gc
import itertools
import re
import socket
from contextlib import ExitStack

import psutil
import pytest
import zmq
from receiver_peer import KIB, MIB, Peer, Running, begun, packet
from waiting import until

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.errors import JournalFull
from stream_ssl.journal.segment import ProducerState
from stream_ssl.receiver.access import Access
from stream_ssl.wire import Ack, Bye, Data, Hello, Nack, Sample, Welcome, encode
from stream_ssl.wire.run_folder import make_keys


@pytest.fixture
def running(tmp_path):
    with Running(tmp_path) as running:
        yield running


def test_packets_are_journalled_before_they_are_acknowledged(running):
    with Peer(running.endpoint) as peer:
        welcome = peer.hello()
        assert (welcome.resume, welcome.position) == (0, None)
        assert (welcome.max_packet, welcome.max_samples) == (8 * MIB, 1024)
        assert welcome.credit >= welcome.max_packet
        for sequence in range(1, 6):
            peer.say(packet(sequence, position=["at", sequence]))
        peer.acked(5)
        assert running.journal.producers() == {"robot": ProducerState(5, ["at", 5])}
        assert running.journalled() == [("robot", n) for n in range(1, 6)]
    until(lambda: running.total("acked_samples") == 10)
    assert (running.total("packets"), running.total("samples")) == (5, 10)
    assert running.total("bytes") == sum(packet(n, position=["at", n]).size for n in range(1, 6))
    assert running.last.captured == 1.0


def test_a_producer_without_a_state_gets_the_position_to_resume_at(running):
    with Peer(running.endpoint) as peer:
        peer.hello(epoch=1)
        peer.say(packet(1, position={"file": "a", "row": 7}))
        peer.acked(1)
    with Peer(running.endpoint) as peer:
        welcome = peer.hello(epoch=2)
        assert (welcome.resume, welcome.position) == (1, {"file": "a", "row": 7})


def test_the_journal_knows_which_producers_are_connected(running):
    """The journal forgets no connected producer, although it may be silent for long."""
    with Peer(running.endpoint) as peer, Peer(running.endpoint) as new:
        peer.hello("camera")
        new.hello("new")  # it has sent nothing, so the journal has no state to forget
        peer.say(packet(1))
        peer.acked(1)
        until(lambda: running.journal.connected)
        assert set(running.journal.connected) == {"camera"}


def test_a_restarted_receiver_continues_at_the_end_of_its_journal(tmp_path):
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.hello()
        peer.say(packet(1))
        peer.acked(1)
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.say(packet(2))
        assert peer.nacked() == ("hello-required", 2, False)
        assert peer.hello(first=2).resume == 1
        peer.say(packet(2))
        peer.acked(2)
        assert running.journalled() == [("robot", 1), ("robot", 2)]


def test_the_receiver_ignores_offsets_of_another_journal(tmp_path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.publish(900, 900, "another-journal")
    with Running(
        tmp_path, budget=32 * MIB, credit=MIB, total_credit=MIB, max_packet=MIB
    ) as running:
        journal = running.journal
        assert (journal.first, journal.last) == (1, 0)
        offsets.publish(900, 900, journal.id)  # as a learner with other checkpoints would
    with Running(
        tmp_path, budget=32 * MIB, credit=MIB, total_credit=MIB, max_packet=MIB
    ) as running:
        assert running.journal.first == 900


def test_the_receiver_counts_lost_packets_once(tmp_path):
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.hello()
        peer.say(packet(1))
        peer.acked(1)
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:  # an old copy of the journal
        for _ in range(3):  # a producer repeats HELLO each second until WELCOME comes
            assert peer.hello(first=10).resume == 1
        peer.say(packet(10))
        peer.acked(10)
        until(lambda: running.total("missing") == 8)
        assert running.journalled() == [("robot", 1), ("robot", 10)]


def test_a_packet_with_a_wrong_checksum_is_requested_again(running):
    with Peer(running.endpoint) as peer:
        peer.hello()
        frames = encode(packet(1))
        frames[3] = b"\xff" * len(frames[3])
        peer.frames(*frames)
        peer.say(packet(2))
        assert peer.nacked() == ("checksum", 1, False)
        peer.say(packet(1))
        peer.say(packet(2))
        peer.acked(2)
        until(lambda: running.counted("refused")["checksum"] == 1)


def test_the_receiver_refuses_another_version_by_a_message_of_its_own_version(running):
    with Peer(running.endpoint) as peer:
        frames = encode(Hello("robot", 1, 1))
        peer.frames(b"SS\x63\x01", *frames[1:])
        nack = peer.hear(Nack)
        assert (nack.sequence, nack.reason, nack.permanent) == (0, "version", True)
        assert nack.detail == "protocol version 99; this side speaks 1"


def test_garbage_is_counted_and_answered_and_harms_nobody(running):
    garbage = [
        [b""],
        [b"GET / HTTP/1.1\r\n"],
        [b"SS\x01\x03"],
        [b"SS\x01\x03", b"short", b"", b""],
        [b"SS\x01\x01", b"\xc1\xff"],
        [b"SS\x01\x01", b"\x90"],
        [b"SS\x01\x04", encode(Ack(1, 1))[1]],
        [b"SS\x01\x00", b"\x80"],
        encode(Hello("no blanks", 1, 1)),
        encode(Hello("stranger", 1, 1 << 63)),
        [b"x"] * 300,
    ]
    with Peer(running.endpoint) as good, Peer(running.endpoint) as bad:
        good.hello()
        for sequence, frames in enumerate(garbage, 1):
            bad.frames(*frames)
            assert bad.nacked() == ("malformed", 0, True), frames
            good.say(packet(sequence))
            good.acked(sequence)
    until(lambda: running.counted("refused")["malformed"] == len(garbage))


def _header(**fields):
    import msgpack

    row = {"id": "a", "time": 1.0, "codec": "raw", "size": 4, "shape": [2, 2, 1]}
    return msgpack.packb({"source": "s", "position": None, "samples": [row], **fields})


def test_packets_that_no_receiver_accepts_are_refused_permanently(tmp_path, monkeypatch):
    tiff = {"id": "a", "time": 1.0, "codec": "tiff", "size": 4}
    refused = [
        (Data(1, b"no msgpack", b"1234"), "malformed", 1),
        (Data(3, _header(samples=[]), b""), "malformed", 1),
        (Data(5, _header(), b"12345"), "malformed", 1),
        (Data(7, _header(samples=[tiff]), b"1234"), "codec", 1),
        (packet(9, samples=5, side=1), "oversize", 5),
        (packet(11, samples=1, side=80), "oversize", 1),
    ]
    monkeypatch.setattr("stream_ssl.receiver.receiver.MOST_SAMPLES", 4)
    limits = {"max_packet": 4 * KIB, "credit": MIB, "total_credit": MIB}
    with Running(tmp_path, **limits) as running, Peer(running.endpoint) as peer:
        peer.hello()
        for data, reason, _ in refused:
            peer.say(data)
            peer.say(packet(data.sequence + 1))
            assert peer.nacked() == (reason, data.sequence, True)
            # The sequence is durable before the NACK.
            assert running.journal.state("robot").sequence >= data.sequence
            peer.acked(data.sequence + 1)
        assert running.journalled() == [("robot", data.sequence + 1) for data, _, _ in refused]
        counts = {"malformed": 3, "codec": 1, "oversize": 6}
        until(lambda: dict(running.counted("rejected")) == counts)


def test_frames_that_are_too_large_are_counted_and_harm_nobody_else(tmp_path):
    with (
        Running(tmp_path, max_packet=64 * KIB, credit=MIB, total_credit=MIB) as running,
        Peer(running.endpoint) as good,
        Peer(running.endpoint) as bad,
        begun(running.endpoint) as worse,
    ):
        good.hello()
        bad.hello("bad")
        bad.say(packet(1, samples=1, side=800))  # one frame, ten times what WELCOME allows
        assert bad.nacked() == ("oversize", 1, True)
        frames = itertools.repeat(b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB))
        with pytest.raises(ConnectionError):  # cut off at once, because this message never ends
            all(worse.sendall(frame) is None for frame in frames)
        good.say(packet(1))
        good.acked(1)
        until(lambda: running.counted("refused")["oversize"] == 1)
        assert running.counted("rejected") == {"oversize": 1}
        assert running.journalled() == [("robot", 1)]


def test_a_newer_incarnation_takes_over(running):
    with Peer(running.endpoint) as old, Peer(running.endpoint) as new:
        old.hello(epoch=1)
        old.say(packet(1))
        old.acked(1)
        assert new.hello(epoch=2).resume == 1
        assert old.nacked() == ("superseded", 0, True)
        old.say(packet(2))
        assert old.nacked() == ("hello-required", 2, False)
        old.say(Hello("robot", 1, 2))
        nack = old.hear(Nack)
        assert (nack.reason, nack.sequence, nack.permanent) == ("superseded", 0, True)
        assert re.fullmatch(r"the other 'robot' connected \d+ s ago \(.*\)", nack.detail)
        new.say(packet(2))
        new.acked(2)
        until(lambda: running.last.producers == 1)  # the old session has ended


def test_an_older_epoch_is_welcome_when_the_newer_connection_is_gone(running):
    """The clock of a robot without a battery may go back at a restart."""
    with Peer(running.endpoint) as first:
        first.hello(epoch=1000)
    with Peer(running.endpoint) as second:
        second.say(Hello("robot", 5, 1))

        def welcomed():
            second.say(Hello("robot", 5, 1))
            return isinstance(second.hear(Welcome | Nack), Welcome)

        until(welcomed)


def test_a_bye_frees_the_credit_of_its_producer(running):
    with Peer(running.endpoint) as peer:
        peer.hello()
        until(lambda: running.records and running.last.producers == 1 and running.last.credit)
        peer.say(Bye("done"))
        until(lambda: running.last.producers == 0 and running.last.credit == 0)


def test_stopping_commits_the_packets_in_flight_and_sends_bye(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_ssl.receiver.receiver.GROUP_SECONDS", 30.0)
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.hello()
        for sequence in range(1, 4):
            peer.say(packet(sequence))
        until(lambda: running.total("packets") == 3)
        assert peer.through == 0
        running.stop.set()
        peer.acked(3)
        assert peer.credit == 0
        assert peer.hear(Bye).reason
    assert running.total("acked_samples") == 6
    with pytest.raises(zmq.ZMQError):  # the socket is closed
        running.receiver.endpoint  # noqa: B018


def test_ten_thousand_short_lived_producers_leave_no_memory_in_use(tmp_path, monkeypatch):
    process = psutil.Process()
    monkeypatch.setattr("stream_ssl.receiver.receiver.MOST_SESSIONS", 100)
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        for n in range(500):
            peer.hello(f"warm/{n}")
        gc.collect()
        before = process.memory_info().rss
        for n in range(10_000):
            peer.hello(f"robot/{n}")
        gc.collect()
        assert process.memory_info().rss - before < 4 * MIB
        assert running.journal.producers() == {}
        until(lambda: running.last.producers <= 100)


def test_the_receiver_serves_more_producers_than_its_table_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_ssl.receiver.receiver.MOST_SESSIONS", 2)
    with Running(tmp_path) as running:
        peers = [Peer(running.endpoint) for _ in range(4)]
        for n, peer in enumerate(peers):
            peer.hello(f"robot/{n}")
        for n, peer in enumerate(peers):
            peer.hello(f"robot/{n}")
            peer.with_credit()
            peer.say(packet(1))
            peer.acked(1)
        assert sorted(running.journalled()) == [(f"robot/{n}", 1) for n in range(4)]
        for peer in peers:
            peer.close()


def test_a_full_disk_stops_credit_until_the_disk_has_room_again(tmp_path, monkeypatch):
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.hello()
        peer.say(packet(1))
        peer.acked(1)
        append = running.journal.append

        def full(_):
            raise JournalFull("no space left on device")

        monkeypatch.setattr(running.journal, "append", full)
        peer.say(packet(2))
        while peer.credit:
            peer.hear(Ack)
        until(lambda: running.total("journal_failures") >= 2)
        assert running.last.ready is False
        assert peer.through == 1
        assert peer.hello().resume == 1
        assert peer.credit == 0

        monkeypatch.setattr(running.journal, "append", append)
        peer.acked(2)
        peer.with_credit()
        peer.say(packet(2))
        peer.say(packet(3))
        peer.acked(3)
        assert running.journalled() == [("robot", n) for n in (1, 2, 3)]
        until(lambda: running.last.ready)


def test_the_receiver_removes_a_false_mark_of_a_full_journal(tmp_path):
    with Running(tmp_path) as running, Peer(running.endpoint) as peer:
        peer.hello()
        running.receiver.offsets.set_journal_full(True)  # the learner would skip records
        until(lambda: not running.receiver.offsets.journal_full)


def test_the_receiver_refuses_invalid_settings_and_names_their_rules(tmp_path):
    (tmp_path / "file").write_text("precious")
    for settings, message in (
        ({"bind": "tcp://0.0.0.0:0"}, "stream-ssl keys"),
        ({"bind": "tcp://*:0"}, "plain text is allowed only on loopback"),
        ({"bind": "tcp://127.0.0.1:99999"}, "port must be 1 to 65535"),
        ({"bind": "tcp://127.0.0.1:-1"}, "port must be 1 to 65535"),
        ({"bind": "tcp://127.0.0.1:"}, "port must be 1 to 65535"),
        ({"bind": "tcp://127.0.0.1"}, "port must be 1 to 65535"),
        ({"bind": "http://127.0.0.1:80"}, "must be tcp://HOST:PORT or ipc://PATH"),
        ({"bind": f"ipc://{tmp_path}/file"}, "file exists and is no socket"),
        ({"bind": f"ipc://{tmp_path}"}, "exists and is no socket"),
        ({"max_packet": 128 * MIB}, r"max_packet 134217728: .* total_credit \(100663296\)"),
        ({"budget": 16 * MIB}, "journal.budget 16777216: must be at least 33554432 bytes"),
        ({"max_lag_bytes": 10}, "max_lag_bytes 10"),
        ({"max_names": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Running(tmp_path, **settings)
    assert (tmp_path / "file").read_text() == "precious"


def test_the_error_names_an_address_in_use_and_a_remedy(running, tmp_path):
    with pytest.raises(OSError, match=r"cannot listen at .*choose another port, or 0"):
        Running(tmp_path / "other", bind=running.endpoint)


def test_a_socket_of_another_receiver_is_not_taken_over(tmp_path):
    address = f"ipc://{tmp_path}/socket"
    with Running(tmp_path / "one", bind=address) as one:
        with pytest.raises(OSError, match=r"cannot listen at ipc://.*stop the process"):
            Running(tmp_path / "two", bind=address)
        with Peer(one.endpoint) as peer:
            peer.hello()
    with socket.socket(socket.AF_UNIX) as left_by_a_killed_one:
        (tmp_path / "socket").unlink(missing_ok=True)
        left_by_a_killed_one.bind(str(tmp_path / "socket"))
    with Running(tmp_path / "two", bind=address) as two, Peer(two.endpoint) as peer:
        peer.hello()


def test_a_receiver_listens_at_a_relative_path_whose_absolute_form_is_too_long(
    tmp_path, monkeypatch
):
    deep = tmp_path / ("folder" * 10) / ("folder" * 10)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with Running(tmp_path / "run", bind="ipc://socket") as running, Peer(running.endpoint) as peer:
        peer.hello()


def test_a_client_in_another_folder_finds_a_relative_socket_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Running(tmp_path / "run", bind="ipc://socket") as running:
        assert running.endpoint == f"ipc://{tmp_path}/socket"
        monkeypatch.chdir("/")
        with Peer(running.endpoint) as peer:
            peer.hello()


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-interface", "::1"])
def test_the_error_names_an_address_of_another_machine(tmp_path, host):
    with pytest.raises(OSError, match=r"cannot listen at tcp://.*; give an address or an interf"):
        Running(tmp_path, bind=f"tcp://{host}:5555", access=Access(*make_keys(tmp_path)))


def test_the_error_names_an_unusable_socket_path(tmp_path):
    for path in (tmp_path / "gone" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(OSError, match=r"cannot listen at ipc://.*choose a path of at most 107"):
            Running(tmp_path / "run", bind=f"ipc://{path}")


def test_the_receiver_decodes_no_samples(running):
    """The learner quarantines a bad image. The receiver must not spend time on it."""
    with Peer(running.endpoint) as peer:
        peer.hello()
        peer.say(Data.pack(1, [Sample("a", b"no jpeg at all", "jpeg")]))
        peer.acked(1)


def test_a_hello_leaves_a_clean_short_line_in_the_log(running, caplog):
    caplog.set_level("INFO")
    with Peer(running.endpoint) as peer:
        peer.say(Hello("robot", 1, 1, agent="mine 1\n2026 ERROR forged\x1b[2J" + "x" * 4000))
        peer.hear(Welcome)
    lines = [r.getMessage() for r in caplog.records if "producer robot" in r.getMessage()]
    assert lines == ["producer robot (mine 1?2026 ERROR forged?[2J" + "x" * 52 + "...) is new"]


def test_a_flood_of_hellos_does_not_fill_the_log(running, caplog):
    caplog.set_level("INFO")
    with Peer(running.endpoint) as peer:
        for epoch in range(200):
            peer.hello(epoch=1 + epoch)
    assert 10 <= len([r for r in caplog.records if "is new" in r.getMessage()]) <= 40


def test_a_producer_cannot_claim_lost_packets_again_and_again(running, caplog):
    """Only a journal that was lost before this receiver began can lack acknowledged packets."""
    with Peer(running.endpoint) as peer:
        peer.hello(first=10)
        peer.say(packet(10))
        peer.acked(10)
        for first in range(100_000, 2_000_000, 100_000):
            peer.say(Hello("robot", 1, first))
            assert peer.nacked()[0] == "malformed"
        until(lambda: running.total("missing") == 9)
        assert running.total("missing") == 9
        assert len([r for r in caplog.records if "are not in this journal" in r.getMessage()]) == 1
        assert running.journalled() == [("robot", 10)]


def test_new_names_beyond_the_limit_are_refused_and_known_names_go_on(tmp_path):
    with Running(tmp_path, max_names=3) as running, Peer(running.endpoint) as peer:
        for n in range(3):
            peer.hello(f"robot-{n}")
            peer.say(packet(1))
            peer.through = 0
            peer.acked(1)
        for n in range(3, 200):
            peer.say(Hello(f"robot-{n}", 1, 1))
            assert peer.nacked() == ("names", 0, True)
        assert peer.hello("robot-1", first=2).resume == 1
        peer.say(packet(2))
        peer.through = 0
        peer.acked(2)
        assert len(running.journal.producers()) == 3
        until(lambda: running.counted("refused")["names"] == 197)
    with Running(tmp_path, max_names=3) as running, Peer(running.endpoint) as peer:
        peer.say(Hello("robot-3", 1, 1))
        nack = peer.hear(Nack)
        assert (nack.reason, "raise receiver.max_names" in nack.detail) == ("names", True)


def test_names_of_connected_producers_count_before_these_send_a_packet(tmp_path):
    with Running(tmp_path, max_names=2) as running, ExitStack() as stack:
        peers = [stack.enter_context(Peer(running.endpoint)) for _ in range(3)]
        peers[0].hello("a")
        peers[1].hello("b")
        peers[2].say(Hello("c", 1, 1))
        assert peers[2].nacked() == ("names", 0, True)
        peers[0].say(Bye())

        def taken():
            peers[2].say(Hello("c", 1, 1))
            return isinstance(peers[2].hear((Nack, Welcome)), Welcome)

        until(taken)
