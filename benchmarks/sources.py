"""Samples per second of the sources that do more than read a file.

Each row is a source and a producer in this process, and a receiver process that calls fsync before
it acknowledges. The crawled host is a process of its own. All share the machine's cores.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ingest import receiver
from stream_ssl.producers import Producer
from stream_ssl.producers.sources import Crawl, Source, VideoFiles

SECONDS = 8.0
WARM_UP_SECONDS = 2.0
WIDTH, HEIGHT, FRAMES = 640, 480, 300
IMAGE_BYTES = 20_000
MIN_FRAMES = 300
MIN_IMAGES = 300


def run(seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Return a row per encoding of video frames, and a row for a crawl."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="stream-ssl-") as name:
        clip = write_clip(Path(name) / "clip.mp4")
        for codec in ("jpeg", "raw"):
            source = VideoFiles(str(clip), epochs=None, codec=codec)
            what = f"video, {WIDTH}x{HEIGHT} H.264, sent as {codec}"
            rows.append(measure(what, source, MIN_FRAMES if codec == "jpeg" else None, seconds))
        with host() as port:
            urls = Path(name) / "urls.txt"
            urls.write_text("".join(f"http://127.0.0.1:{port}/{n}\n" for n in range(200_000)))
            crawl = Crawl(str(urls), per_host=16, allow_networks=["127.0.0.0/8"])
            what = f"crawl, {IMAGE_BYTES // 1000} KB images of one host"
            rows.append(measure(what, crawl, MIN_IMAGES, seconds))
    return rows


def measure(what: str, source: Source, target: int | None, seconds: float) -> dict[str, Any]:
    """Return the row of one source."""
    with tempfile.TemporaryDirectory(prefix="stream-ssl-") as name:
        with receiver(Path(name), curve=False) as (endpoint, facts), Producer(endpoint, "b") as to:
            to.connect()
            begun = mark = time.monotonic()
            base, cpu = to.stats.acked, 0.0
            samples = source.samples()
            for sample, position in samples:
                to.send(sample, position=position)
                now = time.monotonic()
                if mark == begun and now - begun >= WARM_UP_SECONDS:
                    mark, base, cpu = now, to.stats.acked, time.process_time()
                if mark != begun and now - mark >= seconds:
                    break
            done, cpu = to.stats.acked, time.process_time() - cpu
            samples.close()  # type: ignore[attr-defined]
        count = done.samples - base.samples
        return {
            "source": what,
            "samples/s": round(count / (now - mark)),
            "MB/s": round((done.bytes - base.bytes) / 1e6 / (now - mark), 1),
            "producer CPU": round(cpu / (now - mark), 2),
            "receiver CPU": round(facts["cpu"], 2),
            "target": "" if target is None else f">= {target} samples/s",
            "met": None if target is None else count / (now - mark) >= target,
        }


def write_clip(path: Path) -> Path:
    """Write a film of a camera that moves over a textured scene, with sensor noise."""
    import av

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (HEIGHT // 8 + 40, WIDTH // 8 + 40, 3), np.uint8)
    scene = np.kron(coarse, np.ones((8, 8, 1), np.uint8))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(FRAMES):
            image = scene[number % 300 :][:HEIGHT, number % 300 :][:, :WIDTH].astype(np.int16)
            image += rng.integers(-6, 7, image.shape, np.int16)
            frame = av.VideoFrame.from_ndarray(np.clip(image, 0, 255).astype(np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@contextmanager
def host() -> Iterator[int]:
    """Run a process that answers every request with an image, and return its port."""
    command = [sys.executable, "-m", "benchmarks.sources"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def serve() -> None:
    """Serve images in this process, and print the port."""
    body = b"\xff\xd8\xff" + np.random.default_rng(0).bytes(IMAGE_BYTES - 3)
    answer = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                robots = head.startswith(b"GET /robots.txt")
                writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n" if robots else answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
