"""DATA: one packet of samples."""

from __future__ import annotations

import reprlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgpack

from stream_ssl.wire.errors import WireError
from stream_ssl.wire.sample import CODECS, MAX_SOURCE_BYTES, Position, Sample, check_position

MAGIC = b"SS"
VERSION = 1
MAX_MAP_BYTES = 65_536  # of a message's map, DATA's header excepted
MAX_HEADER_BYTES = 1_048_576
MAX_ITEMS = 4096  # of one list; it holds a packet's samples too
MAX_PAIRS = 2048  # of one map
MAX_NESTED = 32_768  # lists and maps of one header or map together
DATA_HEAD = struct.Struct(">QI")  # sequence, CRC-32 of (sequence, header, payload)

Frame = bytes | memoryview
Frames = list[Frame]


@dataclass(frozen=True)
class Data:
    """One packet of samples, numbered by its producer from 1 without gaps.

    The header is the map {"source", "position", "samples"}; a sample is the map {"id", "time",
    "codec", "size"} with "shape" (raw), "label" and "meta" where it has them. Payload holds the
    samples' bytes one after the other, "size" each.
    """

    kind: ClassVar[int] = 3
    sequence: int
    header: Frame
    payload: Frame

    @classmethod
    def pack(cls, sequence: int, samples: Sequence[Sample], position: Position = None) -> Data:
        """A packet of samples that share one source; `position` is the source's after the last.

        Raises:
            ValueError: no samples, or of several sources, or a position that cannot travel.
        """
        if not samples:
            raise ValueError("a packet holds at least one sample")
        source = samples[0].source
        if any(sample.source != source for sample in samples):
            raise ValueError("the samples of a packet share one source; begin a new packet")
        check_position(position)
        rows = [_describe(sample) for sample in samples]
        header = msgpack.packb({"source": source, "position": position, "samples": rows})
        return cls(sequence, header, b"".join([sample.data for sample in samples]))

    @property
    def size(self) -> int:
        """Bytes of header and payload: what counts against credit and max_packet."""
        return len(self.header) + len(self.payload)

    def encode(self) -> Frames:
        """The message's four frames."""
        head = DATA_HEAD.pack(self.sequence, self.checksum())
        return [prefix(self.kind), head, self.header, self.payload]

    def checksum(self) -> int:
        """CRC-32 over the sequence (8 bytes, big-endian), the header and the payload."""
        crc = zlib.crc32(self.sequence.to_bytes(8, "big"))
        return zlib.crc32(self.payload, zlib.crc32(self.header, crc))

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The header, unpacked once and checked against the payload.

        What is wrong with a single sample (its shape, its label) is not looked at here: see
        `sample_of`.

        Raises:
            WireError: "malformed", "codec" or "oversize".
        """
        fields = unpack_map(self.header, MAX_HEADER_BYTES)
        try:
            _check_text_field(fields.get("source"))
            check_position(fields.get("position"))
            total = _check_rows(fields.get("samples"))
        except WireError as error:
            raise WireError(error.reason, f"packet {self.sequence}: {error}") from None
        except ValueError as error:
            raise WireError("malformed", f"packet {self.sequence}: {error}") from None
        if total != len(self.payload):
            raise WireError(
                "malformed",
                f"packet {self.sequence}: sizes add up to {total} bytes, the payload has "
                f"{len(self.payload)}",
            )
        return fields

    @property
    def position(self) -> Position:
        """The source's position after this packet."""
        return self.fields.get("position")

    def __len__(self) -> int:
        return len(self.fields["samples"])

    def samples(self) -> Iterator[Sample]:
        """The samples, payloads as views of the packet's.

        Raises:
            ValueError: a sample breaks a rule; the packet's others can still be had from `rows`.
        """
        for row, data in self.rows():
            yield sample_of(self.fields["source"], row, data)

    def rows(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """The header's map and the payload of each sample, unchecked."""
        view, start = memoryview(self.payload), 0
        for row in self.fields["samples"]:
            yield row, view[start : start + row["size"]]
            start += row["size"]


def sample_of(source: str, row: dict[str, Any], data: bytes | memoryview) -> Sample:
    """The sample that a header's map describes.

    Raises:
        ValueError: it breaks one of Sample's rules.
    """
    shape, meta = row.get("shape"), row.get("meta")
    if shape is not None and not (
        isinstance(shape, list) and len(shape) == 3 and all(type(n) is int for n in shape)
    ):
        raise ValueError(f"sample {row['id']!r}: shape {reprlib.repr(shape)} is no [H, W, C]")
    if meta is not None and not isinstance(meta, dict):
        raise ValueError(f"sample {row['id']!r}: meta {reprlib.repr(meta)} is no map")
    return Sample(
        id=row["id"],
        data=data,
        codec=row["codec"],
        shape=None if shape is None else (shape[0], shape[1], shape[2]),
        time=float(row["time"]),
        source=source,
        label=row.get("label"),
        meta=meta,
    )


def prefix(kind: int) -> bytes:
    """The first frame of a message."""
    return MAGIC + bytes((VERSION, kind))


def unpack_map(frame: Frame, max_bytes: int = MAX_MAP_BYTES) -> dict[str, Any]:
    """A msgpack map, of bounded work whatever the frame holds.

    A byte may stand for an object of 64, and a list may claim more items than follow: so the bytes
    are bounded first, walked through without building anything, and built with their lists and
    maps counted.

    Raises:
        WireError: "malformed" or "oversize".
    """
    if len(frame) > max_bytes:
        raise WireError("oversize", f"a map of {len(frame)} bytes; at most {max_bytes} are read")
    left = MAX_NESTED

    def count(item: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_NESTED} lists and maps in one")
        return item

    try:
        walk = msgpack.Unpacker(max_buffer_size=max_bytes)
        walk.feed(frame)
        walk.skip()
        fields = msgpack.unpackb(
            frame,
            strict_map_key=True,
            object_hook=count,
            list_hook=count,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_PAIRS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise WireError("malformed", f"not msgpack within the limits: {what}") from None
    if not isinstance(fields, dict):
        raise WireError("malformed", f"a msgpack map was due, not {type(fields).__name__}")
    return fields


def _describe(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": sample.id,
        "time": float(sample.time),
        "codec": sample.codec,
        "size": len(sample.data),
    }
    if sample.shape is not None:
        row["shape"] = sample.shape
    if sample.label is not None:
        row["label"] = sample.label
    if sample.meta:
        row["meta"] = dict(sample.meta)
    return row


def _check_text_field(source: Any) -> None:
    if not (isinstance(source, str) and 1 <= len(source.encode()) <= MAX_SOURCE_BYTES):
        raise WireError("malformed", f"source {reprlib.repr(source)} is no text of 1 to 64 bytes")


def _check_rows(rows: Any) -> int:
    """Bytes of payload that a header's samples ask for; one pass, for every packet received."""
    if type(rows) is not list or not rows:
        raise WireError("malformed", "samples is no list of at least one")
    total = 0
    for row in rows:
        if type(row) is not dict:
            raise WireError("malformed", f"sample {reprlib.repr(row)} is no map")
        size, codec = row.get("size"), row.get("codec")
        if (
            type(row.get("id")) is not str
            or type(row.get("time")) not in (float, int)
            or type(codec) is not str
            or type(size) is not int
            or size < 0
        ):
            raise WireError(
                "malformed", f"sample {reprlib.repr(row)} lacks id, time, codec or size"
            )
        if codec not in CODECS:
            raise WireError("codec", f"codec {reprlib.repr(codec)}: known are {', '.join(CODECS)}")
        total += size
    return total
