"""A receiver that a test controls, over real TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from stream_ssl.wire import (
    CODECS,
    Ack,
    Bye,
    Data,
    Hello,
    Keys,
    Message,
    Welcome,
    decode,
    encode,
)

PATIENCE = 60.0  # seconds until a test gives up
MANY = 16 * 1024 * 1024
T = TypeVar("T")


def image(value: int = 0, side: int = 4) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a grey square."""
    return np.full((side, side), value, np.uint8)


def arrived(journal: list[Data]) -> list[str]:
    """Return the ids of all samples, in their order."""
    return [sample.id for data in journal for sample in data.samples()]


class _Allowed:
    """The allow-list that pyzmq's authenticator asks."""

    def __init__(self, keys: list[Keys]) -> None:
        self._keys = {key.public for key in keys}

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in self._keys


class Peer:
    """A ROUTER socket on a free port, for one thread at a time."""

    def __init__(
        self,
        server: Keys | None = None,
        allowed: list[Keys] | None = None,
        address: str = "tcp://127.0.0.1:0",
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.server = server
        self._authenticator: ThreadAuthenticator | None = None
        if server is not None:
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("test", _Allowed(allowed or []))
        self.who = b""
        self.journal: list[Data] = []
        self.address = address
        self.open()

    def open(self) -> None:
        """Bind the socket, after a close to the same port as before."""
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.ipv6 = "[" in self.address
        if self.server is not None:
            assert self.server.secret is not None
            self.socket.curve_server = True
            self.socket.curve_publickey = self.server.public.encode()
            self.socket.curve_secretkey = self.server.secret.encode()
            self.socket.zap_domain = b"test"
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.socket.bind(self.address)
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline, f"{self.address} does not become free"
                time.sleep(0.01)
        self.address = self.socket.last_endpoint.decode()

    def drop(self) -> None:
        """Close the socket: the connection breaks, and nobody listens."""
        self.socket.close(0)

    def restart(self) -> None:
        """Close the socket and open a new one at the same port, which knows no producer."""
        self.drop()
        self.open()

    def hear(self, timeout: float = PATIENCE) -> Message:
        """Return the next message."""
        assert self.socket.poll(1000 * timeout), "the producer says nothing"
        self.who, *frames = self.socket.recv_multipart()
        return decode(frames)

    def expect(self, kind: type[T]) -> T:
        """Return the next message, which must be of a kind. Repeated HELLOs are ignored."""
        message = self.hear()
        while isinstance(message, Hello) and kind is not Hello:
            message = self.hear()
        assert isinstance(message, kind), message
        return message

    def quiet(self, seconds: float = 0.3) -> bool:
        """Return whether no message except HELLO comes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.socket.poll(1000 * left) and not isinstance(self.hear(), Hello):
                return False
        return True

    def say(self, message: Message) -> None:
        """Answer the sender of the last message."""
        self.socket.send_multipart([self.who, *encode(message)])

    def welcome(self, **fields: Any) -> Hello:
        """Wait for HELLO and answer with WELCOME."""
        hello = self.expect(Hello)
        self.say(welcome(**fields))
        return hello

    @contextmanager
    def serving(self, **fields: Any) -> Iterator[list[Data]]:
        """Receive and acknowledge all packets in another thread."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                while not stop.is_set():
                    if self.socket.poll(20):
                        with suppress(zmq.ZMQError):  # the producer may be gone by now
                            self._take(fields)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield self.journal
        finally:
            stop.set()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            assert not failures, failures

    def _take(self, fields: dict[str, Any]) -> None:
        message = self.hear()
        through = self.journal[-1].sequence if self.journal else fields.get("resume", 0)
        if isinstance(message, Hello):
            self.say(welcome(**{**fields, "resume": through}))
        elif isinstance(message, Data) and message.sequence == through + 1:
            self.journal.append(message)
            self.say(Ack(message.sequence, MANY))
        else:
            assert isinstance(message, Bye | Data)

    def close(self) -> None:
        self.socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def welcome(**fields: Any) -> Welcome:
    """Return the WELCOME of a receiver that grants much credit."""
    return Welcome(
        **{
            "resume": 0,
            "position": None,
            "credit": MANY,
            "max_packet": MANY,
            "max_samples": 1024,
            "codecs": CODECS,
            "epoch": 1,
            **fields,
        }
    )


@contextmanager
def background(what: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run a function in a thread, and yield a function that waits for its result."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((what(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> T:
        thread.join(PATIENCE)
        assert box, "it does not end"
        value, error = box[0]
        if error is not None:
            raise error
        return value

    yield result
    thread.join(PATIENCE)
    assert not thread.is_alive()
