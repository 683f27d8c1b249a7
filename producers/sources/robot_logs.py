"""A source of the images in robot logs, for any container format."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stream_ssl.producers.sources.chunked import ChunkedFile
from stream_ssl.producers.sources.fields import file_name, utf8_name
from stream_ssl.producers.sources.frames import Codec
from stream_ssl.producers.sources.mcap_file import MAGIC
from stream_ssl.producers.sources.recordings import Recordings, Where
from stream_ssl.producers.sources.robot_images import Message, RobotImages
from stream_ssl.wire.sample import Sample

UNINDEXED = b"index_pos=" + bytes(8)  # in the head of a ROS 1 bag without an index
BAG_HEAD = 4096  # bytes at the beginning of a bag that contain the head

log = logging.getLogger(__name__)


class RobotLogs(Recordings):
    """A source of the images in log files, by topic or type, in the order of their log times.

    Compressed images are sent unchanged, other images are encoded with `codec`. The capture time is
    the header's stamp, or the log time if the stamp is before 1990.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mcap".
        topics: names of topics, or types of messages; null: all images.
        codec: encoding of uncompressed images: "jpeg", "webp" or "raw".
        quality: JPEG or WebP quality, 1 to 100.
        epochs: number of passes, 1 or more; null: endless.
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument is invalid.
        ModuleNotFoundError: a library is not installed.
    """

    def __init__(
        self,
        files: list[str] | str,
        topics: list[str] | None = None,
        codec: Codec = "jpeg",
        quality: int = 90,
        epochs: int | None = 1,
        name: str = "robot",
    ) -> None:
        self.images = RobotImages(name, topics, codec, quality)
        super().__init__(files, epochs, self.images.skipped, "log", self.images.facts)

    @abstractmethod
    def _messages(self, path: Path, start: int) -> Iterator[Message]:
        """Yield the wanted messages, beginning at or before log time `start` (ns).

        Raises:
            Exception: the rest cannot be read.
        """

    def damaged(self, path: Path, what: object, why: Exception | str) -> None:
        """Count a part of a file that cannot be read. Reading continues with the next part."""
        self.skipped.note_damage(f"{what} of {path}", why)

    def _is_unfinished(self, path: Path) -> bool:
        if path.is_dir() or path.suffix == ".db3":
            return not (path if path.is_dir() else path.parent).joinpath("metadata.yaml").is_file()
        # An error is reported when the messages are read.
        with contextlib.suppress(OSError), path.open("rb") as file:
            if path.suffix in (".bag", ".active"):
                return UNINDEXED in file.read(BAG_HEAD)
            file.seek(max(0, path.stat().st_size - len(MAGIC)))
            return path.suffix == ".mcap" and file.read() != MAGIC
        return False

    def _no_index(self, path: Path, why: Exception) -> None:
        log.warning("source %s: %s has no index: %s", self.name, path, why)

    def _chunked(self, form: type[ChunkedFile], path: Path, start: int) -> Iterator[Message]:
        """Yield the wanted messages of a file of chunks, beginning at or before `start`."""
        with path.open("rb") as stream:
            file = form(
                stream,
                partial(self.images.wanted, origin=path),
                partial(self.damaged, path),
                partial(self._no_index, path),
                self._stopped,
            )
            for stored in file.messages(start):
                topic, kind, decode = file.definition_of(stored.channel)
                yield Message(topic, kind, stored.log_time, partial(decode, stored.data))

    def _recorded(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        where, name = None, file_name(path)
        self.images.unwanted.clear()
        for message in self._messages(path, 0 if after is None else after[0]):
            if self._stopped.is_set():
                return
            # Without an index, log times may decrease; treat such a message as one of the last
            # time.
            if where is None or message.log_time > where[0]:
                where = (message.log_time, 0)
            else:
                where = (where[0], where[1] + 1)
            if after is None or where > after:
                number = f".{where[1]}" if where[1] else ""
                id_ = f"{name}{message.topic}@{where[0]}{number}"
                sample = self.images.sample(message, id_, path, file=utf8_name(path.name))
                if sample is not None:
                    yield sample, where
        if where is None and after is None and not self._stopped.is_set():
            others = ", ".join(sorted(self.images.unwanted))
            has = f"; it has images of {others}" if others else ""
            self.skipped.note(
                "without images", path, f"no message of a topic that is asked for{has}"
            )
