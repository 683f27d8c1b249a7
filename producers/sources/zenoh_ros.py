"""A source of the images that a robot publishes live in ROS 2 over Zenoh."""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stream_ssl.producers.sources.live_robot import AdvertisedTopics, LiveRobot
from stream_ssl.producers.sources.robot_images import Message, RobotImages
from stream_ssl.producers.sources.robot_messages import decoder
from stream_ssl.producers.sources.url_secrets import without_secrets

log = logging.getLogger(__name__)

ENDPOINT = re.compile(r"(tcp|tls|quic|ws|udp)/[^/@?#\s]+:[0-9]{1,5}")
TOKENS = ("@ros2_lv/*/*/*/*/MP/**", "@/*/@ros2_lv/MP/**")
"""Patterns of the tokens with which rmw_zenoh and zenoh-bridge-ros2dds announce publishers."""
POLL_SECONDS = 0.1
MAX_MESSAGE = 2**26  # bytes
WAITING_BYTES, WAITING_TOKENS = 2**28, 4096  # from Zenoh's threads to this source's thread
KINDS = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")


class Publisher(NamedTuple):
    """A topic that a node publishes, and the key under which its messages travel."""

    topic: str
    kind: str  # the type, such as sensor_msgs/msg/Image
    key: str


class ZenohRos(LiveRobot):
    """Images of a live robot with ROS 2, whose messages travel over Zenoh.

    The robot runs rmw_zenoh with its router, or zenoh-bridge-ros2dds. This machine needs no ROS
    installation. Messages are sensor_msgs Image and CompressedImage. The capture time is the
    header's stamp, or the time of arrival if the stamp is before 1990. `LiveRobot` explains the ids
    and further arguments.

    Args:
        endpoint: the router or bridge, as tcp/HOST:7447. Zenoh's tls, quic, ws and udp work too.
        config: JSON5 file of Zenoh's own settings, such as certificates and passwords.
        timeout: seconds that an attempt to connect may take, above 0.
        name: the source's name.

    Raises:
        ValueError: an argument is invalid.
        ModuleNotFoundError: a library is not installed: pip install 'stream-ssl[zenoh]'.
    """

    def __init__(
        self,
        endpoint: str,
        config: Path | None = None,
        timeout: float = 10.0,
        name: str = "zenoh",
        **robot: Any,
    ) -> None:
        super().__init__(name, endpoint, timeout=timeout, **robot)
        if not ENDPOINT.fullmatch(endpoint):
            raise ValueError(
                f"endpoint {without_secrets(endpoint)!r}: must be tcp/HOST:PORT or another "
                "endpoint of Zenoh, such as tcp/robot:7447; passwords belong into the file `config`"
            )
        self._config = config
        settings_of(endpoint, config, timeout)  # fail early if the file cannot be used

    @contextmanager
    def connected(self) -> Iterator[Subscriptions]:
        """Connect to the router or bridge; see `LiveRobot`."""
        import zenoh

        with zenoh.open(settings_of(self._origin, self._config, self.patience())) as session:
            log.info("source %s: connected to %s", self.name, self._origin)
            yield Subscriptions(session, self._images, self._origin)

    def reason(self, error: Exception) -> str:
        """Return the reason of a failure, without the place in Zenoh's code."""
        return super().reason(error).partition(" at /")[0]

    def failures(self) -> tuple[type[Exception], ...]:
        """Return the error types of a lost connection."""
        import zenoh

        return zenoh.ZError, OSError


