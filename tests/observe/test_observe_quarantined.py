"""The samples in the quarantine, as the page shows them."""

from __future__ import annotations

import io
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from stream_ssl.feed.decode import BadSample
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.observe.page import quarantined as page
from stream_ssl.observe.page.quarantined import quarantined, remains

GREY = 128


def photo(form: str = "JPEG", width: int = 96, height: int = 96) -> bytes:
    pixels_HWC = np.random.default_rng(0).integers(0, 60, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, form)
    return file.getvalue()


def shown(address: str | None) -> NDArray[np.uint8]:
    assert address is not None
    head, _, body = address.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(b64decode(body))).convert("L"))


def put(quarantine: Quarantine, sequence: int, codec: str, data: bytes) -> None:
    quarantine.put(
        BadSample("damaged", "cut short"),
        {"id": f"frame-{sequence}", "codec": codec, "size": len(data)},
        data,
        source="cam",
        producer="robot-1",
        sequence=sequence,
        index=0,
        received=17.5,
    )


def test_the_upper_part_of_a_jpeg_that_was_cut_off_is_shown() -> None:
    whole = photo()
    picture_HW = shown(remains(whole[: len(whole) // 2]))
    assert picture_HW.shape == (64, 64)
    assert picture_HW[:20].mean() < 60  # dark, as the photo is
    assert abs(picture_HW[48:].astype(int) - GREY).max() < 12
    assert shown(remains(whole)).mean() < 60


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_other_files_are_shown_only_if_they_are_whole(form: str) -> None:
    whole = photo(form)
    assert shown(remains(whole)).mean() < 60
    assert remains(whole[: len(whole) // 2]) is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"a text", bytes(99)]
)
def test_bytes_without_a_picture_give_no_picture(data: bytes) -> None:
    assert remains(data) is None


def test_a_picture_of_too_many_pixels_is_not_decoded() -> None:
    bomb = io.BytesIO()
    Image.new("L", (4096, 4096)).save(bomb, "PNG")
    assert page.MOST_PIXELS < 4096 * 4096
    assert remains(bomb.getvalue()) is None


def test_each_sample_has_the_picture_of_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine = Quarantine(tmp_path)
    put(quarantine, 1, "png", photo("JPEG"))  # under the codec that was declared
    put(quarantine, 2, "tiff", photo("PNG"))
    put(quarantine, 3, "raw", bytes(48))
    (found,) = tmp_path.glob("*.0000*1.0000.png")
    found.with_suffix(".jpeg").symlink_to("/etc/hostname")  # links are not followed
    by_id = {one["id"]: one for one in quarantined(tmp_path, 10)}
    assert {name: one["picture"] is not None for name, one in by_id.items()} == {
        "frame-1": True,
        "frame-2": True,
        "frame-3": False,
    }
    monkeypatch.setattr(page, "remains", None)  # decoded once
    assert {one["id"]: one for one in quarantined(tmp_path, 10)} == by_id
