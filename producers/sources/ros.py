"""A source of the images that a robot publishes live, through a Foxglove bridge."""

from __future__ import annotations

import base64
import json
import logging
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stream_ssl.bounded_files import parse_json
from stream_ssl.producers.sources.base import own_fault
from stream_ssl.producers.sources.live_robot import AdvertisedTopics, LiveRobot
from stream_ssl.producers.sources.robot_images import Message, RobotImages
from stream_ssl.producers.sources.robot_messages import Schema, decoder_of
from stream_ssl.producers.sources.tls import tls_context
from stream_ssl.producers.sources.url_secrets import without_secrets
from stream_ssl.producers.sources.web_socket import WebSocket
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable

log = logging.getLogger(__name__)

SUBPROTOCOLS = ["foxglove.sdk.v1", "foxglove.websocket.v1"]
MESSAGE_DATA = 1  # opcode: a message of a subscription
DATA_HEADER = struct.Struct("<BIQ")  # opcode, subscription, log time in ns
WARNING = 1  # the level of a status from which on it is logged; 0 is news, 2 an error
MAX_TEXT = 16 * 2**20  # bytes of a JSON message; 1,000 topics with their schemas have about 5 MB
MAX_SCHEMA = 2**20  # bytes
MAX_NAME = 1024  # characters of a topic or type
DEFAULT_SCHEMA_ENCODINGS = {
    "cdr": "ros2msg",
    "ros1": "ros1msg",
    "protobuf": "protobuf",
    "json": "jsonschema",
}
"""The encoding of a channel's schema by the encoding of its messages, if the channel names none."""
BINARY_SCHEMAS = ("protobuf", "flatbuffer")  # these travel as base64


@dataclass(frozen=True, slots=True)
class Channel:
    """A topic that the server advertises, with the encoding and the schema of its messages."""

    id: int
    topic: str
    encoding: str  # of the messages
    schema: Schema


class Ros(LiveRobot):
    """Images of a live robot (ROS 2 or ROS 1), through the Foxglove WebSocket protocol.

    The robot runs foxglove_bridge or another server of this protocol. This machine needs no ROS
    installation. Messages are sensor_msgs Image and CompressedImage, and Foxglove's RawImage and
    CompressedImage as Protobuf or JSON. The capture time is the header's stamp, or the server's
    time of the message if the stamp is before 1990. `LiveRobot` explains the ids and further
    arguments.

    Args:
        url: the server, as ws://HOST:8765, or wss://HOST:8765 for TLS.
        tls_ca: file of trusted certificates for wss, instead of the system's.
        name: the source's name.

    Raises:
        ValueError: an argument is invalid.
        ModuleNotFoundError: a library is not installed: pip install 'stream-ssl[ros]'.
    """

    def __init__(
        self, url: str, tls_ca: Path | None = None, name: str = "ros", **robot: Any
    ) -> None:
        import websockets  # noqa: F401  # fail early if they are not installed

        super().__init__(name, without_secrets(url), **robot)
        self._url = check_url(url)
        self._tls = tls_of(url, tls_ca)

    @contextmanager
    def connected(self) -> Iterator[Subscriptions]:
        """Connect to the server; see `LiveRobot`."""
        opened = WebSocket(self._url, SUBPROTOCOLS, self.patience(), self._tls, self._stopped)
        with opened as server:
            log.info("source %s: connected by %s", self.name, server.subprotocol)
            yield Subscriptions(server, self._images, self._origin)

    def failures(self) -> tuple[type[Exception], ...]:
        """Return the error types of a lost connection."""
        return (OSError,)


