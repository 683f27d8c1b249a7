"""Keys and allow-list over TCP: only keys that are on the list now may send."""

import contextlib
import socket

import pytest
import zmq
from receiver_peer import Peer, Running, allow, packet
from waiting import until

from stream_ssl.receiver import backlogs
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.allow_list import AllowList
from stream_ssl.wire import Hello, Keys, Welcome

SERVER = Keys.generate("receiver")
ROBOT = Keys.generate("robot")
MALLORY = Keys.generate("mallory")


@pytest.fixture
def listed(tmp_path):
    return allow(tmp_path / "allow.json", robot=ROBOT, mallory=MALLORY)


@pytest.fixture
def running(tmp_path, listed):
    with Running(tmp_path, access=Access(SERVER, listed)) as running:
        yield running


def test_a_listed_key_may_send_under_its_name_and_the_names_below(running):
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        for name in ("robot", "robot/left", "robot/left/2"):
            peer.hello(name)
            peer.say(packet(1))
            peer.acked(1)
            peer.through = 0
    assert [name for name, _ in running.journalled()] == ["robot", "robot/left", "robot/left/2"]


def test_one_key_cannot_use_up_the_names_of_another_key(tmp_path, listed):
    with (
        Running(tmp_path, access=Access(SERVER, listed), max_names=2) as running,
        Peer(running.endpoint, MALLORY, SERVER) as greedy,
        Peer(running.endpoint, ROBOT, SERVER) as peer,
    ):
        for n in range(50):
            greedy.say(Hello(f"mallory/{n}", 1, 1))
            greedy.say(packet(1))
        until(lambda: running.counted("refused")["names"] == 48)
        for name in ("robot", "robot/left"):
            peer.hello(name)
        assert running.last.producers <= 4


def test_a_key_may_not_send_under_the_name_of_another(running):
    names = ("mallory", "robot2", "robo", "mallory/robot", "/robot")
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        for name in names:
            peer.say(Hello(name, 1, 1))
            assert peer.nacked() == ("unauthorised", 0, True), name
            peer.say(packet(1))
            assert peer.nacked() == ("hello-required", 1, False), name
    assert running.journalled() == []
    until(lambda: running.counted("refused")["unauthorised"] == len(names))


def test_the_receiver_denies_peers_without_a_listed_key_or_the_right_server_key(running, caplog):
    unknown = Keys.generate("stranger")
    with (
        Peer(running.endpoint) as plain,
        Peer(running.endpoint, unknown, SERVER) as stranger,
        Peer(running.endpoint, ROBOT, Keys.generate("other")) as deceived,
    ):
        for peer in (plain, stranger, deceived):
            peer.socket.sndtimeo = 1000  # a peer that is cut off earlier cannot send
            with contextlib.suppress(zmq.Again):
                peer.say(Hello("robot", 1, 1))
                peer.say(packet(1))
        until(lambda: running.counted("refused").keys() >= {"denied", "server-key"})
        # A plain peer may find the mismatch first and hang up, as any broken handshake does.
        until(lambda: running.counted("refused").keys() & {"no-key", "handshake"})
        for peer in (plain, stranger, deceived):
            assert peer.silent(0.4)
    assert running.journalled() == []
    assert f"connection denied: 127.0.0.1 with the public key {unknown.public}: " in caplog.text


def test_a_plain_receiver_counts_clients_with_keys_under_their_own_reason(tmp_path):
    # A real client may find the mismatch first and hang up before it has named its mechanism.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with Running(tmp_path) as running:
        host, port = running.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(greeting)
            until(lambda: running.counted("refused")["plain-receiver"])
        assert "no-key" not in running.counted("refused")


def test_a_receiver_refuses_a_revoked_key_on_its_open_connection(running, listed, caplog):
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        peer.hello()
        peer.say(packet(1))
        peer.acked(1)
        allow(listed, mallory=MALLORY)
        until(lambda: not running.receiver._access.knows(ROBOT.public))
        for _ in range(2):
            peer.say(packet(2))
            assert peer.nacked() == ("unauthorised", 0, True)
        until(lambda: running.counted("refused")["unauthorised"] == 2)
        whom = f"refused a message from 127.0.0.1 with the public key {ROBOT.public}"
        assert caplog.text.count(whom) == 1
        peer.say(Hello("robot", 1, 1))
        assert peer.nacked() == ("unauthorised", 0, True)
        assert running.journalled() == [("robot", 1)]
    with Peer(running.endpoint, ROBOT, SERVER) as again:
        again.say(Hello("robot", 2, 1))
        assert again.silent(0.5)


def test_the_new_key_of_a_name_is_accepted_and_the_old_key_is_refused(running, listed):
    fresh = Keys.generate("robot")
    with Peer(running.endpoint, ROBOT, SERVER) as old:
        old.hello()
        AllowList.enter(listed, "robot", fresh.public)
        until(lambda: running.receiver._access.knows(fresh.public))
        old.say(Hello("robot", 1, 1))
        assert old.nacked() == ("unauthorised", 0, True)
        with Peer(running.endpoint, fresh, SERVER) as new:
            new.hello(epoch=2)
            new.say(packet(1))
            new.acked(1)


def test_a_key_that_moves_to_another_name_may_send_under_that_name_only(running, listed):
    """This also holds on the connection on which the key sent for the earlier name."""
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        peer.hello()
        allow(listed, camera=ROBOT)
        until(lambda: running.receiver._access.permits(ROBOT.public, "camera"))
        peer.say(packet(1))
        assert peer.nacked() == ("hello-required", 1, False)
        peer.say(Hello("robot", 1, 1))
        assert peer.nacked() == ("unauthorised", 0, True)
        peer.hello("camera")
        peer.say(packet(1))
        peer.acked(1)
    assert running.journalled() == [("camera", 1)]


