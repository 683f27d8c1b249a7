"""Decoders of image messages: of ROS 1 and ROS 2, and of Foxglove in Protobuf or JSON.

The layouts of ROS are constants, because the types of images only ever grow at their end. A
definition in a file is untrusted input: it is compared with the layout, and never compiled to a
decoder.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from stream_ssl.bounded_files import parse_json
from stream_ssl.producers.sources.chunked import unpacked

ZSTD = b"\x28\xb5\x2f\xfd"  # first bytes of compressed data; no CDR message begins with them

Layout = tuple[tuple[str, str], ...]

STAMP = (("int32", "sec"), ("uint32", "nanosec"))
HEADER = (("time", "stamp"), ("string", "frame_id"))
IMAGE = (
    ("header", "header"),
    ("uint32", "height"),
    ("uint32", "width"),
    ("string", "encoding"),
    ("uint8", "is_bigendian"),
    ("uint32", "step"),
    ("uint8[]", "data"),
)
COMPRESSED = (("header", "header"), ("string", "format"), ("uint8[]", "data"))
FOXGLOVE_RAW = (
    ("time", "timestamp"),
    ("string", "frame_id"),
    ("uint32", "width"),
    ("uint32", "height"),
    ("string", "encoding"),
    ("uint32", "step"),
    ("uint8[]", "data"),
)
FOXGLOVE_COMPRESSED = (
    ("time", "timestamp"),
    ("string", "frame_id"),
    ("uint8[]", "data"),
    ("string", "format"),
)
PLAIN_CDR = (0x00, 0x01, 0x02, 0x03, 0x06, 0x07, 0x10, 0x11)
"""Kinds of CDR in which fields follow each other. Those with an odd number are little-endian."""
LAYOUTS: dict[tuple[str, str], Layout] = {
    ("sensor_msgs", "Image"): IMAGE,
    ("sensor_msgs", "CompressedImage"): COMPRESSED,
    ("foxglove_msgs", "RawImage"): FOXGLOVE_RAW,
    ("foxglove_msgs", "CompressedImage"): FOXGLOVE_COMPRESSED,
    ("foxglove", "RawImage"): FOXGLOVE_RAW,
    ("foxglove", "CompressedImage"): FOXGLOVE_COMPRESSED,
}
"""Layouts by the package and name of the message type."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The type and encoding of a channel's messages."""

    id: int
    name: str
    encoding: str
    data: bytes


def decoder_of(encoding: str, schema: Schema) -> Callable[[bytes], Any]:
    """Return a function that decodes the messages of a channel, from a file or from the network.

    Raises:
        ValueError: the encoding of the messages, such as "cdr", is not supported.
        Exception: the schema is damaged.
    """
    form = encoding, schema.encoding
    if form in (("cdr", "ros2msg"), ("ros1", "ros1msg")):
        return decoder(schema.name, schema.data.decode(errors="replace"), form[0] == "ros1")
    if form in (("cdr", "ros2idl"), ("cdr", "omgidl"), ("cdr", "")):
        return decoder(schema.name, "", ros1=False)  # rosbag2 may lack the definition of a type
    if form in (("json", "jsonschema"), ("json", "")):
        return json_image
    if form == ("protobuf", "protobuf"):
        from mcap.records import Schema as Record
        from mcap_protobuf.decoder import DecoderFactory

        record = Record(schema.id, schema.data, schema.encoding, schema.name)
        found = DecoderFactory().decoder_for("protobuf", record)
        assert found is not None
        return found
    raise ValueError(
        f"{form[0]!r:.80} messages with a schema in {form[1]!r:.80}: only cdr with ros2msg, "
        "ros2idl, omgidl or none, ros1 with ros1msg, protobuf, and json with jsonschema or none "
        "are known"
    )


def package_and_name(kind: str) -> tuple[str, str]:
    """Return the package and the name of a type.

    >>> package_and_name("sensor_msgs/msg/Image")
    ('sensor_msgs', 'Image')
    >>> package_and_name("foxglove.RawImage")
    ('foxglove', 'RawImage')
    >>> package_and_name("sensor_msgs::msg::dds_::Image_")  # as DDS names it
    ('sensor_msgs', 'Image')
    """
    names = kind.replace("::", "/").replace(".", "/").split("/")
    return names[0], names[-1].removesuffix("_") if "dds_" in names else names[-1]


def decode(kind: str, definition: str, ros1: bool, data: bytes) -> Any:
    """Return a decoded ROS message; see `decoder`."""
    return decoder(kind, definition, ros1)(data)


@lru_cache(maxsize=64)
def decoder(kind: str, definition: str, ros1: bool) -> Callable[[bytes], Any]:
    """Return a function that decodes messages of a type.

    Args:
        kind: the type, such as sensor_msgs/msg/Image.
        definition: the type's definition in the file; empty if the file has none.
        ros1: whether the messages are serialised as in ROS 1 instead of CDR.

    Raises:
        ValueError: the type is not in LAYOUTS, or the file defines the type differently.
    """
    layout = LAYOUTS.get(package_and_name(kind))
    if layout is None:
        raise ValueError(f"type {kind!r:.80}: known are {', '.join(map('/'.join, LAYOUTS))}")
    if definition.strip():
        check_definition(kind, definition, layout, ros1)
    return lambda data: MessageDecoder(plain(data, ros1), ros1).message(layout)


