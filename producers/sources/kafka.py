"""A source that consumes images from a Kafka topic with librdkafka (confluent-kafka)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stream_ssl.bounded_files import check_private, named, read_text
from stream_ssl.producers.sources.acknowledged import sample_of
from stream_ssl.producers.sources.arrived import ArrivedMessages
from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, mark
from stream_ssl.producers.sources.kafka_member import GroupMember
from stream_ssl.producers.sources.kafka_offsets import PartitionOffsets, offsets_in
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from confluent_kafka import Message

OURS: dict[str, Any] = {
    # librdkafka commits the offsets that `acknowledged` stores, each second and at the end.
    "enable.auto.commit": True,
    "enable.auto.offset.store": False,
    "auto.commit.interval.ms": 1000,
    "enable.partition.eof": False,
    # `GroupMember` counts messages that retention has deleted. Other values skip them silently.
    "auto.offset.reset": "error",
    # `GroupMember` needs eager assignment, which revokes all partitions before reassigning them.
    "partition.assignment.strategy": "range,roundrobin",
}
"""Settings that at-least-once delivery depends on. A config file cannot override them."""
DEFAULTS: dict[str, Any] = {"queued.max.messages.kbytes": 16_384, "fetch.error.backoff.ms": 500}


class Kafka:
    """Images of a Kafka topic. Offsets are committed once the receiver has stored the samples.

    A message is a JPEG, PNG or WebP file. The headers `id`, `time` (seconds since the Unix epoch)
    and `label` describe the sample. Other headers and the key become meta. Without these headers,
    the id is TOPIC-PARTITION-OFFSET and the time is the message's timestamp. A header `time` or
    `label` that cannot be read is counted, and left out alone. A message that is not
    an image is logged and counted in `skipped`, and its offset is committed.

    A position holds the offset of each partition. After a restart, each partition resumes at the
    later of this offset and the group's committed offset. Therefore a crash between the two
    acknowledgements does not send samples twice. Several producers may share a group. When a
    partition moves to another producer, samples in flight may be sent twice, under the same id.

    Args:
        topic: the topic to consume.
        group: the consumer group whose offsets are committed.
        servers: addresses of the cluster, as HOST:PORT, HOST:PORT.
        config: a file of further librdkafka settings, with KEY=VALUE lines. TLS settings and
            passwords (security.protocol, ssl.ca.location, sasl.username, ...) belong only here.
        start: where a group without committed offsets starts.
        idle_seconds: end after this many seconds without a message, or with an error if no broker
            answers; null: consume for ever.
        name: the source's name.

    Raises:
        ValueError: an argument or a line of `config` is invalid.
        ModuleNotFoundError: confluent-kafka is not installed: pip install 'stream-ssl[kafka]'.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        servers: str = "127.0.0.1:9092",
        config: Path | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        idle_seconds: float | None = None,
        name: str = "kafka",
    ) -> None:
        import confluent_kafka  # noqa: F401  # fail early if it is not installed

        if idle_seconds is not None and not idle_seconds > 0:
            raise ValueError(f"idle_seconds {idle_seconds}: must be above 0, or null for ever")
        self.name, self.topic, self._servers = name, topic, servers
        self.skipped = Skipped(name)
        settings = {
            **DEFAULTS,
            **({} if config is None else settings_of(config)),
            **OURS,
            "bootstrap.servers": servers,
            "group.id": group,
            "client.id": f"stream-ssl-{name}",
        }
        self._facts: Facts = {"source": name, "topic": topic, "group": group}
        self._ready: ArrivedMessages[Message] = ArrivedMessages(idle_seconds)
        self._member = GroupMember(name, topic, start, settings, self._ready, self.skipped)

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`.

        Raises:
            ValueError: librdkafka rejects a setting.
            SourceError: during iteration, if the cluster rejects the consumer, has lost consumed
                messages, or does not answer within `idle_seconds`.
        """
        self._member.join(PartitionOffsets(offsets_in(position, self._facts, self.name)))
        return self._consumed()

    def acknowledged(self, position: Position) -> None:
        """Commit the offsets of `position` within one or two seconds."""
        with self._ready.changed:
            self._member.offsets.acknowledge(offsets_in(position, self._facts, self.name))
            self._ready.changed.notify_all()

    def lag(self) -> int | None:
        """Return how many messages of our partitions were not sent yet; None: unknown."""
        return self._member.lag

    def stop(self) -> None:
        """End `samples` immediately. Thread-safe."""
        self._ready.stop()

    def close(self) -> None:
        """Commit the offsets of stored samples, and leave the group; see `GroupMember.leave`."""
        self.stop()
        self._member.leave()

    def _consumed(self) -> Iterator[tuple[Sample, Position]]:
        while True:
            with self._ready.changed:  # a rebalance must not happen in between
                message = self._ready.take()
                if message is None:
                    self._check_placed()
                    break
                sample = self._sample(message)
                position = self._take(message, sample is not None)
            if sample is not None:
                yield sample, position
        self.skipped.tell_end(self._ready.stopped)

    def _check_placed(self) -> None:
        """Raise SourceError if the idle time has passed and no broker has ever answered."""
        if not (self._member.placed or self._ready.stopped.is_set()):
            raise SourceError(
                f"source {self.name!r}: no broker at {self._servers} answered within idle_seconds; "
                "check the address, and that Kafka runs"
            )

    def _take(self, message: Message, readable: bool) -> Position:
        """Advance past a message, and return the position after it; None if it was not readable."""
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self._member.offsets.consumed[partition] = offset + 1
        return mark(self._member.offsets.send(), self._facts) if readable else None

    def _sample(self, message: Message) -> Sample | None:
        place = f"{self.topic}-{message.partition()}-{message.offset()}"
        raw: Any = message.headers() or []
        headers = {key: (value or b"").decode(errors="replace") for key, value in raw}
        kind, stamp = message.timestamp()
        key: Any = message.key()
        if isinstance(key, bytes):
            key = key.decode(errors="replace")
        value: Any = message.value()
        received = stamp / 1000 if kind and stamp >= 0 else time.time()  # -1: no time
        return sample_of(value or b"", headers, place, received, self.skipped, key=key)


def settings_of(config: Path) -> dict[str, str]:
    """Return the settings in a file of KEY=VALUE lines, parsed as Kafka's own tools do.

    Raises:
        ValueError: the file is missing, everyone may read its password, or a line is invalid. The
            message never contains a value, which may be a password.
    """
    with named("config", config):
        text = read_text(config, links=True)
    settings: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not key or key.startswith("#"):
            continue
        if not equals:
            raise ValueError(f"config {config}: line {number} is not KEY=VALUE")
        if key in OURS or key in ("bootstrap.servers", "group.id", "auto.offset.reset"):
            raise ValueError(f"config {config}: line {number}: {key} is set by this source")
        settings[key] = value
    if any("password" in key or "secret" in key for key in settings):
        check_private("config", config, "its password")
    return settings
