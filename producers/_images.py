"""Conversion of the arguments of send() to a Sample."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.image_files import codec_of, read_image
from stream_ssl.wire import Sample
from stream_ssl.wire.sample import short

if TYPE_CHECKING:
    from PIL.Image import Image


FIELDS = ("label", "codec", "shape", "time", "source", "meta")
_NOTHING = dict.fromkeys(FIELDS)  # a call that sets no field


class SampleMaker:
    """Makes samples from the arguments of send(). Samples without an id get one.

    Args:
        source: the source of samples that name no source.
        epoch: distinguishes the ids of this run from those of other runs.
    """

    def __init__(self, source: str, epoch: int) -> None:
        self._source, self._epoch = source, epoch
        self._numbers = itertools.count(1)

    def make(self, image: Any, id: str | None, fields: dict[str, Any]) -> Sample:  # noqa: A002
        """Return a sample of any image that `Producer.send` accepts, or a copy of a Sample.

        Raises:
            TypeError: a field is unknown, or see `as_sample`.
            ValueError: a Sample comes with an id or a field, or see `as_sample`.
            OSError: a file cannot be read.
        """
        if fields and (unknown := fields.keys() - _NOTHING.keys()):
            raise TypeError(
                f"{', '.join(sorted(unknown))}: no such argument; a sample has {', '.join(FIELDS)}"
            )
        if isinstance(image, Sample):
            if id is not None or (fields and any(value is not None for value in fields.values())):
                raise ValueError("a Sample carries its own id, label and fields; pass it alone")
            return owned(image)
        if id is None:
            id = f"{self._epoch:x}-{next(self._numbers)}"  # noqa: A001
        if fields.get("source") is None:
            fields["source"] = self._source
        try:
            return as_sample(image, id, **fields)
        except ValueError as error:
            if isinstance(image, str | os.PathLike):
                raise ValueError(f"{os.fspath(image)}: {error}") from None
            raise


def given(label: Any, codec: Any, shape: Any, time: Any, source: Any, meta: Any) -> dict[str, Any]:
    """Return the fields of a sample by name, or an empty mapping if all of them are None."""
    plain = label is None and codec is None and shape is None and time is None
    if plain and source is None and meta is None:  # the usual call, and the fastest
        return {}
    return dict(zip(FIELDS, (label, codec, shape, time, source, meta), strict=True))


def as_sample(image: Any, id: str, codec: str | None = None, **fields: Any) -> Sample:  # noqa: A002
    """Return a sample with its own copy of the image, which the caller cannot change.

    Args:
        image: any image that `Producer.send` accepts, except a Sample.
        codec: the codec of encoded bytes. None: detect the codec from the bytes.
        **fields: the other fields of Sample. `time` may be a datetime, and `meta` may contain
            NumPy scalars.

    Raises:
        TypeError: `image` is of an unsupported type.
        ValueError: a field of the sample is invalid, or the codec of the bytes is unknown.
        OSError: a file cannot be read.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if "time" in fields:
        fields["time"] = _seconds(fields["time"], id)
    if "meta" in fields:
        fields["meta"] = _plain_meta(fields["meta"])
    if _is_pillow(image):
        image = _pixels(image)
    if isinstance(image, np.ndarray):
        is_vector = image.dtype.kind == "f" and image.ndim == 1
        if codec not in (None, own := "vector" if is_vector else "raw"):
            raise ValueError(
                f"codec {codec!r}: this array is {own!r}; pass an encoded image as bytes"
            )
        if "shape" in fields:
            raise ValueError(f"shape {fields['shape']}: an array has its own shape; pass None")
        make = Sample.from_vector if is_vector else Sample.from_array
        return make(image, id, **fields)
    data = _bytes_of(image)
    if not data:
        raise ValueError("the picture is empty: it has 0 bytes")
    if codec is None:
        codec = codec_of(data) if "shape" not in fields else "raw"
    if codec is None:
        raw = "Raw pixels from a producer need codec='raw' and shape=(H, W, C)"
        raise ValueError(
            f"the bytes {data[:12]!r}... are no JPEG, PNG or WebP: convert the picture to one of "
            f"these{'' if isinstance(image, str | os.PathLike) else f'. {raw}'}"
        )
    return Sample(id, data, codec, **fields)


def owned(sample: Sample) -> Sample:
    """Return the sample with a payload of type bytes, which the caller cannot change."""
    return sample if isinstance(sample.data, bytes) else replace(sample, data=bytes(sample.data))


def _bytes_of(image: Any) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image))
    raise TypeError(
        f"an image is bytes, bytearray, memoryview, a uint8 array H x W or H x W x C, a PIL image "
        f"or a path, not {type(image).__name__}"
    )


def _is_pillow(image: Any) -> bool:
    """Return whether `image` is a PIL image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def _pixels(image: Image) -> NDArray[np.uint8]:
    """Return 8-bit grey, RGB or RGBA pixels of a PIL image, oriented by its EXIF data."""
    from stream_ssl.pictures import upright  # loads Pillow, which the user has loaded already

    mode = image.mode
    if mode.startswith(("I", "F")):
        raise ValueError(f"a PIL image of mode {mode!r} has more than 8 bits; scale it to mode 'L'")
    try:
        return np.asarray(upright(image))
    except ValueError as error:  # Pillow reads the file of an image late
        raise ValueError(
            f"a PIL image of mode {mode!r} cannot be read ({error}); send it before its file is "
            "closed, in a mode such as 'RGB'"
        ) from None


def _seconds(time: Any, id: str) -> Any:  # noqa: A002
    """Return seconds since the Unix epoch. A datetime without a time zone is in local time."""
    if isinstance(time, np.datetime64):
        if np.isnat(time):
            raise ValueError(
                f"sample {short(id)}: time NaT: there is no such moment; leave time out, and the "
                "time of sending is used"
            )
        whole = time.astype("datetime64[s]")  # nanoseconds overflow outside of 1678 to 2262
        return float(whole.astype(np.int64) + (time - whole) / np.timedelta64(1, "s"))
    if isinstance(time, datetime.datetime):
        try:
            return time.timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(
                f"sample {short(id)}: time {time.isoformat()} has no seconds since the Unix epoch "
                f"({error}); leave time out, and the time of sending is used"
            ) from None
    return time.item() if isinstance(time, np.generic) else time


def _plain_meta(meta: Any) -> Any:
    """Return `meta` with NumPy scalars as Python values and datetimes as ISO 8601 text."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta: must be a mapping of names to values, not {type(meta).__name__}")
    return {name: _plain(value) for name, value in meta.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return value.isoformat() if isinstance(value, datetime.date) else value
