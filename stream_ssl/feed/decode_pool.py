"""Threads that decode the samples of a journal, each with a process of its own where that pays."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from stream_ssl.feed.decode import Chunk, DecodeTask, Keep, Payloads, decode_chunk
from stream_ssl.feed.decode_process import IsolatedDecoder
from stream_ssl.feed.journal_tasks import CHUNK


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
