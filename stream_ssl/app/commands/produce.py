"""stream-ssl produce: send a source's samples to a receiver. Needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import Namespace

from stream_ssl.config.file_faults import check_files
from stream_ssl.config.help import summary
from stream_ssl.config.parser import Parser
from stream_ssl.process.failures import Failure, configuring, reported
from stream_ssl.process.signals import stop_on_signals
from stream_ssl.producers import Producer
from stream_ssl.producers.errors import (
    BufferFullError,
    CannotConnectError,
    DeadlineError,
    ProducerError,
    SampleTooLargeError,
)
from stream_ssl.producers.shaping import Continual, Parked, Popularity, Shaped, Shift, Stalls, Video
from stream_ssl.producers.sources import SOURCES, Source
from stream_ssl.producers.sources.acknowledged import Acknowledged, Deliveries, Expected
from stream_ssl.producers.sources.base import Skipped, SourceError
from stream_ssl.producers.sources.live import Live
from stream_ssl.producers.sources.outside import build_source, find_source, listed
from stream_ssl.wire import Position, Sample, Welcome
from stream_ssl.wire.sample import MAX_SOURCE_BYTES, check_text, short

log = logging.getLogger("stream_ssl.produce")

REPORT_SECONDS = 5.0
STOP_SECONDS = 20.0
"""Longest time in seconds that a flush may take once a stop is requested."""
STALL_SECONDS = 1.0
"""Seconds without an acknowledgement after which a flush gives up, once a stop is requested."""
SOURCE_SECONDS = 5.0
"""Seconds from a stop request until the log says that the source has not stopped."""
SPOOL_PATIENCE = 3.0
"""Seconds to wait for the receiver before a live source begins to fill its spool."""
BROKER_SECONDS = 1.5
"""Seconds to wait for a broker to take the last acknowledgements once a stop is requested."""
OWN = {
    *("address", "run", "name", "keys", "server_key", "source", "takeover", "before", "abandon"),
    *("on_rejected", "on_state", "on_stats", "stats_seconds", "exit_timeout"),
}
"""Arguments of Producer that have another name on the command line, or no option there."""
WRAPPERS: dict[str, tuple[Callable[..., Source], str]] = {
    "shift": (Shift, "period"),
    "popularity": (Popularity, "images"),
    "video": (Video, "frames"),
    "stalls": (Stalls, "rate"),
    "parked": (Parked, "share"),
}
"""Wrappers by section, the innermost first, each with the option that turns it on (0: off)."""


def main(arguments: Sequence[str]) -> int:
    """Send until the source ends or SIGTERM arrives. Then wait for all acknowledgements."""
    names = argparse.ArgumentParser(
        prog="stream-ssl produce",
        usage="stream-ssl produce SOURCE (--run FOLDER | --to ADDRESS) --name NAME [OPTIONS]",
        description=(
            "Send a source to a receiver. A producer that was stopped continues under the "
            "same name where the receiver's journal ends."
        ),
        epilog="stream-ssl produce SOURCE --help lists a source's options.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    lines = [f"{name:<11} {summary(cls)}" for name, cls in SOURCES.items()]
    lines += [f"{name:<11} {entry.value}" for name, entry in listed().items()]
    lines.append("or the path of your own class, such as my_package.sources.Mine")
    names.add_argument("source", metavar="SOURCE", help="\n".join(lines))
    chosen = names.parse_args(list(arguments[:1]))
    try:
        cls = find_source(chosen.source)
    except ValueError as error:
        names.error(str(error))
    parser = source_parser(chosen.source)
    check_files(parser, arguments[1:])
    settings = parser.parse_args(list(arguments[1:]))
    if (settings.run is None) == (not settings.to):
        given = "neither is" if settings.run is None else "both are"
        parser.error(
            "give either --run FOLDER, the run's folder on this machine, or --to ADDRESS: "
            f"{given} given"
        )
    named = parser.parse_args(list(arguments[1:]), defaults=False)
    return reported(lambda: produce(settings, cls, named))


def source_parser(name: str) -> Parser:
    """Return the parser of one source's options, with those of shaping and of the producer."""
    cls = find_source(name)
    parser = Parser(
        prog=f"stream-ssl produce {name}",
        usage=f"stream-ssl produce {name} (--run FOLDER | --to ADDRESS) --name NAME [OPTIONS]",
        description=summary(cls),
    )
    parser.add_argument("--config", action="config", help="YAML file with these options")
    parser.add_argument(
        "--run",
        type=Path | None,
        default=None,
        help="folder of a run on this machine; it contains the receiver's address and the keys",
    )
    parser.add_argument(
        "--to",
        default="",
        help=(
            "address of the receiver, as tcp://HOST:PORT, instead of --run; in a list "
            "with commas, the producer's name selects one"
        ),
    )
    parser.add_argument(
        "--before",
        default="",
        help=(
            "value of --to before the list was changed; if it selects another receiver, "
            "the producer first asks that receiver which samples it has "
            "(docs/producers.md)"
        ),
    )
    parser.add_argument(
        "--abandon",
        action="store_true",
        help="do not ask the former receiver, because it no longer exists",
    )
    parser.add_argument(
        "--name", required=True, help="name of this producer; unique, and the same after a restart"
    )
    parser.add_argument(
        "--key",
        type=Path | None,
        default=None,
        help="this producer's NAME.secret.json; with --run, it replaces the run's own key",
    )
    parser.add_argument(
        "--server_key", type=Path | None, default=None, help="the receiver's NAME.public.json"
    )
    parser.add_argument(
        "--connect_seconds",
        type=float,
        default=30.0,
        help=(
            "seconds after which the command gives up if no receiver answers; a live source "
            "with a spool starts without one"
        ),
    )
    parser.add_argument(
        "--takeover", action="store_true", help="disconnect a running producer of the same name"
    )
    parser.add_class_arguments(cls, "source", instantiate=False)
    parser.add_class_arguments(Continual, "continual", skip={"source"}, instantiate=False)
    for section, (wrapper, switch) in WRAPPERS.items():
        parser.add_class_arguments(wrapper, section, skip={"source"}, instantiate=False)
        parser.set_defaults({f"{section}.{switch}": 0})
        option = next(one for one in parser._actions if one.dest == f"{section}.{switch}")
        option.help = f"{option.help} 0: off"
    parser.add_class_arguments(Shaped, "shape", skip={"source"}, instantiate=False)
    parser.add_class_arguments(Producer, "producer", skip=OWN, instantiate=False)
    return parser


