"""The image topics that a live robot advertises, and the reason if no image comes from them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod

from stream_ssl.producers.sources.robot_images import RobotImages
from stream_ssl.rate_limited_logger import printable

log = logging.getLogger(__name__)


class AdvertisedTopics(ABC):
    """The subscriptions of one connection to a robot.

    Args:
        images: decides which topics are wanted, and counts messages that are left out.
        origin: names the robot in the log.
    """

    def __init__(self, images: RobotImages, origin: str) -> None:
        self._images, self._origin = images, origin
        self._began, self._warned = time.monotonic(), False
        images.unwanted.clear()

    @property
    @abstractmethod
    def topics(self) -> set[str]:
        """The topics that are subscribed to now."""

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
