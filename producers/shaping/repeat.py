"""Repetitions of a sample: as it is, jittered, or encoded anew."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from producers.sources.fields import fitting_meta, short_id
from stream_ssl.wire.sample import Sample

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
        payload = repeat_raw(sample, near, rng) if sample.codec == "raw" else reencode(sample, rng)
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


def jitter(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Moved by up to a pixel, a little brighter or darker, and noised; black stays nearly black."""
    height, width, _ = image_HWC.shape
    down, right = rng.integers(-SHIFT, SHIFT + 1, size=2).tolist()
    row_H = np.clip(np.arange(height) + down, 0, height - 1)
    column_W = np.clip(np.arange(width) + right, 0, width - 1)
    change_HWC = rng.integers(-NOISE, NOISE + 1, image_HWC.shape, dtype=np.int16)
    change_HWC += np.int16(rng.integers(-BRIGHTNESS, BRIGHTNESS + 1))
    change_HWC += image_HWC[row_H][:, column_W]
    return np.clip(change_HWC, 0, 255).astype(np.uint8)


def through_jpeg(image_HWC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """The pixels after JPEG of a random quality; an alpha channel stays as it is."""
    pillow = load_pillow()
    grey = image_HWC.shape[2] == 1
    colour = image_HWC[..., 0] if grey else np.ascontiguousarray(image_HWC[..., :3])
    data = encode(pillow.fromarray(colour), rng)
    with pillow.open(io.BytesIO(data)) as image:
        decoded = np.asarray(image).reshape(*image_HWC.shape[:2], -1)
    return np.concatenate([decoded, image_HWC[..., decoded.shape[2] :]], axis=2)


def reencode(sample: Sample, rng: np.random.Generator) -> dict[str, Any] | None:
    """The encoded image as JPEG of a random quality; None where it cannot be decoded."""
    pillow = load_pillow()
    from PIL import ImageOps

    try:
        with pillow.open(io.BytesIO(sample.data)) as image:
            # The orientation tag is lost: turn the pixels instead.
            upright = ImageOps.exif_transpose(image)
            data = encode(upright if upright.mode in ("L", "RGB") else upright.convert("RGB"), rng)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError):
        return None  # it goes on as it is: what to do with it is for the receiver to say
    return {"data": data, "codec": "jpeg"}


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
            "near-duplicates by JPEG need Pillow: pip install 'stream-ssl[images]'"
        ) from error
    return Image
