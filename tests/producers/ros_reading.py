"""Images of a robot, and a reader of a source that runs in a thread."""

import threading
import time
from contextlib import contextmanager

from robot_files import BEGAN, COMPRESSED, IMAGE, ROS2, compressed, image
from source_files import encoded
from video_files import numbered

from stream_ssl.producers.sources.base import SourceError

DEADLINE = 60.0  # seconds; for the busiest machine


def cdr(message, kind):
    return bytes(ROS2.serialize_cdr(message, kind))


def raw(number, stamp=BEGAN):
    return cdr(image(ROS2, numbered(number), "rgb8", stamp), IMAGE)


def jpeg(number, stamp=BEGAN):
    return cdr(compressed(ROS2, encoded(numbered(number), "JPEG"), "jpeg", stamp), COMPRESSED)


@contextmanager
def reading(source):
    """Collect samples in a thread until the end of the block."""
    samples, failed = [], []

    def read():
        try:
            for sample, _ in source.samples():
                samples.append(sample)
        except SourceError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield samples, failed
    finally:
        source.stop()
        reader.join(DEADLINE)
        assert not reader.is_alive()


def wait_for(event, publish=lambda: None):
    """Wait for an event, and publish again and again, since a subscription takes time."""
    deadline = time.monotonic() + DEADLINE
    while not event():
        assert time.monotonic() < deadline
        publish()
        time.sleep(0.02)
