"""The encoding of the protocol's messages; docs/wire.md describes it for other languages.

Every message is a multipart ZeroMQ message. The first frame has four bytes: "SS", the protocol
version, and the kind. Every message but DATA has one more frame, a msgpack map. DATA has three more
frames: sequence and checksum, the packet's header (a msgpack map), and the samples' payloads one
after the other.
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
MAX_TEXT = 4096  # characters of any text field, such as agent, detail and reason
MAX_MAP_BYTES = 65_536  # of the map of any message but DATA
MAX_HEADER_BYTES = 1_048_576
MAX_ITEMS = 4096  # of one list, so also the samples of one packet
MAX_PAIRS = 2048  # of one map
MAX_NESTED = 32_768  # lists and maps in one header or one message's map
MAX_LEVELS = 32  # of lists and maps within each other; Python cannot print some hundred levels
DATA_HEAD = struct.Struct(">QI")  # sequence, CRC-32 of (sequence, header, payload)

Frame = bytes | memoryview
Frames = list[Frame]
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")

REASONS = (
    "checksum",  # the packet was damaged on the way: send it again
    "codec",  # WELCOME did not list this codec
    "gap",  # the sequence is not the next one: resume at the sequence in the NACK
    "hello-required",  # the receiver does not know this connection: send HELLO
    "names",  # the key already uses the most producer names that one key may have
    "malformed",  # the message breaks the format of the protocol
    "oversize",  # the packet is larger than WELCOME allows
    "superseded",  # a newer incarnation of the same producer has connected
    "unauthorised",  # the key may not send for this producer
    "version",  # the message has another version of the protocol
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
    """The first message of a producer on each connection, also after a reconnect."""

    kind: ClassVar[int] = 1
    producer: str  # 1..128 bytes of [A-Za-z0-9._/-]
    epoch: int  # grows with each incarnation of the producer: nanoseconds since the Unix epoch
    first: int  # the oldest sequence that it can still send; 1 if it has numbered none yet
    codecs: tuple[str, ...] = CODECS
    agent: str = ""  # program and version, for the log
    verdicts: bool = False  # ask for VERDICTS messages; not encoded if False
    clock: float = 0.0  # the producer's clock, seconds since the Unix epoch; not encoded if 0
    sporadic: bool = False  # its source may send nothing for long; not encoded if False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer to HELLO: the sequence to resume after, and its limits."""

    kind: ClassVar[int] = 2
    resume: int  # last durable sequence of this producer; 0: none
    position: Position  # the source's resume token that came with `resume`; None: none
    credit: int  # bytes that may be unacknowledged at once; 0: wait for an ACK
    max_packet: int  # bytes of header and payload of one DATA
    max_samples: int  # samples in one DATA
    codecs: tuple[str, ...]
    epoch: int  # grows with each start of the receiver
    written: float = 0.0  # time when `resume` was written, Unix seconds; 0: unknown, not encoded


@dataclass(frozen=True, slots=True)
class Ack:
    """The receiver's statement that all sequences up to `through` are on its disk."""

    kind: ClassVar[int] = 4
    through: int
    credit: int  # bytes that may be unacknowledged beyond `through`


@dataclass(frozen=True, slots=True)
class Nack:
    """The receiver's rejection of a message."""

    kind: ClassVar[int] = 5
    sequence: int  # of the rejected packet; for "gap" and "checksum", the next one it expects
    reason: str  # one of REASONS
    detail: str
    permanent: bool  # do not send the message again


@dataclass(frozen=True, slots=True)
class Bye:
    """The last message before the sender disconnects; its earlier messages remain valid.

    A producer whose source has ended gives the reason ENDED. Other reasons are for people.
    """

    ENDED: ClassVar[str] = "ended"
    kind: ClassVar[int] = 6
    reason: str = ""


class Verdict(NamedTuple):
    """The memory's decision about one sample."""

    source: str
    id: str
    what: str  # one of VERDICTS
    duplicates: float | None = None  # expected number of slots with the same content on arrival
    near: bool = False  # a near-duplicate of a slot; only if the memory or the learner checks this
    age: int | None = None  # of an evicted sample: samples offered since it was admitted


