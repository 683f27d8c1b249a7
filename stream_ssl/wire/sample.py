"""The sample that a producer sends: an image or a vector, with its source and capture time."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

CODECS = ("raw", "jpeg", "png", "webp", "vector")
DTYPES = {"float16": "<f2", "float32": "<f4"}
"""Dtype of a vector -> NumPy's name for its little-endian form, which is sent."""
MAX_ID_BYTES = 255
MAX_SOURCE_BYTES = 64
MAX_META_BYTES = 4096
MAX_POSITION_BYTES = 4096
MAX_POSITION_DEPTH = 16
MAX_SIDE = 65_535
MAX_DIM = 1_048_576
MAX_LABEL = 2**31 - 1
MAX_TIME = 1e11
"""Seconds since the Unix epoch. Today's milliseconds and nanoseconds exceed it."""

Position = Any
"""The resume token of a source: the value that it needs to continue from this point.

Any value that msgpack can encode, at most 4 KiB packed and nested at most 16 levels deep. Only the
source interprets the value."""

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Sample:
    """An image or a vector that a producer sends to the learner.

    Args:
        id: the name of the sample within its source, 1 to 255 bytes of UTF-8. If an image is sent
            twice, keep its id, so that the learner does not use it as its own negative.
        data: the payload. Codec "raw": uint8 pixels, row-major H x W x C. Codec "vector":
            little-endian numbers. Any other codec: an encoded file.
        codec: "raw", "jpeg", "png", "webp" or "vector".
        shape: (H, W, C) of a raw image, C in {1, 3, 4}; (D,) of a vector; None for an encoded
            image.
        time: capture time, seconds since the Unix epoch, at most 1e11 in absolute value.
        source: the name of the place where the sample was captured, 1 to 64 bytes of UTF-8.
        label: the class in [0, 2^31), if the stream carries one. Labels are never used for
            learning.
        meta: text keys with values that are text, numbers or booleans; at most 4 KiB packed.
        dtype: the type of a vector's numbers, "float16" or "float32"; None for images.

    Raises:
        ValueError: a field is outside its range or of a wrong type.
    """

    id: str
    data: bytes | memoryview = field(repr=False)
    codec: str = "raw"
    shape: tuple[int, ...] | None = None
    time: float = field(default_factory=time.time)
    source: str = "unnamed"
    label: int | None = None
    meta: Mapping[str, Scalar] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_text("sample id", self.id, MAX_ID_BYTES)
        check_text("source", self.source, MAX_SOURCE_BYTES)
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r}: must be one of {', '.join(CODECS)}")
        if not _finite(self.time):
            raise ValueError(f"sample {short(self.id)}: time {self.time!r} is not a finite number")
        if not is_capture_time(self.time):
            raise ValueError(
                f"sample {short(self.id)}: time {self.time!r} is not in seconds since the Unix "
                f"epoch, which are at most {MAX_TIME:g}; divide milliseconds by 1e3, or "
                "nanoseconds by 1e9"
            )
        if type(self.data) is not bytes:
            object.__setattr__(self, "data", _flat_buffer(self.id, self.data))
        if self.label is not None:
            object.__setattr__(self, "label", _label(self.id, self.label))
        if self.meta is not None:
            object.__setattr__(self, "meta", _own_meta(self.id, self.meta))
        if self.codec == "vector":
            self._check_vector()
        elif self.dtype is not None:
            raise ValueError(f"sample {short(self.id)}: dtype is a vector's; pass None")
        elif self.codec == "raw":
            self._check_raw()
        elif self.shape is not None:
            raise ValueError(
                f"sample {short(self.id)}: an encoded image carries its own shape; pass None"
            )
        elif len(self.data) == 0:
            raise ValueError(f"sample {short(self.id)}: the {self.codec} payload is empty")

    def _check_raw(self) -> None:
        shape = self.shape
        if type(shape) is not tuple or [type(side) for side in shape] != [int, int, int]:
            raise ValueError(
                f"sample {short(self.id)}: raw images need shape (H, W, C), not {shape!r}"
            )
        height, width, channels = shape
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and channels in (1, 3, 4)):
            raise ValueError(
                f"sample {short(self.id)}: shape {self.shape} must be (H, W, C) with sides 1 to "
                f"{MAX_SIDE} and 1, 3 or 4 channels, which come last"
            )
        if len(self.data) != height * width * channels:
            raise ValueError(
                f"sample {short(self.id)}: {len(self.data)} bytes do not fill shape {self.shape}, "
                f"which needs {height * width * channels}"
            )

    def _check_vector(self) -> None:
        shape = self.shape
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(
                f"sample {short(self.id)}: dtype {short(self.dtype)} of a vector: must be one of "
                f"{', '.join(DTYPES)}"
            )
        if type(shape) is not tuple or len(shape) != 1 or type(shape[0]) is not int:
            raise ValueError(f"sample {short(self.id)}: a vector needs shape (D,), not {shape!r}")
        needed = shape[0] * np.dtype(DTYPES[self.dtype]).itemsize
        if not 1 <= shape[0] <= MAX_DIM or len(self.data) != needed:
            raise ValueError(
                f"sample {short(self.id)}: {len(self.data)} bytes do not fill {self.dtype} of "
                f"shape {shape}, which needs {needed}; D lies in [1, {MAX_DIM}]"
            )

    @classmethod
    def from_vector(cls, value_D: NDArray[Any], id: str, **fields: Any) -> Sample:  # noqa: A002
        """Return a vector sample with a copy of a float16 or float32 array, [D].

        Args:
            value_D: the vector.
            id: the name of the sample within its source.
            **fields: further fields of the sample, such as `time` and `source`.

        Raises:
            ValueError: the vector is no NumPy array, has another dtype or shape, or is not finite.
        """
        _check_array(id, value_D)
        name = value_D.dtype.name
        if name not in DTYPES or value_D.ndim != 1:
            raise ValueError(
                f"sample {short(id)}: {name} of shape {value_D.shape}: a vector is float16 or "
                "float32 of shape [D]; use .astype(np.float32).ravel()"
            )
        if not np.isfinite(value_D).all():
            raise ValueError(f"sample {short(id)}: the vector holds numbers that are not finite")
        data = value_D.astype(DTYPES[name]).tobytes()
        return cls(id, data, "vector", value_D.shape, dtype=name, **fields)

    @classmethod
    def from_array(cls, image_HWC: NDArray[np.uint8], id: str, **fields: Any) -> Sample:  # noqa: A002
        """Return a raw sample with a copy of uint8 pixels, [H, W] or [H, W, C].

        Args:
            image_HWC: the pixels, 0 to 255.
            id: the name of the sample within its source.
            **fields: further fields of the sample, such as `time` and `source`.

        Raises:
            ValueError: the pixels are no NumPy array, are not uint8, or do not have the shape of an
                image.
        """
        _check_array(id, image_HWC)
        if image_HWC.dtype != np.uint8:
            raise ValueError(
                f"sample {short(id)}: pixels must be uint8, not {image_HWC.dtype}; scale to "
                "0..255 first"
            )
        shape = image_HWC.shape
        if len(shape) == 2:
            shape = (*shape, 1)
        if len(shape) != 3:
            raise ValueError(f"sample {short(id)}: {len(shape)} dimensions are no H x W x C image")
        return cls(id, image_HWC.tobytes(), "raw", shape, **fields)


