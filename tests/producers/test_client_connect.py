"""The errors of a producer that cannot connect: each cause has its own words. Also keys."""

from __future__ import annotations

import _thread
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from client_peer import Peer, background, image
from table import table

from stream_ssl.producers import CannotConnectError, ClosedError, Keys, Producer, _connection
from stream_ssl.producers._connection import diagnose
from stream_ssl.producers.errors import ProducerError
from stream_ssl.wire import Ack, Data

SERVER, CAMERA, STRANGER = (Keys.generate(name) for name in ("server", "camera", "stranger"))


@pytest.fixture
def guarded() -> Iterator[Peer]:
    """A receiver that knows only the camera's key."""
    with Peer(server=SERVER, allowed=[CAMERA]) as peer:
        yield peer


def reason(expected: str, address: str, **keys: object) -> str:
    """Return the error of a producer that cannot connect. A busy machine gets more time."""
    text = ""
    for timeout in (1.0, 3.0, 9.0):
        with (
            closing(Producer(address, name="camera", **keys)) as producer,  # type: ignore[arg-type]
            pytest.raises(CannotConnectError) as caught,
        ):
            producer.connect(timeout)
        text = str(caught.value)
        if expected in text:
            assert f"{timeout:g} s" in text
            return text
    raise AssertionError(f"{expected!r} is not in {text!r}")


def test_a_producer_with_a_known_key_connects(guarded: Peer) -> None:
    with Producer(guarded.address, "camera", keys=CAMERA, server_key=SERVER.public) as producer:
        guarded.welcome()
        producer.connect()
        producer.send(image(), id="x")
        assert guarded.expect(Data).sequence == 1
        guarded.say(Ack(1, 1 << 20))


def test_a_producer_accepts_keys_from_files(guarded: Peer, tmp_path: Path) -> None:
    _, secret = CAMERA.save(tmp_path)
    public, _ = SERVER.save(tmp_path)
    with Producer(guarded.address, "camera", keys=secret, server_key=str(public)) as producer:
        guarded.welcome()
        producer.connect()


def test_the_connect_error_names_a_wrong_server_key(guarded: Peer) -> None:
    reason("server key is wrong", guarded.address, keys=CAMERA, server_key=STRANGER.public)


def test_the_connect_error_names_a_key_that_is_not_on_the_allow_list(guarded: Peer) -> None:
    told = "not on the receiver's allow-list"
    text = reason(told, guarded.address, keys=STRANGER, server_key=SERVER.public)
    assert f"{guarded.address} refuses the key 'stranger' (public {STRANGER.public})" in text


def test_the_connect_error_says_that_the_receiver_requires_keys(guarded: Peer) -> None:
    reason("requires keys", guarded.address)


def test_the_connect_error_says_that_the_receiver_speaks_plain_text() -> None:
    with Peer() as peer:
        reason("in plain text", peer.address, keys=CAMERA, server_key=SERVER.public)


def test_a_producer_refuses_greenlets_in_place_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 1)  # like gevent
    with pytest.raises(ProducerError, match=r"greenlets.*patch_all\(thread=False\)"):
        Producer("tcp://127.0.0.1:1", name="a")


def test_the_connect_error_names_an_address_without_a_listener() -> None:
    with Peer() as peer:
        address = peer.address
    reason(f"nobody listens at {address}", address)


def test_the_connect_error_says_that_a_receiver_sent_no_welcome() -> None:
    with Peer() as peer:
        reason("not said WELCOME", peer.address)


