"""The learner's process: its loop, its observers and its checkpoints."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from prometheus_client import CollectorRegistry

from stream_ssl.app import build, ranks, restart
from stream_ssl.app.config import flat, resolved, split_address
from stream_ssl.app.endpoints import Announcement, hold_role
from stream_ssl.app.failures import Failure, Misconfigured, configuring, listening
from stream_ssl.app.logs import StepLog
from stream_ssl.app.notify import Notifier
from stream_ssl.app.page import announced, page_sources, peers_of, process_of
from stream_ssl.app.signals import Stop
from stream_ssl.app.warm_start import warm_start
from stream_ssl.background import Background
from stream_ssl.batch import START, Offset
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.journal_tasks import JournalReplaced, JournalShare
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import journal_id
from stream_ssl.learning.checkpoint import Checkpointer, CheckpointError, CheckpointRecord
from stream_ssl.learning.learner import IncompatibleConfig, Learner
from stream_ssl.learning.records import CheckpointDue, Idle, ReloadDue, StepRecord
from stream_ssl.learning.saved import Saved, originals_of
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.process_group import RankLost
from stream_ssl.observe.balance import Balance, class_counts
from stream_ssl.observe.collisions import ClassCollisions, near_duplicates
from stream_ssl.observe.drift import Drift
from stream_ssl.observe.health import STARTING, Health
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.metrics import WORKING, LearnerMetrics
from stream_ssl.observe.page.group import GroupView, Member
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.peers import ASK_EVERY, Peers
from stream_ssl.observe.prequential import Prequential
from stream_ssl.observe.recent_rank import RecentRank
from stream_ssl.observe.server import Server
from stream_ssl.observe.shadow import Shadow
from stream_ssl.observe.slot_history import VerdictFeed
from stream_ssl.observe.watch import EVERY, Watch
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.verdicts import VerdictSender

log = logging.getLogger("stream_ssl.learner")

TELL_SECONDS = 0.5
"""Seconds between two messages to the receiver."""
FREE_SPACE_SECONDS = 3.0
"""Seconds between two attempts to make room in the journal. The receiver trims in the meantime."""
PATIENCE = 120.0
"""Seconds without a record after which the process counts as stuck. A first GPU step compiles."""

SURVEY_SHARE = 0.02
"""Share of the time that a survey of the expensive numbers (spectra, histograms) may take."""
SURVEY_SECONDS = 15.0
"""Longest time between two surveys, in seconds, even if a survey then exceeds SURVEY_SHARE."""


def learn(parser: ArgumentParser, settings: Namespace, stop: Stop) -> None:
    """Train until `stop` is set. Then write a last checkpoint and return.

    A signal before the first step ends the process at once, because there is nothing to save.

    Args:
        parser: the parser that returned `settings`.
        settings: parsed, not yet instantiated.
        stop: set to end the process.
    """
    with ExitStack() as stack:
        try:
            with configuring(), stop.exiting():
                stack.enter_context(hold_role(settings.run, ranks.role()))
                process = Process(parser, settings, stack)
        except SystemExit:
            log.info("stopped before the first step; there is nothing to save")
            raise
        with Notifier(process.health):
            process.run(stop)


class Process:
    """One learner process.

    Args:
        parser, settings: as for `learn`.
        stack: closes the process's resources.
    """

    def __init__(self, parser: ArgumentParser, settings: Namespace, stack: ExitStack) -> None:
        self._ranks = ranks.meet(settings, stack)
        ranks.check_alike(self._ranks, resolved(parser, _for_all(settings)))
        ranks.check_shared(self._ranks, settings.run)
        self._serve(settings, stack)  # first, because the rest of the start may take minutes
        self._checkpointer = Checkpointer(
            settings.run / "checkpoints", **settings.checkpoints, ranks=self._ranks
        )
        try:
            saved = self._checkpointer.newest()
        except CheckpointError as error:  # from a newer version: a restart will not help
            raise Misconfigured(str(error)) from error
        if saved is not None:
            with configuring():
                settings = restart.resume(parser, settings, saved.config)
        self._config = resolved(parser, settings)
        group = self._ranks.group
        self.metrics.describe(flat(self._config) | {"rank": group.rank, "ranks": group.size})
        for line in build.without_effect(self._config):
            log.warning("%s", line)
        settings = parser.instantiate(settings)
        if saved is not None:
            build.forget_first_weights(settings)
        reader, start = self._open_journal(settings, saved, stack)
        self.learner = build.learner(settings, self._batches, start, self._ranks.group)
        if saved is not None:
            self._resume(settings, saved, start)
        elif settings["from"] is not None:
            self._begin_from(settings)
        # Saved as the checkpoint of step 0 once the first samples have shown that the settings fit.
        self._first = self.learner.capture().copied() if saved is None else None
        self._offsets = ConsumerOffsets(self._part.folder)
        self._checkpointed = (self._checkpointer.needed() or START).record
        self._checkpoint_bytes = expected_bytes(self.learner)
        self._free_space_at = 0.0
        self._limited_log = RateLimitedLogger(log, seconds=60.0)
        self._healthy = True  # whether training was healthy at the last look
        self._failed_step = 0  # step of the last divergence
        self._step_log = StepLog(log)
        self._view = self._page.memory = MemoryView(self.learner.memory, self.learner.origins)
        stack.callback(self._view.close)  # before the server, which would wait for the view
        sender = VerdictSender(self._part.folder)
        stack.callback(sender.close)
        self._verdicts = VerdictFeed(self._view.slots, sender)
        self._observers = Observers(
            self.metrics,
            self.learner.memory,
            build.shadows(settings, self.learner.method.dim),
            self._batches,
            reader,
            build.prequential(settings),
            build.held_out(settings, self.learner),
            self.learner.device,
            RecentRank(settings.run if self._ranks.group.rank == 0 else None),
        )

    def _open_journal(
        self, settings: Namespace, saved: Saved | None, stack: ExitStack
    ) -> tuple[JournalReader, Offset]:
        """Open this rank's journal and its batches. Return the reader and the first offset."""
        group = self._ranks.group
        part = self._part = ranks.part_of(settings, self._ranks, saved)
        if part.apart and part.journal is not None:
            self._checkpointer.read_apart(part.journal, saved)
        elif self._checkpointer.follow(part.journal):
            log.error(
                "the checkpoint continues in journal %s, and %s has journal %s: all ranks "
                "read it from its beginning. To continue where the checkpoint was, stop "
                "the run and put the checkpoint's journal back",
                saved.journal if saved is not None else None,
                part.folder,
                part.journal,
            )
        self._page.peer = partial(process_of, part.folder)
        self._group = self._page.group = self._met(saved, settings)
        place = part.number, len(part.readers)
        start = START if saved is None else saved.start(*place, part.journal)
        before = () if saved is None else saved.before(len(part.readers), part.journal)
        reader = JournalReader(part.folder / "journal")
        stack.callback(reader.close)
        held = set() if saved is None else originals_of(saved.path)
        self._originals = self._page.originals = build.originals(settings, group.size, held)
        self._batches = stack.enter_context(
            build.batches(
                settings,
                reader,
                start,
                JournalShare(*place, before, self._checkpointer.journal),
                group.rank,
                group.size,
                self._originals,
            )
        )
        return reader, start

    def _resume(self, settings: Namespace, saved: Saved, start: Offset) -> None:
        group = self._ranks.group
        if settings["from"] is not None:
            log.info("--from %s has no effect: this run has begun already", settings["from"])
        if saved.ranks != group.size:
            log.warning(
                "the checkpoint has %d ranks, and the run continues with %d: memory and "
                "journal are divided anew, and views and draws get other seeds",
                saved.ranks,
                group.size,
            )
        saved.restore(self.learner, group.rank, group.size, start)
        self.metrics.resumed(saved.step, float(saved.facts["created"]))
        log.info("continuing at step %d from %s", saved.step, saved.path)

    def _begin_from(self, settings: Namespace) -> None:
        if not self._ranks.alone:
            raise Misconfigured(
                "--from begins a run in one process: start it with one process, and "
                f"continue with {self._ranks.group.size} ranks from its first checkpoint"
            )
        warm_start(settings, self.learner)

    def _serve(self, settings: Namespace, stack: ExitStack) -> None:
        """Serve the page and metrics, and watch the conditions. Needs no instantiated settings."""
        self.metrics = LearnerMetrics(
            CollectorRegistry(),
            memories=(WORKING, *settings.shadows),
            classes=settings.classes,
            folders=folders(settings),
        )
        self.health = Health()
        self.health.set("started", False, STARTING)
        with configuring():
            host, port = split_address(settings.http.learner)
            port += self._ranks.group.rank if port else 0  # each rank has its own
            self._page = page_sources(settings)
        server = listening(
            lambda: Server(
                self.metrics.registry,
                self.health,
                "learner",
                host,
                port,
                settings.http.public,
                self._page,
            )
        )
        stack.enter_context(server)
        peers = Peers(partial(peers_of, settings.run, ranks.role()))
        stack.enter_context(Background("peers", peers.ask, ASK_EVERY))
        self._page.hung = peers.why
        watch = Watch(
            "learner",
            self.metrics.registry,
            self.health,
            self.metrics.light,
            folders(settings),
            journal=settings.run / "journal",
            checkpoint_seconds=settings.checkpoints.every_seconds,
            first=self._ranks.group.rank == 0,
            hung=peers.hung,
        )
        stack.enter_context(Background("watch", watch.try_look, EVERY))
        self._where = Announcement(
            settings.run, ranks.role(), http=server.address, **announced(settings)
        )
        log.info("page at %s/, metrics at %s/metrics", server.address, server.address)

    def run(self, stop: threading.Event) -> None:
        """Train until `stop` is set, and handle the learner's records."""
        self.health.expect("learner", PATIENCE)
        self.health.set("started", True)
        self.metrics.started()
        self._tell_receiver()
        try:
            for record in self.learner.run(stop):
                if isinstance(record, CheckpointDue):
                    self._save_behind()
                    continue
                if isinstance(record, ReloadDue):
                    self._reload()
                    continue
                self._save_first(record)
                self._conclude_save()
                self._observers.consume(record)
                if isinstance(record, StepRecord):
                    self._step_log.consume(record)
                    self._follow_originals(record)
                self._view.consume(record)
                self._tell_of_divergence()
                if isinstance(record, StepRecord) and not record.replay:
                    self._follow_journal()
                if isinstance(record, StepRecord):
                    self._verdicts.consume(record)
                    self._free_space_at = 0.0  # samples came, so the receiver has trimmed
                self.health.tick("learner")
                if time.monotonic() >= self._tell_at:
                    self._tell_receiver()
                    self._tell_ranks()
                due = self._checkpointer.due(record) and self.learner.divergence.savable
                if due and not self._ranks.group.rank:
                    self._save_soon()  # rank 0 decides when all ranks save
                first = self._part.number == 0  # the first reader of this journal
                first = first and not self.learner.divergence.halted
                if first and isinstance(record, Idle) and self._offsets.journal_full:
                    self._checkpoint_to_free_space()  # the learner has read the whole journal
        except IncompatibleConfig as error:  # only the samples show this
            raise Misconfigured(str(error)) from error
        except JournalReplaced as error:
            raise Failure(str(error)) from error
        except RankLost as error:
            raise Failure(f"{error}; all ranks continue from the last checkpoint") from error
        self.health.set("started", False, "stopping")
        self._observers.survey()
        self._conclude_save(wait=True)
        if not self.learner.divergence.savable:
            log.warning("no final checkpoint is written, because the last updates were skipped")
        elif self.learner.step:
            if self._originals is not None:
                self._originals.saving(self.learner.originals())
            self._save(lambda: self._checkpointer.save(self.learner, self._config))

    def _met(self, saved: Saved | None, settings: Namespace) -> GroupView:
        """Return a view of the ranks and of the run's parked journals, which no rank reads.

        A journal is parked while its host is away.
        """
        own = {"host": socket.gethostname(), "journal": journal_id(self._part.folder / "journal")}
        members = [Member(**told) for told in self._ranks.tell(own)]
        capacity = settings.memory.capacity
        if not self._part.apart:
            return GroupView(members, (), capacity)
        known, read = self._checkpointer.journals, {member.journal for member in members}
        parked = sorted(known - read - set(settings.ranks.lost))
        self.metrics.parked(len(parked))
        if parked and not self._ranks.group.rank:
            log.warning(
                "parked: %s. No rank reads the journals of these ids, and checkpoints "
                "keep their positions. Start the group with their hosts to continue "
                "reading them",
                ", ".join(parked),
            )
        if saved is not None and self._part.journal not in known and not self._part.number:
            log.warning(
                "journal %s in %s is new to this run: reading it from its beginning",
                self._part.journal,
                self._part.folder,
            )
        return GroupView(members, parked, capacity)

    def _follow_journal(self) -> None:
        """Let the receiver trim nothing when the learner reads another journal than before.

        Older checkpoints do not say what the receiver of another journal may trim.
        """
        if self._checkpointer.follow(self._batches.journal):
            self._checkpointed = START.record

    def _tell_receiver(self) -> None:
        """Tell the receiver how far the learner has read (credit) and what to keep (trimming).

        Training needs no disk. If the write fails, the receiver gets them later.
        """
        if self._part.number:
            self._where.write()
            self._tell_at = time.monotonic() + TELL_SECONDS
            return
        told = self.learner.ranks.last.offsets
        offsets = [self.learner.offset]
        if self.learner.step and len(told) == self._ranks.group.size:  # the ranks have met
            offsets = [told[rank] for rank in self._part.readers]
        read = max(min(offsets).record, self._checkpointed)
        try:
            size = self._checkpoint_bytes if self._one_disk(self._checkpointer.folder) else 0
            self._offsets.publish(read, self._checkpointed, self._checkpointer.journal, size)
        except OSError as error:
            self.health.set("cursor", False, str(error))
            self._limited_log.warning(
                "cursor",
                "the learner's position cannot be sent to the receiver, training "
                f"continues: {error}",
            )
        else:
            self.health.set("cursor", True)
        self._where.write()
        self._tell_at = time.monotonic() + TELL_SECONDS

    def _follow_originals(self, record: StepRecord) -> None:
        """Delete the original files of samples that the learner no longer holds."""
        if self._originals is not None:
            groups = record.dropped_origins, record.origins_B, record.evicted_origins
            self._originals.left(*groups, held=self.learner.originals)
            self.metrics.observe_originals(self._originals.bytes, self._originals.unkept)

    def _save_first(self, record: StepRecord | Idle) -> None:
        """Save the state from before the first step, so that a run can always go back to it."""
        if self._first is not None and isinstance(record, StepRecord):
            first, self._first = self._first, None
            self._save(lambda: self._checkpointer.save(first, self._config))

    def _reload(self) -> None:
        """Load good weights again after training has diverged."""
        divergence, group = self.learner.divergence, self._ranks.group
        self._conclude_save(wait=True)
        saved = self._checkpointer.before(divergence.limit)
        if saved is None:  # there is no earlier one: load the last reloaded one again
            saved = self._checkpointer.before(divergence.reloaded_from + 1)
        if saved is None:
            divergence.halt()
            log.error("no checkpoint is older than the fault: %s", divergence)
        else:
            self._failed_step = self.learner.step
            self.learner.reload(saved.capture(group.rank, group.size, self.learner.offset))
            log.warning("reloaded %s; training continues with the next samples", saved.path.name)
            if divergence.halted:
                log.error("%s", divergence)
        self._tell_of_divergence()

    def _tell_of_divergence(self) -> None:
        """Export the state of divergence. Log when training diverges and when it has recovered."""
        divergence = self.learner.divergence
        self.metrics.observe_divergence(divergence)
        if not divergence.healthy and self._healthy:
            log.warning("%s", divergence)
        if divergence.healthy and not self._healthy:
            log.info("training has recovered: updates succeed again after the reload")
            self._checkpointer.discard_between(divergence.reloaded_from, self._failed_step)
            if not self._ranks.group.rank:
                self._save_soon()
        self._healthy = divergence.healthy
        self.health.set("divergence", self._healthy, str(divergence))

    def _one_disk(self, checkpoints: Path) -> bool:
        """Return whether checkpoints and this learner's journal share a disk."""
        try:
            return checkpoints.stat().st_dev == (self._part.folder / "journal").stat().st_dev
        except OSError:
            return True  # one of the folders does not exist yet

    def _tell_ranks(self) -> None:
        """Tell the other ranks whether this rank is ready, and export the figures of all ranks."""
        if self._ranks.alone:
            return
        told, group = self.learner.ranks, self._ranks.group
        parts = self.health.ready().parts.items()
        told.ready = all(bool(part["ok"]) for name, part in parts if name != "ranks")
        unready = [str(rank) for rank, ready in enumerate(told.last.ready) if not ready]
        why = f"not ready: rank {', '.join(unready)}" if unready else ""
        self.health.set("ranks", not unready, why)
        slots = self.learner.memory.occupied_of_all
        self.metrics.observe_ranks([one.busy for one in told.work], slots, group)
        self._group.consume(self.learner.step, told.work, slots, told.last.offsets)

    def _checkpoint_to_free_space(self) -> None:
        """Make room in a journal that is full of samples that checkpoints would replay.

        Without another checkpoint the receiver trims nothing. Without new samples no checkpoint is
        due.
        """
        if time.monotonic() < self._free_space_at:
            return  # the receiver may not have trimmed yet
        self._free_space_at = time.monotonic() + FREE_SPACE_SECONDS
        if self._checkpointer.busy:
            return  # how much that checkpoint frees is not known yet
        if self._checkpointer.dirty:
            log.info("the journal is full: writing a checkpoint, so that it can be trimmed")
            self._save_soon()
            return
        needed = self._checkpointer.needed(beyond=self._checkpointed)
        if needed is None:
            self._limited_log.warning(
                "small",
                "the journal is full, and its new samples do not fill a batch: free space "
                "if its disk is full, otherwise raise journal.budget or lower "
                "batches.batch_size",
            )
            return
        log.warning(
            "the journal is full of records that only older checkpoints need: records "
            "before %d may now be trimmed, so the oldest checkpoint can only be "
            "evaluated. Raise journal.budget, or lower checkpoints.keep",
            needed.record,
        )
        self._checkpointed = needed.record
        self._tell_receiver()

    def _save_soon(self) -> None:
        """Save now. With several ranks, all save before their next step."""
        if self._ranks.alone:
            self._save_behind()
        else:
            self.learner.ranks.save_asked = True

    def _save_behind(self) -> None:
        """Begin a checkpoint that is written while training goes on."""
        self._conclude_save(wait=True)  # on all ranks, before they meet for the next checkpoint
        if self._originals is not None:
            self._originals.saving(self.learner.originals())
        self._save(lambda: self._checkpointer.begin(self.learner, self._config))

    def _conclude_save(self, wait: bool = False) -> None:
        """Record a checkpoint that is now durable; with `wait`, wait until it is."""
        self._save(lambda: self._checkpointer.finished(wait))

    def _save(self, work: Callable[[], CheckpointRecord | None]) -> None:
        """Run `work`, and record the checkpoint that it returns. Log and count a failed write."""
        try:
            record = work()
        except OSError as error:
            self.metrics.checkpoint_failed()
            self.health.set("checkpoint", False, str(error))
            log.error("checkpoint not written, training continues: %s", error)
            return
        if record is None:
            return
        self.health.set("checkpoint", True)
        self.metrics.consume(record)
        if self._originals is not None:
            self._originals.saved(self.learner.originals())
            self.metrics.observe_originals(self._originals.bytes, self._originals.unkept)
        self._checkpoint_bytes = max(self._checkpoint_bytes, record.bytes)
        self._checkpointed = max(self._checkpointed, record.needed.record)
        self._tell_receiver()
        log.info(
            "checkpoint at step %d: %.1f MB in %.2f s; training waited for %.2f s",
            record.step,
            record.bytes / 1e6,
            record.seconds,
            record.stalled,
        )


