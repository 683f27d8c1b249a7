"""Decoding in processes, so that it does not take the interpreter's lock from the learner.

A learner with a GPU is busy in Python. A thread beside it gets the lock up to 5 ms late, several
times an image, and makes 127 images per second where a process makes 1,500 (benchmarks/decode.py).
A file that ends its decoder's process, through a fault of a library for example, costs one sample
and not the learner.

The answers are msgpack, because a process that reads foreign files must not be trusted with pickle.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

import logging
import math
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from stream_ssl.feed.decode import (
    BadSample,
    Chunk,
    Decoded,
    DecodeTask,
    Keep,
    Payloads,
    Row,
    data_of,
    decode_chunk,
    decode_samples,
    ignore_warnings,
)
from stream_ssl.feed.journal_tasks import CHUNK
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

WAIT = 5.0
"""Seconds in which a process must end after its pipe was closed, before it is killed."""

PATIENCE = 600.0
"""Seconds in which a process must answer, before it is killed. 64 images of the largest size that
`Decoder` accepts take 70 seconds of a free core."""

PAUSES = (0.1, 1.0)
"""Seconds between the attempts to start a process."""

TRIES = 3
"""How often a sample alone must end its process before it is rejected."""

ENDED_BY_OTHERS = ("SIGTERM", "SIGHUP", "SIGINT", "status 255")
"""Ends of a process that are not its sample's doing. The last one means that the fork server ended,
and says nothing about the process."""

MOST_ENDS_BY_OTHERS = 20

MOST_ANSWER = 1 << 20
"""The most bytes of an answer, which holds no pixels."""

MOST_TEXT = 1000
"""The most characters of an error. 64 of them fit into an answer."""

_lock = threading.Lock()
"""Held while `multiprocessing` starts or ends a process, which two threads must not do at once."""

_context = multiprocessing.get_context("forkserver")


class SharedPixels:
    """An array of uint8 that a process started by `multiprocessing` shares with this one.

    It lies in no file system: containers limit /dev/shm to 64 MB, and a write beyond that limit
    kills the process. It is freed when both processes have ended or dropped it.

    Args:
        shape: the shape of the array.
        file: the open file that holds it; None makes a new one.

    Attributes:
        array: the array.
    """

    def __init__(self, shape: tuple[int, ...], file: int | None = None) -> None:
        size = math.prod(shape)
        self._file, self._shape = _new_file() if file is None else file, shape
        if file is None:
            os.ftruncate(self._file, size)
        mapped = mmap.mmap(self._file, size)
        self.array: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8).reshape(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes this array in a process that is being started."""
        return _received, (self._shape, reduction.DupFd(self._file))

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # no file could be opened
            os.close(self._file)


def _received(shape: tuple[int, ...], file: Any) -> SharedPixels:
    return SharedPixels(shape, file.detach())


