"""Tests that one file gives the same picture on every route to the learner."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from evaluation_run import write_run
from numpy.typing import NDArray
from PIL import Image, ImageOps
from table import table

from stream_ssl import load_encoder
from stream_ssl.app.commands.embed import Rows
from stream_ssl.curation import Curator
from stream_ssl.evaluation.labelled import Division, Reader
from stream_ssl.feed.decode import Decoder
from stream_ssl.pictures import over_white, upright
from stream_ssl.producers._images import as_sample
from stream_ssl.producers.shaping.repeat import decode
from stream_ssl.producers.sources import ImageFolder
from stream_ssl.producers.sources.frames import FrameEncoder, Frames, converted
from stream_ssl.producers.sources.lerobot import picture
from stream_ssl.trained.encoder import Encoder
from stream_ssl.trained.feature_file import Read
from stream_ssl.wire import Sample

SIDE = 24
RNG = np.random.default_rng(7)


def learned(sample: Sample) -> NDArray[np.uint8]:
    """Return the pixels that the learner sees."""
    return Decoder(SIDE).decode(sample)


def from_bytes(data: bytes, codec: str) -> NDArray[np.uint8]:
    return learned(Sample("a", data, codec))


def from_pillow(data: bytes, codec: str) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return learned(as_sample(image, "a"))


def from_table(data: bytes, codec: str) -> NDArray[np.uint8]:
    return picture(Path(), {"bytes": data}).to_ndarray(format="rgb24")


def from_shaping(data: bytes, codec: str) -> NDArray[np.uint8]:
    return np.asarray(decode(Sample("a", data, codec)).convert("RGB"))


ROUTES = (from_bytes, from_pillow, from_table, from_shaping)


def file_of(image: Image.Image, codec: str, orientation: int = 1) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"jpeg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": 1}}
    image.save(file, codec, exif=exif, **options.get(codec, {}))
    return file.getvalue()


@table("route", ROUTES)
@table("codec", ["jpeg", "png", "webp"])
@table("orientation", range(1, 9))
def test_every_route_applies_the_orientation_of_a_file(
    route: Callable[[bytes, str], NDArray[np.uint8]], codec: str, orientation: int
) -> None:
    coarse_HWC = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    data = file_of(Image.fromarray(coarse_HWC.repeat(6, 0).repeat(6, 1)), codec, orientation)
    with Image.open(io.BytesIO(data)) as image:
        expected_HWC = np.asarray(ImageOps.exif_transpose(image)).astype(int)
    assert np.abs(route(data, codec) - expected_HWC).max() <= (8 if codec == "jpeg" else 0)


@table("route", ROUTES)
@table("codec", ["png", "webp"])
def test_every_route_lays_transparent_pixels_over_white(
    route: Callable[[bytes, str], NDArray[np.uint8]], codec: str
) -> None:
    image = Image.new("RGBA", (SIDE, SIDE), (200, 0, 0, 0))
    image.paste((0, 0, 100, 255), (0, 0, 8, SIDE))
    image.paste((0, 0, 0, 128), (8, 0, 16, SIDE))
    found_HWC = route(file_of(image, codec), codec)
    assert [found_HWC[3, x].tolist() for x in (3, 19)] == [[0, 0, 100], [255, 255, 255]]
    assert np.abs(found_HWC[3, 11].astype(int) - 127).max() <= 1


def png(bits: int, kind: int, samples_HWC: NDArray[Any], clear: list[int]) -> bytes:
    """Return a PNG of colour type 0 (grey), 2 (colour) or 3 (palette) and a transparent colour."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + check

    height, width, _ = samples_HWC.shape
    shifts = np.arange(bits - 1, -1, -1)
    bits_HX = (samples_HWC.reshape(height, -1, 1) >> shifts & 1).reshape(height, -1)
    rows = [b"\0" + np.packbits(row.astype(np.uint8)).tobytes() for row in bits_HX]
    palette = bytes(range(3 * 2 ** min(bits, 6)))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)),
            chunk(b"PLTE", palette) if kind == 3 else b"",
            chunk(b"tRNS", bytes(clear) if kind == 3 else struct.pack(f">{len(clear)}H", *clear)),
            chunk(b"IDAT", zlib.compress(b"".join(rows))),
            chunk(b"IEND", b""),
        ]
    )


