"""Speed and memory of the learner's decoder, from JPEGs to 224 x 224 squares, compared with Pillow.

Ratios compare processor time on one core; both decoders take turns. Each peak is measured in a
process of its own.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from simplejpeg import decode_jpeg

from benchmarks.ingest import peak_rss
from stream_ssl.feed.decode import Decode, Decoder, DecodeTask, data_of, decode_chunk, scaled
from stream_ssl.feed.decode_process import IsolatedDecoder
from stream_ssl.feed.journal_tasks import CHUNK
from stream_ssl.journal.segment import Record
from stream_ssl.wire import Sample

SIZE = 224
ROUNDS = 31
CALLS = 4
SECONDS = 2.0
MIN_RATIO = 2.5
MAX_PEAK_MB = 16.0  # in addition to the file; all pixels of 3840 x 2160 take 25 MB


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return rows for 640 x 480 and 4K images, and for a task of 64 small images.

    For 640 x 480, the qualities are 75 (the default of Pillow and libjpeg) and 90. For 4K, the rows
    give speed and peak memory of baseline and progressive JPEG.
    """
    return [
        row("640x480 JPEG, quality 75", photograph(640, 480), rounds, MIN_RATIO),
        row("640x480 JPEG, quality 90", photograph(640, 480, quality=90), rounds, None),
        *(
            row(f"3840x2160 JPEG, {kind}", photograph(3840, 2160, kind), rounds // 8, None, limit)
            for kind, limit in (("baseline", MAX_PEAK_MB), ("progressive", None))
        ),
        chunk_row(rounds),
        process_row(rounds),
    ]


def chunk_row(rounds: int) -> dict[str, Any]:
    """Return the row of a task of the learner's threads: many small JPEGs of one size.

    Its target is a stream of 20,000 images per second on 16 cores. Threads of one process share the
    interpreter's lock, which libjpeg and the scaling release. The rest therefore limits the speed
    of all threads together.
    """
    task, decoder = small_jpegs(), Decoder(96)
    data = [bytes(one) for one in data_of(task.rows, task.payload)]

    def unlocked() -> None:
        """Do what needs no lock: decode to the size that the decoder takes, and scale all."""
        large_BHWC = np.stack([decode_jpeg(one, min_width=96, min_height=96) for one in data])
        scaled(large_BHWC, (96, 96))

    def by_pillow() -> None:
        for one in data:
            plainly(one, 96)

    ours, plain = by_turns(lambda: decode_chunk(decoder, task), by_pillow, rounds // 4)
    whole, free = by_turns(lambda: decode_chunk(decoder, task), unlocked, rounds)
    ms, plain_ms = (statistics.median(taken) * 1e3 / CHUNK for taken in (ours, plain))
    locked = [one - other for one, other in zip(whole, free, strict=True)]
    locked_us = statistics.median(locked) * 1e6 / CHUNK
    return {
        "image": f"{CHUNK} x 224x224 JPEG to 96, each",
        "KB": round(len(task.payload) / CHUNK / 1e3),
        "ms": round(ms, 2),
        "Pillow ms": round(plain_ms, 2),
        "Pillow / ours": round(plain_ms / ms, 2),
        "rest, us": round(locked_us),
        "target": "<= 0.8 ms, 50 us besides libjpeg",
        "met": ms <= 0.8 and locked_us <= 50,
    }


def process_row(rounds: int) -> dict[str, Any]:
    """Return the row of the same task in a process of its own, as a run with a GPU decodes.

    It gives the processor time that the learner's process spends, and the images per second of one
    decoding thread beside a thread that is busy in Python, as a learner's is with a GPU.
    """
    task, decoder = small_jpegs(), Decoder(96)
    apart = IsolatedDecoder(decoder, CHUNK)
    try:
        ours, here = by_turns(
            lambda: decode_chunk(decoder, task, decode=apart.decode),
            lambda: decode_chunk(decoder, task),
            rounds,
        )
        rates = [
            [beside_python(task, decoder, decode) for decode in (apart.decode, None)]
            for _ in range(5)
        ]
    finally:
        apart.close()
    fast, slow = (statistics.median(one) for one in zip(*rates, strict=True))
    us, there = (statistics.median(taken) * 1e6 / CHUNK for taken in (ours, here))
    return {
        "image": f"{CHUNK} x 224x224 JPEG to 96, in a process of its own, each",
        "learner, us": round(us, 1),
        "in a thread, us": round(there, 1),
        "beside Python, images/s": round(fast),
        "in a thread beside Python, images/s": round(slow),
        "target": "<= 20 us of the learner's process",
        "met": us <= 20,
    }


def beside_python(task: DecodeTask, decoder: Decoder, decode: Decode | None) -> float:
    """Return the images per second of a decoding thread beside a thread that is busy in Python."""
    over, done = threading.Event(), 0

    def work() -> None:
        nonlocal done
        while not over.is_set():
            decode_chunk(decoder, task, decode=decode)
            done += CHUNK

    thread = threading.Thread(target=work)
    began = time.perf_counter()
    thread.start()
    while time.perf_counter() < began + SECONDS:
        pass
    over.set()
    thread.join()
    return done / (time.perf_counter() - began)


def small_jpegs() -> DecodeTask:
    """Return a task of the learner's threads: many small JPEGs of one size."""
    data = [photograph(224, 224, seed=seed) for seed in range(CHUNK)]
    rows = [{"id": "a", "time": 0.0, "codec": "jpeg", "size": len(one)} for one in data]
    record = Record(1, "a", 1, 0.0, b"", b"".join(data))
    return DecodeTask(record, "a", rows, memoryview(record.payload), 0, True)


def row(
    what: str, data: bytes, rounds: int, least: float | None, most: float | None = None
) -> dict[str, Any]:
    """Return the row of one image.

    Args:
        least: target of the ratio Pillow / ours; None: no target.
        most: largest allowed peak in MB; None: no limit.
    """
    decoder, sample = Decoder(SIZE), Sample("a", data, "jpeg")
    ours, plain = by_turns(lambda: decoder.decode(sample), lambda: plainly(data), rounds)
    ratio = statistics.median(p / o for p, o in zip(plain, ours, strict=True))
    peaks = [peak_of(way, data) if "3840" in what else None for way in ("ours", "plain")]
    met = None
    if least is not None:
        met = ratio >= least
    elif most is not None:
        met = peaks[0] is not None and peaks[0] <= most
    wanted = {least: f">= {least} x Pillow", most: f"<= {most} MB"}
    return {
        "image": what,
        "KB": round(len(data) / 1e3),
        "ms": round(statistics.median(ours) * 1e3, 2),
        "Pillow ms": round(statistics.median(plain) * 1e3, 2),
        "Pillow / ours": round(ratio, 2),
        "peak MB": peaks[0],
        "Pillow's peak MB": peaks[1],
        "target": "" if met is None else wanted[least or most],
        "met": met,
    }


def by_turns(
    ours: Callable[[], Any], plain: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the processor seconds of a call in each round, for both functions."""
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for call, seconds in zip((ours, plain), taken, strict=True):
            begun = time.process_time()
            for _ in range(CALLS):
                call()
            seconds.append((time.process_time() - begun) / CALLS)
    return taken


def plainly(data: bytes, size: int = SIZE) -> np.ndarray[Any, Any]:
    """Decode all pixels, and resize the central square with the same filter."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size
    left, top, side = (width - height) / 2, 0.0, height
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def photograph(
    width: int, height: int, kind: str = "baseline", quality: int = 75, seed: int = 0
) -> bytes:
    """Return a JPEG with a photograph's spectrum, 1/f^1.4, and sensor noise."""
    rng = np.random.default_rng(seed)
    frequency_HW = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency_HW[0, 0] = 1.0
    noise_CHW = np.fft.rfft2(rng.normal(size=(3, height, width)))
    image_CHW = np.fft.irfft2(noise_CHW / frequency_HW**1.4, s=(height, width))
    image_CHW = image_CHW.mean(0) + 0.3 * image_CHW  # colours correlate with brightness
    image_CHW = 128 + 45 * image_CHW / image_CHW.std() + rng.normal(0, 1, image_CHW.shape)
    pixels_HWC = image_CHW.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(
        out, "JPEG", quality=quality, progressive=kind == "progressive"
    )
    return out.getvalue()


def peak_of(way: str, data: bytes) -> float:
    """Return by how many MB decoding this image raises the peak of a new process."""
    command, here = [sys.executable, "-m", "benchmarks.decode", way], Path(__file__).parent.parent
    done = subprocess.run(command, input=data, capture_output=True, check=True, cwd=here)
    return round(float(done.stdout) / 1e6, 1)


def peak(way: str) -> int:
    """Return by how many bytes decoding raises this process's peak above that of a small image."""
    decoder, data = Decoder(SIZE), sys.stdin.buffer.read()
    decode = {
        "ours": lambda data: decoder.decode(Sample("a", data, "jpeg")),
        "plain": plainly,
    }[way]
    small = io.BytesIO()
    Image.new("RGB", (2 * SIZE, 2 * SIZE)).save(small, "JPEG")
    decode(small.getvalue())
    before = peak_rss()
    decode(data)
    return peak_rss() - before


if __name__ == "__main__":
    print(peak(sys.argv[1]))
