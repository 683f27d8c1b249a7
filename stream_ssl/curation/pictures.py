"""A decoder for curation, which also takes pictures that are too large for a run."""

from __future__ import annotations

import threading
from typing import Final, Literal

from stream_ssl.feed.decode import BadSample, Decoder, Pixels
from stream_ssl.wire.sample import Sample

LARGEST: Final = 64_000_000
"""Most pixels of a picture. Decoding it takes up to 16 bytes of memory a pixel."""
LARGEST_JPEG: Final = 200_000_000
"""Most pixels of a JPEG, which is decoded at a reduced scale. Telephones take such photos."""


class PictureDecoder:
    """A decoder of pictures to uint8 [size, size, 3], as `Decoder`, and of larger pictures.

    A picture with more pixels than a run decodes needs much memory, so one is decoded at a time.
    Safe to call from several threads.

    Args:
        size: side of the result, in pixels.
        fit: "crop" or "letterbox"; see `Decoder`.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, size: int, fit: Literal["crop", "letterbox"]) -> None:
        self._usual = Decoder(size, fit=fit)
        self._large = _LargeDecoder(size, max_pixels=LARGEST, fit=fit)
        self._large_jpeg = _LargeDecoder(size, max_pixels=LARGEST_JPEG, fit=fit)
        self._one_at_a_time = threading.Lock()

    def decode(self, sample: Sample) -> Pixels:
        """Return the pixels of a sample; see `Decoder.decode`.

        Raises:
            BadSample: the sample cannot be decoded, or this machine has too little memory for it.
        """
        try:
            return self._usual.decode(sample)
        except BadSample as error:
            if error.reason != "pixels":
                raise
        large = self._large_jpeg if sample.codec == "jpeg" else self._large
        with self._one_at_a_time:
            try:
                return large.decode(sample)
            except MemoryError:
                why = "this machine has too little memory for so many pixels: scale it down"
                raise BadSample("pixels", why) from None


class _LargeDecoder(Decoder):
    @property
    def _limit(self) -> str:
        return f"at most {self.max_pixels} are decoded: scale it down"
