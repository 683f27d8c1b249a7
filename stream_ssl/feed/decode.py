"""Decoding of journal records to images or vectors of one shape, and the reasons of rejection.

Legend: B samples of a chunk, C channels, D numbers of a vector, H height, W width.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.nn import functional as F
from xxhash import xxh3_64

from stream_ssl.batch import Batch, Origin
from stream_ssl.decode_cost import MOST_SCANS, SOS, decode_work, jpeg_header, most_work, scans_of
from stream_ssl.pictures import image_of, over_white, plain, turn, without_texts
from stream_ssl.wire import Sample, sample_of
from stream_ssl.wire.sample import DTYPES, MAX_ID_BYTES, is_capture_time

if TYPE_CHECKING:
    from stream_ssl.journal.segment import Record

REASONS = (
    "damaged",  # the file is truncated or is not a valid image, or a vector is not finite
    "empty",  # the payload has no bytes
    "expensive",  # the file is small but takes long to decode
    "fields",  # id, time, label or meta is invalid
    "format",  # the file does not have the codec that the producer declared
    "packet",  # the header of the packet cannot be read; counts as one sample
    "pixels",  # the image has more pixels or more scans than the limit
    "shape",  # shape or dtype is invalid, or the payload's size does not match it
)

Pixels = NDArray[np.uint8]
Row = Mapping[str, Any]

_INTEGER = frozenset({int})
_MOST_SIDE = 8192
_RARE = {"jpeg": ". If it opens elsewhere, it is JPEG-LS or has 12 bits a level: convert it to PNG"}
_MAGIC = {"jpeg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}


class BadSample(ValueError):
    """An error for a sample that cannot be decoded.

    Attributes:
        reason: one of REASONS.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A task for one thread: decode consecutive samples of a record, from sample `begin` on."""

    record: Record
    source: str
    rows: Sequence[dict[str, Any]]
    payload: memoryview
    begin: int
    last: bool  # whether these are the last samples of the record


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """A rejected sample, with its index in the record and the error."""

    index: int
    error: BadSample
    row: Row
    source: str
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The decoded samples `begin` to `end` (excluded) of a record."""

    record: Record
    begin: int
    end: int
    last: bool  # whether these are the last samples of the record
    batch: Batch[NDArray[Any]]  # the good samples
    index_B: NDArray[np.int64]  # the index of each good sample within the record
    rejected: Sequence[RejectedSample]


EOI = b"\xff\xd9"
"""The end mark of a JPEG."""

BOX = 128
"""The level of the bars beside an image that does not fill its square."""

Keep = Callable[[Row, bytes | memoryview], str | None]
"""Stores the bytes of a sample, and returns their name; None if they are not kept."""


class Payloads(Protocol):
    """A decoder of samples to uint8 arrays of one shape: pixels, or the bytes of vectors.

    Attributes:
        shape_HWC: the shape of the arrays.
    """

    shape_HWC: tuple[int, int, int]

    def read(self, sample: Sample) -> Pixels: ...
    def stacked(self, images: Sequence[Pixels]) -> Pixels: ...
    def decode(self, sample: Sample) -> Pixels: ...
    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None: ...


class Decoded(NamedTuple):
    """The outcome of decoding the samples of a task; indices count from the task's first sample.

    Attributes:
        image_BHWC: the good samples.
        hashes_B: the hashes of their pixels (`content_hashes`).
        good: the index of each of them.
        bad: the index of each bad sample, in order, with its error.
    """

    image_BHWC: Pixels
    hashes_B: NDArray[np.int64]
    good: Sequence[int]
    bad: Sequence[tuple[int, BadSample]] = ()


Decode = Callable[[str, Sequence[Row], memoryview], Decoded]
"""Decodes samples of a source: their maps in the packet's header, and their payload."""


def decode_chunk(
    decoder: Payloads, task: DecodeTask, keep: Keep | None = None, decode: Decode | None = None
) -> Chunk:
    """Decode the samples of a task; bad samples are listed in `Chunk.rejected`.

    Args:
        keep: stores the bytes of a good sample, and returns their name. It is not called for
            samples whose bytes are already pixels of the right shape.
        decode: decodes samples that are not pixels of the right shape; None: here, by `decoder`.
    """
    rows, payload = task.rows, task.payload
    block_BHWC = decoder.block(rows, payload) if _conforms(rows) else None
    if block_BHWC is not None:
        whole = Decoded(block_BHWC, content_hashes(block_BHWC), range(len(rows)))
        return _chunk(task, whole, [None] * len(rows))
    decode = partial(decode_samples, decoder) if decode is None else decode
    decoded = decode(task.source, rows, payload)
    if keep is None:
        return _chunk(task, decoded, [None] * len(decoded.good))
    data = data_of(rows, payload)
    return _chunk(task, decoded, [keep(rows[at], data[at]) for at in decoded.good])