@pytest.mark.parametrize("harm", ["edited", "deleted"])
def test_a_record_reports_a_broken_list_until_the_list_is_readable_again(running, listed, harm):
    good, allowed = listed.read_text(), running.receiver._access.allow
    assert not running.receiver._record().allow_list_broken
    listed.write_text('{"*": "') if harm == "edited" else listed.unlink()
    until(lambda: allowed.broken)
    assert running.receiver._record().allow_list_broken
    listed.write_text(good)
    until(lambda: not allowed.broken)
    assert not running.receiver._record().allow_list_broken


def test_a_broken_list_leaves_the_earlier_list_in_force(running, listed):
    listed.write_text('{"robot": "not a key"}')
    until(
        lambda: (
            running.receiver._access.allow._stat() == running.receiver._access.allow._loaded_stat
        )
    )
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        peer.hello()
        peer.say(packet(1))
        peer.acked(1)


def test_a_stolen_routing_id_delivers_no_packet_and_cuts_no_client_off(running, monkeypatch):
    monkeypatch.setattr(backlogs, "_SILENT_SECONDS", 1.0)
    with (
        Peer(running.endpoint, ROBOT, SERVER, route=b"robot-1") as victim,
        Peer(running.endpoint, MALLORY, SERVER) as other,
    ):
        victim.hello("robot")
        victim.say(packet(1))
        victim.acked(1)
        with Peer(running.endpoint, MALLORY, SERVER, route=b"robot-1") as thief:
            thief.say(packet(2, samples=7))
            thief.say(Hello("robot", 9, 1))
            thief.say(packet(2, samples=7))
            other.hello("mallory")
            victim.say(packet(2))
            victim.acked(2)
            assert thief.silent(0.3)
            until(lambda: running.counted("refused")["silent"] == 1)
        victim.say(packet(3))
        victim.acked(3)
    assert running.journalled() == [("robot", 1), ("robot", 2), ("robot", 3)]
    until(lambda: running.total("acked_samples") == 6)  # the record comes after the ACK
    assert running.total("samples") == 6


def test_another_key_cannot_use_the_routing_id_of_a_closed_connection(running):
    with Peer(running.endpoint, ROBOT, SERVER, route=b"robot-1") as victim:
        victim.hello("robot")
    with Peer(running.endpoint, MALLORY, SERVER, route=b"robot-1") as thief:
        thief.say(packet(1))
        reason, _, _ = thief.nacked()
        assert reason == "hello-required"
        thief.say(Hello("robot", 9, 1))
        assert thief.nacked() == ("unauthorised", 0, True)
    assert running.journalled() == []


def test_a_copied_packet_is_journalled_under_the_name_of_its_own_sender(running):
    with (
        Peer(running.endpoint, ROBOT, SERVER) as robot,
        Peer(running.endpoint, MALLORY, SERVER) as mallory,
    ):
        robot.hello("robot")
        mallory.hello("mallory")
        robot.say(packet(1))
        robot.acked(1)
        mallory.say(packet(1))
        mallory.acked(1)
        assert sorted(running.journalled()) == [("mallory", 1), ("robot", 1)]


def test_a_check_that_raises_denies_the_client_and_later_checks_work(running, monkeypatch):
    access = running.receiver._access
    with monkeypatch.context() as patched:
        patched.setattr(access.allow, "name_of", lambda _: 1 / 0)
        with Peer(running.endpoint, ROBOT, SERVER) as peer:
            peer.say(Hello("robot", 1, 1))
            until(lambda: access.denied)
            assert peer.silent(0.2)
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        peer.hello()


def test_raw_garbage_on_the_port_harms_nobody(running):
    host, port = running.endpoint.removeprefix("tcp://").split(":")
    with Peer(running.endpoint, ROBOT, SERVER) as peer:
        peer.hello()
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" + bytes(8) + b"\x7f" * 500):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(data)
        peer.say(packet(1))
        peer.acked(1)


def test_keys_may_be_given_as_files(tmp_path, listed):
    _, secret = SERVER.save(tmp_path)
    access = Access(secret, listed)
    with (
        Running(tmp_path / "run", access=access) as running,
        Peer(running.endpoint, ROBOT, SERVER) as peer,
    ):
        assert isinstance(peer.hello(), Welcome)


def test_a_receiver_with_keys_may_listen_beyond_loopback(tmp_path, listed):
    with Running(tmp_path, bind="tcp://0.0.0.0:0", access=Access(SERVER, listed)) as running:
        port = running.endpoint.rpartition(":")[2]
        with Peer(f"tcp://127.0.0.1:{port}", ROBOT, SERVER) as peer:
            peer.hello()


def test_the_socket_enforces_curve_in_our_zap_domain(running):
    """Without a ZAP handler libzmq would let every key in; enforcing the domain forbids it."""
    socket = running.receiver._listener.socket
    assert socket.getsockopt(zmq.CURVE_SERVER) == 1
    assert socket.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert socket.getsockopt(zmq.ZAP_DOMAIN).rstrip(b"\0") == b"stream-ssl"


def test_a_receiver_needs_its_secret_key(listed):
    with pytest.raises(ValueError, match="secret half"):
        Access(Keys(SERVER.name, SERVER.public), listed)
