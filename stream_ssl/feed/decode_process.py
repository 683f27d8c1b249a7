"""Decoding in processes, so that it does not take the interpreter's lock from the learner.

Decoding a JPEG takes 30 to 50 microseconds under the lock besides libjpeg. A GPU's step is bound by
Python, so these would be a fifth of it. A file that ends its decoder's process, through a fault of
a library or for want of memory, costs one sample and not the learner.

The answers are msgpack, because a process that reads foreign files must not be trusted with pickle.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import msgpack
import numpy as np
import torch

from stream_ssl.feed.decode import (
    BadSample,
    Decoded,
    Payloads,
    Row,
    data_of,
    decode_samples,
    ignore_warnings,
)
from stream_ssl.feed.shared_pixels import SharedPixels

log = logging.getLogger(__name__)

WAIT = 5.0
"""Seconds in which a process must end after its pipe was closed, before it is killed."""

PATIENCE = 600.0
"""Seconds in which a process must answer, before it is killed. 64 images of the largest size that
`Decoder` accepts take 70 seconds of a free core."""

MOST_ANSWER = 1 << 20
"""The most bytes of an answer, which holds no pixels."""

MOST_TEXT = 4096
"""The most characters of an error."""

_lock = threading.Lock()
"""Held while `multiprocessing` starts or ends a process, which two threads must not do at once."""

_context = multiprocessing.get_context("forkserver")


class DecodeProcess:
    """A process that decodes, for one thread at a time.

    Args:
        decoder: converts payloads to pixels. The process receives a pickled copy.
        most: the most samples of a call of `decode`.
    """

    def __init__(self, decoder: Payloads, most: int) -> None:
        self._decoder, self._pixels = decoder, SharedPixels((most, *decoder.shape_HWC))
        self._process: ForkServerProcess | None = None
        self._ended = ""  # how the last process ended

    def _start(self) -> None:
        """Start a process, and wait until it is ready.

        Raises:
            RuntimeError: it ended instead.
        """
        self._pipe, theirs = _context.Pipe()
        with _lock:
            _context.set_forkserver_preload([__name__])  # imports torch once for all processes
            self._process = _context.Process(
                target=serve, args=(self._decoder, theirs, self._pixels), name="decode", daemon=True
            )
            self._process.start()
        theirs.close()
        try:
            self._pipe.recv_bytes(MOST_ANSWER)
        except (EOFError, OSError):
            self.close()
            raise RuntimeError(
                f"the process that decodes samples ended at its start ({self._ended})"
            ) from None

    def decode(self, source: str, rows: Sequence[Row], payload: memoryview) -> Decoded:
        """Decode samples as `decode_samples` does.

        A sample that ends its process twice, the second time alone, is rejected as "damaged". So is
        one whose decoding never ends.

        Raises:
            RuntimeError: the process cannot start, or the decoder raised an unexpected error.
        """
        if (decoded := self._ask(source, rows, payload)) is not None:
            return decoded
        if len(rows) > 1:  # one of them ended it, or somebody killed it
            parts = zip(rows, data_of(rows, payload), strict=True)
            return _joined([self.decode(source, [row], data) for row, data in parts])
        if (decoded := self._ask(source, rows, payload)) is not None:
            return decoded
        error = BadSample("damaged", f"it ended the process that decoded it ({self._ended})")
        return Decoded(self._pixels.array[:0].copy(), np.empty(0, np.int64), [], [(0, error)])

    def _ask(self, source: str, rows: Sequence[Row], payload: memoryview) -> Decoded | None:
        """Return the answer of the process, which is started if none runs; None if it ended."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send_bytes(msgpack.packb((source, rows), unicode_errors="surrogatepass"))
            self._pipe.send_bytes(payload)
            if not self._pipe.poll(PATIENCE):
                raise TimeoutError
            answer = self._pipe.recv_bytes(MOST_ANSWER)
        except (EOFError, OSError):
            self.close()
            log.warning("a process that decodes ended (%s); another one is started", self._ended)
            return None
        good, hashes, bad, failure = msgpack.unpackb(answer, unicode_errors="surrogatepass")
        if failure:
            raise RuntimeError(f"the decoder failed:\n{failure}")
        return Decoded(
            self._pixels.array[: len(good)].copy(),
            np.frombuffer(hashes, np.int64),
            good,
            [(index, BadSample(reason, message)) for index, reason, message in bad],
        )

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is None:
            return
        self._pipe.close()
        with _lock:
            self._process.join(WAIT)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
            code = self._process.exitcode or 0
        self._ended = signal.Signals(-code).name if code < 0 else f"status {code}"
        self._process = None


def serve(decoder: Payloads, pipe: Connection, pixels: SharedPixels) -> None:
    """Answer requests until the pipe is closed. This is all that the process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    torch.set_num_threads(1)
    ignore_warnings()
    pipe.send_bytes(b"ready")
    while True:
        try:
            source, rows = msgpack.unpackb(pipe.recv_bytes(), unicode_errors="surrogatepass")
            payload = memoryview(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(
            msgpack.packb(
                _answer(decoder, source, rows, payload, pixels), unicode_errors="surrogatepass"
            )
        )


def _answer(
    decoder: Payloads, source: str, rows: Sequence[Row], payload: memoryview, pixels: SharedPixels
) -> tuple[list[int], bytes, list[tuple[int, str, str]], str]:
    """Decode, and return all but the pixels: good indices, hashes, bad samples, an error."""
    try:
        found = decode_samples(decoder, source, rows, payload)
    except MemoryError:  # ends this process, which gives the memory back
        raise
    except Exception:
        return [], b"", [], traceback.format_exc()[-MOST_TEXT:]
    pixels.array[: len(found.good)] = found.image_BHWC
    bad = [(index, error.reason, str(error)[:MOST_TEXT]) for index, error in found.bad]
    return list(found.good), found.hashes_B.tobytes(), bad, ""


def _joined(parts: Sequence[Decoded]) -> Decoded:
    """Return the results of single samples as one."""
    return Decoded(
        np.concatenate([part.image_BHWC for part in parts]),
        np.concatenate([part.hashes_B for part in parts]),
        [index for index, part in enumerate(parts) if part.good],
        [(index, error) for index, part in enumerate(parts) for _, error in part.bad],
    )
