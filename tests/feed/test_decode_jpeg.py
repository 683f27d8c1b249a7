"""Rare kinds of JPEG: lossless ones, and those with an unusual sampling of colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches_naive import encoded
from numpy.typing import NDArray
from PIL import Image

from stream_ssl.decode_cost import jpeg_header
from stream_ssl.feed.decode import BadSample, Decoder, checked


def decode(data: bytes, **options: Any) -> NDArray[np.uint8]:
    row = {"id": "a", "time": 1.0, "codec": "jpeg", "size": len(data)}
    return Decoder(8, **options).decode(checked(row, data, "cam"))


def lossless_jpeg(side: int) -> bytes:
    """Return a lossless JPEG of grey 90: a difference of -38 to 128, then differences of 0."""
    codes = b"\xff\xc4\0\x15\0\1\1" + bytes(14) + b"\0\6"  # 0: no difference, 10: six bits follow
    sides = side.to_bytes(2, "big") * 2
    frame = b"\xff\xc3\0\x0b\x08" + sides + b"\1\1\x11\0" + b"\xff\xda\0\x08\1\1\0\1\0\0"
    return b"\xff\xd8" + codes + frame + b"\x99" + bytes(side * side // 8) + b"\xff\xd9"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("fit", ["crop", "letterbox"])
def test_a_lossless_jpeg_is_not_scaled_while_it_is_decoded(
    channels: int, fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_jpeg(*_: Any, **__: Any) -> None:
        pytest.fail("simplejpeg writes all pixels into a buffer of the smaller size")

    monkeypatch.setattr("simplejpeg.decode_jpeg", decode_jpeg)
    assert (decode(lossless_jpeg(400), channels=channels, fit=fit) == 90).all()


def test_a_jpeg_with_four_rows_of_pixels_for_one_row_of_colours_is_decoded() -> None:
    data = encoded(Image.new("RGB", (32, 32), (200, 30, 60)), "JPEG", quality=95)
    frame = data.index(b"\xff\xc0")
    assert data[frame + 11] == 0x22  # 2 x 2 pixels for a colour: as many as 1 x 4
    tall = data[: frame + 11] + b"\x14" + data[frame + 12 :]
    assert (decode(tall) == decode(data)).all()


@pytest.mark.parametrize("frame", [b"\xff\xf7\0\x0b\x08", b"\xff\xc1\0\x0b\x0c"])
def test_the_error_names_the_remedy_for_formats_of_medical_pictures(frame: bytes) -> None:
    """The files are a JPEG-LS, and a JPEG of 12 bits per level."""
    data = lossless_jpeg(400).replace(b"\xff\xc3\0\x0b\x08", frame)
    with pytest.raises(BadSample, match="it is JPEG-LS or has 12 bits a level: convert it to PNG"):
        decode(data)


def test_a_lossless_frame_is_found_after_other_segments_and_not_in_them() -> None:
    plain, data = encoded(Image.new("L", (400, 400), 90), "JPEG"), lossless_jpeg(400)
    fake = b"\xff\xe2\0\x0a" + b"\xff\xda\xff\xc3\xff\xd9" + b"\0\0"
    assert jpeg_header(plain[:2] + fake + plain[2:]) == (False, False)
    assert jpeg_header(data[:2] + fake + b"\xff\xff" + data[2:]) == (False, True)
    assert jpeg_header(b"\xff\xd8" + b"\xff\xe2\0\2" * 5000 + data[2:]).lossless
