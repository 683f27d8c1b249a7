"""Duplicates of a sample: exact, jittered, or encoded again."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import SourceError, own_fault
from stream_ssl.producers.sources.fields import fitting_meta, short_id
from stream_ssl.wire.sample import DTYPES, Sample, short

if TYPE_CHECKING:
    from PIL import Image

SHIFT = 1  # pixels
BRIGHTNESS = 6  # levels
NOISE = 4  # levels
QUALITY = (50, 90)  # of JPEG
MOST_PIXELS = 1 << 25
"""The most pixels of an image that is changed. As floats, with copies, they take about 1 GB."""
MOST_SIDE = 65_500  # pixels; libjpeg encodes no longer side

NearBy = Literal["jitter", "jpeg"]


def repeat(sample: Sample, number: str, near: NearBy | None, rng: np.random.Generator) -> Sample:
    """Return a duplicate of a sample with a new id, and meta "duplicate_of" and "duplicate".

    Args:
        number: distinguishes the duplicates of one original; part of the new id.
        near: how a raw image differs from its original. None: an exact duplicate. Other values
            encode an encoded image again and add noise to a vector.

    Raises:
        ImportError: an image must be encoded, and Pillow is not installed.
    """
    payload = None
    if near is not None:
        if sample.codec == "vector":
            payload = repeat_vector(sample, rng)
        elif sample.codec == "raw":
            payload = repeat_raw(sample, near, rng)
        else:
            payload = reencode(sample, rng)
    kind = "exact" if payload is None else "near"
    return sent_again(sample, number, {"duplicate": kind}, **(payload or {}))


def sent_again(
    sample: Sample, number: int | str, facts: Mapping[str, object], **changes: Any
) -> Sample:
    """Return a sample under the id ID~NUMBER, with meta "duplicate_of" and further facts.

    `changes` are the other fields that differ from the original's.
    """
    meta = fitting_meta({"duplicate_of": sample.id, **facts}, sample.meta or {})
    return replace(sample, id=short_id(f"{sample.id}~{number}"), meta=meta, **changes)


def frame_of(
    sample: Sample,
    number: int,
    image_HWC: NDArray[np.uint8] | None,
    rng: np.random.Generator,
    **facts: object,
) -> Sample:
    """Return a duplicate of an image, taken now with other pixels. Encoded images become JPEG.

    An image that cannot be decoded, or is too large, is sent unchanged, and the learner decides
    about it.

    Args:
        image_HWC: uint8 pixels of the duplicate; None if the image cannot be decoded.
        rng: draws the quality of the JPEG.
        facts: meta of the duplicate, beside "duplicate": "exact" if no byte differs from the
            original, and "near" otherwise.

    Raises:
        ImportError: the image must be encoded, and Pillow is not installed.
    """
    if image_HWC is None:
        return sent_again(sample, number, {"duplicate": "exact", **facts}, time=time.time())
    data, codec = image_HWC.tobytes(), sample.codec
    if codec != "raw":
        from stream_ssl.pictures import image_of  # Pillow has decoded the original

        data, codec = encode(image_of(image_HWC), rng), "jpeg"
    kind = "exact" if data == sample.data else "near"
    changes = {"data": data, "codec": codec, "time": time.time()}
    return sent_again(sample, number, {"duplicate": kind, **facts}, **changes)


def repeat_raw(sample: Sample, near: NearBy, rng: np.random.Generator) -> dict[str, Any]:
    """Return the changed fields of a near-duplicate of a raw image, which is never equal to it."""
    assert sample.shape is not None
    image_HWC = np.frombuffer(sample.data, dtype=np.uint8).reshape(sample.shape)
    changed_HWC = jitter(image_HWC, rng) if near == "jitter" else through_jpeg(image_HWC, rng)
    if np.array_equal(changed_HWC, image_HWC):
        changed_HWC = changed_HWC.copy()
        changed_HWC[0, 0, 0] ^= 1
    return {"data": changed_HWC.tobytes()}


def repeat_vector(sample: Sample, rng: np.random.Generator) -> dict[str, Any]:
    """Return the changed fields of a vector with noise of 1/20 of its own standard deviation."""
    assert sample.dtype is not None
    dtype = DTYPES[sample.dtype]
    value_D = np.frombuffer(sample.data, dtype).astype(np.float64)
    value_D += rng.normal(0, value_D.std() / 20 + 1e-6, value_D.shape)
    largest = np.finfo(dtype).max
    return {"data": value_D.clip(-largest, largest).astype(dtype).tobytes()}


def jitter(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return the image moved by up to a pixel, with a small change of brightness and noise.

    All changes are added, so black stays nearly black.
    """
    down, right = rng.integers(-SHIFT, SHIFT + 1, size=2).tolist()
    change_HWC = rng.integers(-NOISE, NOISE + 1, image_HWC.shape, dtype=np.int16)
    change_HWC += np.int16(rng.integers(-BRIGHTNESS, BRIGHTNESS + 1))
    change_HWC += moved(image_HWC, down, right)
    return np.clip(change_HWC, 0, 255).astype(np.uint8)


