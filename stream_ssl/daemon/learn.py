"""The learner's process: composes its parts, and passes the learner's records to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from stream_ssl.background import Background
from stream_ssl.batch import START, Offset
from stream_ssl.buckets.copies import CheckpointCopies
from stream_ssl.config import build, restart
from stream_ssl.config.idle_options import without_effect
from stream_ssl.config.options import flat, resolved
from stream_ssl.daemon import ranks, torchrun
from stream_ssl.daemon.endpoints import hold_role
from stream_ssl.daemon.learner_server import LearnerServer
from stream_ssl.daemon.notify import Notifier
from stream_ssl.daemon.observers import Observers
from stream_ssl.daemon.rank_reports import RankReports
from stream_ssl.daemon.receiver_link import ReceiverLink
from stream_ssl.daemon.saver import Saver
from stream_ssl.daemon.start import check_not_lost
from stream_ssl.daemon.warm_start import check_alone, warm_start
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.journal_tasks import JournalReplaced, JournalShare
from stream_ssl.journal.reader import JournalReader
from stream_ssl.learning.capture import Copies
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.checkpoint_folder import CheckpointError
from stream_ssl.learning.compatibility import IncompatibleConfig
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import CheckpointDue, Idle, ReloadDue, StepRecord
from stream_ssl.learning.saved import Saved, originals_of
from stream_ssl.memory.process_group import RankLost
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.logger_process import Deadline
from stream_ssl.observe.loggers import EVERY as LOG_EVERY
from stream_ssl.observe.loggers import Logging
from stream_ssl.observe.page.held_out import HeldOutView
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.recent_rank import RecentRank
from stream_ssl.observe.verdict_feed import VerdictFeed
from stream_ssl.process.failures import Failure, Misconfigured, configuring
from stream_ssl.process.logs import StepLog
from stream_ssl.process.signals import Stop
from stream_ssl.receiver.verdicts import VerdictSender

log = logging.getLogger("stream_ssl.learner")

PATIENCE = 120.0
"""Seconds without a record after which the process counts as stuck. A first GPU step compiles."""


def learn(parser: ArgumentParser, settings: Namespace, stop: Stop) -> None:
    """Train until `stop` is set. Then write a last checkpoint and return.

    A signal before the first step ends the process at once, because nothing has changed yet.

    Args:
        parser: the parser that returned `settings`.
        settings: parsed, not yet instantiated.
    """
    with ExitStack() as stack:
        farewell = "stopped before the first step: nothing has changed that a checkpoint would hold"
        with configuring():
            life = stack.enter_context(hold_role(settings.run, torchrun.role()))
            stop.interrupted = life.interrupted
            with stop.at_once(farewell, life.stopped):
                process = Process(parser, settings, stack)
        with Notifier(process.health):
            process.run(stop)


class Process:
    """One learner process.

    Args:
        parser, settings: as for `learn`.
        stack: closes the process's resources.

    Attributes:
        health: the state of the process and of its loop.
    """

    def __init__(self, parser: ArgumentParser, settings: Namespace, stack: ExitStack) -> None:
        group = ranks.meet(settings, stack)
        ranks.check_alike(group, resolved(parser, _for_all(settings)))
        ranks.check_shared(group, settings.run)
        # The server, before all else, because the rest of the start may take minutes.
        server = LearnerServer(settings, group.group.rank, stack)
        self.health, self._metrics = server.health, server.metrics
        # The settings, which a checkpoint completes.
        checkpointer = build.checkpointer(settings, group)
        saved, settings = _resumed(parser, settings, checkpointer)
        config, rank, size = resolved(parser, settings), group.group.rank, group.group.size
        self._metrics.describe(flat(config) | {"rank": rank, "ranks": size})
        for line in without_effect(config):
            log.warning("%s", line)
        settings = parser.instantiate(settings)
        # The stream.
        part = _divide_journal(settings, group, checkpointer, saved)
        server.link_receiver(part)
        self._reports = RankReports(group, part, checkpointer, saved, settings, server)
        reader = JournalReader(part.folder / "journal")
        stack.callback(reader.close)
        start, share = _share(part, checkpointer, saved)
        held = set() if saved is None else originals_of(saved.path)
        self._originals = server.page.originals = build.originals(settings, size, held)
        self._batches: Batches = stack.enter_context(
            build.batches(settings, reader, start, share, rank, size, self._originals)
        )
        # The learner.
        self.learner = _learner(settings, self._batches, start, group, saved)
        if saved is not None:
            self._metrics.of_checkpoints.resumed(saved.step, float(saved.facts["created"]))
        first = Copies().take(self.learner.capture()) if saved is None else None
        # The links to the disk.
        self._receiver = ReceiverLink(self.learner, self._batches, checkpointer, part, server)
        self._saver = Saver(
            self.learner, checkpointer, config, first, self._originals, self._receiver, server
        )
        # Consumers of the records, which never change the state that is trained.
        self._step_log = StepLog(log)
        self._view = server.page.memory = MemoryView(self.learner.memory, self.learner.origins)
        self._view.search = build.picture_search(settings, self.learner)
        stack.callback(self._view.close)  # before the server, which would wait for the view
        if rank == 0:
            self._open_loggers(settings, config, stack)
            self._copy_checkpoints(settings, checkpointer, stack)
        sender = VerdictSender(part.folder)
        stack.callback(sender.close)
        self._verdicts = VerdictFeed(self._view.slots, sender)
        vectors = build.vectors(settings)
        self._observers = Observers(
            self._metrics,
            self.learner.memory,
            self.learner.novelty.of_pictures,
            build.shadows(settings, self.learner.method.dim),
            self._batches,
            reader,
            self._held_out(settings, saved, server, leads=rank == 0),
            RecentRank(
                settings.run if rank == 0 else None,
                None if vectors is None else vectors.number_bytes,
            ),
        )

    def _open_loggers(
        self, settings: Namespace, config: Mapping[str, Any], stack: ExitStack
    ) -> None:
        """Pass the metrics to TensorBoard and the like, as configured."""
        deadline = Deadline()
        for name, opener in build.loggers(settings, config, deadline).items():
            failed = self._metrics.counts_failures_of(name)
            logs = Logging(name, opener, self._metrics.registry, self._view, failed)
            stack.callback(logs.close)
            stack.enter_context(Background(name, logs.write, LOG_EVERY, at_once=True))
        stack.callback(deadline.start)  # before any of them closes

    def _copy_checkpoints(
        self, settings: Namespace, checkpointer: Checkpointer, stack: ExitStack
    ) -> None:
        """Copy finished checkpoints to a bucket, if one is configured."""
        if settings.copies.to is None:
            return
        of_checkpoints = self._metrics.of_checkpoints
        copies = CheckpointCopies(
            settings.copies, settings.run, checkpointer.folder, of_checkpoints
        )
        copies.start()
        stack.callback(copies.close)

    def _held_out(
        self, settings: Namespace, saved: Saved | None, server: LearnerServer, leads: bool
    ) -> HeldOutProbe | None:
        """Return the evaluation on held-out images, with its result at the start of the process."""
        held_out = build.held_out(settings, self.learner)
        if held_out is None:
            return None
        if saved is None:
            record = held_out.begin(settings.run if leads else None)
        else:
            held_out.resume(settings.run)
            record = held_out.probe(saved.step)
        self._metrics.observe_held_out(record)
        self._metrics.started_at(held_out.first)
        server.page.held_out = HeldOutView(held_out)
        return held_out

    def run(self, stop: threading.Event) -> None:
        """Train until `stop` is set, and handle the learner's records."""
        self.health.expect("learner", PATIENCE)
        self.health.set("started", True)
        self._metrics.started()
        if self.learner.memory.occupied_of_all:  # a restored one
            self._observers.survey_memory()
        self._receiver.tell()
        try:
            for record in self.learner.run(stop):
                if isinstance(record, CheckpointDue):
                    self._saver.begin()
                elif isinstance(record, ReloadDue):
                    self._saver.reload()
                else:
                    self._consume(record)
        except IncompatibleConfig as error:  # only the samples show this
            raise Misconfigured(str(error)) from error
        except JournalReplaced as error:
            raise Failure(str(error)) from error
        except RankLost as error:
            raise Failure(f"{error}; all ranks continue from the last checkpoint") from error
        self.health.set("started", False, "stopping")
        self._observers.survey()
        self._saver.save_last()

    def _consume(self, record: StepRecord | Idle) -> None:
        self._saver.save_first(record)
        self._saver.conclude()
        self._observers.consume(record)
        if isinstance(record, StepRecord):
            self._step_log.consume(record)
        self._follow_originals(record)
        self._view.consume(record)
        self._saver.watch_divergence()
        if isinstance(record, StepRecord):
            if not record.replay:
                self._receiver.follow(self._batches.journal)
            self._verdicts.consume(record)
            self._receiver.samples_came()
        self.health.tick("learner")
        if self._receiver.due:
            self._receiver.tell()
            self._reports.tell(self.learner)
        self._saver.save_if_due(record)
        if isinstance(record, Idle):  # the learner has read the whole journal
            self._receiver.make_room(self._saver.save_soon)

    def _follow_originals(self, record: StepRecord | Idle) -> None:
        """Delete the original files of samples that the learner no longer holds."""
        if self._originals is None:
            return
        if isinstance(record, StepRecord):
            groups = record.dropped_origins, record.origins_B, record.evicted_origins
            self._originals.left(*groups, held=self.learner.originals)
        self._metrics.observe_originals(self._originals.bytes, self._originals.unkept)