class Subscriptions(AdvertisedTopics):
    """The image channels of one connection, and the messages that arrive for them.

    Args:
        server: an open connection.
        images: decides which channels are wanted, and counts unreadable messages.
        origin: names the server in the log.
    """

    def __init__(self, server: WebSocket, images: RobotImages, origin: str) -> None:
        super().__init__(images, origin)
        self._server = server
        self._by_channel: dict[int, int] = {}  # the subscription of each channel
        self._next = 0  # number of the next subscription
        self._limited_log = RateLimitedLogger(log, seconds=60.0, lines=3)

    @property
    def topics(self) -> set[str]:
        return {channel.topic for channel, _ in self._subscribed.values()}

    def arriving(self) -> Iterator[tuple[Message, int] | None]:
        """Yield each image message, and None at other times; see `AdvertisedTopics`."""
        for content in self._server.messages():
            if isinstance(content, str):
                self.follow(content)
                yield None
            else:
                yield None if content is None else self.message(content)

    def follow(self, text: str) -> None:
        """Subscribe to the wanted channels that a JSON message advertises, and forget ended ones.

        Warnings and errors of the server are logged, such as that it drops messages because the
        link is too slow. Messages of other kinds are ignored. A message that cannot be read is
        logged and counted.

        Raises:
            OSError: the connection is lost.
        """
        try:
            if len(text) > MAX_TEXT:
                raise ValueError(f"it has {len(text)} characters; at most {MAX_TEXT} are read")
            message = parse_json(text)
            if not isinstance(message, dict):
                raise ValueError("it is no JSON object")
            listed: object = []
            if message.get("op") == "advertise":
                listed = message.get("channels")
            elif message.get("op") == "unadvertise":
                listed = message.get("channelIds")
            elif message.get("op") == "status":
                self._tell(message)
            if not isinstance(listed, list):
                raise ValueError(f"{message.get('op')} without a list")
        except ValueError as error:
            self._unreadable(f"a text of {len(text)} characters", error)
            return
        if message.get("op") == "advertise":
            self._subscribe(listed)
        else:
            self._forget(listed)

    def message(self, content: bytes | bytearray) -> tuple[Message, int] | None:
        """Return the image message in a binary message, with its bytes; None if there is none.

        Messages of other kinds are ignored. A message that is too short is logged and counted.
        """
        if not content or content[0] != MESSAGE_DATA:
            return None
        if len(content) < DATA_HEADER.size:
            self._unreadable(f"a message of {len(content)} bytes", "it has no whole header")
            return None
        _, subscription, log_time = DATA_HEADER.unpack_from(content)
        if subscription not in self._subscribed:  # unsubscribed while the message travelled
            return None
        channel, decode = self._subscribed[subscription]
        data = bytes(memoryview(content)[DATA_HEADER.size :])
        message = Message(channel.topic, channel.schema.name, log_time, partial(decode, data))
        return message, len(content)

    def _subscribe(self, entries: list[Any]) -> None:
        asked, topics = [], {}
        for entry in entries:
            try:
                channel = channel_of(entry)
            except ValueError as error:
                self._unreadable("an advertised channel", error)
                continue
            if channel.id not in self._by_channel and self._is_wanted(
                channel.topic, channel.schema.name
            ):
                decode = self._decoder(channel)
                if decode is not None:
                    self._by_channel[channel.id] = self._next
                    self._subscribed[self._next] = channel, decode
                    asked.append({"id": self._next, "channelId": channel.id})
                    self._next += 1
                    topics[channel.topic] = channel.schema.name
        if asked:
            self._log_subscribed(topics)
            self._server.send(json.dumps({"op": "subscribe", "subscriptions": asked}))

    def _decoder(self, channel: Channel) -> Callable[[bytes], Any] | None:
        try:
            return decoder_of(channel.encoding, channel.schema)
        except Exception as error:  # a damaged schema can cause errors of any type
            if own_fault(error):
                raise
            self._images.skipped.note("undecodable", channel.topic, error)
            return None

    def _forget(self, ids: list[Any]) -> None:
        for id_ in ids:
            subscription = self._by_channel.pop(id_, None) if type(id_) is int else None
            if subscription is not None:
                del self._subscribed[subscription]

    def _tell(self, status: dict[str, Any]) -> None:
        level, text = status.get("level"), status.get("message")
        if type(level) is int and level >= WARNING and isinstance(text, str):
            line = f"source {self._images.source}: {self._origin} says: {printable(text)}"
            self._limited_log.warning("status", line)

    def _unreadable(self, what: str, why: object) -> None:
        self._images.skipped.note("unreadable", f"{what} from {self._origin}", why)


def channel_of(entry: object) -> Channel:
    """Return the channel of an entry of the message "advertise".

    Raises:
        ValueError: a field is missing, has another type, or is too long.
    """
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    id_ = entry.get("id")
    if type(id_) is not int or not 0 <= id_ < 2**64:
        raise ValueError(f"id {id_!r:.80}: must be a whole number")
    limits = {"topic": MAX_NAME, "schemaName": MAX_NAME, "encoding": MAX_NAME, "schema": MAX_SCHEMA}
    for name, limit in limits.items():
        value = entry.get(name)
        if not isinstance(value, str) or len(value) > limit:
            raise ValueError(f"{name} {value!r:.80}: must be a text of at most {limit} characters")
    encoding = entry["encoding"]
    schema_encoding = entry.get("schemaEncoding") or DEFAULT_SCHEMA_ENCODINGS.get(encoding, "")
    if not isinstance(schema_encoding, str):
        raise ValueError(f"schemaEncoding {schema_encoding!r:.80}: must be a text")
    schema = entry["schema"].encode(errors="replace")
    if schema_encoding in BINARY_SCHEMAS:
        schema = base64.b64decode(schema)
    return Channel(
        id_, entry["topic"], encoding, Schema(0, entry["schemaName"], schema_encoding, schema)
    )


def check_url(url: str) -> str:
    """Return the URL of a server.

    Raises:
        ValueError: it is no WebSocket URL, or contains a password.
    """
    example = "must be ws://HOST:PORT, or wss://HOST:PORT for TLS, such as ws://robot:8765"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number
        valid = False
    if not valid or parts.fragment:
        raise ValueError(f"url {without_secrets(url)!r}: {example}")
    if "@" in parts.netloc:
        raise ValueError("url: the process list would show the password in it; leave it out")
    return url


def tls_of(url: str, ca: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context of a URL; None for ws.

    Raises:
        ValueError: the file cannot be used, or there is a file and the URL does not use TLS.
    """
    if not url.startswith("wss:"):
        if ca is not None:
            shown = without_secrets(url)
            raise ValueError(f"tls_ca {ca}: has no effect with url {shown!r}; use wss://")
        return None
    return tls_context("tls_ca", ca)