VERDICTS = ("kept", "refused", "evicted")
MAX_VERDICTS = 32  # in one message


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A message with verdicts for a producer whose HELLO asked; each is sent at most once."""

    kind: ClassVar[int] = 7
    rows: tuple[Verdict, ...]


@dataclass(frozen=True)
class Data:
    """A packet of samples, which its producer numbers from 1 without gaps.

    The header is the map {"source", "position", "samples"}. A sample is the map {"id", "time",
    "codec", "size"}, with "shape" (raw, vector), "dtype" (vector), "label" and "meta" if it has
    them. The payload holds the samples' bytes one after the other; each sample has "size" bytes.
    """

    kind: ClassVar[int] = 3
    sequence: int
    header: Frame
    payload: Frame

    @classmethod
    def pack(cls, sequence: int, samples: Sequence[Sample], position: Position = None) -> Data:
        """Return a packet of samples.

        Args:
            sequence: the number of the packet, from 1.
            samples: at least one sample; all have the same source.
            position: the resume token of the source after the last sample.

        Raises:
            ValueError: there are no samples, they have several sources, or `check_position`
                rejects the position.
        """
        if not samples:
            raise ValueError("a packet holds at least one sample")
        source = samples[0].source
        if {sample.source for sample in samples} != {source}:
            raise ValueError("the samples of a packet share one source; begin a new packet")
        check_position(position)
        rows = [_pack_row(sample) for sample in samples]
        header = msgpack.packb({"source": source, "position": position, "samples": rows})
        return cls(sequence, header, b"".join([sample.data for sample in samples]))

    @property
    def size(self) -> int:
        """Bytes of header and payload, which count against credit and `max_packet`."""
        return len(self.header) + len(self.payload)

    def encode(self) -> Frames:
        """Return the four frames of the message."""
        head = DATA_HEAD.pack(self.sequence, self.checksum())
        return [prefix(self.kind), head, self.header, self.payload]

    def checksum(self) -> int:
        """Return the CRC-32 over the sequence (8 bytes, big-endian), the header and the payload."""
        crc = zlib.crc32(self.sequence.to_bytes(8, "big"))
        return zlib.crc32(self.payload, zlib.crc32(self.header, crc))

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The header, unpacked once and checked against the payload.

        The shape, label and meta of a sample are not checked here, but in `sample_of`.

        Raises:
            WireError: with reason "malformed", "codec" or "oversize".
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
        """Yield the samples; their payloads are views of the packet's payload.

        Raises:
            ValueError: a sample is invalid. `rows` still yields the other samples of the packet.
        """
        for row, data in self.rows():
            yield sample_of(self.fields["source"], row, data)

    def rows(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Yield the map and the payload of each sample, without the checks of `sample_of`."""
        view, start = memoryview(self.payload), 0
        for row in self.fields["samples"]:
            yield row, view[start : start + row["size"]]
            start += row["size"]


MapMessage = Hello | Welcome | Ack | Nack | Bye | Verdicts
Message = MapMessage | Data
_MAPS: dict[int, type[MapMessage]] = {cls.kind: cls for cls in get_args(MapMessage)}
_LATER_FIELDS = ("verdicts", "written", "clock", "sporadic")  # earlier versions have none of these
_FIELDS: dict[type[MapMessage], dict[str, Any]] = {
    cls: {field.name: field.type for field in fields(cls)} for cls in _MAPS.values()
}


def check_name(name: str) -> str:
    """Return the name of a producer if it is valid.

    Raises:
        ValueError: the name is not 1 to 128 characters of letters, digits and `._/-`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"producer name {reprlib.repr(name)}: must be 1 to 128 characters of "
            "A-Z a-z 0-9 . _ / -"
        )
    return name


def encode(message: Message) -> Frames:
    """Return the frames of a message."""
    if isinstance(message, Data):
        return message.encode()
    values = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    for name in _LATER_FIELDS:
        if not values.get(name, True):
            del values[name]
    return [prefix(message.kind), msgpack.packb(values)]


def decode(frames: Sequence[Frame]) -> Message:
    """Return the message in frames. For DATA, the checksum is verified and the header not yet read.

    Raises:
        WireError: with reason "version", "malformed" or "checksum".
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
        if name not in known:  # ignored, because a later minor revision may add fields
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
    """Return whether a value has the annotated type of its field."""
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
    """Return the first frame of a message of this kind."""
    return MAGIC + bytes((VERSION, kind))


def unpack_map(frame: Frame, max_bytes: int = MAX_MAP_BYTES) -> dict[str, Any]:
    """Unpack a msgpack map with bounded time and memory, also from a hostile frame.

    One byte can become an object of 64 bytes, and a list can claim more items than follow. The
    function therefore checks the length, then parses the frame without building objects, then
    builds the objects while counting the lists and maps, and last checks how deep these are nested.

    Raises:
        WireError: with reason "malformed" or "oversize".
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

    hook = count if len(frame) > MAX_NESTED else None  # each list or map takes at least a byte
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
    _check_levels(fields)
    return fields


def _check_levels(fields: dict[str, Any]) -> None:
    level: list[Any] = [fields]
    for _ in range(MAX_LEVELS):
        level = [
            item
            for value in level
            for item in (value.values() if type(value) is dict else value)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise WireError(
        "malformed", f"lists and maps within each other on more than {MAX_LEVELS} levels"
    )


def sample_of(source: str, row: dict[str, Any], data: bytes | memoryview) -> Sample:
    """Return the sample that a row of `Data.rows` describes.

    Raises:
        ValueError: a field is invalid; see `Sample`.
    """
    shape = row.get("shape")
    if shape is not None and not (
        isinstance(shape, list) and len(shape) in (1, 3) and all(type(n) is int for n in shape)
    ):
        raise ValueError(
            f"sample {row['id']!r}: shape {reprlib.repr(shape)} is no [H, W, C] or [D]"
        )
    return Sample(
        id=row["id"],
        data=data,
        codec=row["codec"],
        shape=None if shape is None else tuple(shape),
        time=float(row["time"]),
        source=source,
        label=row.get("label"),
        meta=row.get("meta"),
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
    """Check the samples of a header in one pass, and return the sum of their payload sizes."""
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