def moved(image_HWC: NDArray[np.uint8], down: int, right: int) -> NDArray[np.uint8]:
    """Return the view that starts `down` rows and `right` columns further. The edge is repeated."""
    height, width, _ = image_HWC.shape
    row_H = np.clip(np.arange(height) + down, 0, height - 1)
    column_W = np.clip(np.arange(width) + right, 0, width - 1)
    return image_HWC[row_H][:, column_W]


def seen_again(
    image_HWC: NDArray[np.uint8],
    rng: np.random.Generator,
    shift: int,
    brightness: float,
    noise: int,
) -> NDArray[np.uint8]:
    """Return the image as the same camera sees it a moment later.

    `Parked` explains the arguments.
    """
    down, right = rng.integers(-shift, shift + 1, size=2).tolist()
    level_HWC = moved(image_HWC, down, right).astype(np.float32)
    level_HWC *= np.float32(rng.uniform(1 - brightness, 1 + brightness))
    level_HWC += rng.integers(-noise, noise + 1, image_HWC.shape, dtype=np.int16)
    return np.clip(np.rint(level_HWC), 0, 255).astype(np.uint8)


def through_jpeg(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return the pixels after JPEG compression of random quality. An alpha channel is unchanged."""
    pillow = load_pillow()
    from stream_ssl.pictures import image_of

    data = encode(image_of(image_HWC[..., :3]), rng)
    with pillow.open(io.BytesIO(data)) as image:
        decoded = np.asarray(image).reshape(*image_HWC.shape[:2], -1)
    return np.concatenate([decoded, image_HWC[..., decoded.shape[2] :]], axis=2)


def reencode(sample: Sample, rng: np.random.Generator) -> dict[str, Any] | None:
    """Return `data` and `codec` of an image encoded again as JPEG of random quality.

    Return None if the image cannot be decoded.
    """
    image = decode(sample)
    return None if image is None else {"data": encode(image, rng), "codec": "jpeg"}


def pixels_of(sample: Sample) -> NDArray[np.uint8] | None:
    """Return the pixels of a sample, uint8 [H, W, C]. An encoded image is decoded.

    The result is None if the image cannot be decoded.

    Raises:
        SourceError: the sample is a vector.
        ImportError: the image is encoded, and Pillow is not installed.
    """
    if sample.codec == "vector":
        raise SourceError(
            f"sample {short(sample.id)} is a vector, and streams of a camera (--parked, --video, "
            "--popularity with noise) need images: repeat vectors with --shape.duplicates"
        )
    if sample.shape is not None:
        return np.frombuffer(sample.data, dtype=np.uint8).reshape(sample.shape)
    if (image := decode(sample)) is None:
        return None
    return np.asarray(image).reshape(image.height, image.width, -1)


def decode(sample: Sample) -> Image.Image | None:
    """Return the pixels of an encoded image, grey or RGB, as the learner would see them.

    The result is None if the image cannot be decoded, or is too large to be encoded again.

    Raises:
        ImportError: Pillow is not installed.
    """
    pillow = load_pillow()
    from stream_ssl.pictures import over_white, upright

    try:
        with pillow.open(io.BytesIO(sample.data)) as image:
            if image.width * image.height <= MOST_PIXELS and max(image.size) <= MOST_SIDE:
                # A new file has neither the orientation tag nor an alpha channel.
                return over_white(upright(image))
    except Exception as error:  # damage can make Pillow raise any exception
        if own_fault(error):
            raise
    return None


def encode(image: Image.Image, rng: np.random.Generator) -> bytes:
    """Return the image as JPEG, of a quality drawn from QUALITY."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(rng.integers(QUALITY[0], QUALITY[1] + 1)))
    return file.getvalue()


def load_pillow() -> Any:
    """Return Pillow's module `Image`.

    Raises:
        ModuleNotFoundError: Pillow is not installed; the message says how to install it.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "encoded images need Pillow to be changed: pip install 'stream-ssl[images]'",
            name=error.name,
        ) from error
    return Image
