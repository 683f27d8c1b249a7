"""A source that consumes images from a Kafka topic with librdkafka (confluent-kafka)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stream_ssl.bounded_files import check_private, named, read_text
from stream_ssl.producers.sources.acknowledged import ArrivedMessages, UnreadableError, sample_of
from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, mark
from stream_ssl.producers.sources.partition_offsets import PartitionOffsets, offsets_in
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.sample import MAX_POSITION_BYTES, Position, Sample

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
ASK_SECONDS = 10.0  # timeout of requests for offsets
ASSIGN_SECONDS = 60.0  # how long to repeat these requests; the group waits for minutes
RETRY_SECONDS = 1.0  # between two such requests
CLOSE_SECONDS = 30  # timeout of the last commit and of leaving the group
LOG_SECONDS = 30.0  # for one line about each kind of error
LEAVE_SECONDS = 10.0  # how long to wait until the partitions are given back
PARTITIONS = MAX_POSITION_BYTES // 16  # the most partitions whose offsets fit into a position
READY = 64  # messages waiting for the sender; at this number, no more are polled
FULL_SECONDS = 1.0  # how long the queue may stay full before librdkafka is paused
OURS: dict[str, Any] = {
    # librdkafka commits the offsets that `acknowledged` stores, each second and at the end.
    "enable.auto.commit": True,
    "enable.auto.offset.store": False,
    "auto.commit.interval.ms": 1000,
    "enable.partition.eof": False,
    # `_reset` counts the messages that retention has deleted. Any other value skips them silently.
    "auto.offset.reset": "error",
    # `_revoke` needs eager assignment, which revokes all partitions before they are reassigned.
    "partition.assignment.strategy": "range,roundrobin",
}
"""Settings that at-least-once delivery depends on. A config file cannot override them."""
DEFAULTS: dict[str, Any] = {"queued.max.messages.kbytes": 16_384, "fetch.error.backoff.ms": 500}
HOPELESS = (
    *("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"),
    *("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
    *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "_FATAL"),
)


class Kafka:
    """Images of a Kafka topic. Offsets are committed once the receiver has stored the samples.

    A message is a JPEG, PNG or WebP file. The headers `id`, `time` (seconds since the Unix epoch)
    and `label` describe the sample. Other headers and the key become meta. Without these headers,
    the id is TOPIC-PARTITION-OFFSET and the time is the message's timestamp. A message that is not
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
        idle_seconds: end after this many seconds without a message; null: consume for ever.
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
        self.name, self.topic, self._start = name, topic, start
        self.skipped = Skipped(name)
        self._settings = {
            **DEFAULTS,
            **({} if config is None else settings_of(config)),
            **OURS,
            "bootstrap.servers": servers,
            "group.id": group,
            "client.id": f"stream-ssl-{name}",
        }
        self._facts: Facts = {"source": name, "topic": topic, "group": group}
        self._offsets = PartitionOffsets({})
        self._lag: int | None = None
        self._outdated: set[int] = set()  # partitions whose next message was deleted
        self._ready: ArrivedMessages[Message] = ArrivedMessages(idle_seconds)
        self._closing = threading.Event()
        self._limited_log = RateLimitedLogger(log, LOG_SECONDS)
        self._thread: threading.Thread | None = None

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`.

        Raises:
            SourceError: during iteration, if the cluster rejects the consumer or has lost consumed
                messages.
        """
        from confluent_kafka import Consumer

        self._offsets = PartitionOffsets(offsets_in(position, self._facts, self.name))
        try:
            # The log lines of librdkafka contain no password.
            consumer = Consumer({**self._settings, "error_cb": self._failed}, logger=log)
        except Exception as error:  # a KafkaException, which carries only text
            raise ValueError(f"source {self.name!r}: {error}") from None
        consumer.subscribe([self.topic], on_assign=self._assign, on_revoke=self._revoke)
        self._thread = threading.Thread(
            target=self._serve, args=(consumer,), name=self.name, daemon=True
        )
        self._thread.start()
        return self._consumed()

    def acknowledged(self, position: Position) -> None:
        """Commit the offsets of `position` within one or two seconds."""
        with self._ready.changed:
            self._offsets.acknowledge(offsets_in(position, self._facts, self.name))
            self._ready.changed.notify_all()

    def lag(self) -> int | None:
        """Return how many messages of our partitions were not sent yet; None: unknown."""
        return self._lag

    def stop(self) -> None:
        """End `samples` immediately. Thread-safe."""
        self._ready.stop()

    def close(self) -> None:
        """Commit the offsets of stored samples, and leave the group.

        If the cluster does not answer within CLOSE_SECONDS, log an error and give up.
        """
        self.stop()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.error(
                    "source %s: the cluster did not answer for %d s: messages without an "
                    "acknowledgement come again, under the same ids",
                    *(self.name, CLOSE_SECONDS),
                )
            self._thread = None

    # Methods of the caller's thread

    def _consumed(self) -> Iterator[tuple[Sample, Position]]:
        while True:
            with self._ready.changed:  # a rebalance must not happen in between
                message = self._ready.take()
                if message is None:
                    break
                sample = self._sample(message)
                position = self._take(message, sample is not None)
            if sample is not None:
                yield sample, position
        log.info("source %s was stopped; %s", self.name, self.skipped)

    def _take(self, message: Message, readable: bool) -> Position:
        """Advance past a message, and return the position after it; None if it was not readable."""
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self._offsets.consumed[partition] = offset + 1
        return mark(self._offsets.send(), self._facts) if readable else None

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

    # One thread makes all calls to the consumer, because `poll` would block a second thread.
    # The thread polls even while the receiver is away, so that offsets are committed and a
    # rebalance of the group does not wait for this member.

    def _serve(self, consumer: Consumer) -> None:
        told = -math.inf
        try:
            while not self._ready.stopped.is_set() and self._ready.error is None:
                self._hold_back(consumer)
                message = consumer.poll(POLL_SECONDS)
                if message is not None:
                    self._arrived(message)
                if time.monotonic() - told >= POLL_SECONDS:
                    self._store(consumer)
                    self._reset(consumer)
                    self._lag = self._behind(consumer)
                    told = time.monotonic()
        except Exception as error:  # passed on to the caller's thread
            self._ready.fail(SourceError(f"source {self.name!r}: {error}"))
        self._closing.wait()  # until then, samples in flight may be acknowledged
        try:
            self._store(consumer)
            self._leave(consumer)
        finally:
            consumer.close()

    def _leave(self, consumer: Consumer) -> None:
        """Give all partitions back, so that `close` handles no change of the group.

        In such a change rd_kafka_assign may never return within `close` (librdkafka's issues 4527
        and 4884), and it holds the interpreter's lock. In `poll` it returns. A member with a
        group.instance.id keeps its partitions for its return, which `unsubscribe` would end.
        """
        if "group.instance.id" in self._settings:
            return
        consumer.unsubscribe()  # librdkafka commits what is stored
        ends = time.monotonic() + LEAVE_SECONDS
        while True:
            consumer.poll(POLL_SECONDS)  # a message that still arrives is not stored, so it is kept
            if not consumer.assignment() or time.monotonic() >= ends:
                return

    def _hold_back(self, consumer: Consumer) -> None:
        """Wait for room if the queue is full, but not so long that the group evicts this member."""
        ready = self._ready
        enough = READY // 2 if ready.paused else READY
        with ready.changed:
            room = ready.changed.wait_for(
                lambda: ready.stopped.is_set() or len(ready) < enough, FULL_SECONDS
            )
        if not room:  # repeated, because new partitions may have been assigned
            consumer.pause(consumer.assignment())
        elif ready.paused:
            consumer.resume(consumer.assignment())
            ready.restart()  # fetching restarts now, so the idle time does, too
        ready.paused = not room

    def _arrived(self, message: Message) -> None:
        if (error := message.error()) is not None:
            partition = message.partition()
            if error.name() == "_AUTO_OFFSET_RESET" and partition is not None:
                self._outdated.add(partition)
            else:
                self._failed(error)
        else:
            self._ready.put([message])

    # Callbacks for assigned and revoked partitions, which librdkafka calls in poll() and close()

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._place_all(consumer, partitions)
        except Exception as error:  # librdkafka would discard the error
            self._ready.fail(SourceError(f"source {self.name!r}: {error}"))
            return
        at = self._offsets.consumed
        consumer.assign(self._places((p.partition, at[p.partition]) for p in partitions))
        self._store(consumer)
        self._ready.restart()
        log.info("source %s: partitions %s", self.name, [one.partition for one in partitions])

    def _place_all(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Set the next offsets of partitions. If a broker is away, ask for up to ASSIGN_SECONDS.

        Raises:
            SourceError, KafkaException: the offsets are unknown, or do not fit the topic.
        """
        from confluent_kafka import KafkaException

        ends = time.monotonic() + ASSIGN_SECONDS
        while True:
            try:
                for one in consumer.committed(partitions, ASK_SECONDS):
                    if one.error is not None:
                        raise SourceError(f"source {self.name!r}: {one.error.str()}")
                    self._place(consumer, one)
                return
            except KafkaException as error:
                self._failed(error.args[0])  # ends the source if a retry cannot help
                if self._ready.error is not None or time.monotonic() >= ends:
                    raise
                if self._ready.stopped.wait(RETRY_SECONDS):
                    raise

    def _place(self, consumer: Consumer, committed: TopicPartition) -> None:
        """Set a partition's next offset to the later of the position and the committed offset."""
        partition = committed.partition
        low, high = consumer.get_watermark_offsets(committed, ASK_SECONDS)
        begin = low if self._start == "earliest" else high
        known = max(self._offsets.consumed.get(partition, -1), committed.offset)
        self._check_end(partition, known, high)
        if 0 <= known < low:
            self._lose(partition, low - known)
        at = max(known, low) if known >= 0 else begin
        self._offsets.place(partition, at)
        if len(self._offsets.consumed) > PARTITIONS:
            raise SourceError(f"source {self.name!r}: more than {PARTITIONS} partitions")

    def _check_end(self, partition: int, known: int, high: int) -> None:
        """Raise SourceError if a partition ends before the messages that were consumed."""
        if known > high:
            raise SourceError(
                f"source {self.name!r}: partition {partition} of {self.topic!r} ends at {high}, "
                f"and {known} were consumed: the topic was made anew. Consume it under another "
                "group and producer name"
            )

    def _lose(self, partition: int, lost: int) -> None:
        log.error(
            "source %s: the topic's retention has deleted %d messages of partition %d that were "
            "not consumed yet; raise retention.ms or retention.bytes of the topic",
            *(self.name, lost, partition),
        )
        self.skipped.by_reason["deleted by retention"] += lost

    def _reset(self, consumer: Consumer) -> None:
        """Continue behind deleted messages, and count them. If a broker is away, try again later.

        Raises:
            SourceError: the topic was made anew.
        """
        from confluent_kafka import KafkaException

        if not self._outdated:
            return
        owned = consumer.assignment()
        lost = {}
        try:
            places = {
                one.partition: one.offset if one.offset >= 0 else consumed
                for one in consumer.position(owned)
                if (consumed := self._offsets.consumed.get(one.partition)) is not None
            }
            for partition in self._outdated & places.keys():
                (place,) = self._places([(partition, 0)])
                low, high = consumer.get_watermark_offsets(place, ASK_SECONDS)
                self._check_end(partition, places[partition], high)
                if low > places[partition]:
                    lost[partition] = low - places[partition]
                    places[partition] = low
        except KafkaException as error:
            self._failed(error.args[0])
            return
        consumer.assign(self._places(places.items()))  # a seek fails in this state
        for partition, count in lost.items():
            self._lose(partition, count)
        self._outdated.clear()

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Wait for the samples in flight and commit, since another member resumes there."""
        from confluent_kafka import KafkaException

        revoked, ready = [one.partition for one in partitions], self._ready
        with ready.changed:
            ready.clear()
            ready.changed.wait_for(
                lambda: ready.stopped.is_set() or self._offsets.settled(revoked), ASK_SECONDS
            )
        if (safe := self._storable(partitions)) and not ready.stopped.is_set():
            try:  # before the automatic commit, since the next member may ask sooner
                consumer.commit(offsets=safe, asynchronous=False)
            except KafkaException as error:  # the group excluded us: sent twice, under one id
                log.warning("source %s: offsets not committed: %s", self.name, error)
        with ready.changed:
            self._offsets.forget(revoked)

    def _places(self, offsets: Iterable[tuple[int, int]]) -> list[TopicPartition]:
        from confluent_kafka import TopicPartition

        return [TopicPartition(self.topic, partition, at) for partition, at in offsets]

    def _behind(self, consumer: Consumer) -> int | None:
        behind = 0
        for one in consumer.assignment():
            _, high = consumer.get_watermark_offsets(one, cached=True)
            if high < 0 or one.partition not in self._offsets.consumed:
                return None
            behind += max(0, high - self._offsets.consumed[one.partition])
        return behind

    def _store(self, consumer: Consumer) -> None:
        """Store the offsets of settled samples for the next automatic commit."""
        from confluent_kafka import KafkaException

        for one in self._storable(consumer.assignment()):
            try:
                consumer.store_offsets(offsets=[one])
            except KafkaException:  # another member of the group owns it now
                log.debug("source %s: partition %d is no longer ours", self.name, one.partition)

    def _storable(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self._ready.changed:
            return self._places(self._offsets.to_commit(one.partition for one in partitions))

    def _failed(self, error: KafkaError) -> None:
        """Handle an error of a broker or librdkafka: end the source only if a retry cannot help."""
        if error.fatal() or error.name() in HOPELESS:
            text = f"source {self.name!r}: {error.name()}: {error.str()}"
            self._ready.fail(SourceError(text))
        else:
            text = f"source {self.name}: {error.name()}: {error.str()}"
            self._limited_log.warning(error.name(), text)


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
