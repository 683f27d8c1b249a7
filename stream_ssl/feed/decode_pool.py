"""Threads that decode the samples of a journal, each with a process of its own where that pays."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from stream_ssl.feed.decode import Chunk, DecodeTask, Keep, Payloads, decode_chunk
from stream_ssl.feed.decode_process import DecodeProcess
from stream_ssl.feed.journal_tasks import CHUNK


class DecodePool:
    """A pool that decodes tasks.

    Args:
        decoder: converts payloads to pixels, or to the bytes of vectors.
        workers: the number of threads.
        processes: whether each thread decodes in a process of its own.
        keep: stores the bytes of a good sample; see `decode_chunk`.
    """

    def __init__(
        self, decoder: Payloads, workers: int, processes: bool, keep: Keep | None = None
    ) -> None:
        self._decoder, self._keep = decoder, keep
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._processes = [DecodeProcess(decoder, CHUNK) for _ in range(workers * processes)]
        self._idle: SimpleQueue[DecodeProcess] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def submit(self, task: DecodeTask) -> Future[Chunk]:
        """Return the future result of `decode_chunk`."""
        return self._threads.submit(self._decode, task)

    def _decode(self, task: DecodeTask) -> Chunk:
        if not self._processes:
            return decode_chunk(self._decoder, task, self._keep)
        process = self._idle.get()
        try:
            return decode_chunk(self._decoder, task, self._keep, process.decode)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the threads and the processes, and drop all samples that they still decode."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()
