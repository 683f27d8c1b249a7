"""Pictures that are too large for a run, in the commands that read a user's own files."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from table import table

from stream_ssl.feed.decode import BadSample, Decoder, VectorDecoder
from stream_ssl.feed.large_pictures import for_own_files
from stream_ssl.wire import Sample


def picture(width: int, height: int, kind: str = "png") -> Sample:
    noise_HW = np.random.default_rng(0).integers(0, 256, (height // 10, width // 10), np.uint8)
    image = Image.fromarray(noise_HW).resize((width, height), Image.Resampling.NEAREST)
    image.save(out := io.BytesIO(), kind)
    return Sample("large", out.getvalue(), kind)


@table(("channels", "fit", "kind"), [(1, "letterbox", "png"), (3, "crop", "jpeg")])
def test_the_decoder_for_own_files_decodes_a_picture_above_the_limit(
    channels: Literal[1, 3], fit: Literal["crop", "letterbox"], kind: str
) -> None:
    sample = picture(900, 400, kind)
    small = Decoder(8, channels, 300_000, fit)
    with pytest.raises(BadSample, match="at most 300000 are decoded"):
        small.decode(sample)
    whole = Decoder(8, channels, 25_000_000, fit).decode(sample)
    found = for_own_files(small)
    assert found.shape_HWC == small.shape_HWC
    assert np.array_equal(found.decode(sample), whole)


def test_a_picture_beyond_all_limits_names_the_remedy() -> None:
    Image.new("L", (8001, 8000)).save(out := io.BytesIO(), "png")
    with pytest.raises(BadSample, match=r"8001 x 8000 pixels; at most 64000000 .*: scale it down"):
        for_own_files(Decoder(8)).decode(Sample("large", out.getvalue(), "png"))


def test_for_own_files_returns_a_vector_decoder_and_a_user_s_decoder_unchanged() -> None:
    class Own(Decoder):
        pass

    for decoder in (Own(8), VectorDecoder(4)):
        assert for_own_files(decoder) is decoder