def _new_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("stream-ssl-pixels")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class DecodeProcess:
    """A process that decodes, ready for requests. It writes the pixels of an answer to `pixels`.

    Raises:
        OSError: the process cannot start, or ended at its start.
    """

    def __init__(self, decoder: Payloads, pixels: SharedPixels) -> None:
        self.pipe, theirs = _context.Pipe()
        try:
            with _lock:
                _context.set_forkserver_preload([__name__])  # imports torch once for all processes
                self._process = _context.Process(
                    target=serve, args=(decoder, theirs, pixels), name="decode", daemon=True
                )
                self._process.start()
        except EOFError:  # the fork server ended meanwhile
            self.pipe.close()
            raise OSError("the process that starts them ended") from None
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        try:
            self.answer()
        except (EOFError, OSError):
            raise OSError(f"it ended at its start ({self.end()})") from None

    def answer(self) -> bytes:
        """Return the next answer.

        Raises:
            EOFError, OSError: the process ended, or does not answer within PATIENCE.
        """
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError
        return self.pipe.recv_bytes(MOST_ANSWER)

    def kill(self) -> None:
        """End the process at once, from any thread."""
        assert self._process.pid is not None, "it was started"
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Close the pipe, wait for the end of the process, and return how it ended."""
        self.pipe.close()
        if not wait([self._process.sentinel], WAIT):
            self.kill()
            wait([self._process.sentinel], 60.0)
        with _lock:
            self._process.join(0)
            code = self._process.exitcode
        if code is None or code >= 0:
            return f"status {code}"
        with suppress(ValueError):  # a real-time signal has no name
            return signal.Signals(-code).name
        return f"signal {-code}"


class IsolatedDecoder:
    """A decoder in a process, for one thread at a time. If the process ends, another one starts.

    Args:
        decoder: converts payloads to pixels. The process receives a pickled copy.
        most: the most samples of a call of `decode`.
    """

    def __init__(self, decoder: Payloads, most: int) -> None:
        self._decoder, self._pixels = decoder, SharedPixels((most, *decoder.shape_HWC))
        self.process: DecodeProcess | None = None
        self._ended = ""  # how the last process ended
        self._stopped = False
        self._limited_log = RateLimitedLogger(log)  # a producer may send many such samples

    def decode(self, source: str, rows: Sequence[Row], payload: memoryview) -> Decoded:
        """Decode samples as `decode_samples` does.

        A sample that ends its process TRIES times, alone, is rejected as "damaged". So is one whose
        decoding never ends.

        Raises:
            RuntimeError: no process can be started, the decoder raised an unexpected error, others
                end all processes, or `stop` was called.
        """
        tries = by_others = 0
        while tries < TRIES:
            if (decoded := self._ask(source, rows, payload)) is not None:
                return decoded
            if len(rows) > 1:  # one of them ended it, or somebody else did
                parts = zip(rows, data_of(rows, payload), strict=True)
                return _joined([self.decode(source, [row], data) for row, data in parts])
            if self._ended not in ENDED_BY_OTHERS:
                tries += 1
            elif (by_others := by_others + 1) > MOST_ENDS_BY_OTHERS:
                raise RuntimeError(f"each process that decodes is ended ({self._ended})")
        error = BadSample("damaged", f"it ended the process that decoded it ({self._ended})")
        return Decoded(self._pixels.array[:0].copy(), np.empty(0, np.int64), [], [(0, error)])

    def _ask(self, source: str, rows: Sequence[Row], payload: memoryview) -> Decoded | None:
        """Return the answer of the process, which is started if none runs; None if it ended."""
        if self.process is None and not self._stopped:
            self.process = self._started()
        process = self.process
        if process is None or self._stopped:  # `stop` may be called while a process starts
            raise RuntimeError("decoding was stopped")
        try:
            process.pipe.send_bytes(msgpack.packb((source, rows), unicode_errors="surrogatepass"))
            process.pipe.send_bytes(payload)
            answer = process.answer()
        except (EOFError, OSError):
            self.close()
            if not self._stopped:
                text = f"a process that decodes ended ({self._ended}); another one starts"
                self._limited_log.warning(self._ended, text)
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

    def _started(self) -> DecodeProcess:
        pauses = list(PAUSES)
        while True:
            try:
                return DecodeProcess(self._decoder, self._pixels)
            except OSError as error:
                if not pauses:
                    raise RuntimeError(
                        f"no process that decodes samples can start: {error}"
                    ) from error
                log.warning("a process that decodes cannot start (%s); trying again", error)
                time.sleep(pauses.pop(0))

    def stop(self) -> None:
        """End the process at once, and start no other one. Any thread may call this."""
        self._stopped = True
        if (process := self.process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if one runs."""
        process, self.process = self.process, None
        if process is not None:
            self._ended = process.end()


class DecodePool:
    """A pool that decodes tasks by `decode_chunk`; `Batches` explains the arguments."""

    def __init__(
        self, decoder: Payloads, workers: int, processes: bool, keep: Keep | None = None
    ) -> None:
        self._decoder, self._keep = decoder, keep
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._decoders = [IsolatedDecoder(decoder, CHUNK) for _ in range(workers * processes)]
        self._idle: SimpleQueue[IsolatedDecoder] = SimpleQueue()
        for isolated in self._decoders:
            self._idle.put(isolated)

    def submit(self, task: DecodeTask) -> Future[Chunk]:
        """Return the future result of `decode_chunk`."""
        return self._threads.submit(self._decode, task)

    def _decode(self, task: DecodeTask) -> Chunk:
        if not self._decoders:
            return decode_chunk(self._decoder, task, self._keep)
        decoder = self._idle.get()
        try:
            return decode_chunk(self._decoder, task, self._keep, decoder.decode)
        finally:
            self._idle.put(decoder)

    def close(self) -> None:
        """End the threads and the processes, and drop all samples that they still decode."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._decoders:
            decoder.stop()
        self._threads.shutdown(wait=True)
        for decoder in self._decoders:
            decoder.close()


def serve(decoder: Payloads, pipe: Connection, pixels: SharedPixels) -> None:
    """Answer requests until the pipe is closed. This is all that the process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):  # if memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    ignore_warnings()
    pipe.send_bytes(b"ready")
    while True:
        try:
            source, rows = msgpack.unpackb(pipe.recv_bytes(), unicode_errors="surrogatepass")
            payload = memoryview(pipe.recv_bytes())
        except EOFError:
            return
        answer = _answer(decoder, source, rows, payload, pixels)
        try:
            pipe.send_bytes(msgpack.packb(answer, unicode_errors="surrogatepass"))
        except OSError:  # the learner has closed the pipe
            return


def _end_with_parent() -> None:
    """End this process with the learner, also while it decodes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(
    decoder: Payloads, source: str, rows: Sequence[Row], payload: memoryview, pixels: SharedPixels
) -> tuple[list[int], bytes, list[tuple[int, str, str]], str]:
    """Decode, and return all but the pixels: good indices, hashes, bad samples, an error."""
    try:
        found = decode_samples(decoder, source, rows, payload)
    except Exception as error:
        of_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        if isinstance(error, MemoryError) or of_torch:
            raise  # this ends the process, which gives the memory back
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
