"""Decoding in processes against decoding in this one, and processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
from batches_naive import (
    SIZE,
    FakeReader,
    FakeRecord,
    assert_equal,
    collect,
    journal,
    naive_batches,
    raw,
    record,
)
from decoding_learner import learned
from waiting import until

from stream_ssl.batch import COLUMNS, START, Offset
from stream_ssl.config import build
from stream_ssl.feed import decode_process
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import REASONS, Chunk, Decoder, DecodeTask, Pixels, decode_chunk
from stream_ssl.feed.decode_process import IsolatedDecoder
from stream_ssl.feed.journal_tasks import CHUNK, JournalShare, JournalTasks
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.wire import Sample

DEADLY, WRONG, LARGE, ENDLESS = 250, 251, 252, 253
"""The first byte of a raw image that ends its decoder, shows a fault of it, needs memory, or never
ends."""


class Fragile(Decoder):
    """A decoder that fails at some images, each in its own way."""

    def read(self, sample: Sample) -> Pixels:
        match bytes(sample.data[:1])[0]:
            case first if first == DEADLY:
                os.kill(os.getpid(), signal.SIGSEGV)
            case first if first == WRONG:
                raise TypeError("a bytes-like object is required, not 'memoryview'")
            case first if first == LARGE:
                raise MemoryError
            case first if first == ENDLESS:
                time.sleep(600)
        return super().read(sample)


class Unready(Decoder):
    """A decoder that no other process can receive."""

    def __setstate__(self, state: object) -> None:
        raise ValueError("not here")


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    forked._start_server()


@pytest.fixture(scope="module")
def process() -> Iterator[IsolatedDecoder]:
    made = IsolatedDecoder(Fragile(SIZE), CHUNK)
    yield made
    made.close()


def tasks_of(records: list[FakeRecord]) -> list[DecodeTask]:
    tasks = []
    for task in JournalTasks(FakeReader(records, chunk=99), START, JournalShare()):
        if task is None:
            return tasks
        if isinstance(task, DecodeTask):
            tasks.append(task)
    raise AssertionError("a journal ends with None")


def assert_same(found: Chunk, expected: Chunk) -> None:
    for name in COLUMNS:
        column, wanted = getattr(found.batch, name), getattr(expected.batch, name)
        assert column.dtype == wanted.dtype
        assert np.array_equal(column, wanted), name
    assert found.batch.origins_B == expected.batch.origins_B
    assert (found.begin, found.end, found.last) == (expected.begin, expected.end, expected.last)
    assert np.array_equal(found.index_B, expected.index_B)
    assert [told(one) for one in found.rejected] == [told(one) for one in expected.rejected]


def told(sample: Any) -> tuple[Any, ...]:
    error = sample.error.reason, str(sample.error)[:1000]
    return sample.index, error, sample.row, sample.source, bytes(sample.data)


def marked(*firsts: int) -> DecodeTask:
    """Return a task of raw images with these first bytes, too large to be used unscaled."""
    rng, samples = np.random.default_rng(len(firsts)), []
    for first in firsts:
        row, data = raw(rng, SIZE + 1, SIZE + 1, 3)
        samples.append((row, bytes([first]) + data[1:]))
    (task,) = tasks_of([record(1, samples)])
    return task


def test_decoding_in_another_process_equals_decoding_in_this_process(
    process: IsolatedDecoder,
) -> None:
    reasons = set[str]()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        records = journal(rng, 20, bad=(0.0, 0.3, 1.0)[seed % 3], gaps=0.0)
        for task in tasks_of(records):
            expected = decode_chunk(Decoder(SIZE), task)
            assert_same(decode_chunk(Decoder(SIZE), task, decode=process.decode), expected)
            reasons |= {one.error.reason for one in expected.rejected}
    assert reasons == set(REASONS) - {"packet"}, "JournalTasks finds bad packets itself"


@pytest.mark.parametrize("seed", [3, 8])
def test_batches_decoded_in_processes_equal_the_naive_twin(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    records, decoder = journal(rng, 24, bad=0.3, gaps=0.1), Decoder(SIZE)
    expected = list(naive_batches(records, decoder, 5, START))
    quarantine = Quarantine(tmp_path / "quarantine", rate=0)
    with Batches(FakeReader(records), decoder, quarantine, 5, workers=2, processes=True) as batches:
        for batch, wanted in zip(collect(batches, len(expected)), expected, strict=True):
            assert_equal(batch, wanted)
        assert batches.next(0) is None
    assert sum(quarantine.counts.values()) > 0


def test_a_learner_with_decoder_processes_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learned("cpu", tmp_path)
    monkeypatch.setattr(build, "decodes_in_processes", lambda _: True)
    found = learned("cpu", tmp_path)
    assert [one.loss for one in found] == [one.loss for one in expected]
    assert [one.rejected for one in found] == [one.rejected for one in expected]
    assert sum(one.rejected.get("damaged", 0) for one in found) > 0


def test_the_same_originals_are_kept_with_and_without_a_process(
    tmp_path: Path, process: IsolatedDecoder
) -> None:
    kept = []
    tasks = tasks_of(journal(np.random.default_rng(1), 12, bad=0.3, gaps=0.0))
    for name, decode in (("here", None), ("there", process.decode)):
        originals = KeptOriginals(tmp_path / name, (SIZE, SIZE, 3), budget=1 << 20)
        chunks = [decode_chunk(Decoder(SIZE), task, originals.keep, decode) for task in tasks]
        kept.append([one.original for chunk in chunks for one in chunk.batch.origins_B or ()])
    assert kept[0] == kept[1]
    assert sum(map(bool, kept[0])) > 10


def test_only_the_image_that_ends_its_decoder_is_rejected(
    process: IsolatedDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    task = marked(1, DEADLY, 2, 3, DEADLY, 4)
    chunk = decode_chunk(Decoder(SIZE), task, decode=process.decode)
    expected = decode_chunk(Decoder(SIZE), marked(1, 0, 2, 3, 0, 4))
    assert chunk.index_B.tolist() == [0, 2, 3, 5]
    good = expected.batch.images_BCHW[[0, 2, 3, 5]]  # type: ignore[index]
    assert np.array_equal(chunk.batch.images_BCHW, good)  # type: ignore[arg-type]
    error = "it ended the process that decoded it (SIGSEGV)"
    assert [(one.index, one.error.reason, str(one.error)) for one in chunk.rejected] == [
        (1, "damaged", error),
        (4, "damaged", error),
    ]
    assert "a process that decodes ended (SIGSEGV); another one starts" in caplog.text
    assert_same(
        decode_chunk(Decoder(SIZE), task, decode=process.decode), chunk
    )  # a replay gives the same


def test_an_image_that_needs_too_much_memory_is_rejected(process: IsolatedDecoder) -> None:
    chunk = decode_chunk(Decoder(SIZE), marked(LARGE, 1), decode=process.decode)
    assert chunk.index_B.tolist() == [1]
    (rejected,) = chunk.rejected
    assert str(rejected.error) == "it ended the process that decoded it (status 1)"


def test_an_image_whose_decoding_never_ends_is_rejected(
    process: IsolatedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_chunk(
        Decoder(SIZE), marked(1), decode=process.decode
    )  # so that the time limit of a start does not apply
    monkeypatch.setattr(decode_process, "PATIENCE", 5.0)
    monkeypatch.setattr(decode_process, "WAIT", 0.1)
    chunk = decode_chunk(Decoder(SIZE), marked(1, ENDLESS), decode=process.decode)
    assert chunk.index_B.tolist() == [0]
    (rejected,) = chunk.rejected
    assert str(rejected.error) == "it ended the process that decoded it (SIGKILL)"


@pytest.mark.parametrize("count", [1, 6])
def test_a_killed_decoder_process_loses_no_sample(count: int, process: IsolatedDecoder) -> None:
    task = marked(*range(count))
    for _ in range(3):
        decode_chunk(Decoder(SIZE), task, decode=process.decode)
        assert process.process is not None
        os.kill(process.process._process.pid or 0, signal.SIGKILL)
        found = decode_chunk(Decoder(SIZE), task, decode=process.decode)
        assert_same(found, decode_chunk(Decoder(SIZE), task))


@pytest.mark.parametrize("count", [1, 6])
def test_decoder_processes_that_are_terminated_again_and_again_lose_no_sample(
    count: int, process: IsolatedDecoder
) -> None:
    """A service manager sends SIGTERM to all processes of a service."""
    task, over = marked(*range(count)), threading.Event()

    def end_all() -> None:
        for _ in range(8):
            if (worker := process.process) is not None:
                os.kill(worker._process.pid or 0, signal.SIGTERM)
            time.sleep(0.1)
        over.set()

    expected = decode_chunk(Decoder(SIZE), task)
    thread = threading.Thread(target=end_all)
    thread.start()
    while not over.is_set():
        assert_same(decode_chunk(Decoder(SIZE), task, decode=process.decode), expected)
    thread.join()


def test_batches_raise_if_no_decoder_process_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(decode_process, "PAUSES", (0.0,))
    monkeypatch.setattr(decode_process._context.Process, "start", start)
    samples = [raw(np.random.default_rng(0), SIZE + 1, SIZE, 3)]
    reader, quarantine = FakeReader([record(1, samples)]), Quarantine(tmp_path, rate=0)
    with (
        Batches(reader, Decoder(SIZE), quarantine, 1, processes=True) as batches,
        pytest.raises(RuntimeError, match="can start: too many open files"),
    ):
        batches.next(60)


def test_a_stopped_decoder_starts_no_process() -> None:
    process = IsolatedDecoder(Fragile(SIZE), CHUNK)
    task, failed = marked(1, ENDLESS), list[BaseException]()

    def decode() -> None:
        try:
            decode_chunk(Decoder(SIZE), task, decode=process.decode)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    until(lambda: process.process is not None)
    process.stop()
    thread.join()
    assert [str(error) for error in failed] == ["decoding was stopped"]
    assert process.process is None


def test_close_ends_a_process_whose_decoding_never_ends(tmp_path: Path) -> None:
    row, data = raw(np.random.default_rng(0), SIZE + 1, SIZE + 1, 3)
    reader = FakeReader([record(1, [(row, bytes([ENDLESS]) + data[1:])])])
    batches = Batches(reader, Fragile(SIZE), Quarantine(tmp_path, rate=0), 1, processes=True)
    until(lambda: any(one.process for one in batches._pool._decoders))
    time.sleep(0.5)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 60, "the image would take 600 s"


def test_a_decoder_process_ignores_an_interrupt(process: IsolatedDecoder) -> None:
    task = marked(1, 2)
    decode_chunk(Decoder(SIZE), task, decode=process.decode)
    assert process.process is not None
    before = process.process._process.pid
    os.kill(before or 0, signal.SIGINT)
    process.process._process.join(1.0)  # an interrupted process would end within this time
    decode_chunk(Decoder(SIZE), task, decode=process.decode)
    assert process.process._process.pid == before


def test_a_fault_of_the_decoder_raises_and_rejects_no_sample(process: IsolatedDecoder) -> None:
    with pytest.raises(RuntimeError, match=r"the decoder failed:(.|\n)*not 'memoryview'"):
        decode_chunk(Decoder(SIZE), marked(1, WRONG), decode=process.decode)
    assert len(decode_chunk(Decoder(SIZE), marked(1, 2), decode=process.decode).batch) == 2


def test_batches_raise_if_the_decoder_cannot_be_sent_to_a_process(tmp_path: Path) -> None:
    samples = [raw(np.random.default_rng(0), SIZE + 1, SIZE, 3)]
    reader, quarantine = FakeReader([record(1, samples)]), Quarantine(tmp_path, rate=0)
    with (
        Batches(reader, Unready(SIZE), quarantine, 1, processes=True) as batches,
        pytest.raises(RuntimeError, match=r"ended at its start \(status 1\)"),
    ):
        batches.next(60)
    assert batches.offset == Offset(1, 0)


def test_close_ends_the_decoder_processes(tmp_path: Path) -> None:
    reader = FakeReader(journal(np.random.default_rng(2), 20, bad=0.2, gaps=0.0))
    quarantine = Quarantine(tmp_path, rate=0)
    with Batches(reader, Decoder(SIZE), quarantine, 4, workers=2, processes=True) as batches:
        collect(batches, 3)
        started = [one.process for one in batches._pool._decoders]
        pids = [one._process.pid for one in started if one is not None]
        assert pids
    assert not any(psutil.pid_exists(pid or 0) for pid in pids)


PARENT = """
import sys, time
from stream_ssl.feed.decode import Decoder
from stream_ssl.feed.decode_process import IsolatedDecoder

class Endless(Decoder):
    def read(self, sample):
        time.sleep(600)

if __name__ == "__main__":
    made = IsolatedDecoder(Endless(8), 64)
    made.process = made._started()
    print(made.process._process.pid, flush=True)
    row = {"id": "a", "time": 0.0, "codec": "jpeg", "size": 1}
    made.decode("a", [row], memoryview(b"x"))
"""


def test_decoder_processes_end_after_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        others = psutil.Process(parent.pid).children(recursive=True)
        assert child in others
        parent.kill()
    assert not psutil.wait_procs(others, timeout=60)[1]


def test_pixels_are_shared_without_a_memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decode_process.os, "memfd_create")
    first = decode_process.SharedPixels((2, 3))
    second = decode_process.SharedPixels((2, 3), os.dup(first._file))
    first.array[1, 2] = 7
    assert second.array.tolist() == [[0, 0, 0], [0, 0, 7]]