def test_the_connect_error_says_that_a_port_never_answered() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        reason("still connecting", address)


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that calls `answer` with each connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server, ExitStack() as peers:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                answer(peers.enter_context(peer))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_connect_error_quotes_the_answer_of_a_server_without_zeromq() -> None:
    with answering(lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")) as address:
        reason("answers b'SSH-2.0-OpenSSH_9.9", address)


def test_the_connect_error_names_both_causes_of_a_broken_handshake() -> None:
    """The producer cannot distinguish this end from a wrong key: both close the connection."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    def end(peer: socket.socket) -> None:
        peer.sendall(greeting)
        peer.recv(1000)
        peer.close()

    with answering(end) as address:
        keys = {"keys": CAMERA, "server_key": SERVER.public}
        text = reason("the receiver ended just then", address, **keys)
    assert "server key is wrong" in text


def test_the_diagnosis_of_a_web_server_asks_for_the_data_address() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        said = diagnose(f"tcp://127.0.0.1:{server.server_port}").reason
        thread.join()
    assert said is not None
    assert "is an HTTP address" in said
    assert "give the data address" in said


def test_a_receiver_and_an_unused_port_get_no_diagnosis() -> None:
    with Peer() as peer:
        assert diagnose(peer.address) == (None, False)
    assert diagnose(peer.address) == (None, False)
    assert diagnose("ipc:///tmp/x") == (None, False)


def test_a_producer_connects_to_a_host_with_only_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        assert not diagnose("tcp://::1:1").ipv6, "this machine has no IPv6"
        return
    with (
        Peer(address="tcp://[::1]:0") as peer,
        # Without brackets, libzmq resolves ::1 as it resolves a name.
        Producer(peer.address.replace("[::1]", "::1"), "camera") as producer,
    ):
        peer.welcome()
        producer.connect()


def test_the_connect_error_names_a_host_that_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(_connection.socket, "getaddrinfo", fail)
    told = "the host name 'recever.invalid' cannot be resolved (Name or service not known)"
    reason(told, "tcp://recever.invalid:5557", keys=CAMERA, server_key=SERVER.public)


def test_plain_text_beyond_loopback_is_refused() -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.1:5555.*only on loopback.*stream-ssl keys"):
        Producer("tcp://192.0.2.1:5555", name="a")


@table(
    ("arguments", "match"),
    [
        ({"keys": CAMERA}, "belong together"),
        ({"server_key": SERVER.public}, "belong together"),
        ({"keys": Keys(CAMERA.name, CAMERA.public), "server_key": SERVER}, r"camera\.secret\.json"),
        ({"keys": CAMERA, "server_key": "short"}, "key file short"),
        ({"on_full": "wait"}, "on_full 'wait'"),
        ({"on_full": "spool"}, "belong together"),
        ({"spool": "folder"}, "belong together"),
        ({"linger": -1}, "linger -1"),
        ({"source": "x" * 65}, "source 'x.*: must be 1 to 64 bytes"),
        ({"source": 5}, "source 5: must be text"),
        ({"name": "two words"}, "two words"),
        ({"address": "127.0.0.1:5557"}, "tcp://HOST:PORT"),
        ({"address": "tcp://127.0.0.1:0"}, "port 1 to 65535"),
    ],
)
def test_a_producer_refuses_invalid_arguments(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Producer(**{"address": "tcp://127.0.0.1:5557", "name": "a", **arguments})  # type: ignore[arg-type]


def test_close_without_a_receiver_reports_the_unacknowledged_samples() -> None:
    producer = Producer("tcp://127.0.0.1:1", name="a")
    producer.send(image())
    with pytest.raises(Exception, match="1 of 1 samples are not acknowledged"):
        producer.close(timeout=0.1)
    with pytest.raises(ClosedError):
        producer.send(image())


def test_the_error_that_ends_a_with_block_is_raised_with_a_note_of_lost_samples() -> None:
    def fail() -> None:
        with Producer("tcp://127.0.0.1:1", name="a") as producer:
            producer.send(image())
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        fail()
    assert "not acknowledged" in caught.value.__notes__[0]


FORKS = """
import asyncio, os, signal, threading, warnings
import numpy as np
from stream_ssl.producers import ClosedError, Producer
warnings.simplefilter("ignore")
producer, image = Producer("tcp://127.0.0.1:1", name="a"), np.zeros((4, 4), np.uint8)

def status_of(call):
    taken, forked = threading.Event(), threading.Event()

    def hold():  # the producer's own thread may hold this lock, too
        with producer._io.lock:
            taken.set()
            forked.wait()

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except ClosedError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    forked.set()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

calls = {
    "send": lambda: producer.send(image),
    "send_async": lambda: asyncio.run(producer.send_async(image)),
    "connect": lambda: producer.connect(1),
    "flush": lambda: producer.flush(1),
    "stats": lambda: producer.stats,
}
found = {name: status_of(call) for name, call in calls.items()}
producer.close()
found["stats once it is closed"] = status_of(calls["stats"])
print([name for name, status in found.items() if status != 7])
"""


def test_a_call_in_a_forked_child_raises_an_error_about_the_fork() -> None:
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_blocked_send_can_be_interrupted() -> None:
    producer = Producer("tcp://127.0.0.1:1", name="a", buffer_bytes=100)
    producer.send(image())

    def interrupt(*_: object) -> None:
        raise InterruptedError("by hand")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            producer.send(image(side=10))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(Exception, match="not acknowledged"):
        producer.close(timeout=0)


def test_close_wakes_a_blocked_send() -> None:
    producer = Producer("tcp://127.0.0.1:1", name="a", buffer_bytes=100)
    producer.send(image())
    with background(lambda: producer.send(image(side=10))) as sent:
        with pytest.raises(Exception, match="not acknowledged"):
            producer.close(timeout=0.1)
        with pytest.raises(ClosedError):
            sent()


def test_producers_close_their_file_descriptors() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def once() -> None:
        with Peer() as peer, Producer(peer.address, name="a") as producer:
            peer.welcome()
            producer.connect()
            peer.restart()
            peer.welcome(epoch=2)

    once()
    before = descriptors()
    for _ in range(3):
        once()
    assert descriptors() <= before
