"""The receiver's process: its loop and its observers."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from jsonargparse import Namespace
from prometheus_client import CollectorRegistry

from stream_ssl.config.options import flat
from stream_ssl.daemon.ended_sources import EndedSources
from stream_ssl.daemon.endpoints import Announcement, hold_role, load, place_of
from stream_ssl.daemon.notify import Notifier
from stream_ssl.daemon.page import announced, page_sources, serve_page
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.errors import JournalError
from stream_ssl.journal.journal import Journal
from stream_ssl.observe.health import STARTING, Health
from stream_ssl.observe.metrics import ReceiverMetrics
from stream_ssl.observe.page.producers import ProducersView
from stream_ssl.observe.watch import Watched
from stream_ssl.process.failures import Failure, Misconfigured, configuring, listening, section
from stream_ssl.process.signals import Stop
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.receiver import Receiver
from stream_ssl.receiver.records import ReceiverRecord
from stream_ssl.receiver.verdicts import VerdictInbox
from stream_ssl.wire.address import check_bind, require_loopback
from stream_ssl.wire.run_folder import KEYS, make_keys

T = TypeVar("T")

log = logging.getLogger("stream_ssl.receiver")

PLAIN = "plain"
"""The value of `access` for plain text, without keys."""
PATIENCE = 15.0
"""Seconds without a round of the loop after which the process counts as stuck."""
MOST_FILES = 65_536
"""The most open files, which include connections. It exceeds the most sessions by far."""


def raise_limits() -> None:
    """Raise the limits of open files and of the size of files as far as the system allows.

    1,024 open files are too few for the connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if most > soft != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):  # the system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def check_file_size(segment: int) -> None:
    """Reject a limit of the size of files (ulimit -f) below a whole segment of the journal.

    The journal's library calls a write beyond the limit an error of the disk.

    Args:
        segment: the size of a whole segment, in bytes.

    Raises:
        ValueError: the limit is too low.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < segment:
        raise ValueError(
            f"this process may write files of at most {most:,} bytes, and a segment has up to "
            f"{segment:,}: raise the limit (ulimit -f; LimitFSIZE in a systemd unit)"
        )


def receive(settings: Namespace, resolved: Mapping[str, Any], stop: Stop) -> None:
    """Receive samples until `stop` is set. Then commit and acknowledge the samples held.

    Args:
        resolved: the same settings as plain values, for the metrics.
    """
    raise_limits()
    with configuring():
        sources = page_sources(settings)
        sources.producers = ProducersView()
    folders = {"journal": settings.run / "journal"}
    metrics = ReceiverMetrics(CollectorRegistry(), folders)
    metrics.describe(flat(resolved))
    health = Health()
    health.set("started", False, STARTING)
    with ExitStack() as stack:
        with configuring():
            life = stack.enter_context(hold_role(settings.run, "receiver"))
            stop.interrupted = life.interrupted
            page = serve_page(
                settings, "receiver", metrics, health, sources, Watched(folders), stack
            )
            access = access_of(settings, settings.run)
            with section("journal"):
                journal = _opened(settings)
                stack.callback(journal.close)
                check_file_size(journal.segment_bytes)
            receiver = _receiver(settings, journal, access)
            stack.callback(receiver.close)
        where = Announcement(
            settings.run,
            "receiver",
            data=receiver.endpoint,
            http=page,
            **place_of(settings.run),
            **announced(settings),
            **({} if access is None else {"server_key": access.keys.public}),
        )
        log.info(
            "listening on %s, %s; page at %s/, metrics at %s/metrics",
            receiver.endpoint,
            "in plain text" if access is None else f"with the allow-list {access.allow.path}",
            page,
            page,
        )
        health.expect("receiver", PATIENCE)
        health.set("started", True)
        sources_ended = EndedSources(settings.run)
        metrics.consume(sources_ended.record)
        metrics.started()
        stack.enter_context(Notifier(health))
        for record in receiver.run(stop):
            where.write()
            metrics.consume(record)
            sources_ended.consume(record)
            sources.producers.offer(receiver.producers)
            _set_health(health, record)
        health.forget("receiver")
    _log_end(receiver.unwritten)


def _receiver(settings: Namespace, journal: Journal, access: Access | None) -> Receiver:
    """Return a receiver that listens at the address of the settings."""
    offsets = ConsumerOffsets(settings.run)

    def listen(bind: str) -> Receiver:
        return listening(
            lambda: Receiver(
                journal,
                offsets,
                access=access,
                verdicts=VerdictInbox(settings.run),
                **{**settings.receiver, "bind": bind},
            )
        )

    with section("receiver"):
        return listen_again(listen, settings.receiver.bind, settings.run)


def _log_end(unwritten: int) -> None:
    """Log whether all received samples are in the journal."""
    if not unwritten:
        log.info("drained: all received samples are in the journal and acknowledged")
        return
    log.warning(
        "stopped with %d received samples that are not in the journal, because it could not be "
        "written. Their producers hold them, and send them again",
        unwritten,
    )


def listen_again(listen: Callable[[str], T], bind: str, run: Path) -> T:
    """Listen. If the settings leave the port open, prefer the port of the run's previous receiver.

    Connected producers know the previous port. It is used if it is free. The port in a copy of a
    run folder belongs to the original run.

    Args:
        run: the run's folder, with the endpoints.json of the previous receiver.
    """
    host, _, port = bind.rpartition(":")
    entry = load(run).get("receiver", {}) if port in ("0", "*") else {}
    before = str(entry.get("data"))
    if all(entry.get(key, value) != value for key, value in place_of(run).items()):
        before = ""
    had = before.rpartition(":")[2]
    if bind.startswith("tcp://") and re.fullmatch(r"tcp://.+:[1-9][0-9]{0,4}", before):
        try:
            return listen(f"{host}:{had}")
        except (OSError, Misconfigured) as error:
            log.warning(
                "the receiver cannot listen on its former port %s (%s); it uses a free "
                "port, and producers with the former port must be restarted",
                had,
                error,
            )
    return listen(bind)


def _opened(settings: Namespace) -> Journal:
    try:
        return Journal(settings.run / "journal", **settings.journal)
    except JournalError as error:  # the disk failed, and may work again after a restart
        if isinstance(error.__cause__, PermissionError):
            raise error.__cause__ from error
        raise Failure(str(error)) from error


def _set_health(health: Health, record: ReceiverRecord) -> None:
    health.refused = {**health.refused, **record.refused_last}
    health.tick("receiver")
    health.set("journal", *_journal(record))
    served = not record.full and (record.credit > 0 or not record.producers)
    health.set("credit", served, "" if served else f"no producer may send: {_why(record)}")


def _journal(record: ReceiverRecord) -> tuple[bool, str]:
    """Return whether the journal is well, and what is wrong with it."""
    if record.ready and not record.journal_away:
        return True, ""
    away = "its folder was moved, deleted or replaced"
    fault = away if record.journal_away else "a write failed"
    return False, f"{fault}; no packet is acknowledged until a write works"


def _why(record: ReceiverRecord) -> str:
    """Return why producers get no credit."""
    if record.disk_full:
        return (
            "the disk of the journal is full, except for the room that a packet and a checkpoint "
            "need; free space on the disk"
        )
    if record.full:
        return "the journal has used its budget"
    if not record.ready:
        return "the last write of the journal failed"
    return "the learner is too far behind"


def access_of(settings: Namespace, run: Path) -> Access | None:
    """Return who may send; None: plain text. A run without keys creates them in the folder `run`.

    Raises:
        ValueError: plain text is asked for beyond loopback, a key file cannot be used, or no other
            process can reach the address.
    """
    if settings.receiver.bind.startswith("inproc:"):
        raise ValueError(
            f"receiver.bind {settings.receiver.bind}: no other process could reach this address; "
            "choose tcp://HOST:PORT or ipc://PATH"
        )
    files = settings.access
    if files == PLAIN:
        remedy = "leave `access` out: the run then makes keys"
        require_loopback(settings.receiver.bind, remedy)
        return None
    if files:
        return Access(files["keys"], files["allow"])
    before = (run / "journal").exists() and not (run / KEYS).exists()
    keys, allow = make_keys(run)
    if before:
        log.warning(
            "this run had no keys and has made them in %s: local producers connect with "
            "--run %s, or run=%r in Python; set `access: plain` to use plain text",
            keys.parent,
            run,
            str(run),
        )
    return Access(keys, allow)


def dry_run(settings: Namespace) -> None:
    """Build what `receive` builds, in a temporary folder without a port, or raise ValueError."""
    check_bind(settings.receiver.bind)
    with TemporaryDirectory() as folder:
        made = (settings.run / KEYS).exists()
        access = access_of(settings, settings.run if made else Path(folder))
        settings = settings.clone()
        settings.receiver.bind = "inproc://check"
        with section("journal"):
            journal = Journal(Path(folder) / "journal", **settings.journal)
        with closing(journal), section("receiver"):
            offsets = ConsumerOffsets(Path(folder))
            Receiver(journal, offsets, access=access, **settings.receiver).close()
