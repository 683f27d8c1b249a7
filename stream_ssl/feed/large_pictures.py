"""A decoder for a user's own files, which also decodes pictures that a run rejects as too large."""

from __future__ import annotations

import threading
from typing import Final, Protocol

from stream_ssl.feed.decode import BadSample, Decoder, Pixels
from stream_ssl.wire.sample import Sample

LARGEST: Final = 64_000_000
"""Most pixels of a picture. Decoding it takes up to 20 bytes of memory a pixel."""
LARGEST_JPEG: Final = 200_000_000
"""Most pixels of a JPEG, which is decoded at a reduced scale. Telephones take such photos."""
_one_at_a_time = threading.Lock()


class OneByOne(Protocol):
    """A decoder of single samples to uint8 arrays of one shape; see `Payloads`."""

    shape_HWC: tuple[int, int, int]

    def decode(self, sample: Sample) -> Pixels: ...


def for_own_files(decoder: OneByOne) -> OneByOne:
    """Return a decoder that gives the same pixels as a run's, and also decodes larger pictures.

    A run rejects large pictures because a stranger may send many. A decoder of vectors, or of a
    class that the user wrote, is returned unchanged.
    """
    return LargePictures(decoder) if type(decoder) is Decoder else decoder


class LargePictures:
    """A decoder that also takes pictures with more pixels than a run decodes.

    Such a picture needs much memory, so a process decodes one of them at a time. Several threads
    may call the decoder.

    Args:
        decoder: decodes the pictures within its `max_pixels`.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.shape_HWC = decoder.shape_HWC
        self._usual = decoder
        self._large, self._large_jpeg = (
            _LargeDecoder(
                decoder.size, decoder.channels, max(most, decoder.max_pixels), decoder.fit
            )
            for most in (LARGEST, LARGEST_JPEG)
        )

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
        with _one_at_a_time:
            try:
                return large.decode(sample)
            except MemoryError:
                why = "this machine has too little memory for so many pixels: scale it down"
                raise BadSample("pixels", why) from None


class _LargeDecoder(Decoder):
    @property
    def _limit(self) -> str:
        return f"at most {self.max_pixels} are decoded: scale it down"
