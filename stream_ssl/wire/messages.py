"""The messages, byte by byte; docs/wire.md describes the same for other languages.

Every message is a multipart ZeroMQ message whose first frame is four bytes: "SS", the protocol
version, the kind. All but DATA carry one more frame, a msgpack map. DATA carries three: sequence
and checksum, the packet's header (a msgpack map), and the samples' payloads one after the other.
"""

from __future__ import annotations

import re
import reprlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, get_args

import msgpack

from stream_ssl.wire.sample import CODECS, MAX_SOURCE_BYTES, Position, Sample, check_position

MAGIC = b"SS"
VERSION = 1
MAX_TEXT = 4096  # bytes of agent, detail and reason
MAX_MAP_BYTES = 65_536  # of a message's map, DATA's header excepted
MAX_HEADER_BYTES = 1_048_576
MAX_ITEMS = 4096  # of one list; it holds a packet's samples too
MAX_PAIRS = 2048  # of one map
MAX_NESTED = 32_768  # lists and maps of one header or map together
DATA_HEAD = struct.Struct(">QI")  # sequence, CRC-32 of (sequence, header, payload)

Frame = bytes | memoryview
Frames = list[Frame]
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")

REASONS = (
    "checksum",  # damaged on the way: send again
    "codec",  # a codec that WELCOME did not list
    "gap",  # not the next sequence: go back to the one named
    "hello-required",  # the receiver does not know this connection: say HELLO
    "names",  # its key has as many producers' names as one may have
    "malformed",  # no message of this protocol
    "oversize",  # larger than WELCOME allows
    "superseded",  # a newer incarnation of the same producer has connected
    "unauthorised",  # the key may not speak for this producer
    "version",  # another version of the protocol
)


class WireError(ValueError):
    """A message that breaks the protocol.

    Attributes:
        reason: one of REASONS, the bounded set that NACK and the metrics use.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Hello:
    """A producer introduces itself; sent again after every reconnect."""

    kind: ClassVar[int] = 1
    producer: str  # 1..128 bytes of [A-Za-z0-9._/-]
    epoch: int  # grows with each incarnation of the producer: nanoseconds since the Unix epoch
    first: int  # the oldest sequence that it can still send; 1 if it has numbered none yet
    codecs: tuple[str, ...] = CODECS
    agent: str = ""  # program and version, for the log
    verdicts: bool = False  # tell how samples fared; left out where it is False
    clock: float = 0.0  # its clock as it sends this, seconds since the Unix epoch; 0: left out


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer: from where to send, and how much it accepts."""

    kind: ClassVar[int] = 2
    resume: int  # last durable sequence of this producer; 0: none
    position: Position  # the source's resume token that came with it; None: none
    credit: int  # bytes that may be unacknowledged at once; 0: wait for an ACK
    max_packet: int  # bytes of header and payload of one DATA
    max_samples: int  # samples in one DATA
    codecs: tuple[str, ...]
    epoch: int  # grows with each start of the receiver
    written: float = 0.0  # when `resume` came, seconds since the Unix epoch; left out where unknown


@dataclass(frozen=True, slots=True)
class Ack:
    """All sequences up to `through` are durable: on the receiver's disk."""

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
    """The sender leaves; all that it said before still holds."""

    kind: ClassVar[int] = 6
    reason: str = ""


class Verdict(NamedTuple):
    """How one sample fared in the memory."""

    source: str
    id: str
    what: str  # one of VERDICTS
    duplicates: float | None = None  # slots expected to show the same when it came
    near: bool = False  # found a near-copy of a slot, where memory or learner test for that
    age: int | None = None  # of an evicted one: samples offered since it came

    def row(self) -> tuple[object, ...]:
        """As it travels."""
        return tuple(self)


VERDICTS = ("kept", "refused", "evicted")
MAX_VERDICTS = 32  # in one message


@dataclass(frozen=True, slots=True)
class Verdicts:
    """How samples fared, for a producer whose HELLO asked. None is sent twice, some never."""

    kind: ClassVar[int] = 7
    rows: tuple[Verdict, ...]


