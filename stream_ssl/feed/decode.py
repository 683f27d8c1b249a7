"""Journal records to chunks of images or vectors of one shape, and the reasons to refuse a sample.

Legend: B samples of a chunk, C channels, D numbers of a vector, H height, W width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO
from typing import Any, Literal, Protocol

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.nn import functional as F

from stream_ssl.batch import Batch, Origin
from stream_ssl.decode_cost import MOST_SCANS, SOS, decode_work, most_work, scans_of
from stream_ssl.pictures import over_white, plain, turn
from stream_ssl.wire import Sample, sample_of
from stream_ssl.wire.sample import DTYPES, MAX_ID_BYTES

REASONS = (
    "damaged",  # cut short, or its bytes make no image
    "empty",  # no bytes
    "expensive",  # few bytes that take long to decode
    "fields",  # id, time, label or meta breaks a rule of the wire
    "format",  # the file is not of the codec that it came under
    "packet",  # the packet's header cannot be read: counted as one sample
    "pixels",  # more pixels than the limit, or more scans of them
    "shape",  # raw bytes do not fill their shape
)

Pixels = NDArray[np.uint8]
Row = Mapping[str, Any]

_MAGIC = {"jpeg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}


class BadSample(ValueError):
    """A sample that cannot be learned from.

    Attributes:
        reason: one of REASONS.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class JournalRecord(Protocol):
    """What is read of a journal's record."""

    @property
    def position(self) -> int: ...
    @property
    def producer(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def received(self) -> float: ...
    @property
    def header(self) -> bytes: ...
    @property
    def payload(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Consecutive samples of one record, from sample `begin` on, to be decoded in one thread."""

    record: JournalRecord
    source: str
    rows: Sequence[dict[str, Any]]
    payload: memoryview
    begin: int
    last: bool  # ends the record


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """A sample that was left out: its index in the record, its bytes, and why."""

    index: int
    error: BadSample
    row: Row
    source: str
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The samples `begin` to `end` of a record, decoded."""

    record: JournalRecord
    begin: int
    end: int
    last: bool  # ends the record
    batch: Batch[NDArray[Any]]  # the good samples
    index_B: NDArray[np.int64]  # of each good sample within the record
    rejected: Sequence[RejectedSample]


class Payloads(Protocol):
    """Turns samples into uint8 arrays of one shape: pixels, or the bytes of vectors.

    Attributes:
        shape_HWC: of the arrays.
    """

    shape_HWC: tuple[int, int, int]

    def __call__(self, row: Row, data: bytes | memoryview, source: str) -> Pixels: ...
    def decode(self, sample: Sample) -> Pixels: ...
    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None: ...


def decode_chunk(decoder: Payloads, task: DecodeTask) -> Chunk:
    """Decodes a task's samples; a bad sample lands in `rejected` and the others go on."""
    block_BHWC = decoder.block(task.rows, task.payload) if _conforms(task.rows) else None
    if block_BHWC is not None:
        return _chunk(task, block_BHWC, range(len(task.rows)), ())
    images: list[Pixels] = []
    good: list[int] = []
    rejected: list[RejectedSample] = []
    start = 0
    for index, row in enumerate(task.rows):
        data = task.payload[start : start + row["size"]]
        start += row["size"]
        try:
            images.append(decoder(row, data, task.source))
            good.append(index)
        except BadSample as error:
            rejected.append(RejectedSample(task.begin + index, error, row, task.source, data))
    image_BHWC = np.stack(images) if images else np.empty((0, *decoder.shape_HWC), np.uint8)
    return _chunk(task, image_BHWC, good, rejected)


def rejected_packet(record: JournalRecord, error: Exception) -> Chunk:
    """A record whose header cannot be read, as one rejected sample."""
    sample = RejectedSample(0, BadSample("packet", str(error)), {}, "", record.payload)
    none = np.empty(0, np.int64)
    return Chunk(record, 0, 1, True, Batch(none), none, (sample,))


def sample_ids(source: str, ids: Sequence[str]) -> NDArray[np.int64]:
    """The 63-bit ids of samples, >= 0: BLAKE2b-64 of source, NUL, id, big-endian, without its
    lowest bit. [B]"""
    head = source.encode() + b"\0"
    return _numbers([blake2b(head + name.encode(), digest_size=8).digest() for name in ids])


def content_hashes(image_BHWC: Pixels) -> NDArray[np.int64]:
    """The 63-bit hashes of pixels, > 0: the same of their bytes; 1 in place of 0, which says
    "unknown". [B]"""
    step = math.prod(image_BHWC.shape[1:])
    flat = image_BHWC.reshape(-1).data
    digests = [_digest(flat[at : at + step]) for at in range(0, len(flat), step)]
    return np.maximum(_numbers(digests), 1)


def _chunk(
    task: DecodeTask,
    image_BHWC: Pixels,
    good: Sequence[int],
    rejected: Sequence[RejectedSample],
) -> Chunk:
    """`good` are the indices of the decoded samples within the task."""
    rows = [task.rows[index] for index in good]
    labels = [-1 if row.get("label") is None else row["label"] for row in rows]
    batch: Batch[NDArray[Any]] = Batch(
        ids_B=sample_ids(task.source, [row["id"] for row in rows]),
        hashes_B=content_hashes(image_BHWC),
        labels_B=np.array(labels, np.int64),
        images_BCHW=image_BHWC.transpose(0, 3, 1, 2),
        received_B=np.full(len(rows), task.record.received),
        origins_B=[
            Origin(task.record.producer, task.source, row["id"], row["time"]) for row in rows
        ],
    )
    index_B = np.array(good, np.int64) + task.begin
    end = task.begin + len(task.rows)
    return Chunk(task.record, task.begin, end, task.last, batch, index_B, rejected)


def _digest(data: memoryview) -> bytes:
    """BLAKE2b-64, in steps so short that hashlib does not release the interpreter's lock.

    It does from 2,048 bytes on, and to take the lock back from a thread that is busy in Python
    takes up to 5 ms: beside a training loop, decoding would run at a fortieth of the speed.
    """
    hashed = blake2b(digest_size=8)
    for at in range(0, len(data), 2047):
        hashed.update(data[at : at + 2047])
    return hashed.digest()


def _numbers(digests: Sequence[bytes]) -> NDArray[np.int64]:
    return (np.frombuffer(b"".join(digests), ">u8") >> np.uint64(1)).astype(np.int64)


def _conforms(rows: Sequence[Row]) -> bool:
    """Whether the fields that Decoder.block does not check keep the wire's rules; where in doubt
    False: the samples are then checked one by one."""
    for row in rows:
        label = row.get("label")
        if not 1 <= len(row["id"].encode()) <= MAX_ID_BYTES or not math.isfinite(row["time"]):
            return False
        if row.get("meta") or not (label is None or (type(label) is int and 0 <= label < 2**31)):
            return False
    return True


def checked(row: Row, data: bytes | memoryview, source: str) -> Sample:
    """The sample of a row.

    Raises:
        BadSample: it breaks a rule of the wire.
    """
    if len(data) == 0:
        raise BadSample("empty", "the payload is empty")
    try:
        return sample_of(source, dict(row), data)
    except ValueError as error:
        reason = "fields" if _fills_shape(row, data) else "shape"
        raise BadSample(reason, str(error)) from None


class Decoder:
    """Turns samples into uint8 [size, size, channels].

    Colours: grey is repeated over 3 channels; 3 channels become grey by Rec. 601 luma; what is
    transparent is laid over white; 16-bit grey keeps its high byte; CMYK and palettes become RGB.
    Of an animation the first frame counts. EXIF orientation is applied. A JPEG is decoded at the
    least n/8 of its sides that leaves `size` pixels on the short one, and then scaled to it: what a
    view is cropped from has been averaged down, never up. Safe to call from several threads.

    Args:
        size: side of the result, pixels: the short side is scaled to it, and the middle kept.
        channels: 1 or 3.
        max_pixels: images with more pixels are refused by their header, and so are JPEGs with
            more than 16 scans of so many pixels. Decoding takes up to 16 bytes of memory a pixel
            and 45 ns: with the default up to 400 MB and 1.1 s in each worker. A full frame of a
            24-megapixel camera fits. Images of more than 2^20 pixels are also refused where they
            have more than 512 pixels a byte ("expensive"): nearly blank ones, and bombs.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        size: int = 32,
        channels: Literal[1, 3] = 3,
        max_pixels: int = 25_000_000,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels {channels}: must be 1 or 3")
        if not 1 <= size * size <= max_pixels:
            raise ValueError(f"size {size}: must be at least 1, its square at most {max_pixels=}")
        self.size, self.channels, self.max_pixels = size, channels, int(max_pixels)
        self.shape_HWC = (size, size, int(channels))
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
            BadSample: it cannot be decoded; reason and message say why.
        """
        return self.decode(checked(row, data, source))

    def decode(self, sample: Sample) -> Pixels:
        """The same of a sample that is checked already.

        Raises:
            BadSample: it cannot be decoded; reason and message say why.
        """
        if sample.codec == "vector":
            raise BadSample(
                "format", "a vector came, and this run learns from images; vectors need vectors.dim"
            )
        return self._raw(sample) if sample.codec == "raw" else self._encoded(sample)

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """All samples at once, [B, size, size, channels], as a read-only view of `payload`; None
        unless every one is raw and of just this shape. Fields other than these are not checked."""
        shape = [self.size, self.size, self.channels]
        count = self.size * self.size * self.channels
        for row in rows:
            if row["codec"] != "raw" or row.get("shape") != shape or row["size"] != count:
                return None
        return np.frombuffer(payload, np.uint8).reshape(len(rows), *shape)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise BadSample(
                "pixels", f"{width} x {height} pixels; at most {self.max_pixels} are decoded"
            )

    def _check_scans(self, data: bytes, width: int, height: int) -> None:
        """Each scan of a JPEG goes over all of its pixels, and takes some tens of bytes."""
        most = MOST_SCANS * self.max_pixels // (width * height)
        if data.count(SOS) > most and (scans := scans_of(data)) > most:
            raise BadSample(
                "pixels",
                f"{width} x {height} pixels in {scans} scans; at most {most} scans of so many "
                "pixels are decoded",
            )

    def _check_work(self, data: bytes, codec: str, width: int, height: int) -> None:
        """Refuse few bytes that take long to decode, by the header: the same at each replay."""
        pixels, most = width * height, most_work(len(data))
        work = decode_work(pixels, data.count(SOS) if codec == "jpeg" else None)
        if codec == "jpeg" and work > most:
            work = decode_work(pixels, scans_of(data))
        if work > most:
            raise BadSample(
                "expensive",
                f"{width} x {height} pixels in {len(data)} bytes take as long to decode as {work} "
                f"pixels; of so few bytes at most {most} are decoded",
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
                if sample.codec == "jpeg":
                    self._check_scans(data, *image.size)
                self._check_work(data, sample.codec, *image.size)
                if sample.codec == "jpeg" and image.mode in ("L", "RGB"):
                    if (scaled_HWC := self._jpeg(data)) is not None:
                        return _turned(scaled_HWC, turn(image))
                    image.draft("L" if self.channels == 1 else image.mode, (self.size, self.size))
                return self._shape(image)
        except (BadSample, MemoryError):  # out of memory is our fault, not the sample's
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadSample("pixels", str(error)) from None
        except Exception as error:  # a hostile file makes Pillow raise anything
            if isinstance(error, UnidentifiedImageError):
                if _begins_like(sample.codec, data):
                    raise BadSample("damaged", f"its bytes make no {sample.codec} image") from None
                raise BadSample(
                    "format", f"came as {sample.codec}, begins with {data[:8]!r}"
                ) from None
            raise BadSample("damaged", f"{type(error).__name__}: {error}") from None

    def _jpeg(self, data: bytes) -> Pixels | None:
        """The quick way for a sound JPEG in grey or colour; None where Pillow must judge, for
        simplejpeg refuses what libjpeg but warns of."""
        try:
            found_HWC: Pixels = simplejpeg.decode_jpeg(
                data,
                "GRAY" if self.channels == 1 else "RGB",
                min_height=self.size,
                min_width=self.size,
            )
        except ValueError:
            return None
        height, width, _ = found_HWC.shape
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        middle_HWC = np.ascontiguousarray(found_HWC[top : top + side, left : left + side])
        if side == self.size:
            return middle_HWC
        # Pillow's filter, in a fifth of its time: torch sees channels last, and copies nothing.
        middle_1CHW = torch.from_numpy(middle_HWC).unsqueeze(0).permute(0, 3, 1, 2)
        sides = (self.size, self.size)
        scaled_1CHW = F.interpolate(middle_1CHW, sides, mode="bilinear", antialias=True)
        scaled_HWC: Pixels = scaled_1CHW.permute(0, 2, 3, 1)[0].numpy()
        return scaled_HWC

    def _shape(self, image: Image.Image) -> Pixels:
        stored, image = image, plain(image)
        side, (width, height) = min(image.size), image.size
        if image.size != (self.size, self.size):
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        image = over_white(image)
        how = turn(stored)
        if how is not None:  # the crop is square and central: turning it now is the same
            image = image.transpose(how)
        image = image.convert("L" if self.channels == 1 else "RGB")
        return np.asarray(image).reshape(self.size, self.size, self.channels)


class VectorDecoder:
    """Turns vectors into their bytes, uint8 [1, 1, D * itemsize], of one dtype.

    Args:
        dim: D; vectors of another length are refused.
        dtype: of what is kept, "float16" or "float32"; vectors of the other are converted.
    """

    def __init__(self, dim: int, dtype: str = "float32") -> None:
        self.dim, self.dtype = dim, dtype
        self._kept = np.dtype(DTYPES[dtype])
        self.shape_HWC = (1, 1, dim * self._kept.itemsize)

    def __call__(self, row: Row, data: bytes | memoryview, source: str) -> Pixels:
        """The bytes of one sample; see `Decoder`.

        Raises:
            BadSample: no vector of D finite numbers, with a finite sum of squares.
        """
        return self.decode(checked(row, data, source))

    def decode(self, sample: Sample) -> Pixels:
        """The same of a sample that is checked already.

        Raises:
            BadSample: no vector of D finite numbers, with a finite sum of squares.
        """
        if sample.codec != "vector" or sample.dtype is None:
            raise BadSample(
                "format", f"an image came as {sample.codec}, and this run learns from vectors"
            )
        if sample.shape != (self.dim,):
            raise BadSample("shape", f"a vector of shape {sample.shape} came, D is {self.dim}")
        sent_D = np.frombuffer(sample.data, DTYPES[sample.dtype])
        with np.errstate(over="ignore"):  # beyond float16: infinite, and refused
            value_D = sent_D.astype(self._kept)
        if not _usable(value_D):
            raise BadSample(
                "damaged", f"numbers, or a sum of squares, that are not finite as {self.dtype}"
            )
        return value_D.view(np.uint8).reshape(self.shape_HWC)

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """All samples at once, as a view of `payload`; None unless each is just what is kept."""
        for row in rows:
            if (
                row["codec"] != "vector"
                or row.get("dtype") != self.dtype
                or row.get("shape") != [self.dim]
                or row["size"] != self.shape_HWC[2]
            ):
                return None
        value_BD = np.frombuffer(payload, self._kept).reshape(len(rows), self.dim)
        if not _usable(value_BD):
            return None
        return value_BD.view(np.uint8).reshape(len(rows), *self.shape_HWC)


def _usable(value: NDArray[Any]) -> bool:
    """Whether numbers, [D] or [B, D], have a mean, a deviation and a norm in float32: one vector
    without them would cost its whole batch."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.einsum("...d,...d->...", value, value, dtype=np.float32)
    return bool(np.isfinite(square).all())


def _turned(image_HWC: Pixels, how: Image.Transpose | None) -> Pixels:
    if how is None:
        return image_HWC
    image = Image.fromarray(image_HWC[:, :, 0] if image_HWC.shape[2] == 1 else image_HWC)
    return np.asarray(image.transpose(how)).reshape(image_HWC.shape)


def _begins_like(codec: str, data: bytes) -> bool:
    magic = _MAGIC[codec]
    kind = data[8:12] if codec == "webp" else b""  # RIFF holds sound and video, too
    return data[: len(magic)] == magic[: len(data)] and b"WEBP".startswith(kind)


def _fills_shape(row: Row, data: bytes | memoryview) -> bool:
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