def produce(settings: Namespace, cls: Callable[..., Source], given: Namespace) -> None:
    """Send a source until it ends or SIGTERM arrives.

    `settings` has all options, and `given` only the options that the user named.
    """
    with configuring():
        # A source may list a million files here, so a signal still ends the process at once.
        # A class without arguments has no section of options.
        origin = build_source(cls, settings.get("source") or {})
        check_text("--source.name", origin.name, MAX_SOURCE_BYTES)  # may be the folder's name
        stop = stop_on_signals()
        broker = origin if isinstance(origin, Acknowledged) else None
        source = Shaped(stream(origin, settings, given), **settings.shape)
        if broker is not None:
            _check_broker(settings, source, broker)
        sporadic = settings.producer.sporadic or getattr(origin, "sporadic", False)
        producer = Producer(
            settings.to.split(",") if settings.to else None,
            settings.name,
            run=settings.run,
            before=[one for one in settings.before.split(",") if one],
            abandon=settings.abandon,
            keys=settings.key,
            server_key=settings.server_key,
            takeover=settings.takeover,
            on_rejected=lambda rejection: log.warning(
                "the receiver refused permanently: %s", rejection
            ),
            **{**settings.producer, "sporadic": sporadic},
        )
    try:
        with producer:
            spools = isinstance(origin, Live) and settings.producer.on_full == "spool"
            send_all(source, producer, settings.connect_seconds, stop, broker, spools)
            producer.close(ended=not stop.is_set())
    except ProducerError as error:
        raise Failure(f"producer {settings.name!r}: {error}") from error
    except SourceError as error:
        raise Failure(str(error)) from error
    finally:
        if broker is not None:  # after the producer's last callback
            close_broker(broker, stop)


