"""The membership in a Kafka consumer group: partitions, offsets and commits."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from stream_ssl.producers.sources.arrived import ArrivedMessages
from stream_ssl.producers.sources.base import Skipped, SourceError
from stream_ssl.producers.sources.kafka_offsets import PartitionOffsets
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.sample import MAX_POSITION_BYTES

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
HOPELESS = (
    *("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"),
    *("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
    *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "_FATAL"),
)


class LimitedLog:
    """The part of a logger that librdkafka uses, with a limit for each kind of line.

    While no broker answers, librdkafka logs several lines a second.

    Args:
        limited: the logger to write to.
    """

    def __init__(self, limited: RateLimitedLogger) -> None:
        self._limited = limited

    def log(self, level: int, form: str, *facts: object) -> None:
        """Log a line, unless its kind, which is the first of the facts, has reached the limit."""
        if level < logging.WARNING:  # asked for by the setting `debug`
            log.log(level, form, *facts)
        else:
            self._limited.log(level, f"librdkafka {facts[0] if facts else ''}", form % facts)


class GroupMember:
    """A member of a consumer group, whose thread makes all calls to librdkafka.

    A second thread would wait while `poll` blocks. The thread polls even while the receiver is
    away, so that offsets are committed and a rebalance of the group does not wait for this member.
    The messages go to `ready`, and `skipped` counts those that are lost.

    Attributes:
        offsets: what is consumed, and what is acknowledged, by partition; guarded by
            `ready.changed`.
        lag: how many messages of the partitions were not consumed yet; None: unknown.
        placed: whether the group has ever given this member its partitions.
    """

    def __init__(
        self,
        name: str,
        topic: str,
        start: Literal["earliest", "latest"],
        settings: Mapping[str, Any],
        ready: ArrivedMessages[Message],
        skipped: Skipped,
    ) -> None:
        self.name, self.topic, self._start, self._settings = name, topic, start, settings
        self._ready, self.skipped = ready, skipped
        self.offsets = PartitionOffsets({})
        self.lag: int | None = None
        self.placed = False
        self._outdated: set[int] = set()  # partitions whose next message was deleted
        self._closing = threading.Event()
        self._limited_log = RateLimitedLogger(log, LOG_SECONDS)
        self._thread: threading.Thread | None = None

    def join(self, offsets: PartitionOffsets) -> None:
        """Join the group, and continue behind these offsets.

        Raises:
            ValueError: librdkafka rejects a setting.
        """
        from confluent_kafka import Consumer

        self.offsets = offsets
        try:
            # The log lines of librdkafka contain no password.
            settings = {**self._settings, "error_cb": self._failed}
            consumer = Consumer(settings, logger=LimitedLog(self._limited_log))
        except Exception as error:  # a KafkaException, which carries only text
            raise ValueError(f"source {self.name!r}: {error}") from None
        consumer.subscribe([self.topic], on_assign=self._assign, on_revoke=self._revoke)
        self._thread = threading.Thread(
            target=self._serve, args=(consumer,), name=self.name, daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Commit the offsets of acknowledged messages, and leave the group.

        If the cluster does not answer within CLOSE_SECONDS, log an error and give up.
        """
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

    def _serve(self, consumer: Consumer) -> None:
        stored_at = -math.inf
        try:
            while not self._ready.stopped.is_set() and self._ready.error is None:
                self._hold_back(consumer)
                message = consumer.poll(POLL_SECONDS)
                if message is not None:
                    self._arrived(message)
                if time.monotonic() - stored_at >= POLL_SECONDS:
                    self._store(consumer)
                    self._reset(consumer)
                    self.lag = self._behind(consumer)
                    stored_at = time.monotonic()
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
        at = self.offsets.consumed
        consumer.assign(self._places((p.partition, at[p.partition]) for p in partitions))
        self._store(consumer)
        self.placed = True
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
        known = max(self.offsets.consumed.get(partition, -1), committed.offset)
        self._check_end(partition, known, high)
        if 0 <= known < low:
            self._lose(partition, low - known)
        at = max(known, low) if known >= 0 else begin
        self.offsets.place(partition, at)
        if len(self.offsets.consumed) > PARTITIONS:
            raise SourceError(f"source {self.name!r}: more than {PARTITIONS} partitions")

    def _check_end(self, partition: int, known: int, high: int) -> None:
        """Raise SourceError if a partition ends before the messages that were consumed."""
        if known > high:
            raise SourceError(
                f"source {self.name!r}: partition {partition} of {self.topic!r} ends at {high}, "
                f"and {known} were consumed: the topic was deleted and created again. "
                "Consume it under another group and producer name"
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
            SourceError: the topic was deleted and created again.
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
                if (consumed := self.offsets.consumed.get(one.partition)) is not None
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
                lambda: ready.stopped.is_set() or self.offsets.settled(revoked), ASK_SECONDS
            )
        if (safe := self._storable(partitions)) and not ready.stopped.is_set():
            try:  # before the automatic commit, since the next member may ask sooner
                consumer.commit(offsets=safe, asynchronous=False)
            except KafkaException as error:  # the group excluded us: sent twice, under one id
                log.warning("source %s: offsets not committed: %s", self.name, error)
        with ready.changed:
            self.offsets.forget(revoked)

    def _places(self, offsets: Iterable[tuple[int, int]]) -> list[TopicPartition]:
        from confluent_kafka import TopicPartition

        return [TopicPartition(self.topic, partition, at) for partition, at in offsets]

    def _behind(self, consumer: Consumer) -> int | None:
        behind = 0
        for one in consumer.assignment():
            _, high = consumer.get_watermark_offsets(one, cached=True)
            if high < 0 or one.partition not in self.offsets.consumed:
                return None
            behind += max(0, high - self.offsets.consumed[one.partition])
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
            return self._places(self.offsets.to_commit(one.partition for one in partitions))

    def _failed(self, error: KafkaError) -> None:
        """Handle an error of a broker or librdkafka: end the source only if a retry cannot help."""
        if error.fatal() or error.name() in HOPELESS:
            text = f"source {self.name!r}: {error.name()}: {error.str()}"
            self._ready.fail(SourceError(text))
        else:
            text = f"source {self.name}: {error.name()}: {error.str()}"
            self._limited_log.warning(error.name(), text)
            if error.name() == "_ALL_BROKERS_DOWN":
                self._ready.begin()