@dataclass(frozen=True)
class Data:
    """One packet of samples, numbered by its producer from 1 without gaps.

    The header is the map {"source", "position", "samples"}; a sample is the map {"id", "time",
    "codec", "size"} with "shape" (raw, vector), "dtype" (vector), "label" and "meta" where it has
    them. Payload holds the
    samples' bytes one after the other, "size" each.
    """

    kind: ClassVar[int] = 3
    sequence: int
    header: Frame
    payload: Frame

    @classmethod
    def pack(cls, sequence: int, samples: Sequence[Sample], position: Position = None) -> Data:
        """A packet of samples that share one source; `position` is its resume token after the last.

        Raises:
            ValueError: no samples, several sources, or a position that msgpack cannot carry.
        """
        if not samples:
            raise ValueError("a packet holds at least one sample")
        source = samples[0].source
        if any(sample.source != source for sample in samples):
            raise ValueError("the samples of a packet share one source; begin a new packet")
        check_position(position)
        rows = [_pack_row(sample) for sample in samples]
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

        A single sample's shape, label and meta are not checked here: see `sample_of`.

        Raises:
            WireError: "malformed", "codec" or "oversize".
        """
        fields = unpack_map(self.header, MAX_HEADER_BYTES)
        try:
            _check_source(fields.get("source"))
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
        """The source's resume token after this packet."""
        return self.fields.get("position")

    def __len__(self) -> int:
        return len(self.fields["samples"])

    def samples(self) -> Iterator[Sample]:
        """The samples, payloads as views of the packet's.

        Raises:
            ValueError: a sample breaks a rule; `rows` still gives the packet's others.
        """
        for row, data in self.rows():
            yield sample_of(self.fields["source"], row, data)

    def rows(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """The header's map and the payload of each sample, not checked by `sample_of`."""
        view, start = memoryview(self.payload), 0
        for row in self.fields["samples"]:
            yield row, view[start : start + row["size"]]
            start += row["size"]


MapMessage = Hello | Welcome | Ack | Nack | Bye | Verdicts
Message = MapMessage | Data
_MAPS: dict[int, type[MapMessage]] = {cls.kind: cls for cls in get_args(MapMessage)}
_FIELDS: dict[type[MapMessage], dict[str, Any]] = {
    cls: {field.name: field.type for field in fields(cls)} for cls in _MAPS.values()
}


def check_name(name: str) -> str:
    """Returns a valid producer's name.

    Raises:
        ValueError: not 1 to 128 characters of letters, digits and `._/-`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"producer name {reprlib.repr(name)}: must be 1 to 128 characters of "
            "A-Z a-z 0-9 . _ / -"
        )
    return name


def encode(message: Message) -> Frames:
    """The frames of a message."""
    if isinstance(message, Data):
        return message.encode()
    values = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    for name, unsaid in (
        ("verdicts", False),
        ("written", 0.0),
        ("clock", 0.0),
    ):  # as before there were any
        if values.get(name, ...) == unsaid:
            del values[name]
    return [prefix(message.kind), msgpack.packb(values)]


def decode(frames: Sequence[Frame]) -> Message:
    """The message in frames; DATA's checksum is verified, its header not yet read.

    Raises:
        WireError: "version", "malformed" or "checksum".
    """
    first = bytes(frames[0][:16]) if frames else b""
    if len(first) != 4 or first[:2] != MAGIC:
        raise WireError("malformed", f"the first frame {first!r} is not b'SS' + version + kind")
    version, kind = first[2], first[3]
    if version != VERSION:
        raise WireError("version", f"protocol version {version}; this side speaks {VERSION}")
    if kind == Data.kind:
        return _decode_data(frames)
    cls = _MAPS.get(kind)
    if cls is None or len(frames) != 2:
        raise WireError("malformed", f"kind {kind} with {len(frames)} frames is no message")
    return _decode_map(cls, unpack_map(frames[1]))


def _decode_data(frames: Sequence[Frame]) -> Data:
    if len(frames) != 4 or len(frames[1]) != DATA_HEAD.size:
        raise WireError(
            "malformed", f"DATA has 4 frames, the second of 12 bytes; got {len(frames)}"
        )
    sequence, checksum = DATA_HEAD.unpack(frames[1])
    data = Data(sequence, frames[2], frames[3])
    if data.checksum() != checksum:
        raise WireError("checksum", f"packet {sequence}: checksum does not match")
    return data


def _decode_map(cls: type[MapMessage], sent: dict[str, Any]) -> MapMessage:
    known = _FIELDS[cls]
    values: dict[str, Any] = {}
    for name, value in sent.items():
        if name not in known:  # a later minor revision may add fields
            continue
        if not _fits(known[name], value):
            raise WireError("malformed", f"{cls.__name__.upper()}: {name} is {reprlib.repr(value)}")
        if name == "rows":
            value = [Verdict(*row[:6]) for row in value]
        values[name] = tuple(value) if name in ("codecs", "rows") else value
    missing = [
        field.name for field in fields(cls) if field.name not in values and field.default is MISSING
    ]
    if missing:
        raise WireError("malformed", f"{cls.__name__.upper()}: {', '.join(missing)} is missing")
    try:
        message = cls(**values)
        if isinstance(message, Hello):
            check_name(message.producer)
    except ValueError as error:
        raise WireError("malformed", f"{cls.__name__.upper()}: {error}") from None
    return message


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value has the type that a field is annotated with."""
    match kind:
        case "int":
            return type(value) is int and value >= 0
        case "float":
            return type(value) in (int, float) and value >= 0
        case "str":
            return isinstance(value, str) and len(value) <= MAX_TEXT
        case "bool":
            return isinstance(value, bool)
        case "tuple[str, ...]":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "tuple[Verdict, ...]":
            return isinstance(value, list) and all(_is_verdict(row) for row in value)
    return True


def _is_verdict(row: Any) -> bool:
    if not isinstance(row, list | tuple) or len(row) < 6:
        return False
    source, name, what, duplicates, near, age = row[:6]
    return (
        isinstance(source, str)
        and isinstance(name, str)
        and what in VERDICTS
        and (duplicates is None or isinstance(duplicates, float))
        and isinstance(near, bool)
        and (age is None or _fits("int", age))
    )


def prefix(kind: int) -> bytes:
    """The first frame of a message."""
    return MAGIC + bytes((VERSION, kind))


def unpack_map(frame: Frame, max_bytes: int = MAX_MAP_BYTES) -> dict[str, Any]:
    """Unpacks a msgpack map with bounded work and memory, whatever the frame contains.

    One byte may become an object of 64, and a list may claim more items than follow. So the length
    is bounded first, then the bytes are skipped through without building anything, and at last
    built with their lists and maps counted.

    Raises:
        WireError: "malformed" or "oversize".
    """
    if len(frame) > max_bytes:
        raise WireError("oversize", f"a map of {len(frame)} bytes; at most {max_bytes} are read")
    nested = 0

    def count(item: Any) -> Any:
        nonlocal nested
        nested += 1
        if nested > MAX_NESTED:
            raise ValueError(f"more than {MAX_NESTED} lists and maps in one")
        return item

    hook = count if len(frame) > MAX_NESTED else None  # each takes a byte
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=max_bytes)
        unpacker.feed(frame)
        unpacker.skip()
        fields = msgpack.unpackb(
            frame,
            strict_map_key=True,
            object_hook=hook,
            list_hook=hook,
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


def sample_of(source: str, row: dict[str, Any], data: bytes | memoryview) -> Sample:
    """The sample that a row of `Data.rows` describes.

    Raises:
        ValueError: it breaks one of Sample's rules.
    """
    shape, meta = row.get("shape"), row.get("meta")
    if shape is not None and not (
        isinstance(shape, list) and len(shape) in (1, 3) and all(type(n) is int for n in shape)
    ):
        raise ValueError(
            f"sample {row['id']!r}: shape {reprlib.repr(shape)} is no [H, W, C] or [D]"
        )
    if meta is not None and not isinstance(meta, dict):
        raise ValueError(f"sample {row['id']!r}: meta {reprlib.repr(meta)} is no map")
    return Sample(
        id=row["id"],
        data=data,
        codec=row["codec"],
        shape=None if shape is None else tuple(shape),
        time=float(row["time"]),
        source=source,
        label=row.get("label"),
        meta=meta,
        dtype=row.get("dtype"),
    )


def _pack_row(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": sample.id,
        "time": float(sample.time),
        "codec": sample.codec,
        "size": len(sample.data),
    }
    if sample.shape is not None:
        row["shape"] = sample.shape
    if sample.dtype is not None:
        row["dtype"] = sample.dtype
    if sample.label is not None:
        row["label"] = sample.label
    if sample.meta:
        row["meta"] = dict(sample.meta)
    return row


def _check_source(source: Any) -> None:
    if not (isinstance(source, str) and 1 <= len(source.encode()) <= MAX_SOURCE_BYTES):
        raise WireError("malformed", f"source {reprlib.repr(source)} is no text of 1 to 64 bytes")


def _check_rows(rows: Any) -> int:
    """Checks a header's samples in one pass; returns the bytes of payload that they add up to."""
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
