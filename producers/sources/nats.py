"""A source that consumes images from a NATS JetStream stream (nats-py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.producers.sources.acknowledged import sample_of
from stream_ssl.producers.sources.arrived import ArrivedMessages
from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, mark, place
from stream_ssl.producers.sources.nats_consumer import (
    CONNECT_SECONDS,
    LOG_SECONDS,
    RETRY_SECONDS,
    ConsumerSettings,
    DurableConsumer,
    TlsFiles,
    secrets_of,
    tls_arguments,
)
from stream_ssl.producers.sources.ranges import check_above_0
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)

MISSING_SECONDS = 10.0  # after two redeliveries, until another client is suspected
FETCH = 64  # messages per fetch
FETCH_SECONDS = 0.5
READY = 256  # messages waiting for the sender; at this number, no more are fetched
MAX_SEQUENCE = 2**62


class Nats:
    """Images of a JetStream stream, acknowledged once the receiver has stored them.

    A message is a JPEG, PNG or WebP file. The headers `id` (or `Nats-Msg-Id`), `time` (seconds
    since the Unix epoch) and `label` describe the sample. Other headers and the subject become
    meta. Without these headers, the id is STREAM-SEQUENCE and the time is when the server stored
    the message. A header `time` or `label` that cannot be read is counted, and left out alone. A
    message that is not an image is logged, counted in `skipped` and terminated.

    The durable consumer must belong to this producer alone. It is created if it does not exist.
    Samples are sent in stream order, and a position is the sequence number of the last sample.
    After a crash, the server redelivers the unacknowledged messages when `ack_wait` has passed. The
    source waits for them, and only acknowledges those that the receiver already has.

    Args:
        stream: the stream's name.
        durable: the name of the durable pull consumer.
        servers: URLs, separated by commas: nats://HOST:4222 or tls://HOST:4222.
        subject: consume only this subject; null: all. Used only when the consumer is created.
        credentials: a .creds file, or JSON with "user" and "password", or with "token". Other users
            must not be able to read the file. It is read again after an error of the connection.
        in_flight: maximum number of unacknowledged messages. Used only when the consumer is
            created.
        ack_wait: seconds without a sign of life after which the server redelivers messages. This
            process renews the time while it runs. Used only when the consumer is created.
        idle_seconds: end after this many seconds without a message; null: consume for ever.
        name: the source's name.
        tls: the arguments of `TlsFiles`: `tls_ca`, `tls_certificate` and `tls_key`.

    Raises:
        ValueError: an argument is invalid.
        ModuleNotFoundError: nats-py is not installed: pip install 'stream-ssl[nats]'.
    """

    def __init__(
        self,
        stream: str,
        durable: str,
        servers: str = "nats://127.0.0.1:4222",
        subject: str | None = None,
        credentials: Path | None = None,
        in_flight: int = 1024,
        ack_wait: float = 30.0,
        idle_seconds: float | None = None,
        name: str = "nats",
        **tls: Any,
    ) -> None:
        import nats  # noqa: F401  # fail early if it is not installed

        files = TlsFiles(**tls)  # in a statement of its own, where jsonargparse finds the class
        check_above_0(in_flight=in_flight, ack_wait=ack_wait, idle_seconds=idle_seconds)
        if "@" in servers:
            raise ValueError(
                "servers: the process list would show a password in a URL; pass it in a file: "
                "credentials"
            )
        self.name = name
        self.skipped = Skipped(name)
        self._stream, self._durable = stream, durable
        self._ack_wait = ack_wait
        connection = {
            "servers": [server.strip() for server in servers.split(",")],
            **tls_arguments(servers, files),
        }
        settings = ConsumerSettings(stream, durable, subject, in_flight, ack_wait)
        secrets = partial(secrets_of, None if credentials is None else Path(credentials))
        self._consumer = DurableConsumer(name, connection, secrets, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._opening: Future[tuple[JetStreamContext, str, int]] | None = None
        self._pulling: Future[None] | None = None
        # Delivered and unacknowledged messages by sequence; only the loop's thread uses this dict.
        self._in_hand: dict[int, Msg] = {}
        self._held: list[int] | None = None  # sequences that wait for older ones; None: not held
        self._held_since = 0.0
        self._last_delivery = 0  # the consumer's delivery number
        self._safe = 0  # sequence up to which all samples are on the receiver's disk
        self._target = 0  # sequence that the loop will acknowledge next
        self._telling = False  # whether an acknowledgement is scheduled
        self._behind: int | None = None
        self._facts: Facts = {}
        self._ready: ArrivedMessages[tuple[int, Msg]] = ArrivedMessages(idle_seconds)
        self._room = asyncio.Event()
        self._limited_log = RateLimitedLogger(log, LOG_SECONDS)

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`.

        Raises:
            SourceError: the server cannot be reached or rejects the connection. During iteration:
                the consumer was deleted, or another client consumes its messages.
        """
        self._thread.start()
        self._opening = self._call(self._open())
        if self._ready.stopped.is_set():
            self._opening.cancel()
        try:
            js, created, last = self._opening.result()
        except CancelledError:
            return iter(())
        self._facts = {"source": self.name, "stream": self._stream, "created": created}
        (self._safe,) = place(position, self._facts, self.name, (MAX_SEQUENCE,))
        if self._safe > last:
            raise SourceError(
                f"source {self.name!r}: stream {self._stream!r} ends at {last}, and {self._safe} "
                "were consumed: the server has lost messages. Consume under another producer name"
            )
        self._ready.restart()
        self._pulling = self._call(self._pull(js))
        self._call(self._keep())
        return self._consumed()

    def acknowledged(self, position: Position) -> None:
        """Acknowledge all messages up to `position`."""
        self._target = position["at"][0]
        if not self._telling:
            self._telling = True
            with contextlib.suppress(RuntimeError):  # closed
                self._call(self._acknowledge())

    def lag(self) -> int | None:
        """Return how many messages of the stream were not sent yet; None: unknown."""
        return None if self._behind is None else self._behind + len(self._ready)

    def stop(self) -> None:
        """End `samples` immediately. Thread-safe."""
        self._ready.stop()
        self._consumer.closing = True
        if self._opening is not None:
            self._opening.cancel()  # no effect if it is done

    def close(self) -> None:
        """Hand unacknowledged messages back to the server, and disconnect."""
        self.stop()
        if self._thread.is_alive():
            with contextlib.suppress(Exception):  # an absent server redelivers anyway
                self._call(self._part()).result(CONNECT_SECONDS)
            self._call(end_of_tasks()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # Methods of the caller's thread

    def _call(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop.is_closed():
            what.close()
            raise RuntimeError("closed")
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _consumed(self) -> Iterator[tuple[Sample, Position]]:
        while (taken := self._ready.take()) is not None:
            sequence, message = taken
            if len(self._ready) < READY // 2:
                self._loop.call_soon_threadsafe(self._room.set)
            sample = self._sample(sequence, message)
            if sample is None:
                self._call(self._terminate(sequence))
            else:
                yield sample, mark([sequence], self._facts)
        self.skipped.tell_end(self._ready.stopped)

    def _sample(self, sequence: int, message: Msg) -> Sample | None:
        headers = dict(message.headers or {})
        id_ = headers.pop("Nats-Msg-Id", None)
        if id_ is not None:
            headers.setdefault("id", id_)
        return sample_of(
            message.data,
            headers,
            f"{self._stream}-{sequence}",
            message.metadata.timestamp.timestamp(),
            self.skipped,
            subject=message.subject,
        )

    # Methods of the loop's thread

    async def _open(self) -> tuple[JetStreamContext, str, int]:
        """Connect; return the context, and the stream's creation time and end."""
        js, consumer, created, last = await self._consumer.open()
        self._ack_wait = consumer.config.ack_wait or self._ack_wait
        if consumer.num_ack_pending:
            self._hold(f"{consumer.num_ack_pending} messages were delivered to an earlier run")
        return js, created, last

    async def _pull(self, js: JetStreamContext) -> None:
        from nats.errors import Error
        from nats.js.errors import NotFoundError

        try:
            subscription = await js.pull_subscribe_bind(durable=self._durable, stream=self._stream)
            while not self._ready.stopped.is_set():
                while len(self._ready) >= READY and not self._ready.stopped.is_set():
                    self._room.clear()
                    await self._room.wait()
                try:
                    messages = await subscription.fetch(FETCH, timeout=FETCH_SECONDS)
                except TimeoutError:
                    messages = []
                except Error as error:
                    text = f"source {self.name}: {error}; trying again"
                    self._limited_log.warning(type(error).__name__, text)
                    await asyncio.sleep(RETRY_SECONDS)
                    messages = []
                for message in messages:
                    await self._arrived(message)
                if self._held is not None or not messages:
                    await self._look(js)
        except NotFoundError:
            self._end(f"consumer {self._durable!r} or stream {self._stream!r} was deleted")
        except Exception as error:  # passed on to the caller's thread
            self._end(str(error) or type(error).__name__)

    def _end(self, why: str) -> None:
        self._ready.fail(SourceError(f"source {self.name!r}: {why}"))

    async def _arrived(self, message: Msg) -> None:
        sequence, delivery = message.metadata.sequence.stream, message.metadata.sequence.consumer
        self._behind = message.metadata.num_pending
        if self._last_delivery and delivery != self._last_delivery + 1 and self._held is None:
            self._hold("a delivery was lost on its way")
        self._last_delivery = delivery
        if sequence <= self._safe:
            await message.ack()
            return
        known = sequence in self._in_hand  # redelivered: the renewal came too late
        self._in_hand[sequence] = message
        if known:
            return
        if self._held is None:
            self._ready.put([(sequence, message)])
        else:
            self._held.append(sequence)

    def _hold(self, why: str) -> None:
        """Hold back new messages until the server has redelivered the older ones."""
        text = f"source {self.name}: {why}; waiting up to {self._ack_wait:g} s for a redelivery"
        self._limited_log.log(logging.INFO, "hold", text)
        self._held, self._held_since = [], time.monotonic()

    async def _look(self, js: JetStreamContext) -> None:
        """Hand over the held messages once all messages that the server delivered are here."""
        from nats.errors import Error
        from nats.js.errors import NotFoundError

        try:
            pending = (await js.consumer_info(self._stream, self._durable)).num_ack_pending or 0
        except NotFoundError:
            raise
        except Error:  # the server is away
            return
        missing = pending - len(self._in_hand)
        if self._held is None:
            return
        if missing <= 0:
            held, self._held = sorted(self._held), None
            self._ready.put([(one, self._in_hand[one]) for one in held])
        elif time.monotonic() - self._held_since > 2 * self._ack_wait + MISSING_SECONDS:
            raise SourceError(
                f"{missing} messages do not come: another client takes from consumer "
                f"{self._durable!r}; give each producer one of its own"
            )

    async def _acknowledge(self) -> None:
        self._telling = False
        self._safe = max(self._safe, self._target)
        for sequence in [one for one in self._in_hand if one <= self._safe]:
            await self._in_hand.pop(sequence).ack()

    async def _terminate(self, sequence: int) -> None:
        await self._in_hand.pop(sequence).term()

    async def _keep(self) -> None:
        """Renew the `ack_wait` of the messages in hand, three times per period."""
        while True:
            await asyncio.sleep(self._ack_wait / 3)
            for message in list(self._in_hand.values()):
                with contextlib.suppress(Exception):  # acknowledged meanwhile, or disconnected
                    await message.in_progress()

    async def _part(self) -> None:
        client = self._consumer.client
        if client is not None and client.is_connected:
            if self._pulling is not None:
                self._room.set()
                await asyncio.wrap_future(self._pulling)
            for message in self._in_hand.values():
                await message.nak()
            await client.flush()
        if client is not None:
            await client.close()


async def end_of_tasks() -> None:
    """Cancel all other tasks of this loop, and wait for their end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
