"""Transport of verdicts from the learner to the receiver; it is lossy and never blocks.

Verdicts are datagrams on a Unix socket in the run's folder. The receiver opens the socket when a
producer asks for verdicts; without the socket the learner sends nothing. Datagrams that do not fit
into the kernel's buffer are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgpack

from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.messages import MAX_VERDICTS, Verdict

log = logging.getLogger(__name__)

FILE = "verdicts.sock"
READ = 64
"""Most datagrams per call of `VerdictInbox.read`."""
MAX_BYTES = 60_000
MAX_PATH = 107
"""Most bytes of a Unix socket's path. If the path in the run's folder is longer, there are no
verdicts."""
RETRY_SECONDS = 60.0
"""Seconds before the inbox tries again to listen after a failure."""


class VerdictInbox:
    """The receiver's end of the socket for verdicts, in the folder of a run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder).absolute() / FILE
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._limited_log = RateLimitedLogger(log, seconds=3600.0)

    def listen(self, wanted: bool) -> None:
        """Open the socket if verdicts are wanted and close it otherwise; log failures."""
        if wanted == (self._socket is not None) or time.monotonic() < self._retry_at:
            return
        if not wanted:
            self.close()
            return
        try:
            if len(os.fsencode(self._path)) > MAX_PATH:
                raise OSError(f"its path has more than {MAX_PATH} bytes")
            self._path.unlink(missing_ok=True)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            # `bind` uses the mode of the socket, whereas chmod of the path would follow a link.
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(str(self._path))
        except OSError as error:  # such as a full disk
            self.close()
            self._retry_at = time.monotonic() + RETRY_SECONDS
            text = f"no verdicts for producers: {self._path} cannot be listened at: {error}"
            self._limited_log.warning("listen", text)

    def read(self) -> Iterator[tuple[str, list[Verdict]]]:
        """Yield the received verdicts as (name of the producer, verdicts); never blocks."""
        for _ in range(READ if self._socket is not None else 0):
            try:
                assert self._socket is not None, "asked before"
                producer, rows = msgpack.unpackb(self._socket.recv(MAX_BYTES + 1))
                yield str(producer), [Verdict(*row) for row in rows[:MAX_VERDICTS]]
            except BlockingIOError:
                return
            except (OSError, ValueError, TypeError, LookupError, msgpack.UnpackException):
                continue  # the datagram is not from a learner

    def close(self) -> None:
        """Close and remove the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                self._path.unlink()


class VerdictSender:
    """The learner's end of the socket for verdicts, in the folder of a run.

    Attributes:
        left_out: the number of verdicts that could not be sent.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder).absolute() / FILE
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.left_out = 0

    @property
    def wanted(self) -> bool:
        """Whether the receiver's socket exists; False if the folder cannot be read."""
        return os.access(self._path, os.F_OK)  # Path.exists would raise

    def send(self, verdicts: Mapping[str, Sequence[Verdict]]) -> None:
        """Send verdicts, given by producer; drop and count those that cannot be sent at once."""
        for producer, rows in verdicts.items():
            for start in range(0, len(rows), MAX_VERDICTS):
                part = rows[start : start + MAX_VERDICTS]
                try:
                    self._socket.sendto(msgpack.packb((producer, part)), str(self._path))
                except OSError:
                    self.left_out += len(part)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
