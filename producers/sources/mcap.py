"""A source of images in MCAP files, as ROS 2 and Foxglove record them."""

from __future__ import annotations

import base64
import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stream_ssl.bounded_files import parse_json
from stream_ssl.producers.sources.base import own_fault
from stream_ssl.producers.sources.mcap_file import Channel, McapFile, Schema
from stream_ssl.producers.sources.robot_images import Message
from stream_ssl.producers.sources.robot_logs import RobotLogs
from stream_ssl.producers.sources.ros_messages import decoder

log = logging.getLogger(__name__)


class McapFiles(RobotLogs):
    """Images of MCAP files: ROS messages, and Foxglove messages in Protobuf.

    A file without an index, for example after a power failure, is read from its beginning up to the
    damage. Sample ids are FILE~DIGEST/TOPIC@LOGTIME, with the log time in nanoseconds.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mcap".
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument is invalid.
        ModuleNotFoundError: the MCAP libraries or Pillow are not installed.
    """

    def __init__(self, files: list[str] | str, name: str = "mcap", **logs: Any) -> None:
        import mcap_protobuf  # noqa: F401  # fail early if it is not installed

        super().__init__(files, name=name, **logs)

    def _messages(self, path: Path, start: int) -> Iterator[Message]:
        return mcap_messages(self, path, start)


def mcap_messages(logs: RobotLogs, path: Path, start: int) -> Iterator[Message]:
    """Yield the image messages of one MCAP file.

    Raises:
        BrokenFileError: the rest cannot be read.
    """

    @cache
    def made(channel: Channel, schema: Schema) -> Callable[[bytes], Any] | ValueError:
        try:
            return decoder_of(channel.message_encoding, schema)
        except Exception as error:  # a damaged schema can cause errors of any type
            if own_fault(error):
                raise
            return ValueError(f"{type(error).__name__}: {error}")

    def decode(channel: Channel, schema: Schema, data: bytes) -> Any:
        if isinstance(found := made(channel, schema), ValueError):
            raise found
        return found(data)

    with path.open("rb") as stream:
        file = McapFile(
            stream,
            lambda channel, schema: logs.images.wanted(channel.topic, schema.name, path),
            partial(logs.damaged, path),
            partial(logs.no_index, path),
            logs.stopped,
        )
        for stored in file.messages(start):
            channel = file.channels[stored.channel]
            schema = file.schemas[channel.schema]
            yield Message(
                channel.topic,
                schema.name,
                stored.log_time,
                partial(decode, channel, schema, stored.data),
            )


def decoder_of(encoding: str, schema: Schema) -> Callable[[bytes], Any]:
    """Return a function that decodes the messages of a channel, from a file or from the network.

    Args:
        encoding: the encoding of the messages, such as "cdr".
        schema: the type of the messages.

    Raises:
        ValueError: the encoding is not supported.
        Exception: the schema is damaged.
    """
    form = encoding, schema.encoding
    if form in (("cdr", "ros2msg"), ("ros1", "ros1msg")):
        return decoder(schema.name, schema.data.decode(errors="replace"), form[0] == "ros1")
    if form in (("cdr", "ros2idl"), ("cdr", "omgidl")):
        return decoder(schema.name, "", ros1=False)
    if form == ("json", "jsonschema"):
        return json_image
    if form == ("protobuf", "protobuf"):
        from mcap.records import Schema as Record
        from mcap_protobuf.decoder import DecoderFactory

        record = Record(schema.id, schema.data, schema.encoding, schema.name)
        found = DecoderFactory().decoder_for("protobuf", record)
        assert found is not None
        return found
    raise ValueError(
        f"{form[0]!r:.80} messages with a schema in {form[1]!r:.80}: only cdr with ros2msg or "
        "ros2idl, ros1 with ros1msg, protobuf, and json with jsonschema are known"
    )


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