@table("route", (from_bytes, from_pillow, from_shaping))
@table(
    ("bits", "kind"),
    [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2), (1, 3), (2, 3), (4, 3)],
)
def test_transparent_colours_of_every_bit_depth_become_white(
    route: Callable[[bytes, str], NDArray[np.uint8]], bits: int, kind: int
) -> None:
    if (bits, kind, route) == (16, 0, from_pillow):
        return  # send() refuses 16-bit PIL images, which test_client_images.py tests
    levels = np.array([0, 1, 2**bits // 3, 2**bits - 1])
    samples_HWC = levels[RNG.integers(0, 4, (SIDE, SIDE, 3 if kind == 2 else 1))]
    clear = [255, 0] if kind == 3 else samples_HWC[5, 6].tolist()
    found_HWC = route(png(bits, kind, samples_HWC, clear), "png")
    if kind == 3:
        clear_HW = samples_HWC[..., 0] == 1
        expected_HWC = samples_HWC * 3 + np.arange(3)
    else:
        clear_HW = (samples_HWC == clear).all(2)
        scaled = samples_HWC >> 8 if bits == 16 else samples_HWC * 255 // (2**bits - 1)
        expected_HWC = np.broadcast_to(scaled, (SIDE, SIDE, 3))
    if (bits, kind) == (16, 2):  # Pillow reads the upper 8 bits, so 0 and 1 are one level
        clear_HW = (samples_HWC >> 8 == np.array(clear) >> 8).all(2)
    expected_HWC = np.where(clear_HW[..., None], 255, expected_HWC)
    assert clear_HW.any()
    assert not clear_HW.all()
    assert found_HWC.tolist() == expected_HWC.tolist()


def boxed(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Return a picture scaled by its long side, pasted in the middle of a grey square."""
    shape = [max(1, round(length * side / max(image.size))) for length in image.size]
    box = Image.new("RGB", (side, side), (128, 128, 128))
    place = [(side - length) // 2 for length in shape]
    box.paste(image.resize(shape, Image.Resampling.BILINEAR), place)
    return np.asarray(box)


@pytest.fixture(scope="module")
def with_bars(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("letterbox") / "run"
    write_run(folder, decoder={"size": SIDE, "channels": 3, "fit": "letterbox"})
    return load_encoder(folder)


@table("size", [(60, 36), (36, 61), (90, 7), (10, 12), (300, 1)])
@table("codec", ["jpeg", "png", "webp"])
@table("orientation", [1, 6])
def test_every_route_keeps_the_whole_picture_in_a_letterbox(
    with_bars: Encoder, tmp_path: Path, size: tuple[int, int], codec: str, orientation: int
) -> None:
    small_HWC = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(small_HWC).resize(size, Image.Resampling.BILINEAR)
    data = file_of(picture, codec, orientation)
    with Image.open(io.BytesIO(data)) as image:
        upright_image = ImageOps.exif_transpose(image)
        expected_HWC = boxed(upright_image, SIDE).astype(int)
        pillow = as_sample(image, "a")
    folder = tmp_path / f"{size}-{codec}-{orientation}"
    (folder / "class").mkdir(parents=True)
    (folder / "class" / f"picture.{codec}").write_bytes(data)
    images = ImageFolder(str(folder))
    (evaluated,) = Reader(images, with_bars.decoder, Division(1))
    (embedded,) = Rows(images, with_bars.decoder, Read())
    routes = {
        "learner": Decoder(SIDE, fit="letterbox").decode(Sample("a", data, codec)),
        "pillow": Decoder(SIDE, fit="letterbox").decode(pillow),
        "load_encoder": with_bars.preprocess(data).permute(1, 2, 0).numpy(),
        "evaluation": evaluated.image_BHWC[0],
        "embed": embedded.pixels_HWC,
    }
    for route in ("load_encoder", "evaluation", "embed"):
        assert np.array_equal(routes[route], routes["learner"]), route
    for route in ("learner", "pillow"):
        difference_HWC = np.abs(routes[route] - expected_HWC)
        if codec == "jpeg" and route == "learner":  # libjpeg scales coarsely
            assert difference_HWC.mean() <= 4
        else:
            assert difference_HWC.max() <= 3
    bars_HW = (expected_HWC == 128).all(axis=2)
    assert (routes["learner"][bars_HW] == 128).all()
    if orientation != 1:
        return
    curator = Curator(tmp_path / f"state-{folder.name}", 4, size=32, fit="letterbox")
    list(curator.run(images))
    kept_HWC = curator.memory.images_of(torch.tensor([0]))[0].permute(1, 2, 0).numpy()
    assert np.abs(kept_HWC - boxed(upright_image, 32).astype(int)).mean() <= 4


def test_the_decoder_refuses_an_unknown_fit() -> None:
    with pytest.raises(ValueError, match='fit \'stretch\': must be "crop" or "letterbox"'):
        Decoder(SIDE, fit="stretch")  # type: ignore[arg-type]


def test_upright_leaves_its_picture_unchanged() -> None:
    data = png(2, 0, RNG.integers(0, 4, (SIDE, SIDE, 1)), [1])
    with Image.open(io.BytesIO(data)) as image:
        assert upright(image).tobytes() == upright(image).tobytes()
        assert image.info["transparency"] == 85


def test_pixels_with_alpha_are_encoded_over_white() -> None:
    """The hidden colour of a robot's rgba8 image is red."""
    pixels_HWC = np.full((SIDE, SIDE, 4), (255, 0, 0, 0), np.uint8)
    for codec in ("jpeg", "webp", "raw"):
        sample = Sample("a", **FrameEncoder(codec, 100)(pixels_HWC))  # type: ignore[arg-type]
        assert learned(sample).min() >= 254


@pytest.mark.parametrize("kind", ["rgba", "yuva420p", "ya8"])
def test_a_video_frame_with_alpha_is_encoded_over_white(kind: str) -> None:
    clear = np.full((SIDE, SIDE, 4), (255, 0, 0, 0), np.uint8)
    frame = converted(av.VideoFrame.from_ndarray(clear, format="rgba"), SIDE, SIDE, kind)
    for codec in ("jpeg", "webp", "raw"):
        sample = Sample("a", **Frames(codec=codec).payload(frame))  # type: ignore[arg-type]
        assert learned(sample).min() >= 254


def test_no_row_of_a_frame_keeps_the_alpha_of_another_frame() -> None:
    """FFmpeg's own threads left stale rows in one of forty conversions."""
    clear = np.full((SIDE, SIDE, 4), (255, 0, 0, 0), np.uint8)
    frame = converted(av.VideoFrame.from_ndarray(clear, format="rgba"), SIDE, SIDE, "yuva420p")
    raw = Frames(codec="raw")
    assert min(learned(Sample("a", **raw.payload(frame))).min() for _ in range(1000)) >= 254


def test_a_frame_is_converted_in_one_thread() -> None:
    """The test above detects several threads only now and then."""
    asked: list[dict[str, Any]] = []
    frame: Any = SimpleNamespace(reformat=lambda *size, **options: asked.append(options))
    converted(frame, 4, 4, "rgba")
    assert [options["threads"] for options in asked] == [1]


def test_over_white_leaves_opaque_pictures_unchanged() -> None:
    for mode in ("L", "RGB"):
        image = Image.new(mode, (2, 2), 7)
        assert over_white(upright(image)) is image
