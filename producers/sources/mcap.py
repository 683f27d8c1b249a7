"""Images of MCAP files, as ROS 2 and Foxglove record them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from producers.sources.robot_logs import Message, RobotLogs

log = logging.getLogger(__name__)

MAX_RECORD = 1 << 30  # bytes; a damaged length must not fill the memory


class McapFiles(RobotLogs):
    """Images of MCAP files: ROS 2 messages, and Foxglove's as Protobuf.

    A file without an index, such as after a power cut, is read from its beginning up to the damage.
    Sample ids are FILE~DIGEST/TOPIC@LOGTIME, in nanoseconds.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mcap".
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument breaks its rule.
        ModuleNotFoundError: the MCAP libraries or Pillow are not installed.
    """

    def __init__(self, files: list[str] | str, name: str = "mcap", **logs: Any) -> None:
        import mcap_protobuf  # noqa: F401  # a machine without them is to say so at once
        import mcap_ros2  # noqa: F401

        super().__init__(files, name=name, **logs)

    def _messages(self, path: Path, start: int) -> Iterator[Message]:
        from mcap_protobuf.decoder import DecoderFactory as Protobuf
        from mcap_ros2.decoder import DecoderFactory as Ros2

        factories = (Ros2(), Protobuf())
        decoders: dict[int, Callable[[bytes], Any]] = {}

        def decode(schema: Any, channel: Any, data: bytes) -> Any:
            if channel.id not in decoders:
                made = [each.decoder_for(channel.message_encoding, schema) for each in factories]
                found = [decoder for decoder in made if decoder is not None]
                if not found:
                    raise ValueError(
                        f"{channel.message_encoding} messages with a schema in {schema.encoding}: "
                        "only cdr with ros2msg and protobuf are known"
                    )
                decoders[channel.id] = found[0]
            return decoders[channel.id](data)

        with path.open("rb") as file:
            for schema, channel, message in self._records(file, path, start):
                if self._stopped.is_set():
                    return
                if schema is not None and self.wanted(channel.topic, schema.name):
                    yield Message(
                        channel.topic,
                        schema.name,
                        message.log_time,
                        partial(decode, schema, channel, message.data),
                    )

    def _records(self, file: IO[bytes], path: Path, start: int) -> Iterator[tuple[Any, Any, Any]]:
        """Schema, channel and message of each record, by the index where there is one."""
        from mcap.exceptions import McapError
        from mcap.reader import NonSeekingReader, SeekingReader

        indexed = SeekingReader(file, validate_crcs=True, record_size_limit=MAX_RECORD)
        try:
            summary = indexed.get_summary()
        except (McapError, ValueError, OSError) as error:
            log.warning("source %s: %s has no index: %s", self.name, path, error)
            summary = None
        if summary is not None and summary.chunk_indexes:
            topics = [
                channel.topic
                for channel in summary.channels.values()
                if channel.schema_id in summary.schemas
                and self.wanted(channel.topic, summary.schemas[channel.schema_id].name)
            ]
            yield from indexed.iter_messages(topics, starting_at=start)
        else:
            file.seek(0)
            linear = NonSeekingReader(file, validate_crcs=True, record_size_limit=MAX_RECORD)
            yield from linear.iter_messages(log_time_order=False)
