"""One sample: an image, where it came from and when."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODECS = ("raw", "jpeg", "png", "webp")
MAX_ID_BYTES = 255
MAX_SOURCE_BYTES = 64
MAX_META_BYTES = 4096
MAX_SIDE = 65_535

Position = Any
"""Where a source stands: a small value that msgpack can carry, opaque to all but the source."""

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One image on its way from a source to the learner.

    Args:
        id: names the image within its source, 1 to 255 bytes of UTF-8. The same image sent twice
            keeps its id: the learner never takes it for its own negative.
        data: the payload. For codec "raw" uint8 pixels, row-major H x W x C; else an encoded file.
        codec: "raw", "jpeg", "png" or "webp".
        shape: (H, W, C) of a raw image, C in {1, 3, 4}; None for encoded ones.
        time: capture time, seconds since the Unix epoch.
        source: names where the sample was captured, 1 to 64 bytes of UTF-8.
        label: class in [0, 2^31), where the stream carries one. Never used for learning.
        meta: further facts, at most 4 KiB packed.

    Raises:
        ValueError: a field breaks its rule.
    """

    id: str
    data: bytes | memoryview = field(repr=False)
    codec: str = "raw"
    shape: tuple[int, int, int] | None = None
    time: float = field(default_factory=time.time)
    source: str = "unnamed"
    label: int | None = None
    meta: Mapping[str, Scalar] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.id.encode()) <= MAX_ID_BYTES:
            raise ValueError(f"sample id {self.id!r}: must be 1 to {MAX_ID_BYTES} bytes of UTF-8")
        if not 1 <= len(self.source.encode()) <= MAX_SOURCE_BYTES:
            raise ValueError(f"source {self.source!r}: must be 1 to {MAX_SOURCE_BYTES} bytes")
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r}: must be one of {', '.join(CODECS)}")
        if not math.isfinite(self.time):
            raise ValueError(f"sample {self.id!r}: time {self.time} is not finite")
        if self.label is not None and not 0 <= self.label < 2**31:
            raise ValueError(f"sample {self.id!r}: label {self.label} lies outside [0, 2^31)")
        if self.codec == "raw":
            self._check_raw()
        elif self.shape is not None:
            raise ValueError(f"sample {self.id!r}: an encoded image carries its own shape; pass None")
        elif len(self.data) == 0:
            raise ValueError(f"sample {self.id!r}: the {self.codec} payload is empty")

    def _check_raw(self) -> None:
        if self.shape is None or len(self.shape) != 3:
            raise ValueError(f"sample {self.id!r}: raw images need shape (H, W, C), not {self.shape}")
        height, width, channels = self.shape
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and channels in (1, 3, 4)):
            raise ValueError(
                f"sample {self.id!r}: shape {self.shape} must have sides 1 to {MAX_SIDE} "
                "and 1, 3 or 4 channels"
            )
        if len(self.data) != height * width * channels:
            raise ValueError(
                f"sample {self.id!r}: {len(self.data)} bytes do not fill shape {self.shape}, "
                f"which needs {height * width * channels}"
            )

    @classmethod
    def from_array(cls, image_HWC: NDArray[np.uint8], id: str, **fields: Any) -> Sample:
        """A raw sample from uint8 pixels, H x W or H x W x C.

        Raises:
            ValueError: the array is not uint8, or has no image's shape.
        """
        if image_HWC.dtype != np.uint8:
            raise ValueError(
                f"sample {id!r}: pixels must be uint8, not {image_HWC.dtype}; scale to 0..255 first"
            )
        if image_HWC.ndim == 2:
            image_HWC = image_HWC[:, :, None]
        if image_HWC.ndim != 3:
            raise ValueError(f"sample {id!r}: {image_HWC.ndim} dimensions are no H x W x C image")
        height, width, channels = image_HWC.shape
        return cls(
            id=id, data=image_HWC.tobytes(), codec="raw", shape=(height, width, channels), **fields
        )
