"""Images of ROS bags: ROS 1 files, and ROS 2 folders and files."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producers.sources.robot_logs import Message, RobotLogs

if TYPE_CHECKING:
    from rosbags.rosbag1.reader import Header
    from rosbags.typesys.store import Typestore

log = logging.getLogger(__name__)


class RosBags(RobotLogs):
    """Images of ROS 1 bags (.bag) and of ROS 2 bags: folders, or .db3 and .mcap files.

    A ROS 1 bag without an index, such as after a power cut, is read from its beginning up to the
    damage; of a ROS 2 folder without metadata.yaml the files that lie there are read. Sample ids
    are FILE~DIGEST/TOPIC@LOGTIME, in nanoseconds.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.bag".
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument breaks its rule.
        ModuleNotFoundError: rosbags or Pillow is not installed.
    """

    def __init__(self, files: list[str] | str, name: str = "rosbag", **logs: Any) -> None:
        import rosbags.highlevel  # noqa: F401  # a machine without it is to say so at once

        super().__init__(files, name=name, **logs)

    def _messages(self, path: Path, start: int) -> Iterator[Message]:
        from rosbags.highlevel import AnyReader

        files = [path]
        if path.is_dir() and not (path / "metadata.yaml").exists():
            files = sorted([*path.glob("*.db3"), *path.glob("*.mcap")])
        reader = AnyReader(files, default_typestore=usual_types())
        try:
            reader.open()
        except Exception as error:  # whatever damaged bytes lead to
            if path.suffix != ".bag":
                raise
            log.warning("source %s: %s has no index: %s", self.name, path, error)
            yield from self._unindexed(path)
            return
        with closing(reader):
            wanted = [one for one in reader.connections if self.wanted(one.topic, one.msgtype)]
            if wanted:  # of none the reader would make all
                for connection, log_time, data in reader.messages(wanted, start=start):
                    decode = partial(reader.deserialize, data, connection.msgtype)
                    yield Message(connection.topic, connection.msgtype, log_time, decode)

    def _unindexed(self, path: Path) -> Iterator[Message]:
        """Messages of a ROS 1 bag in its own order; see wiki.ros.org/Bags/Format/2.0."""
        from rosbags.rosbag1.reader import Header, RecordType
        from rosbags.typesys import Stores, get_types_from_msg, get_typestore
        from rosbags.typesys.msg import normalize_msgtype

        types, topics = get_typestore(Stores.EMPTY), {}
        with path.open("rb") as file:
            if not file.readline().startswith(b"#ROSBAG V2.0"):
                raise ValueError("it does not begin as a ROS 1 bag does")
            for header, data in unpacked(file):
                if self._stopped.is_set():
                    return
                kind = header.get_uint8("op")
                if kind not in (RecordType.CONNECTION, RecordType.MSGDATA):
                    continue
                number = header.get_uint32("conn")
                if kind == RecordType.CONNECTION and number not in topics:
                    told = Header.read(io.BytesIO(len(data).to_bytes(4, "little") + data))
                    name = normalize_msgtype(told.get_string("type"))
                    topics[number] = header.get_string("topic"), name
                    types.register(get_types_from_msg(told.get_string("message_definition"), name))
                elif kind == RecordType.MSGDATA:
                    topic, name = topics[number]
                    if self.wanted(topic, name):
                        decode = partial(types.deserialize_ros1, data, name)
                        yield Message(topic, name, header.get_time("time"), decode)


@cache
def usual_types() -> Typestore:
    """For bags of older ROS 2, which do not define their types; those of images never changed."""
    from rosbags.typesys import Stores, get_typestore

    return get_typestore(Stores.LATEST)


def unpacked(file: io.BufferedReader) -> Iterator[tuple[Header, bytes]]:
    """Header and data of a ROS 1 bag's records, those in chunks too, up to the end of the file."""
    from rosbags.rosbag1.reader import Header, RecordType, decompressors, read_bytes, read_uint32

    while file.peek(1):
        header = Header.read(file)
        data = read_bytes(file, read_uint32(file))
        if header.get_uint8("op") == RecordType.CHUNK:
            plain = decompressors[header.get_string("compression")](data)
            yield from unpacked(io.BufferedReader(io.BytesIO(plain)))
        else:
            yield header, data
