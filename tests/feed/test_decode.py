"""The decoder: colour modes, sizes, orientations, and the samples that it refuses."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
import pytest
import simplejpeg
from batches_naive import encoded, picture, png_bomb
from PIL import Image, PngImagePlugin
from table import table
from xxhash import xxh3_64_intdigest

from stream_ssl.decode_cost import scans_of
from stream_ssl.feed.decode import (
    REASONS,
    BadSample,
    Decoder,
    DecodeTask,
    VectorDecoder,
    checked,
    content_hashes,
    decode_chunk,
    decode_samples,
)
from stream_ssl.journal.segment import Record
from stream_ssl.wire import Data, Sample, WireError

RNG = np.random.default_rng(0)
RED, GREEN, BLUE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (90, 90, 90)


def decode(data: bytes, codec: str = "png", size: int = 8, **options: Any) -> Any:
    row = {"id": "a", "time": 1.0, "codec": codec, "size": len(data)}
    return Decoder(size, **options).decode(checked(row, data, "cam"))


def decode_raw(shape: Any, data: bytes, size: int = 8, **options: Any) -> Any:
    row = {"id": "a", "time": 1.0, "codec": "raw", "size": len(data), "shape": shape}
    return Decoder(size, **options).decode(checked(row, data, "cam"))


def refused(data: bytes, codec: str = "png", **options: Any) -> BadSample:
    with pytest.raises(BadSample) as caught:
        decode(data, codec, **options)
    assert caught.value.reason in REASONS
    return caught.value


def outcome(data: bytes, codec: str) -> str:
    """Return the reason for a refusal, or "" for an image of the right shape."""
    try:
        return "" if decode(data, codec, max_pixels=10_000).shape == (8, 8, 3) else "wrong"
    except BadSample as error:
        return error.reason


# -- raw


def test_a_raw_image_of_the_right_shape_is_decoded_to_a_view() -> None:
    data = RNG.bytes(8 * 8 * 3)
    image_HWC = decode_raw([8, 8, 3], data)
    assert image_HWC.tobytes() == data
    assert np.shares_memory(image_HWC, np.frombuffer(data, np.uint8))


@table("shape", [(8, 8, 1), (8, 8, 4), (20, 13, 3), (5, 30, 1), (9, 9, 4), (1, 1, 3)])
@table("channels", [1, 3])
def test_a_raw_image_and_its_png_are_decoded_to_the_same_pixels(
    shape: tuple[int, int, int], channels: int
) -> None:
    data = RNG.bytes(shape[0] * shape[1] * shape[2])
    pixels = np.frombuffer(data, np.uint8).reshape(shape)
    png = encoded(Image.fromarray(pixels[:, :, 0] if shape[2] == 1 else pixels), "PNG")
    image_HWC = decode_raw(list(shape), data, channels=channels)
    assert image_HWC.shape == (8, 8, channels)
    np.testing.assert_array_equal(image_HWC, decode(png, channels=channels))


@table("shape", [[8, 9, 3], [8, 8], None, "x", [0, 8, 3], [8, 8, 2], [8, -8, -3], [8.0, 8, 3]])
def test_raw_samples_with_a_wrong_shape_are_refused(shape: Any) -> None:
    with pytest.raises(BadSample) as caught:
        decode_raw(shape, RNG.bytes(8 * 8 * 3))
    assert caught.value.reason == "shape"


def test_block_returns_a_packet_of_images_without_a_copy() -> None:
    rows = [{"codec": "raw", "shape": [8, 8, 3], "size": 192} for _ in range(5)]
    payload = RNG.bytes(5 * 192)
    block = Decoder(8).block(rows, memoryview(payload))
    assert block is not None
    assert block.shape == (5, 8, 8, 3)
    assert block.tobytes() == payload
    assert np.shares_memory(block, np.frombuffer(payload, np.uint8))


@table(
    "odd",
    [
        {"codec": "png"},
        {"shape": [8, 8, 1]},
        {"shape": None},
        {"shape": [16, 4, 3]},
        {"shape": [8.0, 8, 3]},
        {"dtype": "float32"},
        {"size": 191},
    ],
)
def test_block_returns_none_for_a_packet_with_one_odd_sample(odd: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [{"codec": "raw", "shape": [8, 8, 3], "size": 192}] * 4
    assert Decoder(8).block([*rows, {**rows[0], **odd}], bytes(5 * 192)) is None


# -- colour


@table("kind", ["PNG", "JPEG", "WEBP"])
@table("channels", [1, 3])
@table("mode", ["L", "RGB"])
def test_each_format_keeps_its_colours(kind: str, channels: int, mode: str) -> None:
    colour = GREY if mode == "L" else (200, 30, 60)
    image = Image.new("RGB", (8, 8), colour).convert(mode)
    options = {} if kind == "PNG" else {"quality": 100}
    found = decode(encoded(image, kind, **options), kind.lower(), channels=channels)
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(8, 8, channels)
    assert np.abs(found.astype(int) - expected).max() <= 6


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 0)).convert("CMYK")
    found = decode(encoded(image, "JPEG", quality=100), "jpeg")
    assert np.abs(found.astype(int) - np.array(RED)).max() <= 4
    grey = decode(encoded(image, "JPEG", quality=100), "jpeg", channels=1)
    assert np.abs(grey.astype(int) - 76).max() <= 4


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_a_grey_image_of_more_than_8_bits_keeps_its_brightness(bits: int) -> None:
    values_HW = RNG.integers(0, 2**bits, (8, 8)).astype(np.uint16)
    values_HW[0, 0] = 2**bits - 1
    png = encoded(Image.fromarray(values_HW), "PNG")
    bright_HW = values_HW // 2 ** (bits - 8)
    np.testing.assert_array_equal(decode(png, channels=1)[:, :, 0], bright_HW)
    np.testing.assert_array_equal(decode(png)[:, :, 2], bright_HW)
    assert decode(encoded(Image.fromarray(np.repeat(values_HW, 3, 1)), "PNG")).shape == (8, 8, 3)


def test_a_png_of_one_bit_becomes_black_and_white() -> None:
    pixels = RNG.integers(0, 2, (8, 8)).astype(bool)
    png = encoded(Image.fromarray(pixels), "PNG")
    np.testing.assert_array_equal(decode(png, channels=1)[:, :, 0], pixels * 255)


def test_a_png_with_a_palette_keeps_its_colours() -> None:
    image = picture(RNG, 8, 8).quantize(16)
    np.testing.assert_array_equal(decode(encoded(image, "PNG")), np.asarray(image.convert("RGB")))


def test_a_transparent_colour_of_a_palette_becomes_white() -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (0, 0, 4, 8))
    found = decode(encoded(image, "PNG", transparency=1))
    np.testing.assert_array_equal(found[:, :4], np.full((8, 4, 3), 255))  # white, not green
    np.testing.assert_array_equal(found[:, 4:], np.broadcast_to(RED, (8, 4, 3)))


@table("mode", ["RGBA", "LA"])
@table("size", [8, 4])
def test_transparent_pixels_become_white(mode: str, size: int) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))  # black under full transparency
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    found = decode(encoded(image.convert(mode), "PNG"), size=size)
    assert (found[:, 0] == 0).all()
    assert (found[:, -1] == 255).all()


def test_a_half_transparent_pixel_is_mixed_with_white() -> None:
    found = decode(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "PNG"))
    assert np.abs(found.astype(int) - 127).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_decoded_to_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 50}
    found = decode(encoded(frames[0], kind, **options), kind.lower())
    assert np.abs(found.astype(int) - np.array(RED)).max() <= 3


def test_a_file_of_a_stereo_camera_is_decoded_to_its_first_picture() -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN)]
    found = decode(encoded(images[0], "MPO", save_all=True, append_images=images[1:]), "jpeg")
    assert np.abs(found.astype(int) - np.array(RED)).max() <= 3


# -- fit


def test_resize_keeps_the_central_square() -> None:
    image = Image.new("RGB", (40, 16), BLUE)
    image.paste(RED, (12, 0, 28, 16))  # the central square
    wide = decode(encoded(image, "PNG"))
    tall = decode(encoded(image.transpose(Image.Transpose.ROTATE_90), "PNG"))
    np.testing.assert_array_equal(tall, np.rot90(wide))
    np.testing.assert_array_equal(wide[:, 1:-1], np.broadcast_to(RED, (8, 6, 3)))
    assert (wide[:, [0, -1], 0] > 200).all()  # the filter looks a little over the edge


def test_resize_averages_the_pixels_of_a_larger_image() -> None:
    board = np.indices((64, 64)).sum(0) % 2 * 255
    found = decode(encoded(Image.fromarray(board.astype(np.uint8)), "PNG"))
    assert np.abs(found.astype(int) - 127).max() <= 3


def test_a_jpeg_decoded_at_a_smaller_scale_looks_like_the_resized_original() -> None:
    image = picture(RNG, 12, 16).resize((640, 480), Image.Resampling.BICUBIC)
    expected = image.resize((48, 48), Image.Resampling.BILINEAR, box=(80, 0, 560, 480))
    found = decode(encoded(image, "JPEG", quality=95), "jpeg", size=48)
    assert np.abs(found.astype(int) - np.asarray(expected)).mean() < 3


@table(
    ("sides", "size", "decoded"),
    [((640, 480), 224, (240, 320)), ((480, 320), 200, (200, 300)), ((104, 120), 60, (75, 65))],
)
def test_a_jpeg_is_decoded_at_the_smallest_sufficient_multiple_of_an_eighth(
    sides: tuple[int, int], size: int, decoded: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    real = simplejpeg.decode_jpeg

    def decode_jpeg(*arguments: Any, **options: Any) -> Any:
        image_HWC = real(*arguments, **options)
        found.append(image_HWC.shape[:2])
        return image_HWC

    monkeypatch.setattr("simplejpeg.decode_jpeg", decode_jpeg)
    image = picture(RNG, 12, 16).resize(sides, Image.Resampling.BICUBIC)
    for channels, mode in ((3, "RGB"), (1, "L")):
        expected_HWC = decode(encoded(image.convert(mode), "PNG"), size=size, channels=channels)
        image_HWC = decode(encoded(image, "JPEG", quality=95), "jpeg", size=size, channels=channels)
        assert np.abs(image_HWC.astype(int) - expected_HWC).mean() < 3
    assert found == [decoded, decoded]


@table("sides", [(32, 32), (56, 32), (20, 20)])
def test_a_jpeg_that_is_not_shrunk_has_the_same_pixels_as_in_pillow(sides: tuple[int, int]) -> None:
    image = picture(RNG, 12, 16).resize(sides, Image.Resampling.BICUBIC)
    data = encoded(image, "JPEG", quality=90)
    with Image.open(BytesIO(data)) as decoded:
        expected_HWC = decode(encoded(decoded, "PNG"), size=32)
    worst = np.abs(decode(data, "jpeg", size=32).astype(int) - expected_HWC).max()
    assert worst <= (0 if min(sides) == 32 else 2)  # enlarged pixels are rounded


@pytest.mark.parametrize("size", [16, 80])
def test_a_jpeg_with_extraneous_bytes_is_decoded(size: int) -> None:
    data = encoded(picture(RNG, 6, 8).resize((160, 120), Image.Resampling.BICUBIC), "JPEG")
    table = data.index(b"\xff\xdb")
    odd = data[:table] + bytes(7) + data[table:]
    with pytest.raises(ValueError, match=r"(?i)extraneous"):
        simplejpeg.decode_jpeg(odd)
    difference = decode(odd, "jpeg", size=size).astype(int) - decode(data, "jpeg", size=size)
    assert np.abs(difference).mean() < 3


@table("cut", [1, 2])
@table("options", [{}, {"progressive": True}])
def test_a_jpeg_that_lacks_only_its_end_mark_is_decoded(cut: int, options: dict[str, Any]) -> None:
    data = encoded(picture(RNG, 20, 20), "JPEG", **options)
    assert (decode(data[:-cut], "jpeg") == decode(data, "jpeg")).all()
    assert refused(data[:-3], "jpeg").reason == "damaged"


# -- orientation


@table("orientation", range(1, 9))
@table("kind", ["PNG", "JPEG", "WEBP"])
def test_decode_applies_each_orientation_of_exif(orientation: int, kind: str) -> None:
    image = Image.new("RGB", (24, 16), BLUE)
    image.paste(RED, (4, 0, 12, 8))  # top left of the central square
    image.paste(GREEN, (12, 0, 20, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {} if kind == "PNG" else {"quality": 100}
    found = decode(encoded(image, kind, exif=exif, **options), kind.lower(), size=16)
    corners = {
        place: "rgb"[int(np.argmax(found[row, column]))]
        for place, (row, column) in {
            "tl": (3, 3),
            "tr": (3, 12),
            "bl": (12, 3),
            "br": (12, 12),
        }.items()
    }
    # Red and green are what the camera saw in its first row, from left to right. The standard
    # says where that row and its left end belong.
    red, green = {
        1: ("tl", "tr"),
        2: ("tr", "tl"),
        3: ("br", "bl"),
        4: ("bl", "br"),
        5: ("tl", "bl"),
        6: ("tr", "br"),
        7: ("br", "tr"),
        8: ("bl", "tl"),
    }[orientation]
    assert corners == dict.fromkeys(corners, "b") | {red: "r", green: "g"}


@table("marker, name", [(b"\xff\xe0", b"JFXX\0\x10"), (b"\xff\xed", b"Photoshop 3.0\0")])
def test_decode_finds_the_orientation_behind_a_thumbnail(marker: bytes, name: bytes) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    photo = encoded(picture(RNG, 16, 16), "JPEG", exif=exif)
    body = name + encoded(picture(RNG, 8, 8), "JPEG")
    at = photo.index(b"\xff\xe1")
    odd = photo[:at] + marker + (len(body) + 2).to_bytes(2, "big") + body + photo[at:]
    np.testing.assert_array_equal(decode(odd, "jpeg"), decode(photo, "jpeg"))


@table("kind", ["JPEG", "PNG", "WEBP"])
@table("exif", [b"Exif\0\0MM\0*\0\0", b"Exif\0\0rubbish", b"Exif\0\0"])
def test_an_image_with_damaged_exif_is_decoded(exif: bytes, kind: str) -> None:
    image = Image.new("RGB", (8, 8), RED)
    found = decode(encoded(image, kind, quality=100, exif=exif), kind.lower())
    assert np.abs(found.astype(int) - np.array(RED)).max() <= 3


def long_texts() -> PngImagePlugin.PngInfo:
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", "x" * 2_000_000, zip=True)
    return texts


@table("extra", [{"pnginfo": long_texts()}, {"icc_profile": bytes(2_000_000)}])
def test_a_png_with_a_long_text_or_profile_is_decoded(extra: dict[str, Any]) -> None:
    image = picture(RNG, 8, 8)
    np.testing.assert_array_equal(decode(encoded(image, "PNG", **extra)), np.asarray(image))


# -- refused samples


@table("sides", [(12_000, 12_000), (60_000, 60_000), (2**31 - 1, 1), (5_000, 5_001)])
def test_a_pixel_bomb_is_refused_by_its_header(
    sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    error = refused(png_bomb(*sides))
    assert error.reason == "pixels"
    assert str(error).endswith("pixels; at most 25000000 are decoded (decoder.max_pixels)")
    assert re.match(rf"({sides[0]} x {sides[1]}|{sides[0] * sides[1]}) pixels;", str(error))


def test_an_image_that_pillow_refuses_is_refused_by_pillow_s_limit() -> None:
    """The other readers of a process keep Pillow's own limit."""
    error = refused(png_bomb(15_000, 13_000), max_pixels=300_000_000)
    assert str(error) == "195000000 pixels; Pillow opens at most 178956970"
    assert error.reason == "pixels"


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content


