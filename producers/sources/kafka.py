"""Images of a Kafka topic, by librdkafka (confluent-kafka)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from producers.sources.acknowledged import UnreadableError, sample_of
from producers.sources.base import Facts, Skipped, SourceError, checked, mark, misfit
from stream_ssl.wire.sample import MAX_POSITION_BYTES, Position, Sample

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
ASK_SECONDS = 10.0  # for the broker's answer to a question about offsets
PARTITIONS = MAX_POSITION_BYTES // 16  # whose offsets fit into a position
OURS: dict[str, Any] = {
    # What `acknowledged` stores is committed each second and at the end; see also `_revoke`.
    "enable.auto.commit": True,
    "enable.auto.offset.store": False,
    "auto.commit.interval.ms": 1000,
    "enable.partition.eof": False,
    # A receiver that is away is waited for; it must not cost us our partitions.
    "max.poll.interval.ms": 86_400_000,
}
"""What at-least-once delivery rests on: a config file may not say otherwise."""
DEFAULTS: dict[str, Any] = {"queued.max.messages.kbytes": 16_384, "fetch.error.backoff.ms": 500}
HOPELESS = (
    *("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"),
    *("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
    *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "_FATAL"),
)


class Kafka:
    """Consumes a Kafka topic; offsets are committed once the receiver has the samples on disk.

    A message is a JPEG, PNG or WebP file. Its headers `id`, `time` (seconds since the Unix epoch)
    and `label` describe the sample, others and the key become meta. Without them the id is
    TOPIC-PARTITION-OFFSET and the time the message's. What is no image is logged, counted in
    `skipped` and committed past.

    A position holds the offset of each partition. After a restart each partition goes on at the
    later of this and the group's committed offset, so that a crash between the two acknowledgements
    sends nothing twice. Several producers may share a group; where a partition changes hands,
    what was under way may be sent twice, under the same id.

    Args:
        topic: to consume.
        group: the consumer group, whose offsets are committed.
        servers: of the cluster, as HOST:PORT, HOST:PORT.
        config: a file of further settings of librdkafka, KEY=VALUE a line: TLS and passwords go
            here (security.protocol, ssl.ca.location, sasl.username, ...), and nowhere else.
        start: where a group without offsets begins.
        idle_seconds: end when nothing has come for this long; null: consume for ever.
        name: the source's name.

    Raises:
        ValueError: an argument or a line of `config` breaks its rule.
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
        import confluent_kafka  # noqa: F401  # a machine without it is to say so at once

        if idle_seconds is not None and not idle_seconds > 0:
            raise ValueError(f"idle_seconds {idle_seconds}: must be above 0, or null for ever")
        self.name, self.topic = name, topic
        self.skipped = Skipped(name)
        self._settings = {
            **DEFAULTS,
            **({} if config is None else settings_of(config)),
            **OURS,
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": start,
            "client.id": f"stream-ssl-{name}",
        }
        self._idle = idle_seconds
        self._facts: Facts = {"source": name, "topic": topic, "group": group}
        # Offsets of each partition: after what was consumed, after what was sent of it, and after
        # what of that is on the receiver's disk.
        self._next: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._safe: dict[int, int] = {}
        self._lag: int | None = None
        self._came = math.inf  # when the last message did, or partitions
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._error: SourceError | None = None
        self._consumer: Consumer | None = None

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`.

        Raises:
            SourceError: while running: the cluster refuses, or has lost what was consumed.
        """
        from confluent_kafka import Consumer

        self._next = self._offsets(position)
        try:
            # librdkafka's own lines name no password.
            self._consumer = Consumer({**self._settings, "error_cb": self._failed}, logger=log)
        except Exception as error:  # KafkaException, of which it tells no more than a text
            raise ValueError(f"source {self.name!r}: {error}") from None
        self._consumer.subscribe([self.topic], on_assign=self._assign, on_revoke=self._revoke)
        return self._consumed(self._consumer)

    def acknowledged(self, position: Position) -> None:
        """Have the offsets committed within a second or two."""
        with self._changed:
            for partition, at in self._offsets(position).items():
                self._safe[partition] = max(at, self._safe.get(partition, at))
            self._changed.notify_all()

    def lag(self) -> int | None:
        """Messages of our partitions that were not sent; None: not known yet."""
        return self._lag

    def stop(self) -> None:
        """From any thread: `samples` ends at once."""
        self._stopped.set()

    def close(self) -> None:
        """Commit what is stored, and leave the group."""
        self.stop()
        if self._consumer is not None:
            self._store(self._consumer)
            self._consumer.close()
            self._consumer = None

    def _consumed(self, consumer: Consumer) -> Iterator[tuple[Sample, Position]]:
        """The only thread that calls the consumer: another would wait for `poll`, for ever when
        polls follow each other."""
        told = -math.inf
        while not self._stopped.is_set():
            message = consumer.poll(POLL_SECONDS)
            if self._error is not None:
                raise self._error
            if time.monotonic() - told >= POLL_SECONDS:
                self._store(consumer)
                self._lag = self._behind(consumer)
                told = time.monotonic()
            if message is None:
                if self._idle is not None and time.monotonic() - self._came >= self._idle:
                    return
                continue
            self._came = time.monotonic()
            if (error := message.error()) is not None:
                self._failed(error)
                continue
            sample = self._sample(message)
            position = self._take(message, sample is not None)
            if sample is not None:
                yield sample, position
        log.info("source %s was stopped; %s", self.name, self.skipped)

    def _take(self, message: Message, readable: bool) -> Position:
        """The position after a message; None: it is passed over."""
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        with self._changed:
            self._next[partition] = offset + 1
            if readable:
                self._sent = dict(self._next)
                return mark([list(one) for one in sorted(self._sent.items())], self._facts)
        return None

    def _sample(self, message: Message) -> Sample | None:
        place = f"{self.topic}-{message.partition()}-{message.offset()}"
        raw: Any = message.headers() or []
        headers = {key: (value or b"").decode(errors="replace") for key, value in raw}
        kind, stamp = message.timestamp()
        key: Any = message.key()
        if isinstance(key, bytes):
            key = key.decode(errors="replace")
        value: Any = message.value()
        try:
            return sample_of(
                value or b"",
                headers,
                place,
                stamp / 1000 if kind else time.time(),
                self.name,
                key=key,
            )
        except UnreadableError as error:
            self.skipped.note(error.reason, f"message {place}", error)
            return None

    # Partitions come and go; librdkafka calls these from poll() and close()

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            for one in consumer.committed(partitions, ASK_SECONDS):
                if one.error is not None:
                    raise SourceError(f"source {self.name!r}: {one.error.str()}")
                self._place(consumer, one)
        except Exception as error:  # which would be lost on its way through librdkafka
            self._error = SourceError(f"source {self.name!r}: {error}")
            return
        consumer.assign(self._placed(partitions))
        self._store(consumer)
        self._came = time.monotonic()
        log.info("source %s: partitions %s", self.name, [one.partition for one in partitions])

    def _place(self, consumer: Consumer, committed: TopicPartition) -> None:
        """Where a partition goes on: at the later of the position and the committed offset."""
        partition = committed.partition
        low, high = consumer.get_watermark_offsets(committed, ASK_SECONDS)
        begin = low if self._settings["auto.offset.reset"] == "earliest" else high
        known = max(self._next.get(partition, -1), committed.offset)
        if known > high:
            raise SourceError(
                f"source {self.name!r}: partition {partition} of {self.topic!r} ends at {high}, "
                f"and {known} were consumed: the topic was made anew. Consume it under another "
                "group and producer name"
            )
        if 0 <= known < low:
            lost = low - known
            log.error(
                "source %s: the topic's retention has deleted %d messages of partition %d that "
                "were not consumed yet",
                *(self.name, lost, partition),
            )
            self.skipped.by_reason["deleted by retention"] += lost
        at = max(known, low) if known >= 0 else begin
        self._next[partition] = self._sent[partition] = self._safe[partition] = at
        if len(self._next) > PARTITIONS:
            raise SourceError(f"source {self.name!r}: more than {PARTITIONS} partitions")

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Others take these over at the committed offsets: wait for what is under way."""
        from confluent_kafka import KafkaException

        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or self._settled(), ASK_SECONDS)
        if (safe := self._storable()) and not self._stopped.is_set():
            try:  # at once: the next member may ask before the second of auto-commit is over
                consumer.commit(offsets=safe, asynchronous=False)
            except KafkaException as error:  # the group went on without us: sent twice, one id
                log.warning("source %s: offsets not committed: %s", self.name, error)
        with self._changed:
            for one in partitions:
                for offsets in (self._next, self._sent, self._safe):
                    offsets.pop(one.partition, None)

    def _settled(self) -> bool:
        return all(self._safe[partition] >= at for partition, at in self._sent.items())

    def _placed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        from confluent_kafka import TopicPartition

        return [
            TopicPartition(self.topic, p.partition, self._next[p.partition]) for p in partitions
        ]

    def _behind(self, consumer: Consumer) -> int | None:
        behind = 0
        for one in consumer.assignment():
            _, high = consumer.get_watermark_offsets(one, cached=True)
            if high < 0 or one.partition not in self._next:
                return None
            behind += max(0, high - self._next[one.partition])
        return behind

    def _store(self, consumer: Consumer) -> None:
        """Have what is safe committed."""
        from confluent_kafka import KafkaException

        for one in self._storable():
            try:
                consumer.store_offsets(offsets=[one])
            except KafkaException:  # it belongs to another member of the group by now
                log.debug("source %s: partition %d is no longer ours", self.name, one.partition)

    def _storable(self) -> list[TopicPartition]:
        """Offsets after what is safe, and after what was passed over behind it."""
        from confluent_kafka import TopicPartition

        with self._changed:
            return [
                TopicPartition(
                    self.topic,
                    partition,
                    (self._next if self._safe[partition] >= sent else self._safe)[partition],
                )
                for partition, sent in self._sent.items()
            ]

    def _failed(self, error: KafkaError) -> None:
        """A broker's or librdkafka's error; it goes on trying, so what is hopeless is ended."""
        if error.fatal() or error.name() in HOPELESS:
            self._error = SourceError(f"source {self.name!r}: {error.name()}: {error.str()}")
        else:
            log.warning("source %s: %s: %s", self.name, error.name(), error.str())

    def _offsets(self, position: Position) -> dict[int, int]:
        """The offset of each partition.

        Raises:
            ValueError: not a position of this source.
        """
        if position is None:
            return {}
        at = checked(position, self._facts, self.name)
        try:
            return {int(partition): int(offset) for partition, offset in at}
        except (TypeError, ValueError):
            raise misfit(self.name, f"{at!r:.80} is no list of [partition, offset]") from None


def settings_of(config: Path) -> dict[str, str]:
    """The settings in a file of KEY=VALUE lines, as Kafka's own tools read them.

    Raises:
        ValueError: the file is missing, others may read it, or a line breaks its rule; never with a
            value, which may be a password.
    """
    try:
        mode, text = config.stat().st_mode, config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config {config}: {getattr(error, 'strerror', error)}") from None
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
    if mode & 0o007 and any("password" in key or "secret" in key for key in settings):
        raise ValueError(
            f"config {config}: everybody may read its password (mode {mode & 0o777:04o}); "
            f"run: chmod 600 {config}"
        )
    return settings
