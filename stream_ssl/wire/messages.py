"""The messages, byte by byte: docs/wire.md is this file in prose.

Every message is a multipart ZeroMQ message whose first frame is four bytes: "SS", the protocol
version, the kind. All but DATA carry one more frame, a msgpack map. DATA carries three: sequence
and checksum, the packet's header (a msgpack map), and the samples' payloads one after the other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgpack

from stream_ssl.wire.sample import CODECS, Position, Sample

MAGIC = b"SS"
VERSION = 1
DATA_HEAD = struct.Struct(">QI")  # sequence, CRC-32 of (sequence, header, payload)

Frame = bytes | memoryview
Frames = list[Frame]


class WireError(ValueError):
    """A message that breaks the protocol.

    Attributes:
        reason: one word of the bounded set that NACK and the metrics use.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REASONS = (
    "checksum",  # damaged on the way: send again
    "codec",  # a codec that WELCOME did not list
    "gap",  # not the next sequence: go back to the one named
    "hello-required",  # the receiver does not know this connection: say HELLO
    "malformed",  # no message of this protocol
    "oversize",  # larger than WELCOME allows
    "superseded",  # a newer incarnation of the same producer has connected
    "unauthorised",  # the key may not speak for this producer
    "version",  # another version of the protocol
)


@dataclass(frozen=True, slots=True)
class Hello:
    """A producer introduces itself; sent again after every reconnect."""

    kind: ClassVar[int] = 1
    producer: str  # 1..128 bytes of [A-Za-z0-9._/-]
    epoch: int  # grows with each incarnation of the producer: nanoseconds since the Unix epoch
    first: int  # the oldest sequence that it can still send
    codecs: tuple[str, ...] = CODECS
    agent: str = ""  # program and version, for the log


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer: where to go on, and how much it takes."""

    kind: ClassVar[int] = 2
    resume: int  # last durable sequence of this producer; 0: none
    position: Position  # the source's position that came with it; None: none
    credit: int  # bytes that may be unacknowledged at once; 0: wait for an ACK
    max_packet: int  # bytes of header and payload of one DATA
    max_samples: int  # samples in one DATA
    codecs: tuple[str, ...]
    epoch: int  # grows with each start of the receiver


@dataclass(frozen=True, slots=True)
class Ack:
    """All sequences up to `through` are on disk."""

    kind: ClassVar[int] = 4
    through: int
    credit: int  # bytes that may be unacknowledged beyond `through`


@dataclass(frozen=True, slots=True)
class Nack:
    """A message was refused. Permanent: do not send it again. For a gap, `sequence` is the one
    expected."""

    kind: ClassVar[int] = 5
    sequence: int
    reason: str  # one of REASONS
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender leaves; nothing that it said before is taken back."""

    kind: ClassVar[int] = 6
    reason: str = ""


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
            ValueError: no samples, or of several sources.
        """
        if not samples:
            raise ValueError("a packet holds at least one sample")
        source = samples[0].source
        if any(sample.source != source for sample in samples):
            raise ValueError("the samples of a packet share one source; begin a new packet")
        header = msgpack.packb(
            {
                "source": source,
                "position": position,
                "samples": [_describe(sample) for sample in samples],
            }
        )
        return cls(sequence, header, b"".join(sample.data for sample in samples))

    @property
    def size(self) -> int:
        """Bytes of header and payload: what counts against credit and max_packet."""
        return len(self.header) + len(self.payload)

    def encode(self) -> Frames:
        """The message's four frames."""
        head = DATA_HEAD.pack(self.sequence, self.checksum())
        return [_prefix(self.kind), head, self.header, self.payload]

    def checksum(self) -> int:
        """CRC-32 over the sequence (8 bytes, big-endian), the header and the payload."""
        crc = zlib.crc32(self.sequence.to_bytes(8, "big"))
        return zlib.crc32(self.payload, zlib.crc32(self.header, crc))

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The header, unpacked and checked against the payload.

        Raises:
            WireError: "malformed" or "codec".
        """
        fields = _unpack(self.header)
        try:
            source, rows = fields["source"], fields["samples"]
            assert isinstance(source, str) and 1 <= len(source.encode()) <= 64
            assert isinstance(rows, list) and rows
            assert all(isinstance(row["id"], str) and isinstance(row["time"], float) for row in rows)
            assert all(isinstance(row["size"], int) and row["size"] >= 0 for row in rows)
            codecs = {row["codec"] for row in rows}
            total = sum(row["size"] for row in rows)
        except (AssertionError, KeyError, TypeError, UnicodeError) as error:
            raise WireError("malformed", f"packet {self.sequence}: bad header: {error!r}") from None
        if not codecs <= set(CODECS):
            raise WireError("codec", f"packet {self.sequence}: codecs {codecs - set(CODECS)}")
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
            ValueError: a sample breaks a rule; the packet's others can still be had from `fields`.
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
    shape, label, meta = row.get("shape"), row.get("label"), row.get("meta")
    if shape is not None and not (
        isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) for n in shape)
    ):
        raise ValueError(f"sample {row['id']!r}: shape {shape!r} is no [H, W, C]")
    if label is not None and not isinstance(label, int):
        raise ValueError(f"sample {row['id']!r}: label {label!r} is no integer")
    if meta is not None and not isinstance(meta, dict):
        raise ValueError(f"sample {row['id']!r}: meta {meta!r} is no map")
    return Sample(
        id=row["id"],
        data=data,
        codec=row["codec"],
        shape=None if shape is None else (shape[0], shape[1], shape[2]),
        time=row["time"],
        source=source,
        label=label,
        meta=meta,
    )


Message = Hello | Welcome | Data | Ack | Nack | Bye
_MAPS: dict[int, type[Hello | Welcome | Ack | Nack | Bye]] = {
    cls.kind: cls for cls in (Hello, Welcome, Ack, Nack, Bye)
}


def encode(message: Message) -> Frames:
    """The frames of a message."""
    if isinstance(message, Data):
        return message.encode()
    return [_prefix(message.kind), msgpack.packb(asdict(message))]


def decode(frames: Sequence[Frame]) -> Message:
    """The message that frames hold; DATA's checksum is verified, its header not yet read.

    Raises:
        WireError: "version", "malformed" or "checksum".
    """
    prefix = bytes(frames[0]) if frames else b""
    if len(prefix) != 4 or prefix[:2] != MAGIC:
        raise WireError("malformed", f"the first frame {prefix[:16]!r} is not b'SS' + version + kind")
    version, kind = prefix[2], prefix[3]
    if version != VERSION:
        raise WireError("version", f"protocol version {version}; this side speaks {VERSION}")
    if kind == Data.kind:
        return _decode_data(frames)
    cls = _MAPS.get(kind)
    if cls is None or len(frames) != 2:
        raise WireError("malformed", f"kind {kind} with {len(frames)} frames is no message")
    return _decode_map(cls, _unpack(frames[1]))


def _decode_data(frames: Sequence[Frame]) -> Data:
    if len(frames) != 4 or len(frames[1]) != DATA_HEAD.size:
        raise WireError("malformed", f"DATA has 4 frames, the second of 12 bytes; got {len(frames)}")
    sequence, checksum = DATA_HEAD.unpack(frames[1])
    data = Data(sequence, frames[2], frames[3])
    if data.checksum() != checksum:
        raise WireError("checksum", f"packet {sequence}: checksum does not match")
    return data


def _decode_map(
    cls: type[Hello | Welcome | Ack | Nack | Bye], fields: dict[str, Any]
) -> Hello | Welcome | Ack | Nack | Bye:
    known = cls.__dataclass_fields__
    values = {name: value for name, value in fields.items() if name in known}  # later ones may add
    try:
        message = cls(**values)
    except TypeError as error:
        raise WireError("malformed", f"{cls.__name__.upper()}: {error}") from None
    for name, value in values.items():
        expected = {"int": int, "str": str, "bool": bool, "tuple[str, ...]": list}.get(
            str(known[name].type)
        )
        if expected and (not isinstance(value, expected) or (expected is int and value < 0)):
            raise WireError("malformed", f"{cls.__name__.upper()}: {name} is {value!r}")
    return message


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


def _prefix(kind: int) -> bytes:
    return MAGIC + bytes((VERSION, kind))


def _unpack(frame: Frame) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError("malformed", f"not msgpack: {error!r}") from None
    if not isinstance(fields, dict):
        raise WireError("malformed", f"a msgpack map was due, not {type(fields).__name__}")
    return fields
