"""Selection of the images among a robot's messages, from files or from the network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stream_ssl.producers.sources.base import Facts, Skipped, own_fault
from stream_ssl.producers.sources.fields import OLDEST, digest, fitting_meta, fitting_time, short_id
from stream_ssl.producers.sources.frames import Codec, FrameEncoder
from stream_ssl.producers.sources.image_files import codec_of
from stream_ssl.producers.sources.robot_messages import package_and_name
from stream_ssl.producers.sources.robot_pixels import BAYER, demosaic, grey_levels, pixels
from stream_ssl.wire.sample import Sample

IMAGES = {"Image", "RawImage", "CompressedImage"}
PACKAGES = {"sensor_msgs", "foxglove", "foxglove_msgs"}
VIDEO = {"CompressedVideo", "FFMPEGPacket", "theora_image_transport.Packet"}
"""Types whose messages are parts of a video. They are counted but not read."""
NOT_FITTING = (ValueError, TypeError, AttributeError, ArithmeticError, OSError)
"""Errors of messages whose sender defines its own types, or whose size an encoder rejects."""
MOST_UNWANTED = 12  # topics that a message names
MAX_NAMED = 1024  # characters of topics that a position names; it has a digest of more
MOSAIC = re.compile(r"(bayer_\w+); (?:jpeg|png) compressed *(?:\1)?")
"""The format of a compressed Bayer image that its sender has not converted to colours."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a robot."""

    topic: str
    kind: str  # the type, such as sensor_msgs/msg/Image
    log_time: int  # ns
    decode: Callable[[], Any]


class RobotImages:
    """A selector of a robot's image messages, and their conversion to samples.

    Compressed images are sent unchanged. Other images are encoded with `codec`, and so are
    compressed Bayer images, whose pixels need their colours first. The capture time is the header's
    stamp, or the log time if the stamp is before 1990: a camera's own clock may count from its
    start. `RobotLogs` explains the arguments.

    Raises:
        ValueError: `quality` is out of range.
        ModuleNotFoundError: Pillow, which JPEG and WebP need, is not installed.
    """

    def __init__(self, source: str, topics: list[str] | None, codec: Codec, quality: int) -> None:
        self.skipped = Skipped(source)
        self.source, self._topics = source, topics
        self.unwanted: dict[str, str] = {}  # types of images that were not asked for, by topic
        self._encoder = FrameEncoder(codec, quality)
        named = None if topics is None else " ".join(sorted(topics))
        if named is not None and len(named) > MAX_NAMED:
            named = f"{len(named.split())} topics, {digest([named.encode()])}"
        self.facts: Facts = {"topics": named, "codec": self._encoder.fact}

    def wanted(self, topic: str, kind: str, origin: object) -> bool:
        """Return whether messages of this topic and type are sent.

        A wanted topic of video messages is counted under "video messages", because video is not
        read. `origin` names the file or server in the log.
        """
        if self._topics is not None and topic not in self._topics and kind not in self._topics:
            if is_image(kind) and len(self.unwanted) < MOST_UNWANTED:
                self.unwanted[topic] = kind
            return False
        package, name = package_and_name(kind)
        if name in VIDEO or f"{package}.{name}" in VIDEO:
            self.skipped.note("video messages", f"{topic} of {origin}", f"{kind} is not read")
        return is_image(kind)

    def sample(self, message: Message, id_: str, origin: object, **meta: str) -> Sample | None:
        """Return the sample of a message; None if it is no image, which is logged and counted.

        `origin` names the file or server in the log. The message's topic and frame_id are added to
        the facts in `meta`.
        """
        what = f"{message.topic} at {message.log_time} of {origin}"
        try:
            decoded = message.decode()
        except Exception as error:  # damaged bytes can cause errors of any type
            if own_fault(error):
                raise
            self.skipped.note("undecodable", what, f"{type(error).__name__}: {error}")
            return None
        header = getattr(decoded, "header", decoded)  # Foxglove messages have no header
        at = stamp(header)
        try:
            return Sample(
                id=short_id(id_),
                time=fitting_time(at if at >= OLDEST else math.nan, message.log_time * 1e-9),
                source=self.source,
                meta=fitting_meta(
                    {**meta, "topic": message.topic, "frame_id": getattr(header, "frame_id", "")}
                ),
                **self._payload(decoded, message.kind),
            )
        except NOT_FITTING as error:
            self.skipped.note("no image", what, error)
            return None

    def _payload(self, decoded: Any, kind: str) -> dict[str, Any]:
        if package_and_name(kind)[1] != "CompressedImage":
            return self._encoder(pixels(decoded))
        data = bytes(decoded.data)
        codec, form = codec_of(data), getattr(decoded, "format", "")
        if "compressedDepth" in form:
            raise ValueError(f"format {form!r:.80} is of depths, and no picture")
        if codec is None:
            raise ValueError(f"format {form!r:.80} is neither JPEG, PNG nor WebP")
        sensor = MOSAIC.fullmatch(form)
        pattern = BAYER.get(sensor[1]) if sensor else None
        image_HW = None if pattern is None else grey_levels(data)
        if pattern is not None and image_HW is not None:
            return self._encoder(demosaic(image_HW, pattern))
        return {"data": data, "codec": codec}


def is_image(kind: str) -> bool:
    """Return whether messages of this type are images that can be read."""
    package, name = package_and_name(kind)
    return package in PACKAGES and name in IMAGES


def stamp(header: Any) -> float:
    """Return the stamp of a ROS header or Foxglove message in Unix seconds; 0 if there is none."""
    at = getattr(header, "stamp", None) or getattr(header, "timestamp", None)
    names = (("sec", "nanosec"), ("sec", "nsec"), ("seconds", "nanos"), ("secs", "nsecs"))
    for seconds, nanoseconds in names:
        if hasattr(at, seconds) and hasattr(at, nanoseconds):
            return float(getattr(at, seconds) + getattr(at, nanoseconds) * 1e-9)
    return 0.0