class Observers:
    """The observers of a learner: metrics, balance, drift, probes and shadows.

    They consume the learner's records, and never change the state that is trained.

    Args:
        metrics: the exported metrics.
        memory: the working memory.
        shadows: memories that see the same stream under other policies.
        batches, reader: report how far the learner is behind.
        prequential: predicts the labels of the stream.
        held_out: probes a held-out labelled set; None: no such set.
        device: the learner's device.
        recent_rank: detects a collapse.
        every: shortest time between two surveys of the expensive numbers, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        metrics: LearnerMetrics,
        memory: WorkingMemory,
        shadows: Sequence[Shadow],
        batches: Batches,
        reader: JournalReader,
        prequential: Prequential | None = None,
        held_out: HeldOutProbe | None = None,
        device: torch.device | None = None,
        recent_rank: RecentRank | None = None,
        every: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._memory, self._shadows = metrics, memory, shadows
        self._batches, self._reader = batches, reader
        self._balance, self._drift = Balance(), Drift()
        self._recent_rank = recent_rank or RecentRank()
        self._collisions = ClassCollisions()
        self._prequential = prequential or Prequential()
        self._held_out, self._device = held_out, device
        self._new = 0  # samples that wait in the learner
        self._every, self._clock = every, clock
        self._next = clock()

    def consume(self, record: StepRecord | Idle) -> None:
        """Consume one record."""
        self._metrics.consume(record)
        if isinstance(record, StepRecord):
            self._new = record.waiting
        if isinstance(record, StepRecord) and record.batch:
            self._recent_rank.consume(record)
            self._balance.consume(record)
            self._drift.consume(record)
            self._collisions.consume(record)
            self._prequential.consume(record)
            for shadow in self._shadows:
                if (admission := shadow.consume(record)) is not None:
                    self._metrics.admitted(shadow.name, admission)
            if self._held_out and (finding := self._held_out.consume(record)) is not None:
                self._metrics.observe_held_out(finding)
        if (begun := self._clock()) >= self._next:
            self.survey()
            spent = self._clock() - begun
            self._next = begun + max(self._every, min(spent / SURVEY_SHARE, SURVEY_SECONDS))

    def survey(self) -> None:
        """Export the numbers that are too expensive to compute at every step."""
        memories = {WORKING: self._memory} | {s.name: s.memory for s in self._shadows}
        for name, memory in memories.items():
            counts = class_counts(memory.labels)
            self._metrics.observe_memory(name, memory.stats(), counts)
        self._metrics.observe_producers(self._memory.holdings())
        self._metrics.observe_collisions(
            self._collisions.measure(self._memory), near_duplicates(self._memory)
        )
        self._metrics.observe_balance(self._balance)
        self._metrics.observe_ranks_of(self._recent_rank)
        shifts = self._drift.shift, self._drift.image_shift
        self._metrics.observe_drift(*shifts, self._drift.take_new())
        self._metrics.observe_prequential(self._prequential.read(), self._prequential.take_new())
        waiting, pending = self._batches.waiting(), self._batches.pending() + self._new
        rejected = self._batches.rejected()  # before `decoded`, so that no share is too large
        self._metrics.observe_journal(
            waiting, pending, self._reader.corrupt, rejected, self._batches.decoded()
        )
        if self._device is not None and self._device.type == "cuda":
            self._metrics.observe_gpu(
                {
                    "allocated": torch.cuda.memory_allocated(self._device),
                    "reserved": torch.cuda.memory_reserved(self._device),
                    "free": torch.cuda.mem_get_info(self._device)[0],
                }
            )


def _for_all(settings: Namespace) -> Namespace:
    """Return the settings that all ranks must share. Devices and receivers belong to each host."""
    shared: Namespace = settings.clone()
    shared.ranks.receivers = []
    shared.learner.device = torch.device(settings.learner.device).type
    return shared


def expected_bytes(learner: Learner) -> int:
    """Estimate the bytes of a checkpoint with a full memory, before one has been written."""
    weights = sum(value.nbytes for value in learner.method.state_dict().values())
    moments = sum(2 * value.nbytes for value in learner.method.parameters() if value.requires_grad)
    columns = learner.memory.state_dict(keep_vars=True)
    slot = sum(
        math.prod(column.shape[1:]) * column.element_size()
        for name, column in columns.items()
        if name.startswith("columns.")
    )
    return int(weights + moments + learner.memory.capacity * slot) + (1 << 20)


def folders(settings: Namespace) -> dict[str, Path]:
    """Return the folders that a learner writes, by purpose."""
    return {"checkpoints": settings.run / "checkpoints", "quarantine": settings.run / "quarantine"}