def decode_samples(
    decoder: Payloads, source: str, rows: Sequence[Row], payload: memoryview
) -> Decoded:
    """Decode samples one by one, and scale them together."""
    images: list[Pixels] = []
    good: list[int] = []
    bad: list[tuple[int, BadSample]] = []
    for index, (row, data) in enumerate(zip(rows, data_of(rows, payload), strict=True)):
        try:
            images.append(decoder.read(checked(row, data, source)))
            good.append(index)
        except BadSample as error:
            bad.append((index, error))
    image_BHWC = decoder.stacked(images)
    return Decoded(image_BHWC, content_hashes(image_BHWC), good, bad)


def data_of(rows: Sequence[Row], payload: memoryview) -> list[memoryview]:
    """Return the part of the payload that belongs to each row."""
    ends = list(accumulate(row["size"] for row in rows))
    return [payload[end - row["size"] : end] for row, end in zip(rows, ends, strict=True)]


def rejected_packet(record: Record, error: Exception) -> Chunk:
    """Return a chunk with one rejected sample, for a record whose header cannot be read."""
    sample = RejectedSample(0, BadSample("packet", str(error)), {}, "", record.payload)
    none = np.empty(0, np.int64)
    return Chunk(record, 0, 1, True, Batch(none), none, (sample,))


