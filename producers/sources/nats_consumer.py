"""The connection to a NATS server, with the durable consumer that delivers a stream's messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.bounded_files import check_private, named, parse_json, read_text
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.tls import tls_context
from stream_ssl.rate_limited_logger import RateLimitedLogger

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig, ConsumerInfo

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
RETRY_SECONDS = 1
LOG_SECONDS = 30.0  # for one line about each kind of event
NO_SECRETS: dict[str, Any] = dict.fromkeys(("user", "password", "token"))  # of the client's options


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """A durable pull consumer, with the settings for its creation; see `Nats`."""

    stream: str
    durable: str
    subject: str | None
    in_flight: int
    ack_wait: float


class DurableConsumer:
    """A durable pull consumer of a stream. All methods run in one event loop.

    Args:
        name: the source's name.
        connection: the arguments of `connect` of nats-py's client.
        secrets: returns the further arguments that authenticate the client. It is called again
            after each error of the connection.
        settings: the consumer, which is created if it does not exist.

    Attributes:
        client: the client; None before `open`.
        closing: whether the connection is closed on purpose, so that its end is no error.
    """

    def __init__(
        self,
        name: str,
        connection: dict[str, Any],
        secrets: Callable[[], dict[str, Any]],
        settings: ConsumerSettings,
    ) -> None:
        self.client: Client | None = None
        self.closing = False
        self._name, self._settings = name, settings
        self._connection, self._secrets = {**connection, **secrets()}, secrets
        self._limited_log = RateLimitedLogger(log, LOG_SECONDS)

    async def open(self) -> tuple[JetStreamContext, ConsumerInfo, str, int]:
        """Connect; return context, consumer, and the stream's creation time and last number.

        Raises:
            SourceError: the server cannot be reached or rejects the connection, or the consumer's
                settings would lose messages.
        """
        last: list[Exception] = []
        try:
            js = await self._connect(last)
            stream = await js.stream_info(self._settings.stream)
            consumer = await self._find(js)
        except Exception as error:  # nats-py raises many types
            cause = last[0] if last and isinstance(error, OSError) else error
            why = str(cause) or type(cause).__name__
            raise SourceError(
                f"source {self._name!r}: stream {self._settings.stream!r}: {why}"
            ) from None
        self._check(consumer.config)
        log.info("source %s: connected; %d messages wait", self._name, consumer.num_pending)
        return js, consumer, str(stream.created), stream.state.last_seq

    async def _connect(self, last: list[Exception]) -> JetStreamContext:
        """Connect within CONNECT_SECONDS, and keep the client's last error in `last` meanwhile."""
        from nats.aio.client import Client

        async def failed(error: Exception) -> None:
            if not (last and isinstance(error, OSError)):  # the server's message is more specific
                last[:] = [error]
            if not self.closing:
                kind = type(error).__name__
                self._limited_log.warning(kind, f"source {self._name}: {str(error) or kind}")
                with contextlib.suppress(OSError, ValueError):  # the file is being replaced
                    client.options.update(NO_SECRETS | self._secrets())

        async def reconnected() -> None:
            text = f"source {self._name}: connected again"
            self._limited_log.log(logging.INFO, "connected", text)

        self.client = client = Client()
        connecting = client.connect(
            **self._connection,
            name=f"stream-ssl {self._name}",
            error_cb=failed,
            reconnected_cb=reconnected,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RETRY_SECONDS,
        )
        await asyncio.wait_for(connecting, CONNECT_SECONDS)
        return client.jetstream()

    async def _find(self, js: JetStreamContext) -> ConsumerInfo:
        """Return the durable consumer; create it if it does not exist."""
        from nats.js.api import AckPolicy, ConsumerConfig
        from nats.js.errors import NotFoundError

        settings = self._settings
        try:
            found: ConsumerInfo = await js.consumer_info(settings.stream, settings.durable)
        except NotFoundError:
            wanted = ConsumerConfig(
                durable_name=settings.durable,
                filter_subject=settings.subject,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=settings.ack_wait,
                max_ack_pending=settings.in_flight,
                max_deliver=-1,
            )
            found = await js.add_consumer(settings.stream, wanted)
        return found

    def _check(self, config: ConsumerConfig) -> None:
        """Raise SourceError if the consumer's settings would lose messages."""
        from nats.js.api import AckPolicy

        durable = self._settings.durable
        if config.ack_policy != AckPolicy.EXPLICIT or config.deliver_subject:
            raise SourceError(
                f"source {self._name!r}: consumer {durable!r} must be a pull consumer with "
                "explicit acknowledgement; name a consumer that does not exist, and this source "
                "creates it"
            )
        if config.headers_only:
            raise SourceError(
                f"source {self._name!r}: consumer {durable!r} delivers no images (headers_only), "
                "and this source would terminate all messages; name a consumer that does not "
                "exist, and this source creates it"
            )
        if (config.max_deliver or -1) > 0:
            raise SourceError(
                f"source {self._name!r}: consumer {durable!r} gives a message up after "
                f"{config.max_deliver} deliveries (max_deliver), and restarts would lose some; "
                "name a consumer that does not exist, and this source creates it without a limit"
            )


def secrets_of(path: Path | None) -> dict[str, Any]:
    """Return the authentication arguments from a .creds file or JSON; none for no file.

    Raises:
        ValueError: the file is missing, everyone may read it, or its format is wrong. The message
            never contains a secret.
    """
    if path is None:
        return {}
    with named("credentials", path):
        text = read_text(path, links=True)
    check_private("credentials", path)
    if "BEGIN NATS USER JWT" in text:
        return {"user_credentials": str(path)}
    with contextlib.suppress(ValueError):
        fields = parse_json(text)
        if isinstance(fields, dict) and set(fields) in ({"user", "password"}, {"token"}):
            return fields
    raise ValueError(
        f"credentials {path}: must be a .creds file, or JSON with user and password, or with token"
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a TLS connection.

    Args:
        tls_ca: file of trusted certificates, instead of the system's.
        tls_certificate: client certificate, used with `tls_key`.
        tls_key: private key of `tls_certificate`.
    """

    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None


def tls_arguments(servers: str, files: TlsFiles) -> dict[str, Any]:
    """Return the TLS context as connection arguments; empty if no argument asks for TLS.

    Raises:
        ValueError: a file cannot be used, or only one of certificate and key is given.
    """
    ca, certificate, key = files.tls_ca, files.tls_certificate, files.tls_key
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate and tls_key belong together: pass both")
    if not (ca or certificate or "tls://" in servers):
        return {}
    context = tls_context("tls_ca", ca)
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # includes ssl.SSLError
            raise ValueError(
                f"tls_certificate {certificate}, tls_key {key}: {error.strerror}; give PEM files "
                "of one key pair"
            ) from None
    return {"tls": context}