def stream(source: Source, settings: Namespace, given: Namespace) -> Source:
    """Return the source, divided into tasks or wrapped as the options ask.

    `settings` has all options, and `given` only the options that the user named.

    Raises:
        ValueError: an option belongs to a wrapper that is off.
    """
    if settings.continual.kind != "keep" or settings.continual.imbalance > 1:
        source = tasks = Continual(source, **settings.continual)
        log.info("%s: the tasks have the classes %s", tasks.kind, tasks.tasks)
    else:
        _refuse(given, "continual", "--continual.kind or --continual.imbalance")
    for section, (wrapper, switch) in WRAPPERS.items():
        if settings[section][switch]:
            source = wrapper(source, **settings[section])
        else:
            _refuse(given, section, f"--{section}.{switch}")
    return source


def _refuse(given: Namespace, section: str, switch: str) -> None:
    """Reject options of a section that `switch` has not turned on."""
    for name in given.as_dict().get(section) or ():
        option = f"--{section}.{name}"
        if option not in switch:
            raise ValueError(f"{option} has no effect without {switch}")


def _check_broker(settings: Namespace, source: Shaped, broker: Acknowledged) -> None:
    """Raise ValueError if an option would separate a broker's messages and acknowledgements."""
    if source.source is not broker or not source.plain:
        raise ValueError(
            f"source {broker.name!r}: a broker's messages are sent one by one, so only "
            "the shaping options --shape.rate and --shape.limit apply"
        )
    if settings.producer.on_full != "block":
        raise ValueError(
            f"--producer.on_full {settings.producer.on_full}: the broker of source "
            f"{broker.name!r} keeps messages that are not acknowledged; use "
            "--producer.on_full block"
        )


def send_all(
    source: Shaped,
    producer: Producer,
    patience: float,
    stop: threading.Event,
    broker: Acknowledged | None = None,
    spools: bool = False,
) -> None:
    """Send from where the receiver's journal ends. Return once all samples are on its disk.

    Args:
        patience: seconds to wait for the receiver.
        spools: whether the source is live and has a spool. Then it also starts without a receiver,
            and the spool keeps the pictures that come before the receiver answers.
    """
    try:
        patience = min(patience, SPOOL_PATIENCE) if spools else patience
        welcome = connect(producer, patience, stop)
    except CannotConnectError as error:
        if not spools:
            raise
        log.warning("%s; the samples wait in the spool", error)
        position = None
    else:
        if welcome is None:
            return
        position = welcome.position
        resumed = "; going on" if position is not None else ""
        log.info("connected to %s%s", producer.address, resumed)
    report = Report(producer, broker)
    early = _send_samples(source, position, producer, stop, broker, report)
    log.info("waiting until the receiver has all samples on disk")
    flush(producer, report, stop)
    if early:
        log.info("stopped by a signal before the end of the source; the same command goes on")
    if position is not None and not producer.stats.sent.samples and not stop.is_set():
        log.info(
            "nothing to send: the receiver already has all samples of this source from an "
            "earlier start"
        )


def _send_samples(
    source: Shaped,
    position: Position,
    producer: Producer,
    stop: threading.Event,
    broker: Acknowledged | None,
    report: Report,
) -> bool:
    """Send the samples after a position. Return whether a stop came before the source ended."""
    ended = threading.Event()
    threading.Thread(target=_stop_source, args=(source, stop, ended), daemon=True).start()
    with configuring():
        try:
            samples = source.samples(position)
        except SourceError as error:  # a broker does not answer: the settings are not at fault
            raise Failure(str(error)) from error
    deliveries = None if broker is None else Deliveries(broker)
    too_large = Skipped(source.name)
    for sample, after in samples:
        # A plain `Shaped` stores the broker's position as "inner".
        expected = None if deliveries is None else deliveries.expect(after["inner"])
        try:
            if not send(producer, sample, after, stop, expected):
                break
        except SampleTooLargeError as error:
            too_large.note("too large", f"sample {short(sample.id)}", error)
            if expected is not None:
                expected.passed_over()
        except ValueError as error:  # such as a position that no packet can hold
            why = f"source {source.name!r}: at sample {short(sample.id)}: {error}"
            raise Failure(why) from error
        report.write_if_due()
    early = stop.is_set()
    ended.set()
    if too_large.by_reason:
        log.warning("%s", too_large)
    return early


