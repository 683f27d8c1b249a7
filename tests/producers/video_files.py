"""Small videos that FFmpeg writes. Each frame shows its number."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from stream_ssl.wire.sample import Sample

WIDTH, HEIGHT, RATE = 64, 48, 25
BITS = 8


def numbered(number: int) -> np.ndarray:
    """Return a picture [48, 64, 3] of a number in stripes: white for 1, bit 0 at the left."""
    bits = np.array([(number >> bit) & 1 for bit in range(BITS)], np.uint8) * 200 + 20
    image_HWC = np.repeat(np.tile(bits, (HEIGHT, 1)), WIDTH // BITS, axis=1)[..., None]
    return np.repeat(image_HWC, 3, axis=2)


def number_of(sample: Sample) -> int:
    """Return the number in a sample's picture of any encoding."""
    if sample.codec == "raw":
        image_HWC = np.frombuffer(sample.data, np.uint8).reshape(sample.shape)
    else:
        image_HWC = np.asarray(Image.open(io.BytesIO(sample.data)))
    middle = np.linspace(0, image_HWC.shape[1], BITS * 2 + 1).astype(int)[1::2]
    levels = image_HWC[image_HWC.shape[0] // 2, middle].mean(axis=-1)
    return sum(1 << bit for bit, level in enumerate(levels) if level > 120)


def write_video(
    path: Path,
    frames: int = 30,
    codec: str = "libx264",
    gop: int = 10,
    begin: int = 0,
    dated: bool | str = True,
    **settings: Any,
) -> Path:
    """Write frames 0, 1, ... at 25 a second, as H.264 with B frames by default.

    The times in the stream begin at `begin` seconds, and only a `dated` file has a creation time.
    """
    with av.open(str(path), "w", **settings) as container:
        if dated:
            when = "2024-05-06T07:08:09Z" if dated is True else dated
            container.metadata["creation_time"] = when
        stream = container.add_stream(codec, rate=RATE)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = gop
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24")
            if begin:
                frame.pts, frame.time_base = begin * RATE + number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
