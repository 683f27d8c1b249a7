"""Repetitions of a sample: as it is, jittered, or encoded anew."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.fields import fitting_meta, short_id
from stream_ssl.wire.sample import DTYPES, Sample, short

if TYPE_CHECKING:
    from PIL import Image

SHIFT = 1  # pixels
BRIGHTNESS = 6  # levels
NOISE = 4  # levels
QUALITY = (50, 90)  # of JPEG

NearBy = Literal["jitter", "jpeg"]


def repeat(sample: Sample, number: str, near: NearBy | None, rng: np.random.Generator) -> Sample:
    """The sample once more, under an id of its own, with meta "duplicate_of" and "duplicate".

    Args:
        sample: the original.
        number: tells apart the repetitions of one original.
        near: how it differs; None: not at all. Encoded images are always encoded anew.
        rng: draws the difference.

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
    origin = {"duplicate_of": sample.id, "duplicate": kind}
    changes: dict[str, Any] = {} if payload is None else payload
    return replace(
        sample,
        id=short_id(f"{sample.id}~{number}"),
        meta=fitting_meta(origin, sample.meta or {}),
        **changes,
    )


def repeat_raw(sample: Sample, near: NearBy, rng: np.random.Generator) -> dict[str, Any]:
    """Raw pixels that are nearly the sample's, and never quite."""
    assert sample.shape is not None
    image_HWC = np.frombuffer(sample.data, dtype=np.uint8).reshape(sample.shape)
    changed_HWC = jitter(image_HWC, rng) if near == "jitter" else through_jpeg(image_HWC, rng)
    if np.array_equal(changed_HWC, image_HWC):
        changed_HWC = changed_HWC.copy()
        changed_HWC[0, 0, 0] ^= 1
    return {"data": changed_HWC.tobytes()}


def repeat_vector(sample: Sample, rng: np.random.Generator) -> dict[str, Any]:
    """A vector noised by a twentieth of its own standard deviation."""
    assert sample.dtype is not None
    dtype = DTYPES[sample.dtype]
    value_D = np.frombuffer(sample.data, dtype).astype(np.float64)
    value_D += rng.normal(0, value_D.std() / 20 + 1e-6, value_D.shape)
    return {"data": value_D.astype(dtype).tobytes()}


def jitter(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Moved by up to a pixel, a little brighter or darker, and noised; black stays nearly black."""
    down, right = rng.integers(-SHIFT, SHIFT + 1, size=2).tolist()
    change_HWC = rng.integers(-NOISE, NOISE + 1, image_HWC.shape, dtype=np.int16)
    change_HWC += np.int16(rng.integers(-BRIGHTNESS, BRIGHTNESS + 1))
    change_HWC += moved(image_HWC, down, right)
    return np.clip(change_HWC, 0, 255).astype(np.uint8)


def moved(image_HWC: NDArray[np.uint8], down: int, right: int) -> NDArray[np.uint8]:
    """The part of the image that begins so many pixels further, its edge drawn out."""
    height, width, _ = image_HWC.shape
    row_H = np.clip(np.arange(height) + down, 0, height - 1)
    column_W = np.clip(np.arange(width) + right, 0, width - 1)
    return image_HWC[row_H][:, column_W]


def through_jpeg(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """The pixels after JPEG of a random quality; an alpha channel stays as it is."""
    data = encode(from_pixels(image_HWC[..., :3]), rng)
    with load_pillow().open(io.BytesIO(data)) as image:
        decoded = np.asarray(image).reshape(*image_HWC.shape[:2], -1)
    return np.concatenate([decoded, image_HWC[..., decoded.shape[2] :]], axis=2)


def reencode(sample: Sample, rng: np.random.Generator) -> dict[str, Any] | None:
    """The encoded image as JPEG of a random quality; None where it cannot be decoded."""
    try:
        data = encode(decode(sample), rng)
    except (OSError, ValueError):
        return None  # it goes on as it is: what to do with it is for the receiver to say
    return {"data": data, "codec": "jpeg"}


def decode(sample: Sample) -> Image.Image:
    """Return the pixels of an encoded image, grey or RGB, as the learner would see them.

    Raises:
        ValueError: it cannot be decoded.
        ImportError: Pillow is not installed.
    """
    pillow = load_pillow()
    from stream_ssl.pictures import over_white, upright

    try:
        with pillow.open(io.BytesIO(sample.data)) as image:
            # A new file has neither the orientation tag nor an alpha channel.
            return over_white(upright(image))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        # Pillow names the buffer that it could not read, which tells nobody anything.
        what = f"no {sample.codec} image" if "cannot identify image" in str(error) else str(error)
        raise ValueError(f"sample {short(sample.id)} cannot be decoded: {what}") from error


def from_pixels(image_HWC: NDArray[np.uint8]) -> Image.Image:
    """Pixels of 1 or 3 channels as Pillow has them."""
    grey = image_HWC.shape[2] == 1
    image: Image.Image = load_pillow().fromarray(
        image_HWC[..., 0] if grey else np.ascontiguousarray(image_HWC)
    )
    return image


def encode(image: Image.Image, rng: np.random.Generator) -> bytes:
    """The image as JPEG of a quality drawn from QUALITY."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(rng.integers(QUALITY[0], QUALITY[1] + 1)))
    return file.getvalue()


def load_pillow() -> Any:
    """Pillow's module Image.

    Raises:
        ImportError: Pillow is not installed; says how to install it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "encoded images need Pillow to be changed: pip install 'stream-ssl[images]'"
        ) from error
    return Image
