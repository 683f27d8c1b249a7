"""The base of the sources that read the images of a live robot."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from stream_ssl.producers.sources.frames import Codec
from stream_ssl.producers.sources.live import Live, connection_id
from stream_ssl.producers.sources.robot_images import Message, RobotImages
from stream_ssl.rate_limited_logger import printable
from stream_ssl.wire.sample import Sample

log = logging.getLogger(__name__)

MAX_TOPICS = 256  # topics that are subscribed to in one connection


class LiveRobot(Live[tuple[str, Message]]):
    """Images that a robot publishes live.

    Compressed images are sent unchanged, other images are encoded with `codec`.

    The source reconnects, and drops the oldest waiting images if the sender cannot keep up; see
    `Live`. Sample ids are TOPIC@CONNECTION-N, where N is the number of the image in its connection.

    Args:
        name: the source's name.
        origin: names the robot in the log.
        topics: names of topics, or types of messages; null: all images.
        codec: encoding of uncompressed images: "jpeg", "webp" or "raw".
        quality: JPEG or WebP quality, 1 to 100.

    Raises:
        ValueError: an argument is invalid.
        ModuleNotFoundError: Pillow, which JPEG and WebP need, is not installed.
    """

    def __init__(
        self,
        name: str,
        origin: str,
        topics: list[str] | None = None,
        codec: Codec = "jpeg",
        quality: int = 90,
        **live: Any,
    ) -> None:
        super().__init__(name, **live)
        self._images = RobotImages(name, topics, codec, quality)
        self.skipped = self._images.skipped
        self._origin = origin

    @abstractmethod
    def connected(self) -> AbstractContextManager[AdvertisedTopics]:
        """Connect to the robot, and return its topics as a context that ends the connection."""

    def received(self) -> Iterator[tuple[tuple[str, Message], int]]:
        """Yield (sample id, image message) of one connection, with the bytes; see `Live`."""
        connection, numbers = connection_id(), itertools.count()
        with self.connected() as topics:
            for arrived in topics.arriving():
                if self._stopped.is_set():
                    return
                if arrived is not None:
                    message, size = arrived
                    yield (f"{message.topic}@{connection}-{next(numbers)}", message), size
                if self.is_overdue():
                    raise ConnectionError(topics.why_empty())
                topics.warn_once_if_empty(self._timeout)

    def sample(self, item: tuple[str, Message]) -> Sample | None:
        """Return the sample of a message; None if it is no image, which is logged and counted."""
        id_, message = item
        return self._images.sample(message, id_, self._origin)

    def reason(self, error: Exception) -> str:
        """Return the reason of a failure, with the robot."""
        text = super().reason(error)
        return text if self._origin in text else f"{self._origin}: {text}"


class AdvertisedTopics(ABC):
    """The subscriptions of one connection to a robot.

    Args:
        images: decides which topics are wanted, and counts messages that are left out.
        origin: names the robot in the log.
    """

    def __init__(self, images: RobotImages, origin: str) -> None:
        self._images, self._origin = images, origin
        self._subscribed: dict[Any, Any] = {}
        self._began, self._warned = time.monotonic(), False
        images.unwanted.clear()

    @property
    @abstractmethod
    def topics(self) -> set[str]:
        """The topics that are subscribed to now."""

    @abstractmethod
    def arriving(self) -> Iterator[tuple[Message, int] | None]:
        """Yield each image message with its bytes. Yield None after any other message or a pause.

        The iteration also subscribes to the wanted topics that the robot advertises meanwhile.

        Raises:
            OSError: the connection is lost.
        """

    def _is_wanted(self, topic: str, kind: str) -> bool:
        """Return whether to subscribe to a topic. `kind` is the type of its messages."""
        if not self._images.wanted(topic, kind, self._origin):
            return False
        if len(self._subscribed) >= MAX_TOPICS:
            why = f"the source subscribes to at most {MAX_TOPICS} topics; name the topics"
            self._images.skipped.note("channels", topic, why)
            return False
        return True

    def _log_subscribed(self, topics: dict[str, str]) -> None:
        """Log the topics, with the types of their messages, that are subscribed to from now on."""
        shown = ", ".join(f"{topic} ({kind})" for topic, kind in topics.items())
        log.info("source %s: subscribes to %s", self._images.source, printable(shown, 600))

    def why_empty(self) -> str:
        """Return why no images come."""
        if self.topics:
            return f"nothing is published on {printable(', '.join(sorted(self.topics)))}"
        others = ", ".join(f"{topic} ({kind})" for topic, kind in self._images.unwanted.items())
        advertised = f"only {printable(others, 600)}" if others else "no topic of images"
        return f"{self._origin} advertises none of the wanted topics; it has {advertised}"

    def warn_once_if_empty(self, patience: float) -> None:
        """Log a warning if no wanted topic was advertised for `patience` seconds."""
        if not (self._warned or self.topics) and time.monotonic() - self._began > patience:
            self._warned = True
            log.warning("source %s: no frames yet: %s", self._images.source, self.why_empty())
