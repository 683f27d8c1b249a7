"""The messages, byte by byte: docs/wire.md is this folder in prose.

Every message is a multipart ZeroMQ message whose first frame is four bytes: "SS", the protocol
version, the kind. All but DATA carry one more frame, a msgpack map. DATA carries three: sequence
and checksum, the packet's header (a msgpack map), and the samples' payloads one after the other.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgpack

from stream_ssl.wire.errors import REASONS, WireError
from stream_ssl.wire.packet import (
    DATA_HEAD,
    MAGIC,
    VERSION,
    Data,
    Frame,
    Frames,
    prefix,
    sample_of,
    unpack_map,
)
from stream_ssl.wire.sample import CODECS, Position

__all__ = [
    "DATA_HEAD",
    "MAGIC",
    "REASONS",
    "VERSION",
    "Ack",
    "Bye",
    "Data",
    "Frame",
    "Frames",
    "Hello",
    "Message",
    "Nack",
    "Welcome",
    "WireError",
    "check_name",
    "decode",
    "encode",
    "sample_of",
]

MAX_TEXT = 4096  # bytes of agent, detail and reason
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Hello:
    """A producer introduces itself; sent again after every reconnect."""

    kind: ClassVar[int] = 1
    producer: str  # 1..128 bytes of [A-Za-z0-9._/-]
    epoch: int  # grows with each incarnation of the producer: nanoseconds since the Unix epoch
    first: int  # the oldest sequence that it can still send; 1 as long as it has numbered none
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


Mapped = Hello | Welcome | Ack | Nack | Bye
Message = Mapped | Data
_MAPS: dict[int, type[Mapped]] = {cls.kind: cls for cls in (Hello, Welcome, Ack, Nack, Bye)}
_FIELDS: dict[type[Mapped], dict[str, Any]] = {
    cls: {field.name: field.type for field in fields(cls)} for cls in _MAPS.values()
}


def check_name(name: str) -> str:
    """A producer's name, as it is.

    Raises:
        ValueError: not 1 to 128 characters of letters, digits and `._/-`.
    """
    if not _NAME.fullmatch(name):
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
    return [prefix(message.kind), msgpack.packb(values)]


def decode(frames: Sequence[Frame]) -> Message:
    """The message that frames hold; DATA's checksum is verified, its header not yet read.

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


def _decode_map(cls: type[Mapped], sent: dict[str, Any]) -> Mapped:
    known = _FIELDS[cls]
    values: dict[str, Any] = {}
    for name, value in sent.items():
        if name not in known:  # a later minor revision may add fields
            continue
        if not _fits(known[name], value):
            raise WireError("malformed", f"{cls.__name__.upper()}: {name} is {reprlib.repr(value)}")
        values[name] = tuple(value) if name == "codecs" else value
    try:
        message = cls(**values)
        if isinstance(message, Hello):
            check_name(message.producer)
    except (TypeError, ValueError) as error:
        raise WireError("malformed", f"{cls.__name__.upper()}: {error}") from None
    return message


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value has the type that a field is annotated with."""
    match kind:
        case "int":
            return type(value) is int and value >= 0
        case "str":
            return isinstance(value, str) and len(value) <= MAX_TEXT
        case "bool":
            return isinstance(value, bool)
        case "tuple[str, ...]":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return True
