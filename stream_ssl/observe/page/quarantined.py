"""The newest samples in the quarantine, each with a picture of what is left of it."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import read_bytes
from stream_ssl.feed.decode import Decoder
from stream_ssl.feed.quarantine import newest
from stream_ssl.originals import codec_in
from stream_ssl.pictures import png_address
from stream_ssl.wire import CODECS, Sample

MOST_BYTES, MOST_PIXELS = 8 << 20, 1 << 23
"""The largest file, and the most pixels of an image, that are decoded for the page."""

END_OF_JPEG = b"\xff\xd9"

_DECODER = Decoder(64, max_pixels=MOST_PIXELS, fit="letterbox")


def quarantined(folder: Path, limit: int) -> list[dict[str, Any]]:
    """Return the newest samples, the last first: their notes, and `picture`, a data URL or None."""
    return [
        {**note, "picture": _picture(folder / note["file"], note["at"])}
        for note in newest(folder, limit)
    ]


@lru_cache(maxsize=256)
def _picture(note: Path, written: float) -> str | None:
    """Return the picture of the sample beside a note, which was written at this time."""
    del written  # a part of the cache's key
    for codec in (*CODECS, "bin"):
        with suppress(OSError, ValueError):
            return remains(read_bytes(note.with_suffix(f".{codec}"), MOST_BYTES))
    return None


def remains(data: bytes) -> str | None:
    """Return what can be decoded of an image file, as a PNG of 64 x 64 pixels in a data URL.

    The codec is the one that the file begins with, whatever its producer declared. The lower part
    of a JPEG that was cut off is grey. None: nothing can be decoded within the decoder's limits.
    """
    codec = codec_in(data)
    if codec == "jpeg":
        data += END_OF_JPEG  # without it, the decoder refuses the part before the cut, too
    with suppress(ValueError):  # BadSample, or no bytes
        return png_address(_DECODER.decode(Sample(id="remains", codec=codec, data=data)))
    return None