def sample_ids(source: str, ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the 63-bit ids of samples, int64 [B], >= 0.

    An id is the big-endian BLAKE2b-64 of the source, a NUL byte and the id, without its lowest bit.
    """
    head = source.encode() + b"\0"
    digests = [blake2b(head + name.encode(), digest_size=8).digest() for name in ids]
    return (np.frombuffer(b"".join(digests), ">u8") >> np.uint64(1)).astype(np.int64)


def content_hashes(image_BHWC: Pixels) -> NDArray[np.int64]:
    """Return the 63-bit hashes of pixels, int64 [B], > 0.

    A hash is the XXH3-64 of the pixels' bytes, without its lowest bit. 0 would mean "unknown", so
    it is replaced by 1. XXH3 takes a fortieth of the time of BLAKE2b, all of it under the
    interpreter's lock. A producer who makes two images of one hash only removes a negative.
    """
    step = math.prod(image_BHWC.shape[1:])
    flat = image_BHWC.reshape(-1).data
    hashes = [_digest(flat[at : at + step]) >> 1 for at in range(0, len(flat), step)]
    return np.maximum(np.array(hashes, np.int64), 1)


def _chunk(task: DecodeTask, decoded: Decoded, originals: Sequence[str | None]) -> Chunk:
    """Return the chunk of a task; `originals` names the stored bytes of each good sample."""
    rows = [task.rows[index] for index in decoded.good]
    labels = [-1 if row.get("label") is None else row["label"] for row in rows]
    batch: Batch[NDArray[Any]] = Batch(
        ids_B=sample_ids(task.source, [row["id"] for row in rows]),
        hashes_B=decoded.hashes_B,
        labels_B=np.array(labels, np.int64),
        images_BCHW=decoded.image_BHWC.transpose(0, 3, 1, 2),
        received_B=np.full(len(rows), task.record.received),
        origins_B=[
            Origin(task.record.producer, task.source, row["id"], row["time"], original)
            for row, original in zip(rows, originals, strict=True)
        ],
    )
    index_B = np.array(decoded.good, np.int64) + task.begin
    end = task.begin + len(task.rows)
    data = data_of(task.rows, task.payload) if decoded.bad else []
    rejected = [
        RejectedSample(task.begin + index, error, task.rows[index], task.source, data[index])
        for index, error in decoded.bad
    ]
    return Chunk(task.record, task.begin, end, task.last, batch, index_B, rejected)


def _digest(data: memoryview) -> int:
    """Return the XXH3-64, computed in steps that do not release the interpreter's lock.

    xxhash releases the lock for large inputs. Getting it back from a thread that is busy in Python
    takes up to 5 ms, and 64 KiB take 4 microseconds.
    """
    hashed = xxh3_64()
    for at in range(0, len(data), 1 << 16):
        hashed.update(data[at : at + (1 << 16)])
    return hashed.intdigest()


def _conforms(rows: Sequence[Row]) -> bool:
    """Return whether the fields that `Decoder.block` does not check are valid.

    If False, the samples may still be valid, and the caller checks them one by one.
    """
    for row in rows:
        label = row.get("label")
        if not 1 <= len(row["id"].encode()) <= MAX_ID_BYTES or not is_capture_time(row["time"]):
            return False
        if row.get("meta") not in (None, {}):
            return False
        if not (label is None or (type(label) is int and 0 <= label < 2**31)):
            return False
    return True


def checked(row: Row, data: bytes | memoryview, source: str) -> Sample:
    """Return the sample of a row after checking its fields.

    Raises:
        BadSample: a field is invalid; the reason is "empty", "fields" or "shape".
    """
    if len(data) == 0:
        raise BadSample("empty", "the payload is empty")
    row = dict(row)
    try:
        return sample_of(source, row, data)
    except ValueError as error:
        try:
            sample_of(source, row | {"id": "a", "time": 0.0, "label": None, "meta": None}, data)
        except ValueError:
            raise BadSample("shape", str(error)) from None
        raise BadSample("fields", str(error)) from None


class Decoder:
    """A decoder of images to uint8 [size, size, channels].

    Conversion of colours: grey is repeated over 3 channels, and 3 channels become grey by Rec. 601
    luma. Transparent pixels are drawn over white. 16-bit grey keeps the upper 8 of its used bits
    (bit_depth.py). CMYK and palettes become RGB. Only the first frame of an animation is used. EXIF
    orientation is applied. A JPEG is decoded at the smallest n/8 of its size that is no smaller
    than the result, and is then scaled down. Safe to call from several threads.

    Args:
        size: side of the result, in pixels; at most 8,192.
        channels: 1 or 3.
        max_pixels: the most pixels of an image; a larger image is rejected by its header. A JPEG is
            also rejected if its pixels times its scans exceed 16 times this number. Decoding takes
            up to 20 bytes of memory and 45 ns per pixel: with the default, up to 500 MB and 1.1 s
            in each worker. The default accepts the full frame of a 24-megapixel camera. Above
            178,956,970 pixels, only JPEGs in grey or colour are decoded, because Pillow refuses the
            others. An image with more than 2^20 pixels is also rejected ("expensive") if it has
            more than 512 pixels per byte. Nearly blank images and decompression bombs are examples.
        fit: "crop" scales the short side of an image to `size` and keeps the centre. "letterbox"
            scales the long side to `size` and fills the rest with grey (128), so that nothing is
            cut off: for screens, documents and objects that fill the image.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        size: int = 32,
        channels: Literal[1, 3] = 3,
        max_pixels: int = 25_000_000,
        fit: Literal["crop", "letterbox"] = "crop",
    ) -> None:
        if fit not in ("crop", "letterbox"):
            raise ValueError(f'fit {fit!r}: must be "crop" or "letterbox"')
        if channels not in (1, 3):
            raise ValueError(f"channels {channels}: must be 1 or 3")
        if not 1 <= size <= _MOST_SIDE or size * size > max_pixels:
            raise ValueError(
                f"size {size}: must be from 1 to {_MOST_SIDE:,}, and its square at most "
                f"{max_pixels=}"
            )
        self.size, self.channels, self.max_pixels = size, channels, int(max_pixels)
        self.fit = fit
        self.shape_HWC = (size, size, int(channels))
        self._sides = size, size
        ignore_warnings()

    def decode(self, sample: Sample) -> Pixels:
        """Return the pixels of one sample, uint8 [size, size, channels].

        The result may be a read-only view of the sample's data. The sample's fields must be
        checked (`checked`).

        Raises:
            BadSample: the sample cannot be decoded.
        """
        image_HWC = self._pixels(sample)
        if image_HWC.shape != self.shape_HWC:
            (image_HWC,) = scaled(image_HWC[None], self._sides)
        return image_HWC

    def read(self, sample: Sample) -> Pixels:
        """Return the pixels of a sample for `stacked`, which scales many of them at once.

        They are the final pixels if a subclass has a `decode` of its own.

        Raises:
            BadSample: the sample cannot be decoded.
        """
        as_here = type(self).decode is Decoder.decode
        return self._pixels(sample) if as_here else self.decode(sample)

    def _pixels(self, sample: Sample) -> Pixels:
        if sample.codec == "vector":
            raise BadSample(
                "format", "a vector came, and this run learns from images; vectors need vectors.dim"
            )
        return self._raw(sample) if sample.codec == "raw" else self._encoded(sample)

    def stacked(self, images: Sequence[Pixels]) -> Pixels:
        """Return the results of `read` in their final shape, uint8 [B, size, size, channels].

        All squares of one size are scaled in one call.
        """
        of_shape = defaultdict[tuple[int, ...], list[int]](list)
        for index, image_HWC in enumerate(images):
            of_shape[image_HWC.shape].append(index)
        fitted_BHWC = np.empty((len(images), *self.shape_HWC), np.uint8)
        for shape, indices in of_shape.items():
            same_BHWC = np.stack([images[index] for index in indices])
            if shape != self.shape_HWC:
                same_BHWC = scaled(same_BHWC, self._sides)
            if len(of_shape) == 1:
                return same_BHWC
            fitted_BHWC[indices] = same_BHWC
        return fitted_BHWC

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """Return all samples at once, uint8 [B, size, size, channels], without decoding.

        The result is a read-only view of `payload`. It is None unless every sample is raw and has
        exactly this shape. No other fields are checked.
        """
        shape = [self.size, self.size, self.channels]
        if not _uniform(rows, "raw", math.prod(shape), shape, None):
            return None
        return np.frombuffer(payload, np.uint8).reshape(len(rows), *shape)

    @property
    def _limit(self) -> str:
        return f"at most {self.max_pixels} are decoded (decoder.max_pixels)"

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise BadSample("pixels", f"{width} x {height} pixels; {self._limit}")

    def _check(self, data: bytes, codec: str, width: int, height: int) -> None:
        """Reject an image with too many pixels or scans, and a small file that takes long.

        Each scan of a JPEG needs few bytes and decodes all pixels. The rules use only the header
        and not a clock, so that a replay has the same result.
        """
        self._check_size(width, height)
        pixels, most_of_file = width * height, most_work(len(data))
        most, scans = MOST_SCANS * self.max_pixels // pixels, None
        if codec == "jpeg":
            scans = data.count(SOS)  # quick, and never too low
            if scans > most or decode_work(pixels, scans) > most_of_file:
                scans = scans_of(data)
            if scans > most:
                raise BadSample(
                    "pixels",
                    f"{width} x {height} pixels in {scans} scans; at most {most} scans of so many "
                    "pixels are decoded",
                )
        work = decode_work(pixels, scans)
        if work > most_of_file:
            raise BadSample(
                "expensive",
                f"{width} x {height} pixels in {len(data)} bytes take as long to decode as {work} "
                f"pixels; of so few bytes at most {most_of_file} are decoded",
            )

    def _raw(self, sample: Sample) -> Pixels:
        assert sample.shape is not None  # Sample requires a shape for codec "raw"
        height, width, _ = sample.shape
        self._check_size(width, height)
        image_HWC = np.frombuffer(sample.data, np.uint8).reshape(sample.shape)
        if sample.shape == (self.size, self.size, self.channels):
            return image_HWC
        return self._shape(image_of(image_HWC))

    def _encoded(self, sample: Sample) -> Pixels:
        data = bytes(sample.data)
        try:
            if sample.codec == "jpeg" and (found_HWC := self._jpeg(data)) is not None:
                return found_HWC
            try:
                return self._opened(data, sample.codec)
            except ValueError as error:
                if sample.codec != "png" or isinstance(error, BadSample):
                    raise
                return self._opened(without_texts(data), "png")
        except (BadSample, MemoryError):  # running out of memory is not an error of the sample
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            pixels = next(iter(re.findall(r"\d+", str(error))), "too many")
            most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            limit = self._limit if self.max_pixels <= most else f"Pillow opens at most {most}"
            raise BadSample("pixels", f"{pixels} pixels; {limit}") from None
        except Exception as error:  # a hostile file can make Pillow raise any exception
            if isinstance(error, UnidentifiedImageError):
                if _begins_like(sample.codec, data):
                    why = f"its bytes make no {sample.codec} image{_RARE.get(sample.codec, '')}"
                    raise BadSample("damaged", why) from None
                raise BadSample(
                    "format", f"came as {sample.codec}, begins with {data[:8]!r}"
                ) from None
            raise BadSample("damaged", f"{type(error).__name__}: {error}") from None

    def _opened(self, data: bytes, codec: str) -> Pixels:
        with Image.open(BytesIO(data), formats=(codec.upper(),)) as image:
            self._check(data, codec, *image.size)
            if codec == "jpeg" and image.mode in ("L", "RGB") and not jpeg_header(data).lossless:
                image.draft("L" if self.channels == 1 else image.mode, self._inner(*image.size))
            return self._shape(image)

    def _jpeg(self, data: bytes) -> Pixels | None:
        """Decode an intact grey or colour JPEG quickly; return None if Pillow must try instead.

        simplejpeg raises an error in cases in which libjpeg, and so Pillow, only warns. Pillow
        reads the headers only of files with an APP1 segment, because no other file has an
        orientation. A header takes it 60 microseconds under the interpreter's lock.

        Returns:
            With "crop", a square that may be up to twice as large as the result, so that many can
            be scaled at once.
        """
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError):  # KeyError: rare sampling of colours, such as 4:4:1
            return None
        self._check(data, "jpeg", width, height)
        header = jpeg_header(data)
        if colours not in ("Gray", "YCbCr", "RGB") or header.lossless:
            return None
        how = None
        if header.app1:
            with Image.open(BytesIO(data), formats=("JPEG",)) as image:
                how = turn(image)
        sides = self._inner(width, height)
        found_HWC = _strictly(data, "GRAY" if self.channels == 1 else "RGB", sides)
        if found_HWC is None:
            return None
        height, width, _ = found_HWC.shape
        if self.fit == "letterbox":
            if (width, height) != sides:
                (found_HWC,) = scaled(found_HWC[None], sides[::-1])
            return self._boxed(_turned(found_HWC, how))
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        middle_HWC = np.ascontiguousarray(found_HWC[top : top + side, left : left + side])
        if how is not None or side > 2 * self.size:
            (middle_HWC,) = scaled(middle_HWC[None], self._sides)
        return _turned(middle_HWC, how)

    def _inner(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is scaled, at least, before it is fitted.

        With "letterbox", the result is exact.
        """
        if self.fit == "crop":
            return self.size, self.size
        longest = max(width, height)
        return (
            max(1, round(width * self.size / longest)),
            max(1, round(height * self.size / longest)),
        )

    def _boxed(self, image_HWC: Pixels) -> Pixels:
        """Return the image in the middle of a grey square, or itself if it fills the square."""
        height, width, channels = image_HWC.shape
        if (height, width) == (self.size, self.size):
            return image_HWC
        box_HWC = np.full((self.size, self.size, channels), BOX, np.uint8)
        top, left = (self.size - height) // 2, (self.size - width) // 2
        box_HWC[top : top + height, left : left + width] = image_HWC
        return box_HWC

    def _shape(self, image: Image.Image) -> Pixels:
        stored, image = image, plain(image)
        side, (width, height) = min(image.size), image.size
        if self.fit == "letterbox":
            inner = self._inner(width, height)
            if image.size != inner:
                image = image.resize(inner, Image.Resampling.BILINEAR)
        elif image.size != (self.size, self.size):
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        image = over_white(image)
        how = turn(stored)
        if how is not None:  # a crop is a centred square, so the order does not matter
            image = image.transpose(how)
        image = image.convert("L" if self.channels == 1 else "RGB")
        pixels_HWC = np.asarray(image).reshape(image.height, image.width, self.channels)
        return self._boxed(pixels_HWC)


def _strictly(data: bytes, colours: str, sides: tuple[int, int]) -> Pixels | None:
    """Return the pixels of an intact JPEG at a width and height of at least `sides`, or None.

    A file that lacks only its end mark is intact, because some cameras leave the mark out.
    """
    width, height = sides
    for whole in (data,) if data.endswith(EOI) else (data, data + EOI):
        with suppress(ValueError):
            found_HWC: Pixels = simplejpeg.decode_jpeg(
                whole, colours, min_width=width, min_height=height
            )
            return found_HWC
    return None


def ignore_warnings() -> None:
    """Ignore the warnings of Pillow, one for each damaged file.

    Python stores the text of every warning, so a hostile producer could exhaust the memory. Real
    errors are raised as BadSample.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


class VectorDecoder:
    """A decoder of vectors to the bytes of one dtype, uint8 [1, 1, D * itemsize].

    Args:
        dim: the length of a vector, D; vectors of another length are rejected.
        dtype: the dtype of the result, "float16" or "float32"; other vectors are converted to it.
    """

    def __init__(self, dim: int, dtype: str = "float32") -> None:
        self.dim, self.dtype = dim, dtype
        self._kept = np.dtype(DTYPES[dtype])
        self.shape_HWC = (1, 1, dim * self._kept.itemsize)

    def read(self, sample: Sample) -> Pixels:
        """Return the bytes of a sample, uint8 [1, 1, D * itemsize]; see `Decoder`.

        Raises:
            BadSample: the sample is not a vector of D finite numbers with a finite sum of squares.
        """
        if sample.codec != "vector" or sample.dtype is None:
            raise BadSample(
                "format",
                f"an image came as {sample.codec}, and this run learns from vectors of {self.dim} "
                "numbers; a run without vectors.dim learns from images",
            )
        if sample.shape != (self.dim,):
            raise BadSample(
                "shape",
                f"a vector of shape {sample.shape} came, and this run learns from vectors of "
                f"{self.dim} numbers; send such vectors, or set vectors.dim of a new run",
            )
        sent_D = np.frombuffer(sample.data, DTYPES[sample.dtype])
        with np.errstate(over="ignore"):  # numbers beyond float16 become infinite, and are rejected
            value_D = sent_D.astype(self._kept)
        if not _usable(value_D):
            wider = ", or set vectors.dtype to float32 in a new run" * (self.dtype == "float16")
            raise BadSample(
                "damaged",
                f"numbers, or a sum of squares, that are not finite as {self.dtype}; scale the "
                f"vectors{wider}",
            )
        return value_D.view(np.uint8).reshape(self.shape_HWC)

    decode = read  # a vector needs no scaling

    def stacked(self, images: Sequence[Pixels]) -> Pixels:
        """Return the results of `read` together, uint8 [B, 1, 1, D * itemsize]."""
        return np.stack(images) if images else np.empty((0, *self.shape_HWC), np.uint8)

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """Return all samples as a view of `payload`; None if one is bad or needs a conversion."""
        if not _uniform(rows, "vector", self.shape_HWC[2], [self.dim], self.dtype):
            return None
        value_BD = np.frombuffer(payload, self._kept).reshape(len(rows), self.dim)
        if not _usable(value_BD):
            return None
        return value_BD.view(np.uint8).reshape(len(rows), *self.shape_HWC)


def _uniform(
    rows: Sequence[Row], codec: str, size: int, shape: list[int], dtype: str | None
) -> bool:
    """Return whether all samples have these fields; 8.0 is no valid side, although it equals 8."""
    for row in rows:
        sides = row.get("shape")
        if row["codec"] != codec or row["size"] != size or sides != shape:
            return False
        if row.get("dtype") != dtype or not _INTEGER.issuperset(map(type, sides)):
            return False
    return True


def _usable(value: NDArray[Any]) -> bool:
    """Return whether all vectors, [D] or [B, D], have a finite sum of squares in float32.

    Their mean, standard deviation and norm are then finite too. A single vector without them would
    make its whole batch unusable.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.einsum("...d,...d->...", value, value, dtype=np.float32)
    return bool(np.isfinite(square).all())


def scaled(image_BHWC: Pixels, sides: tuple[int, int]) -> Pixels:
    """Scale images to (height, width), with Pillow's filter in a fifth of its time."""
    image_BCHW = torch.from_numpy(image_BHWC).permute(0, 3, 1, 2)  # needs no copy
    scaled_BCHW = F.interpolate(image_BCHW, sides, mode="bilinear", antialias=True)
    scaled_BHWC: Pixels = scaled_BCHW.permute(0, 2, 3, 1).numpy()
    return scaled_BHWC


def _turned(image_HWC: Pixels, how: Image.Transpose | None) -> Pixels:
    if how is None:
        return image_HWC
    turned = image_of(image_HWC).transpose(how)
    return np.asarray(turned).reshape(turned.height, turned.width, image_HWC.shape[2])


def _begins_like(codec: str, data: bytes) -> bool:
    magic = _MAGIC[codec]
    kind = data[8:12] if codec == "webp" else b""  # RIFF is also used for sound and video
    return data[: len(magic)] == magic[: len(data)] and b"WEBP".startswith(kind)