def scan_bomb(side: int, scans: int) -> bytes:
    """Return a valid grey progressive JPEG: one scan for DC, and scans that change nothing."""
    blocks = ((side + 7) // 8) ** 2
    size = side.to_bytes(2, "big")
    head = segment(0xDB, bytes(1) + b"\1" * 64)
    head += segment(0xC2, b"\x08" + size + size + b"\1\1\x11\0")
    head += segment(0xC4, bytes([0x00, 1, *bytes(15), 0x00]))  # DC: '0' is no difference
    head += segment(0xC4, bytes([0x10, 1, *bytes(15), 0xE0]))  # AC: '0' + 14 bits is a run of ends
    runs = -(-blocks // 16384)
    bits = ("0" + "0" * 14) * runs
    bits += "1" * (-len(bits) % 8)
    run = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    parts = [segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-blocks // 8))]
    for number in range(scans - 1):
        band = 1 + number % 63
        parts.append(segment(0xDA, bytes([1, 1, 0, band, band, 0])) + run)
    return b"\xff\xd8" + head + b"".join(parts) + b"\xff\xd9"


def test_a_scan_bomb_is_refused_by_its_markers() -> None:
    """Each scan takes as long as all pixels, in few bytes. This image would take minutes."""
    began = time.process_time()
    error = refused(scan_bomb(7000, 20_000), "jpeg", max_pixels=50_000_000)
    assert (error.reason, time.process_time() - began < 5.0) == ("pixels", True)
    assert re.search("7000 x 7000 pixels in 20000 scans; at most 16 scans", str(error))
    assert decode(scan_bomb(64, 400), "jpeg").shape == (8, 8, 3)  # small ones may have many
    assert decode(scan_bomb(2000, 16), "jpeg", max_pixels=4_000_000).shape == (8, 8, 3)
    assert refused(scan_bomb(2000, 17), "jpeg", max_pixels=4_000_000).reason == "pixels"


def truncated_jpeg(side: int, scans: int) -> bytes:
    """Return a JPEG whose header claims a large picture, and whose scans are cut short."""
    data = scan_bomb(8, scans)
    frame = data.index(b"\xff\xc2") + 5
    return data[:frame] + side.to_bytes(2, "big") * 2 + data[frame + 4 :]


@table(
    ("make", "codec"),
    [
        (lambda: truncated_jpeg(5000, 10), "jpeg"),
        (lambda: truncated_jpeg(5000, 1), "jpeg"),
        (lambda: scan_bomb(1400, 200), "jpeg"),
        (lambda: encoded(Image.new("RGB", (2000, 1000)), "WEBP", lossless=True), "webp"),
        (lambda: png_bomb(2000, 1000), "png"),
        (lambda: encoded(Image.new("1", (2000, 2000)), "PNG"), "png"),
    ],
)
def test_an_image_of_few_bytes_that_takes_long_to_decode_is_refused(
    make: Callable[[], bytes], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credit counts bytes. Without a limit, a producer's credit can buy hours of decoding."""

    def load(*_: Any) -> None:
        raise AssertionError("pixels were decoded")

    data = make()
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    monkeypatch.setattr("simplejpeg.decode_jpeg", load)
    error = refused(data, codec)
    assert error.reason == "expensive"
    assert f"in {len(data)} bytes" in str(error)


@table(
    ("make", "codec"),
    [
        (lambda: encoded(Image.new("L", (2000, 1000)), "JPEG", optimize=True), "jpeg"),
        (lambda: encoded(Image.new("RGB", (1920, 1080)), "PNG", compress_level=9), "png"),
        (lambda: encoded(Image.new("RGB", (1024, 1024)), "WEBP", lossless=True), "webp"),
        (lambda: encoded(Image.new("RGB", (1024, 1024)), "JPEG", progressive=True), "jpeg"),
        (lambda: encoded(picture(RNG, 30, 40).resize((2000, 1500)), "JPEG", progressive=True),
         "jpeg"),
    ],
)  # fmt: skip
def test_blank_images_of_usual_sizes_are_decoded(make: Callable[[], bytes], codec: str) -> None:
    assert decode(make(), codec).shape == (8, 8, 3)


def test_the_pictures_within_a_jpeg_do_not_count_as_its_scans() -> None:
    """Cameras put previews, and maps of any bytes, into segments."""
    data = encoded(picture(RNG, 40, 40), "JPEG", progressive=True)
    assert 5 <= scans_of(data) <= 16
    preview = segment(0xE2, b"\xff\xda\0\x08" * 1000)
    within = data[:2] + preview + data[2:]
    assert scans_of(within) == scans_of(data) == scans_of(within + b"\xff\xda" * 99)
    assert decode(within, "jpeg", max_pixels=1600).shape == (8, 8, 3)


def test_an_image_with_exactly_max_pixels_is_decoded() -> None:
    data = encoded(picture(RNG, 20, 30), "PNG")
    assert decode(data, max_pixels=600).shape == (8, 8, 3)
    assert refused(data, max_pixels=599).reason == "pixels"
    with pytest.raises(BadSample, match="at most 599"):
        decode_raw([20, 30, 1], bytes(600), max_pixels=599)


@table("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_is_cut_short_is_refused_as_damaged(kind: str) -> None:
    data = encoded(picture(RNG, 20, 20), kind)
    for length in range(1, len(data) - 12, max(1, len(data) // 40)):
        error = refused(data[:length], kind.lower())
        assert error.reason == "damaged", length
        assert "BytesIO" not in str(error)


@table("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_with_random_wrong_bytes_is_decoded_or_refused(kind: str) -> None:
    data, rng = encoded(picture(RNG, 20, 20), kind), random.Random(3)
    for _ in range(300):
        hostile = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            hostile[rng.randrange(len(hostile))] = rng.randrange(256)
        assert outcome(bytes(hostile), kind.lower()) in ("", "damaged", "format", "pixels")


@table("codec", ["jpeg", "png", "webp"])
@table("kind", ["GIF", "TIFF", "BMP", "PPM", "JPEG", "PNG", "WEBP"])
def test_a_file_of_another_format_than_its_codec_is_refused(codec: str, kind: str) -> None:
    if kind.lower() == codec:
        assert decode(encoded(picture(RNG, 9, 9), kind), codec).shape == (8, 8, 3)
    else:
        error = refused(encoded(picture(RNG, 9, 9), kind), codec)
        assert error.reason == "format"
        assert codec in str(error)


@table("data", [b"RIFF\0\0\0\0WAVEfmt ", b"%!PS-Adobe", b"<svg/>"])
def test_data_that_are_no_image_are_refused_by_their_format(data: bytes) -> None:
    assert refused(data, "webp").reason == "format"


def test_a_sample_without_bytes_is_refused_as_empty() -> None:
    assert refused(b"").reason == "empty"
    with pytest.raises(BadSample, match="empty"):
        decode_raw([0, 0, 3], b"")


@table(
    "wrong",
    [
        {"id": ""},
        {"id": "x" * 256},
        {"time": float("inf")},
        {"time": 1.764e12},
        {"label": -1},
        {"label": 2**31},
        {"label": 1.5},
        {"label": True},
        {"meta": []},
        {"meta": {"deep": {}}},
        {"shape": [8, 8, 3]},
    ],
)
def test_a_sample_whose_fields_break_the_rules_of_the_wire_is_refused(
    wrong: dict[str, Any],
) -> None:
    data = encoded(picture(RNG, 8, 8), "PNG")
    row = {"id": "a", "time": 1.0, "codec": "png", "size": len(data), **wrong}
    with pytest.raises(BadSample) as caught:
        Decoder(8).decode(checked(row, data, "cam"))
    assert caught.value.reason == ("shape" if "shape" in wrong else "fields")


ODD: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2**64 - 1,
        1.5,
        float("nan"),
        "",
        "\0",
        "x" * 300,
        "float32",
        b"",
        b"\xff",
    ),
    *([], [1], [2.0], [8, 8, 3.0], [8, 8, True], [2**63], [[1]], [None], {}, {"a": [1]}, {b"a": 1}),
]


@table("field", ["id", "time", "codec", "size", "shape", "dtype", "label", "meta"])
def test_a_sample_with_an_odd_value_in_a_field_is_decoded_or_refused(field: str) -> None:
    """An exception of another kind would stop the learner at this record, at each start.

    A packet without decoding gives the same result as its samples one by one.
    """
    raw = {"id": "a", "time": 1.0, "codec": "raw", "size": 192, "shape": [8, 8, 3]}
    vector = {**raw, "codec": "vector", "size": 8, "shape": [2], "dtype": "float32"}
    for row in (raw, vector, {**raw, "codec": "jpeg", "shape": None}):
        for value in ODD:
            if (task := accepted([{**row, field: value}])) is None:
                continue
            for decoder in (Decoder(8), VectorDecoder(2)):
                chunk = decode_chunk(decoder, task)
                alone = decode_samples(decoder, "cam", task.rows, task.payload)
                assert len(chunk.batch) + len(chunk.rejected) == 1
                assert len(chunk.batch) == len(alone.good), value


def accepted(rows: list[dict[str, Any]]) -> DecodeTask | None:
    """Return the task for a packet of zeros with these samples, or None if receivers refuse it."""
    size = sum(
        row["size"] for row in rows if type(row["size"]) is int and row["size"] in range(999)
    )
    header = msgpack.packb({"source": "cam", "samples": rows})
    data = Data(1, header, bytes(size))
    try:
        rows = data.fields["samples"]
    except WireError:
        return None
    record = Record(1, "robot", 1, 1.0, header, bytes(size))
    return DecodeTask(record, "cam", rows, memoryview(data.payload), 0, True)


@table(
    ("wrong", "reason"),
    [
        ({"label": -1}, "fields"),
        ({"time": 1.764e12}, "fields"),
        ({"shape": [3]}, "shape"),
        ({"dtype": "float64"}, "shape"),
    ],
)
def test_a_bad_vector_is_refused_by_its_fields_or_its_shape(
    wrong: dict[str, Any], reason: str
) -> None:
    row = {"id": "a", "time": 1.0, "codec": "vector", "size": 8, "shape": [2], "dtype": "float32"}
    with pytest.raises(BadSample) as caught:
        checked({**row, **wrong}, bytes(8), "cam")
    assert caught.value.reason == reason


def test_a_lack_of_memory_raises_memory_error_and_no_bad_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any) -> None:
        raise MemoryError

    data = encoded(picture(RNG, 8, 8), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(MemoryError):
        decode(data)


# -- the decoder


@pytest.mark.parametrize("fit", ["crop", "letterbox"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_that_are_scaled_together_equal_images_scaled_one_by_one(
    fit: Any, channels: Any
) -> None:
    """Some sizes are scaled together, some alone, some not at all; one image is turned."""
    decoder = Decoder(16, channels, fit=fit)
    sides = [(16, 16), (20, 24), (31, 30), (20, 24), (200, 150), (20, 24), (9, 40), (8, 8)]
    files = [("JPEG", encoded(picture(RNG, *side), "JPEG")) for side in sides]
    exif = Image.Exif()
    exif[0x0112] = 6
    files += [("JPEG", encoded(picture(RNG, 20, 24), "JPEG", exif=exif))]
    files += [("PNG", encoded(picture(RNG, 20, 24), "PNG"))]
    samples = [Sample("a", data, codec.lower()) for codec, data in files]
    together_BHWC = decoder.stacked([decoder.read(sample) for sample in samples])
    assert together_BHWC.shape == (len(samples), 16, 16, channels)
    for one_HWC, sample in zip(together_BHWC, samples, strict=True):
        assert np.array_equal(one_HWC, decoder.decode(sample))
    assert decoder.stacked([]).shape == (0, 16, 16, channels)


def test_the_hash_of_a_large_image_is_the_hash_of_its_bytes() -> None:
    image_BHWC = RNG.integers(0, 256, (2, 224, 224, 3), np.uint8)
    expected = [xxh3_64_intdigest(one_HWC.tobytes()) >> 1 for one_HWC in image_BHWC]
    assert content_hashes(image_BHWC).tolist() == expected


def test_a_whole_packet_is_decoded_by_the_decode_method_of_a_subclass() -> None:
    class Negative(Decoder):
        def decode(self, sample: Sample) -> Any:
            return 255 - super().decode(sample)

    sample = Sample("a", encoded(picture(RNG, 20, 24), "JPEG"), "jpeg")
    (found_HWC,) = Negative(16).stacked([Negative(16).read(sample)])
    assert np.array_equal(found_HWC, 255 - Decoder(16).decode(sample))


def test_all_threads_decode_an_image_to_the_same_pixels() -> None:
    decoder, data = Decoder(8), encoded(picture(RNG, 100, 80), "JPEG")
    row = {"id": "a", "time": 1.0, "codec": "jpeg", "size": len(data)}
    found: list[bytes] = []

    def work() -> None:
        found.extend(decoder.decode(checked(row, data, "cam")).tobytes() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 80
    assert len(set(found)) == 1


@table(
    ("wrong", "says"),
    [
        ({"channels": 2}, "channels 2"),
        ({"size": 0}, "size 0"),
        ({"size": 10**9, "max_pixels": 10**18}, "size 1000000000"),  # from an export's file
        ({"size": -3}, "size -3: must be from 1 to 8,192"),
        ({"size": 100, "max_pixels": 50}, "max_pixels=50"),
    ],
)
def test_a_decoder_refuses_invalid_settings(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder(**{"size": 8, **wrong})
