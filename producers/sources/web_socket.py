"""A WebSocket client with bounds: a server can hold neither the thread nor much memory."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from stream_ssl.rate_limited_logger import printable

if TYPE_CHECKING:
    from websockets.client import ClientProtocol
    from websockets.protocol import Event

MAX_MESSAGE = 64 * 2**20  # bytes; a raw image of 4K with 16-bit colours has 50 MB
PIECE = 1 << 18  # bytes per read
END_SECONDS = 0.2  # to send a close frame
TICK_SECONDS = 0.25  # longest wait for data; then the caller can decide to stop


class LostError(OSError):
    """The connection cannot be opened, or cannot be used any longer."""


class WebSocket:
    """A connection to a WebSocket server, for one thread.

    Each byte that arrives is a sign of life, so a large message may take long on a slow link. After
    half of `timeout` without a byte, the client sends a ping. Compression and redirects are off.

    Args:
        url: ws://HOST:PORT/PATH or wss://HOST:PORT/PATH.
        subprotocols: the server must choose one of them.
        timeout: seconds without a byte after which the connection counts as lost. The handshake as
            a whole may take as long.
        tls: context of TLS, for wss.
        stopped: ends the handshake when it is set.

    Raises:
        LostError: there is no such server.
        OSError: the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        subprotocols: list[str],
        timeout: float,
        tls: ssl.SSLContext | None,
        stopped: threading.Event,
    ) -> None:
        from websockets.client import ClientProtocol
        from websockets.typing import Subprotocol
        from websockets.uri import parse_uri

        place = parse_uri(url)
        self._timeout = timeout
        self._socket = socket.create_connection((place.host, place.port), timeout)
        try:
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=place.host)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            offered = [Subprotocol(name) for name in subprotocols]
            self._protocol: ClientProtocol = ClientProtocol(
                place, subprotocols=offered, max_size=MAX_MESSAGE
            )
            self._events: list[Event] = []  # frames that were received and not read yet
            self._message = bytearray()  # the fragments of a message so far
            self._text = False
            self._last_byte = time.monotonic()
            self._pinged = False
            self._shake_hands(stopped)
        except BaseException:
            self._socket.close()
            raise

    @property
    def subprotocol(self) -> str:
        """The subprotocol that the server chose."""
        return str(self._protocol.subprotocol)

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError), self._socket:
            if self._is_open():
                self._protocol.send_close()
                self._flush(END_SECONDS)

    def send(self, text: str) -> None:
        """Send a text message.

        Raises:
            OSError: the connection is lost.
        """
        if not self._is_open():  # the server closed it behind the message that is answered
            raise LostError(self._why_closed())
        self._protocol.send_text(text.encode())
        self._flush()

    def messages(self) -> Iterator[str | bytes | bytearray | None]:
        """Yield each message, and None after each TICK_SECONDS without data.

        Invalid UTF-8 in a text becomes replacement characters.

        Raises:
            LostError: the server closed the connection, broke the protocol, or is silent.
            OSError: the connection is lost.
        """
        from websockets.frames import Frame, Opcode

        while True:
            events, self._events = self._events, []
            for event in events:
                if not isinstance(event, Frame) or event.opcode not in (
                    Opcode.TEXT,
                    Opcode.BINARY,
                    Opcode.CONT,
                ):
                    continue  # the protocol answers pings itself
                if event.opcode is not Opcode.CONT:
                    self._text = event.opcode is Opcode.TEXT
                assert isinstance(event.data, bytes | bytearray)
                whole = event.data  # a message of one frame is not copied
                if self._message or not event.fin:
                    self._message += event.data
                    whole = self._message
                if event.fin:
                    self._message = bytearray()
                    yield whole.decode(errors="replace") if self._text else whole
            if not self._is_open():
                raise LostError(self._why_closed())
            if not self._receive():
                yield None

    def _shake_hands(self, stopped: threading.Event) -> None:
        deadline = time.monotonic() + self._timeout
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        while not self._events and self._protocol.handshake_exc is None:
            self._receive()
            if stopped.is_set() or time.monotonic() > deadline:
                raise LostError(f"no WebSocket handshake within {self._timeout:g} s")
        if (error := self._protocol.handshake_exc) is not None:
            why = printable(error.__cause__ or error)
            raise LostError(f"the server rejects this client, or speaks no WebSocket: {why}")
        if self._protocol.subprotocol is None:
            raise LostError("the server knows none of the offered subprotocols")
        del self._events[0]  # the response; frames may have come with it

    def _receive(self) -> bool:
        """Pass the data that arrive to the protocol; return False if none came for a tick."""
        self._socket.settimeout(min(TICK_SECONDS, self._timeout / 4))
        try:
            data = self._socket.recv(PIECE)
        except TimeoutError:
            silent = time.monotonic() - self._last_byte
            if silent > self._timeout:
                raise LostError(f"nothing came for {self._timeout:g} s") from None
            if silent > self._timeout / 2 and not self._pinged and self._is_open():
                self._pinged = True
                self._protocol.send_ping(b"")
                self._flush()
            return False
        self._last_byte, self._pinged = time.monotonic(), False
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        self._events += self._protocol.events_received()
        self._flush()
        return True

    def _flush(self, seconds: float | None = None) -> None:
        """Send what the protocol wants to send, such as pongs, within `timeout` or `seconds`."""
        self._socket.settimeout(seconds or self._timeout)
        for data in self._protocol.data_to_send():
            if data:  # an empty part asks for a half-closed connection; the caller closes it
                self._socket.sendall(data)

    def _is_open(self) -> bool:
        from websockets.protocol import State

        return self._protocol.state is State.OPEN

    def _why_closed(self) -> str:
        from websockets.exceptions import PayloadTooBig

        error, closed = self._protocol.parser_exc, self._protocol.close_rcvd
        if closed is not None:
            return f"the server closed the connection: {printable(closed)}"
        if isinstance(error, PayloadTooBig):
            return f"a message has more than {MAX_MESSAGE} bytes, which is the limit"
        if isinstance(error, EOFError):
            return "the connection broke"
        return f"the server broke the protocol: {printable(error)}"