def _resumed(
    parser: ArgumentParser, settings: Namespace, checkpointer: Checkpointer
) -> tuple[Saved | None, Namespace]:
    """Return the newest checkpoint, and the settings with which the run begins or resumes."""
    try:
        saved = checkpointer.newest()
    except CheckpointError as error:  # from a newer version: a restart will not help
        raise Misconfigured(str(error)) from error
    with configuring():
        if saved is not None:
            return saved, restart.resume(parser, settings, saved.config)
        check_not_lost(settings.run)
    return None, settings


def _divide_journal(
    settings: Namespace, group: Ranks, checkpointer: Checkpointer, saved: Saved | None
) -> ranks.Part:
    """Return this rank's part of the journals, and let the checkpointer follow its journal."""
    part = ranks.part_of(settings, group, saved)
    if part.apart and part.journal is not None:
        checkpointer.positions.read_apart(part.journal, saved)
    elif checkpointer.positions.follow(part.journal):
        log.error(
            "the checkpoint continues in journal %s, and %s has journal %s: all ranks "
            "read it from its beginning. To continue where the checkpoint was, stop "
            "the run and put the checkpoint's journal back",
            saved.journal if saved is not None else None,
            part.folder,
            part.journal,
        )
    return part


def _share(
    part: ranks.Part, checkpointer: Checkpointer, saved: Saved | None
) -> tuple[Offset, JournalShare]:
    """Return where this rank's stream starts, and which records of the journal it reads."""
    place, journal = (part.number, len(part.readers)), checkpointer.positions.journal
    if saved is None:
        return START, JournalShare(*place, (), journal)
    before = saved.before(len(part.readers), part.journal)
    return saved.start(*place, part.journal), JournalShare(*place, before, journal)


def _learner(
    settings: Namespace, batches: Batches, start: Offset, group: Ranks, saved: Saved | None
) -> Learner:
    """Return a learner with the state of the checkpoint, of --from, or of a new run."""
    rank, size = group.group.rank, group.group.size
    if saved is not None:
        build.forget_first_weights(settings)
    learner = build.learner(settings, batches, start, group.group)
    if saved is None:
        if settings["from"] is not None:
            check_alone(size)
            warm_start(settings, learner)
        return learner
    if settings["from"] is not None:
        log.info("--from %s has no effect: this run has begun already", settings["from"])
    if saved.ranks != size:
        log.warning(
            "the checkpoint has %d ranks, and the run continues with %d: memory and "
            "journal are divided anew, and views and draws get other seeds",
            saved.ranks,
            size,
        )
    saved.restore(learner, rank, size, start)
    log.info("continuing at step %d from %s", saved.step, saved.path)
    return learner


def _for_all(settings: Namespace) -> Namespace:
    """Return the settings that all ranks must share. Devices and receivers belong to each host."""
    shared: Namespace = settings.clone()
    shared.ranks.receivers = []
    shared.learner.device = torch.device(settings.learner.device).type
    return shared
