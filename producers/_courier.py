"""The thread that owns a producer's sockets: sockets are not thread-safe."""

from __future__ import annotations

import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable

import zmq

from producers._connection import Connection, Curve
from producers._dialogue import Dialogue
from producers._packer import Packet
from producers.errors import ProducerError
from producers.stats import Rejection
from stream_ssl.wire import Bye, Data, Hello, WireError, decode, encode
from stream_ssl.wire.messages import Frames

BACKOFF = (0.05, 1.0)  # seconds between connections: first and most
BYE_LINGER_MS = 500
BURST = 64  # messages sent before looking for acknowledgements

logger = logging.getLogger("producers")


class Courier:
    """Carries a dialogue over the network, in a thread of its own.

    `changed` guards the dialogue; it is notified whenever something happened to it.
    """

    def __init__(
        self,
        address: str,
        curve: Curve | None,
        dialogue: Dialogue,
        changed: threading.Condition,
        on_rejected: Callable[[Rejection], None] | None,
    ) -> None:
        self._address, self._curve = address, curve
        self._dialogue, self._changed = dialogue, changed
        self._on_rejected = on_rejected
        self._stopping = False
        self._asleep = False
        self._backoff = BACKOFF[0]
        self._waker, self._alarm = socket.socketpair()
        self._waker.setblocking(False)
        self._alarm.setblocking(False)
        self.thread = threading.Thread(
            target=self._run, name=f"producer {dialogue.hello.producer}", daemon=True
        )

    def wake(self) -> None:
        """There is something to do. Called with `changed` held."""
        if self._asleep:
            self._asleep = False
            self._waker.send(b"!")

    def stop(self) -> None:
        """Says BYE, ends the thread, frees the sockets."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self.wake()
        self.thread.join()
        self._waker.close()
        self._alarm.close()

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping:
                self._serve(context)
        except Exception as error:
            logger.exception("a producer's thread died")
            self._die(error)
        finally:
            context.destroy(linger=0)

    def _die(self, error: Exception) -> None:
        with self._changed:
            self._dialogue.fatal = ProducerError(f"the producer's thread died: {error!r}")
            self._dialogue.state = "refused"
            self._changed.notify_all()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """One connection from beginning to end."""
        connection = Connection(context, self._address, self._curve)
        try:
            while not self._stopping and not connection.lost:
                self._turn(connection)
                if self._dialogue.state == "refused":
                    break
        finally:
            if connection.up and self._stopping:
                connection.send(encode(Bye("closed")))
            connection.close(BYE_LINGER_MS if connection.up else 0)
        with self._changed:
            self._dialogue.disconnected(connection.reason)
            self._changed.notify_all()
            if self._dialogue.state == "refused":
                self._changed.wait_for(lambda: self._stopping)
            else:
                self._changed.wait_for(lambda: self._stopping, self._pause())

    def _pause(self) -> float:
        """Seconds before the next connection: doubled each time, and never in step with others."""
        pause, self._backoff = self._backoff, min(2 * self._backoff, BACKOFF[1])
        return pause * random.uniform(0.5, 1.0)

    def _turn(self, connection: Connection) -> None:
        """Sends what can be sent, then waits until something happens."""
        blocked, timeout = self._send(connection)
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
        poller.register(connection.monitor, zmq.POLLIN)
        poller.register(self._alarm.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1000 * timeout)))
        self._asleep = False
        if self._alarm.fileno() in ready:
            self._hush()
        if connection.monitor in ready:
            self._watch(connection)
        if connection.socket in ready:
            self._receive(connection)
        self._tell()

    def _send(self, connection: Connection) -> tuple[bool, float]:
        """Sends until nothing is due or the socket is full (True); and seconds to sleep then."""
        sent = None
        for _ in range(BURST):
            with self._changed:
                now = time.monotonic()
                if sent is not None:
                    self._dialogue.left(sent, now)
                sent = self._due(connection, now)
                if sent is None:
                    self._asleep = not self._stopping
                    return False, self._dialogue.timer(now) if self._asleep else 0.0
            if not connection.send(_frames(sent)):
                self._asleep = True
                return True, 0.0 if self._stopping else 1.0
        with self._changed:
            assert sent is not None
            self._dialogue.left(sent, time.monotonic())
        return False, 0.0

    def _due(self, connection: Connection, now: float) -> Hello | tuple[int, Packet] | None:
        """What should leave over this connection now."""
        if self._stopping or not connection.up:
            return None
        if self._dialogue.stale(now):
            connection.lost, connection.reason = True, self._dialogue.trouble
            return None
        return self._dialogue.outgoing(now)

    def _hush(self) -> None:
        try:
            while self._alarm.recv(64):
                pass
        except BlockingIOError:
            pass

    def _watch(self, connection: Connection) -> None:
        was_up = connection.up
        connection.watch()
        with self._changed:
            if connection.up and not was_up:
                self._dialogue.connected(time.monotonic())
            elif not connection.up:
                self._dialogue.disconnected(connection.reason)
            self._changed.notify_all()

    def _receive(self, connection: Connection) -> None:
        """Takes in all that has arrived."""
        heard = False
        while (frames := connection.receive()) is not None:
            heard = True
            try:
                message = decode(frames)
            except WireError as error:
                with self._changed:
                    self._dialogue.misread(error)
                continue
            with self._changed:
                self._dialogue.received(message, time.monotonic())
                if self._dialogue.state == "active":
                    self._backoff = BACKOFF[0]
        if heard:
            with self._changed:
                self._changed.notify_all()

    def _tell(self) -> None:
        """Passes rejections on, without the lock: what the user does with them may take time."""
        if not self._dialogue.rejections:
            return
        with self._changed:
            rejections, self._dialogue.rejections = self._dialogue.rejections, []
            self._changed.notify_all()
        if self._on_rejected is None:
            return
        for rejection in rejections:
            try:
                self._on_rejected(rejection)
            except Exception:
                logger.exception("on_rejected failed")


def _frames(message: Hello | tuple[int, Packet]) -> Frames:
    if isinstance(message, Hello):
        return encode(message)
    sequence, packet = message
    return Data(sequence, packet.data.header, packet.data.payload).encode()
