"""Payloads to pixels of one shape, and the reasons to refuse one.

Legend: N samples, H height, W width, C channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from stream_ssl.wire import Sample, sample_of

REASONS = (
    "damaged",  # cut short, or its bytes make no image
    "empty",  # no bytes
    "fields",  # id, time, label or meta breaks a rule of the wire
    "format",  # the file is not of the codec that it came under
    "packet",  # the packet's header cannot be read: counted as one sample
    "pixels",  # more pixels than the limit
    "shape",  # raw bytes do not fill their shape, or fit="refuse" and other sides
)

Pixels = NDArray[np.uint8]
Row = Mapping[str, Any]

_MAGIC = {"jpeg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}
_ORIENTATION = 0x0112  # EXIF tag
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadSample(ValueError):
    """A sample that cannot be learned from.

    Attributes:
        reason: one of REASONS.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Decoder:
    """Turns samples into uint8 [size, size, channels].

    Colours: grey is repeated over 3 channels; 3 channels become grey by Rec. 601 luma; what is
    transparent is laid over white; 16-bit grey keeps its high byte; CMYK and palettes become RGB.
    Of an animation the first frame counts. EXIF orientation is applied. Safe to call from several
    threads.

    Args:
        size: side of the result, pixels.
        channels: 1 or 3.
        fit: "resize" scales the short side to `size` and keeps the middle; "refuse" takes only
            images of `size` x `size`, of any colour mode.
        max_pixels: larger images are refused by their header, before a pixel is decoded. A decode
            may hold up to 16 bytes a pixel for a moment.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        size: int,
        channels: Literal[1, 3] = 3,
        fit: Literal["resize", "refuse"] = "resize",
        max_pixels: int = 50_000_000,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels {channels}: must be 1 or 3")
        if fit not in ("resize", "refuse"):
            raise ValueError(f'fit {fit!r}: must be "resize" or "refuse"')
        if not 1 <= size * size <= max_pixels:
            raise ValueError(f"size {size}: must be at least 1, its square at most {max_pixels=}")
        self.size, self.channels, self.fit, self.max_pixels = size, channels, fit, int(max_pixels)
        # Pillow warns about each damaged file, and Python keeps every text that it has warned of:
        # a leak in the hands of a hostile producer. What matters is raised as BadSample.
        warnings.filterwarnings("ignore", module=r"PIL\.")

    def __call__(self, row: Row, data: bytes | memoryview, source: str) -> Pixels:
        """The pixels of one sample, [size, size, channels]; may be a read-only view of `data`.

        Args:
            row: the sample's map in the packet's header.
            data: its payload.
            source: the packet's.

        Raises:
            BadSample: it cannot be had; reason and message say why.
        """
        sample = self._checked(row, data, source)
        if sample.codec == "raw":
            return self._raw(sample)
        return self._encoded(sample)

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """All samples at once, [N, size, size, channels], as a read-only view of `payload`; None
        unless every one is raw and of just this shape. Fields other than these are not checked."""
        shape = [self.size, self.size, self.channels]
        count = self.size * self.size * self.channels
        for row in rows:
            if row["codec"] != "raw" or row.get("shape") != shape or row["size"] != count:
                return None
        return np.frombuffer(payload, np.uint8).reshape(len(rows), *shape)

    def _checked(self, row: Row, data: bytes | memoryview, source: str) -> Sample:
        if len(data) == 0:
            raise BadSample("empty", "the payload is empty")
        try:
            return sample_of(source, dict(row), data)
        except ValueError as error:
            reason = "fields" if _fills(row, data) else "shape"
            raise BadSample(reason, str(error)) from None

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise BadSample(
                "pixels", f"{width} x {height} pixels; at most {self.max_pixels} are decoded"
            )
        if self.fit == "refuse" and (width, height) != (self.size, self.size):
            raise BadSample(
                "shape", f'{width} x {height} pixels; fit="refuse" takes {self.size} x {self.size}'
            )

    def _raw(self, sample: Sample) -> Pixels:
        assert sample.shape is not None  # the wire's rule for raw
        height, width, channels = sample.shape
        self._check_size(width, height)
        image_HWC = np.frombuffer(sample.data, np.uint8).reshape(sample.shape)
        if sample.shape == (self.size, self.size, self.channels):
            return image_HWC
        return self._shape(Image.fromarray(image_HWC[:, :, 0] if channels == 1 else image_HWC))

    def _encoded(self, sample: Sample) -> Pixels:
        data = bytes(sample.data)
        try:
            with Image.open(BytesIO(data), formats=(sample.codec.upper(),)) as image:
                self._check_size(*image.size)
                if image.mode in ("L", "RGB"):  # JPEG only: decode at 1/2, 1/4 or 1/8, or just luma
                    image.draft("L" if self.channels == 1 else image.mode, (self.size, self.size))
                turn = _turn(image)
                return self._shape(image, turn)
        except (BadSample, MemoryError):  # want of memory is ours, not the sample's
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadSample("pixels", str(error)) from None
        except Exception as error:  # a hostile file makes Pillow raise anything
            if isinstance(error, UnidentifiedImageError) and not _looks(sample.codec, data):
                raise BadSample(
                    "format", f"came as {sample.codec}, begins with {data[:8]!r}"
                ) from None
            raise BadSample("damaged", f"{type(error).__name__}: {error}") from None

    def _shape(self, image: Image.Image, turn: Image.Transpose | None = None) -> Pixels:
        image = _plain(image)
        side, (width, height) = min(image.size), image.size
        if image.size != (self.size, self.size):
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if image.mode == "RGBA":
            white = Image.new("RGBA", image.size, "white")
            white.alpha_composite(image)
            image = white
        if turn is not None:  # the crop is square and central: turning it now is the same
            image = image.transpose(turn)
        image = image.convert("L" if self.channels == 1 else "RGB")
        return np.asarray(image).reshape(self.size, self.size, self.channels)


def _plain(image: Image.Image) -> Image.Image:
    """The image as L, RGB or RGBA, which Pillow scales well."""
    if image.mode.startswith("I"):  # 16-bit grey
        high_HW = np.asarray(image).clip(0, 65_535) >> 8
        return Image.fromarray(high_HW.astype(np.uint8))
    if image.has_transparency_data:
        return image.convert("RGBA")
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURN.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # damaged EXIF in a sound image
        return None


def _looks(codec: str, data: bytes) -> bool:
    magic = _MAGIC[codec]
    kind = data[8:12] if codec == "webp" else b""  # RIFF holds sound and video, too
    return data[: len(magic)] == magic[: len(data)] and b"WEBP".startswith(kind)


def _fills(row: Row, data: bytes | memoryview) -> bool:
    """Whether a raw sample's bytes fill a valid shape; True for encoded ones."""
    shape = row.get("shape")
    if row.get("codec") != "raw":
        return shape is None
    try:
        height, width, channels = (int(n) for n in shape or ())
    except (TypeError, ValueError):
        return False
    return (
        min(height, width) >= 1
        and channels in (1, 3, 4)
        and (height * width * channels == len(data))
    )