def connect(producer: Producer, patience: float, stop: threading.Event) -> Welcome | None:
    """Wait for the receiver's WELCOME and return it; None once a stop is requested.

    Raises:
        CannotConnectError: no receiver answered for `patience` seconds. The message says why.
    """
    deadline = time.monotonic() + patience
    while not stop.is_set():
        try:
            return producer.connect(min(0.2, max(0.0, deadline - time.monotonic())))
        except CannotConnectError as error:
            if time.monotonic() >= deadline:
                why = str(error).partition(": ")[2]
                raise CannotConnectError(f"no connection within {patience:g} s: {why}") from None
    return None


def close_broker(broker: Acknowledged, stop: threading.Event) -> None:
    """Close the source of a broker. The source first sends the last acknowledgements.

    Once a stop is requested, a broker that does not answer is given up after BROKER_SECONDS.
    """
    closing = threading.Thread(target=broker.close, name=f"close {broker.name}", daemon=True)
    closing.start()
    while closing.is_alive() and not stop.is_set():
        closing.join(0.05)
    closing.join(BROKER_SECONDS)
    if closing.is_alive():
        log.warning(
            "source %s: the broker does not answer: messages without an acknowledgement "
            "are delivered again, under the same ids",
            broker.name,
        )


def _stop_source(source: Shaped, stop: threading.Event, ended: threading.Event) -> None:
    """Stop the source once `stop` is set, because a source that waits for files does not see it.

    Log a warning if the source has not `ended` SOURCE_SECONDS later.
    """
    stop.wait()
    source.stop()
    if not ended.wait(SOURCE_SECONDS):
        log.warning(
            "source %s does not stop. A second signal ends the command, and the same command sends "
            "again what was not acknowledged. A source of your own that waits needs a method "
            "stop() (docs/own-source.md)",
            source.name,
        )


def send(
    producer: Producer,
    sample: Sample,
    after: Position,
    stop: threading.Event,
    expected: Expected | None = None,
) -> bool:
    """Send one sample, or drop it as `on_full` says. Return False once a stop is requested.

    The producer counts dropped samples, and the report shows them.
    """
    while not stop.is_set():
        try:
            producer.send(sample, position=after, timeout=1.0, on_delivery=expected)
        except BufferFullError as error:
            raise Failure(str(error)) from error
        except DeadlineError:
            continue
        return True
    return False


def flush(producer: Producer, report: Report, stop: threading.Event) -> None:
    """Wait until all samples are on the receiver's disk, and write the last report.

    Once a stop is requested, wait only while acknowledgements arrive. The remaining samples are not
    lost: they are in the spool, or the next producer of this name sends them again.
    """
    deadline, acked = None, -1
    while True:
        try:
            producer.flush(STALL_SECONDS if stop.is_set() else 0.2)
        except DeadlineError as error:
            report.write_if_due()
            if not stop.is_set():
                continue
            before, acked = acked, producer.stats.acked.samples
            deadline = deadline or time.monotonic() + STOP_SECONDS
            if acked == before or time.monotonic() >= deadline:
                log.warning("stopped: %s. The same command sends these samples again", error)
                report.write()
                with contextlib.suppress(DeadlineError):
                    producer.close(0.0)
                return
        else:
            report.write()
            return


class Report:
    """A log line of progress every REPORT_SECONDS."""

    def __init__(self, producer: Producer, broker: Acknowledged | None = None) -> None:
        self._producer, self._broker = producer, broker
        self._last = time.monotonic()
        self._acked = 0

    def write_if_due(self) -> None:
        """Write a line if REPORT_SECONDS have passed since the last one."""
        if time.monotonic() - self._last >= REPORT_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the totals, and the rate since the last line."""
        stats, now = self._producer.stats, time.monotonic()
        rate = (stats.acked.samples - self._acked) / max(now - self._last, 1e-9)
        self._last, self._acked = now, stats.acked.samples
        lag = None if self._broker is None else self._broker.lag()
        log.info(
            "samples: %d on the receiver's disk (%.1f MB), %.0f/s, %d waiting%s%s",
            stats.acked.samples,
            stats.acked.bytes / 1e6,
            rate,
            stats.waiting,
            f", {stats.dropped.samples} dropped" if stats.dropped.samples else "",
            "" if lag is None else f", {lag} waiting at the broker",
        )