def plain(data: bytes, ros1: bool) -> bytes:
    """Return a message without the compression of rosbag2, which only the first bytes reveal.

    Raises:
        BrokenFileError: the data is damaged, or too large when unpacked.
    """
    return unpacked("zstd", data) if data.startswith(ZSTD) and not ros1 else data


def check_definition(kind: str, definition: str, layout: Layout, ros1: bool) -> None:
    """Compare a file's definition of a type with the layout that decodes its messages.

    The type may have further fields at its end, as those of a newer version have.

    Raises:
        ValueError: they differ.
    """
    sections: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in definition.splitlines():
        words = line.partition("#")[0].split()
        if line.startswith("MSG:"):
            name = line.rpartition("/")[2].strip().lower()
            sections[name] = []
        elif len(words) >= 2 and "=" not in words[1] and "=" not in "".join(words[2:3]):
            sections[name].append((words[0].rpartition("/")[2].lower(), words[1]))
    header = ((("uint32", "seq"),) if ros1 else ()) + HEADER
    for part, expected in (("", layout), ("header", header)):
        found = sections.get(part)
        compared = found if part or found is None else found[: len(layout)]
        if compared is not None and compared != list(expected):
            raise ValueError(
                f"the file defines {part or kind} as {found!r:.200}, and not as ROS does"
            )


class MessageDecoder:
    """A decoder of one message. Every length is checked against the message's bytes."""

    def __init__(self, data: bytes, ros1: bool) -> None:
        self._data, self._ros1 = data, ros1
        self._at = 0 if ros1 else 4  # CDR begins with a header of four bytes
        if not ros1 and len(data) < 4:
            raise ValueError(f"a message of {len(data)} bytes")
        if not ros1 and data[1] not in PLAIN_CDR:
            kinds = ", ".join(f"0x{kind:02x}" for kind in PLAIN_CDR)
            raise ValueError(f"CDR of kind 0x{data[1]:02x}: only plain kinds are read: {kinds}")
        self._order = "<" if ros1 or data[1] % 2 else ">"

    def message(self, layout: Layout) -> SimpleNamespace:
        """Return the fields of a layout, by name."""
        return SimpleNamespace(**{name: self._field(kind) for kind, name in layout})

    def _field(self, kind: str) -> Any:
        if kind == "string":
            return bytes(self._bytes()).rstrip(b"\0").decode(errors="replace")
        if kind == "uint8[]":
            return self._bytes()
        if kind == "uint8":
            return self._take(1)[0]
        if kind == "time":
            return self.message(STAMP)
        if kind == "header":
            if self._ros1:
                self._number("I")  # the sequence number
            return self.message(HEADER)
        return self._number("i" if kind == "int32" else "I")

    def _number(self, form: str) -> int:
        if not self._ros1:
            self._at += -self._at % 4  # CDR aligns numbers to their size
        return int(struct.unpack(self._order + form, self._take(4))[0])

    def _bytes(self) -> memoryview:
        return self._take(self._number("I"))

    def _take(self, size: int) -> memoryview:
        taken = memoryview(self._data)[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError(f"a field claims {size} bytes, and {len(taken)} are there")
        self._at += size
        return taken


def json_image(data: bytes) -> SimpleNamespace:
    """Return the fields of a RawImage or CompressedImage in JSON, whose data are base64.

    JSON that was made from Protobuf lacks each field with the default value of its type.

    Raises:
        ValueError: a field has another type than Foxglove's schemas give it.
    """
    fields = parse_json(data.decode())
    if not isinstance(fields, dict) or not isinstance(fields.get("data"), str):
        raise ValueError("no JSON object with data in base64")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in ("width", "height", "step"):
        value = fields.setdefault(name, 0)
        if not (type(value) is int and 0 <= value < 2**32):
            raise ValueError(f"{name} {value!r:.80}: must be a whole number")
    for name in ("frame_id", "encoding", "format"):
        if not isinstance(fields.setdefault(name, ""), str):
            raise ValueError(f"{name} {fields[name]!r:.80}: must be a text")
    fields["timestamp"] = json_stamp(fields.get("timestamp"))
    fields["data"] = base64.b64decode(fields["data"], validate=True)
    return SimpleNamespace(**fields)


def json_stamp(value: object) -> SimpleNamespace:
    """Return the stamp in Foxglove's or in Protobuf's JSON; its seconds are 0 if there is none."""
    stamp: dict[str, float] = {"sec": 0, "nsec": 0}
    if isinstance(value, dict):
        for name, other in (("sec", "seconds"), ("nsec", "nanos")):
            number = value.get(name, value.get(other, 0))
            if isinstance(number, int | float):
                stamp[name] = number
    elif isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            moment = datetime.datetime.fromisoformat(value)
            stamp["sec"] = moment.timestamp() if moment.tzinfo else 0
    return SimpleNamespace(**stamp)
