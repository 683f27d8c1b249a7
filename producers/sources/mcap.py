"""A source of images in MCAP files, as ROS 2 and Foxglove record them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_ssl.producers.sources.mcap_file import McapFile
from stream_ssl.producers.sources.robot_images import Message
from stream_ssl.producers.sources.robot_logs import RobotLogs


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
        return self._chunked(McapFile, path, start)