class Subscriptions(AdvertisedTopics):
    """The image topics of one connection, and the messages that arrive for them.

    Zenoh calls from threads of its own, which only fill bounded queues.

    Args:
        session: an open session.
        images: decides which topics are wanted, and counts messages that are left out.
        origin: names the robot in the log.
    """

    def __init__(self, session: Any, images: RobotImages, origin: str) -> None:
        super().__init__(images, origin)
        self._session = session
        self._messages: queue.SimpleQueue[tuple[Message, int]] = queue.SimpleQueue()
        self._bytes, self._changing = 0, threading.Lock()  # of the messages
        self._tokens: queue.Queue[str] = queue.Queue(WAITING_TOKENS)
        live = session.liveliness()
        self._follows = [
            live.declare_subscriber(pattern, self._announced, history=True) for pattern in TOKENS
        ]

    def follow(self) -> None:
        """Subscribe to the wanted topics that were announced since the last call."""
        for _ in range(self._tokens.qsize()):  # more may come meanwhile, without an end
            self._subscribe(self._tokens.get_nowait())

    @property
    def topics(self) -> set[str]:
        return {found.topic for found in self._subscribed}

    def arriving(self) -> Iterator[tuple[Message, int] | None]:
        """Yield each image message, and None at other times; see `AdvertisedTopics`."""
        while True:
            self.follow()
            taken = self.take()
            info = self._session.info
            if taken is None and not (info.routers_zid() or info.peers_zid()):
                raise ConnectionError("the connection was lost")
            yield taken

    def take(self) -> tuple[Message, int] | None:
        """Return the oldest message with its bytes; None if none comes for a moment."""
        try:
            message, size = self._messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None
        with self._changing:
            self._bytes -= size
        return message, size

    def _announced(self, token: Any) -> None:
        try:
            self._tokens.put_nowait(str(token.key_expr))
        except queue.Full:
            self._images.skipped.note("channels", self._origin, "too many publishers at a time")

    def _subscribe(self, token: str) -> None:
        import zenoh

        found = publisher_of(token)
        if found is None or found in self._subscribed:
            return
        if not self._is_wanted(found.topic, found.kind):
            return
        if found.kind not in KINDS:
            why = f"{found.kind} is not read over Zenoh"
            self._images.skipped.note("undecodable", found.topic, why)
            return
        # Zenoh does not carry the types' definitions, as bags and bridges do.
        arrived = partial(self._arrived, found, decoder(found.kind, "", ros1=False))
        try:
            self._subscribed[found] = self._session.declare_subscriber(found.key, arrived)
        except zenoh.ZError as error:  # the topic's name is not valid as a key
            self._images.skipped.note("unreadable", f"{found.topic} of {self._origin}", error)
            return
        self._log_subscribed({found.topic: found.kind})

    def _arrived(self, found: Publisher, decode: Callable[[bytes], Any], sample: Any) -> None:
        data = sample.payload.to_bytes()
        message = Message(found.topic, found.kind, time.time_ns(), partial(decode, data))
        with self._changing:
            if fits := self._bytes + len(data) <= WAITING_BYTES:
                self._bytes += len(data)
        if fits:
            self._messages.put((message, len(data)))
        else:
            why = "messages come faster than they are taken in"
            self._images.skipped.note("late", f"a message of {found.topic}", why)


def publisher_of(token: str) -> Publisher | None:
    """Return the publisher that a liveliness token announces; None if it announces none.

    rmw_zenoh's tokens are @ros2_lv/DOMAIN/SESSION/NODE/ID/MP/ENCLAVE/NAMESPACE/NAME/TOPIC/TYPE/HASH
    /QOS, with % for each slash. Those of zenoh-bridge-ros2dds are @/ID/@ros2_lv/MP/TOPIC/TYPE/QOS,
    with another sign for each slash, and its topics are the keys of the messages.
    """
    parts = token.split("/")
    if parts[0] == "@ros2_lv" and len(parts) == 13 and parts[5] == "MP":
        topic, kind = parts[9].replace("%", "/"), parts[10]
        package, _, name = kind.removesuffix("_").partition("::msg::dds_::")
        key = f"{parts[1]}/{topic.strip('/')}/{kind}/*"
        return Publisher(topic, f"{package}/msg/{name}", key)
    if parts[0] == "@" and len(parts) == 7 and parts[2:4] == ["@ros2_lv", "MP"]:
        topic, kind = (part.replace("§", "/") for part in parts[4:6])
        return Publisher(f"/{topic.strip('/')}", kind, topic.strip("/"))
    return None


def settings_of(endpoint: str, config: Path | None, timeout: float) -> Any:
    """Return the settings of a Zenoh client of this endpoint.

    Raises:
        ValueError: the file cannot be used.
    """
    import zenoh

    try:
        settings = zenoh.Config() if config is None else zenoh.Config.from_file(config)
        for name, value in {
            "mode": "client",
            "connect/endpoints": [endpoint],
            "connect/timeout_ms": round(1000 * timeout),
            "connect/exit_on_failure": True,
            "listen/endpoints": [],
            "scouting/multicast/enabled": False,
            "transport/link/rx/max_message_size": MAX_MESSAGE,
        }.items():
            settings.insert_json5(name, json.dumps(value))
    except zenoh.ZError as error:
        raise ValueError(f"config {config}: {error}") from None
    return settings