def short(name: object) -> str:
    """Return an id for an error message, shortened to at most 62 characters."""
    text = repr(name)
    return text if len(text) <= 62 else f"{text[:58]}...{text[-1]}"


def check_position(position: Position) -> Position:
    """Check that a resume token can be sent. Return a copy that the caller cannot change.

    Raises:
        ValueError: msgpack cannot encode the token, or it is too large or too deeply nested.
    """
    if position is None or (type(position) is int and -(2**63) <= position < 2**63):
        return position
    if _levels_left(position, MAX_POSITION_DEPTH) < 0:
        raise ValueError(f"position: nested more than {MAX_POSITION_DEPTH} levels deep; flatten it")
    packed = _packed_size("position", position)
    try:
        copy = msgpack.unpackb(msgpack.packb(position), strict_map_key=True, max_ext_len=0)
    except ValueError as error:
        raise ValueError(
            f"position: no receiver would read it: {error}; use text keys and plain values"
        ) from None
    if packed > MAX_POSITION_BYTES:
        raise ValueError(
            f"position: {packed} bytes packed, at most {MAX_POSITION_BYTES}; "
            "keep a place in the source, not the source's content"
        )
    return copy


def check_text(what: str, text: str, limit: int) -> None:
    """Check that `text` is a string of 1 to `limit` bytes of UTF-8.

    Raises:
        ValueError: the check failed; the message begins with `what`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{what} {short(text)}: must be text, not {type(text).__name__}")
    if text.isascii() and 1 <= len(text) <= limit:
        return
    try:
        fits = 1 <= len(text.encode()) <= limit
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ValueError(f"{what} {short(text)}: must be 1 to {limit} bytes of UTF-8")


def is_capture_time(time: float) -> bool:
    """Return whether a number can be a capture time in seconds since the Unix epoch."""
    return -MAX_TIME <= time <= MAX_TIME


def _finite(time: Any) -> bool:
    try:
        return math.isfinite(time) and not isinstance(time, bool)
    except (TypeError, OverflowError):
        return False


def _check_array(name: str, value: Any) -> None:
    if not isinstance(value, np.ndarray):
        raise ValueError(
            f"sample {short(name)}: {type(value).__name__} is no NumPy array; use np.asarray"
        )
    # The bytes of masked values are those of a fill value. Here, `np.ma` would import a module.
    if type(value) is not np.ndarray and np.any(getattr(value, "mask", False)):
        raise ValueError(
            f"sample {short(name)}: the array has masked values; choose a value for them: "
            ".filled(0)"
        )


def _flat_buffer(name: str, data: Any) -> bytes | memoryview:
    """Return a view of a contiguous buffer; `len()` of the view is its size in bytes."""
    try:
        view = memoryview(data)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError:
        raise ValueError(
            f"sample {short(name)}: data must be bytes or a contiguous buffer, not "
            f"{type(data).__name__}"
        ) from None


def _label(name: str, label: Any) -> int:
    """Return the label as a Python int; NumPy integers are accepted too."""
    try:
        value = operator.index(label)
    except TypeError:
        value = -1
    if isinstance(label, bool) or not 0 <= value <= MAX_LABEL:
        raise ValueError(f"sample {short(name)}: label {label!r} is no integer in [0, 2^31)")
    return value


def _own_meta(sample: str, meta: Any) -> dict[str, Scalar]:
    """Return a checked copy of the facts, because a user may change the map for the next sample."""
    if not isinstance(meta, Mapping):
        raise ValueError(
            f"sample {short(sample)}: meta must be a map, not {type(meta).__name__}; leave it out "
            "if there are no facts"
        )
    own = dict(meta)
    for name, value in own.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
            raise ValueError(
                f"sample {short(sample)}: meta {name!r}: {type(value).__name__}; keys are text, "
                "values text, numbers or booleans"
            )
    packed = _packed_size(f"sample {short(sample)}: meta", own)
    if packed > MAX_META_BYTES:
        raise ValueError(
            f"sample {short(sample)}: meta takes {packed} bytes, at most {MAX_META_BYTES}"
        )
    return own


def _packed_size(what: str, value: Any) -> int:
    try:
        return len(msgpack.packb(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what}: msgpack cannot carry it: {error}") from None


def _levels_left(value: Any, allowed: int) -> int:
    """Return how many of the allowed nesting levels a value leaves unused; below 0 if too deep."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return allowed
    if allowed == 0:
        return -1
    return min((_levels_left(item, allowed - 1) for item in value), default=allowed - 1)
