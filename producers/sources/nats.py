"""Images of a NATS JetStream stream (nats-py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.bounded_files import parse_json, read_text
from stream_ssl.producers.sources.acknowledged import UnreadableError, sample_of
from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, mark, place
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig, ConsumerInfo

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MISSING_SECONDS = 10.0  # beyond two redeliveries, until messages count as another client's
RETRY_SECONDS = 1
FETCH = 64  # messages asked for at a time
FETCH_SECONDS = 0.5
READY = 256  # messages that wait for the sender, above which no more are asked for
MAX_SEQUENCE = 2**62


class Nats:
    """Consumes a JetStream stream; messages are acknowledged once the receiver has them on disk.

    A message is a JPEG, PNG or WebP file. Its headers `id` (or `Nats-Msg-Id`), `time` (seconds
    since the Unix epoch) and `label` describe the sample, others and the subject become meta.
    Without them the id is STREAM-SEQUENCE and the time that of storing. What is no image is
    logged, counted in `skipped` and terminated.

    The durable consumer is this producer's alone, and is made where there is none. Samples go out
    in the order of the stream; a position is the sequence of the last one. What a run that was
    killed had not acknowledged, the server delivers again after `ack_wait`: it is waited for, and
    of that what the receiver has already is only acknowledged.

    Args:
        stream: the stream's name.
        durable: the name of the durable pull consumer.
        servers: URLs, with commas between: nats://HOST:4222, or tls://HOST:4222.
        subject: only messages of this subject, where the consumer is made; null: all.
        credentials: a .creds file, or JSON with "user" and "password", or with "token"; for its
            owner alone to read.
        tls_ca: certificates to trust in place of the system's.
        tls_certificate: this client's, with `tls_key`.
        tls_key: see tls_certificate.
        in_flight: messages that may be unacknowledged, where the consumer is made.
        ack_wait: seconds after which the server takes a consumer for dead and delivers again, where
            the consumer is made; renewed as long as this process lives.
        idle_seconds: end when nothing has come for this long; null: consume for ever.
        name: the source's name.

    Raises:
        ValueError: an argument breaks its rule.
        ModuleNotFoundError: nats-py is not installed: pip install 'stream-ssl[nats]'.
    """

    def __init__(
        self,
        stream: str,
        durable: str,
        servers: str = "nats://127.0.0.1:4222",
        subject: str | None = None,
        credentials: Path | None = None,
        tls_ca: Path | None = None,
        tls_certificate: Path | None = None,
        tls_key: Path | None = None,
        in_flight: int = 1024,
        ack_wait: float = 30.0,
        idle_seconds: float | None = None,
        name: str = "nats",
    ) -> None:
        import nats  # noqa: F401  # a machine without it is to say so at once

        for what, value in (
            ("in_flight", in_flight),
            ("ack_wait", ack_wait),
            ("idle_seconds", 1.0 if idle_seconds is None else idle_seconds),
        ):
            if not value > 0:
                raise ValueError(f"{what} {value}: must be above 0")
        if "@" in servers:
            raise ValueError(
                "servers: a password in a URL would stand in the process list; pass it in a file: "
                "credentials"
            )
        self.name = name
        self.skipped = Skipped(name)
        self._stream, self._durable, self._subject = stream, durable, subject
        self._in_flight, self._ack_wait, self._idle = in_flight, ack_wait, idle_seconds
        self._connection = {
            "servers": [server.strip() for server in servers.split(",")],
            **({} if credentials is None else secrets_of(Path(credentials))),
            **tls_of(servers, tls_ca, tls_certificate, tls_key),
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._client: Client | None = None
        self._opening: Future[tuple[JetStreamContext, str, int]] | None = None
        self._pulling: Future[None] | None = None
        # In the order of the stream: delivered to us and not acknowledged. The loop's own.
        self._in_hand: dict[int, Msg] = {}
        self._held: list[int] | None = None  # of these, what waits for older ones; None: none does
        self._last_delivery = 0  # the consumer's number of it
        self._safe = 0  # sequence up to which all is on the receiver's disk, ...
        self._target = 0  # ... and that which the loop is about to be told, ...
        self._telling = False  # ... if it is
        self._behind: int | None = None
        self._ready: deque[tuple[int, Msg]] = deque()
        self._changed = threading.Condition()
        self._room = asyncio.Event()
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`.

        Raises:
            SourceError: the server cannot be reached or refuses; while running, the consumer is
                gone, or another client takes from it.
        """
        self._thread.start()
        self._opening = self._call(self._open())
        if self._stopped.is_set():
            self._opening.cancel()
        try:
            js, created, last = self._opening.result()
        except CancelledError:
            return iter(())
        self._facts: Facts = {"source": self.name, "stream": self._stream, "created": created}
        (self._safe,) = place(position, self._facts, self.name, (MAX_SEQUENCE,))
        if self._safe > last:
            raise SourceError(
                f"source {self.name!r}: stream {self._stream!r} ends at {last}, and {self._safe} "
                "were consumed: the server has lost messages. Consume under another producer name"
            )
        self._pulling = self._call(self._pull(js))
        self._call(self._keep())
        return self._consumed()

    def acknowledged(self, position: Position) -> None:
        """Acknowledge all messages up to there."""
        self._target = position["at"][0]
        if not self._telling:
            self._telling = True
            with contextlib.suppress(RuntimeError):  # closed
                self._call(self._acknowledge())

    def lag(self) -> int | None:
        """Messages of the stream that were not sent; None: not known yet."""
        return None if self._behind is None else self._behind + len(self._ready)

    def stop(self) -> None:
        """From any thread: `samples` ends at once."""
        self._stopped.set()
        if self._opening is not None:
            self._opening.cancel()  # without effect once it is done
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Hand back what was not acknowledged, and disconnect."""
        self.stop()
        if self._thread.is_alive():
            with contextlib.suppress(Exception):  # the server is away: it delivers again anyway
                self._call(self._part()).result(CONNECT_SECONDS)
            self._call(end_of_tasks()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # In the caller's thread

    def _call(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop.is_closed():
            what.close()
            raise RuntimeError("closed")
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _consumed(self) -> Iterator[tuple[Sample, Position]]:
        while (taken := self._take()) is not None:
            sequence, message = taken
            try:
                sample = self._sample(sequence, message)
            except UnreadableError as error:
                self.skipped.note(error.reason, f"message {sequence} of {self._stream}", error)
                self._call(self._terminate(sequence))
                continue
            yield sample, mark([sequence], self._facts)
        log.info("source %s was stopped; %s", self.name, self.skipped)

    def _take(self) -> tuple[int, Msg] | None:
        """The next message in order; None once stopped, or idle for long enough."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._ready or self._error or self._stopped.is_set(), self._idle
            )
            if self._stopped.is_set() or not came:
                return None
            if not self._ready:
                assert self._error is not None
                raise self._error
            taken = self._ready.popleft()
        if len(self._ready) < READY // 2:
            self._loop.call_soon_threadsafe(self._room.set)
        return taken

    def _sample(self, sequence: int, message: Msg) -> Sample:
        headers = dict(message.headers or {})
        id_ = headers.pop("Nats-Msg-Id", None)
        if id_ is not None:
            headers.setdefault("id", id_)
        return sample_of(
            message.data,
            headers,
            f"{self._stream}-{sequence}",
            message.metadata.timestamp.timestamp(),
            self.name,
            subject=message.subject,
        )

    # In the loop's thread

    async def _open(self) -> tuple[JetStreamContext, str, int]:
        """Connect, find or make the consumer; also when the stream was created, and its end."""
        told: list[Exception] = []
        try:
            js = await self._connect(told)
            stream = await js.stream_info(self._stream)
            consumer = await self._find_consumer(js)
        except Exception as error:  # nats-py raises many kinds
            cause = told[0] if told and isinstance(error, OSError) else error
            why = str(cause) or type(cause).__name__
            raise SourceError(f"source {self.name!r}: stream {self._stream!r}: {why}") from None
        self._check(consumer.config)
        self._ack_wait = consumer.config.ack_wait or self._ack_wait
        if consumer.num_ack_pending:
            self._hold(f"{consumer.num_ack_pending} messages were delivered to an earlier run")
        log.info("source %s: connected; %d messages wait", self.name, consumer.num_pending)
        return js, str(stream.created), stream.state.last_seq

    async def _connect(self, told: list[Exception]) -> JetStreamContext:
        """Connected within CONNECT_SECONDS; `told` holds the client's last error meanwhile."""
        from nats.aio.client import Client

        async def failed(error: Exception) -> None:
            if not (told and isinstance(error, OSError)):  # what the server said tells more
                told[:] = [error]
            if not self._stopped.is_set():  # a connection that is cut by our own close is no news
                log.warning("source %s: %s", self.name, error or type(error).__name__)

        async def reconnected() -> None:
            log.info("source %s: connected again", self.name)

        self._client = Client()
        connecting = self._client.connect(
            **self._connection,
            name=f"stream-ssl {self.name}",
            error_cb=failed,
            reconnected_cb=reconnected,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RETRY_SECONDS,
        )
        await asyncio.wait_for(connecting, CONNECT_SECONDS)
        return self._client.jetstream()

    async def _find_consumer(self, js: JetStreamContext) -> ConsumerInfo:
        """The durable consumer, made where there is none."""
        from nats.js.api import AckPolicy, ConsumerConfig
        from nats.js.errors import NotFoundError

        try:
            found: ConsumerInfo = await js.consumer_info(self._stream, self._durable)
        except NotFoundError:
            wanted = ConsumerConfig(
                durable_name=self._durable,
                filter_subject=self._subject,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._ack_wait,
                max_ack_pending=self._in_flight,
                max_deliver=-1,
            )
            found = await js.add_consumer(self._stream, wanted)
        return found

    def _check(self, config: ConsumerConfig) -> None:
        """Refuse a consumer that would lose messages."""
        from nats.js.api import AckPolicy

        if config.ack_policy != AckPolicy.EXPLICIT or config.deliver_subject:
            raise SourceError(
                f"source {self.name!r}: consumer {self._durable!r} must be a pull consumer with "
                "explicit acknowledgement; name another one, which is made so"
            )
        if (config.max_deliver or -1) > 0:
            raise SourceError(
                f"source {self.name!r}: consumer {self._durable!r} gives a message up after "
                f"{config.max_deliver} deliveries (max_deliver), and restarts would lose some; "
                "name another one, which is made without"
            )

    async def _pull(self, js: JetStreamContext) -> None:
        from nats.errors import Error
        from nats.js.errors import NotFoundError

        try:
            subscription = await js.pull_subscribe_bind(durable=self._durable, stream=self._stream)
            while not self._stopped.is_set():
                while len(self._ready) >= READY and not self._stopped.is_set():
                    self._room.clear()
                    await self._room.wait()
                try:
                    messages = await subscription.fetch(FETCH, timeout=FETCH_SECONDS)
                except TimeoutError:
                    messages = []
                except Error as error:
                    log.warning("source %s: %s; trying again", self.name, error)
                    await asyncio.sleep(RETRY_SECONDS)
                    messages = []
                for message in messages:
                    await self._arrived(message)
                if self._held is not None or not messages:
                    await self._look(js)
        except NotFoundError:
            self._end(f"consumer {self._durable!r} or stream {self._stream!r} was deleted")
        except Exception as error:  # in this thread nobody would hear of it
            self._end(str(error) or type(error).__name__)

    def _end(self, why: str) -> None:
        with self._changed:
            self._error = SourceError(f"source {self.name!r}: {why}")
            self._changed.notify()

    async def _arrived(self, message: Msg) -> None:
        sequence, delivery = message.metadata.sequence.stream, message.metadata.sequence.consumer
        self._behind = message.metadata.num_pending
        if self._last_delivery and delivery != self._last_delivery + 1 and self._held is None:
            self._hold("a delivery was lost on its way")
        self._last_delivery = delivery
        if sequence <= self._safe:
            await message.ack()
            return
        known = sequence in self._in_hand  # the server did not hear in time that it is
        self._in_hand[sequence] = message
        if known:
            return
        if self._held is None:
            self._hand_over([sequence])
        else:
            self._held.append(sequence)

    def _hold(self, why: str) -> None:
        """Hand nothing over until the server has delivered again what is older."""
        log.info("source %s: %s; it is waited for, %g s at most", self.name, why, self._ack_wait)
        self._held, self._held_since = [], time.monotonic()

    async def _look(self, js: JetStreamContext) -> None:
        """Hand over what is held once all that the server thinks delivered is in our hands."""
        from nats.errors import Error
        from nats.js.errors import NotFoundError

        try:
            pending = (await js.consumer_info(self._stream, self._durable)).num_ack_pending or 0
        except NotFoundError:
            raise
        except Error:  # it is away
            return
        missing = pending - len(self._in_hand)
        if self._held is None:
            return
        if missing <= 0:
            held, self._held = sorted(self._held), None
            self._hand_over(held)
        elif time.monotonic() - self._held_since > 2 * self._ack_wait + MISSING_SECONDS:
            raise SourceError(
                f"{missing} messages do not come: another client takes from consumer "
                f"{self._durable!r}; give each producer one of its own"
            )

    def _hand_over(self, sequences: list[int]) -> None:
        with self._changed:
            self._ready.extend((one, self._in_hand[one]) for one in sequences)
            self._changed.notify()

    async def _acknowledge(self) -> None:
        self._telling = False
        self._safe = max(self._safe, self._target)
        for sequence in [one for one in self._in_hand if one <= self._safe]:
            await self._in_hand.pop(sequence).ack()

    async def _terminate(self, sequence: int) -> None:
        await self._in_hand.pop(sequence).term()

    async def _keep(self) -> None:
        """Tell the server, before `ack_wait` is over, that what we hold is in good hands."""
        while True:
            await asyncio.sleep(self._ack_wait / 3)
            for message in list(self._in_hand.values()):
                with contextlib.suppress(Exception):  # acknowledged meanwhile; disconnected
                    await message.in_progress()

    async def _part(self) -> None:
        client = self._client
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
    """All other tasks of this loop have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def secrets_of(path: Path) -> dict[str, Any]:
    """How to authenticate, by a .creds file or JSON.

    Raises:
        ValueError: the file is missing, others may read it, or it is neither; never with a secret.
    """
    try:
        mode, text = path.stat().st_mode, read_text(path, links=True)
    except OSError as error:
        raise ValueError(f"credentials {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"credentials {error}") from None
    if mode & 0o007:
        raise ValueError(
            f"credentials {path}: everybody may read this secret (mode {mode & 0o777:04o}); "
            f"run: chmod 600 {path}"
        )
    if "BEGIN NATS USER JWT" in text:
        return {"user_credentials": str(path)}
    with contextlib.suppress(ValueError):
        fields = parse_json(text)
        if isinstance(fields, dict) and set(fields) in ({"user", "password"}, {"token"}):
            return fields
    raise ValueError(
        f"credentials {path}: must be a .creds file, or JSON with user and password, or with token"
    )


def tls_of(
    servers: str, ca: Path | None, certificate: Path | None, key: Path | None
) -> dict[str, Any]:
    """The TLS context, where TLS is asked for.

    Raises:
        ValueError: a file cannot be used, or only one of certificate and key is given.
    """
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate and tls_key belong together: pass both")
    if not (ca or certificate or "tls://" in servers):
        return {}
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"TLS files {ca}, {certificate}, {key}: {error}") from None
    return {"tls": context}
