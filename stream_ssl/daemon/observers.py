"""The observers of a learner: they consume its records, and export what they measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from stream_ssl.feed.batches import Batches
from stream_ssl.journal.reader import JournalReader
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.observe.balance import Balance, class_counts
from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.collisions import ClassCollisions, NearDuplicateShare
from stream_ssl.observe.drift import Drift
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.metrics import LearnerMetrics
from stream_ssl.observe.prequential import Prequential
from stream_ssl.observe.recent_rank import RecentRank
from stream_ssl.observe.shadow import Shadow

SURVEY_SHARE = 0.02
"""Share of the time that a survey of the expensive numbers (spectra, histograms) may take."""
SURVEY_EVERY = 1.0
"""Shortest time between two surveys, in seconds."""
SURVEY_SECONDS = 15.0
"""Longest time between two surveys, in seconds, even if a survey then exceeds SURVEY_SHARE."""


class Observers:
    """The observers of a learner: metrics, balance, drift, probes and shadows.

    They consume the learner's records, and never change the state that is trained.

    Args:
        test: finds near-duplicates of the memory's pictures; None: it has no pictures.
        shadows: memories that see the same stream under other policies.
        batches, reader: report how far the learner is behind.
        held_out: probes a held-out labelled set; None: no such set.
        recent_rank: detects a collapse.
    """

    def __init__(
        self,
        metrics: LearnerMetrics,
        memory: WorkingMemory,
        test: NearDuplicates | None,
        shadows: Sequence[Shadow],
        batches: Batches,
        reader: JournalReader,
        held_out: HeldOutProbe | None = None,
        recent_rank: RecentRank | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._memory, self._shadows = metrics, memory, shadows
        self._near_duplicates = NearDuplicateShare(test, memory)
        self._batches, self._reader = batches, reader
        self._recent_rank = recent_rank or RecentRank()
        self._balance = Balance()
        self._drift = Drift(number_bytes=self._recent_rank.number_bytes)
        self._collisions = ClassCollisions()
        self._prequential = Prequential()
        self._held_out, self._device = held_out, memory.device
        self._new = 0  # samples that wait in the learner
        self._clock = clock
        self._next = clock()

    def consume(self, record: StepRecord | Idle) -> None:
        """Consume one record."""
        self._metrics.consume(record)
        self._new = record.waiting
        if isinstance(record, StepRecord) and record.batch:
            self._recent_rank.consume(record)
            self._balance.consume(record)
            self._drift.consume(record)
            self._collisions.consume(record)
            self._prequential.consume(record)
            for shadow in self._shadows:
                if (admission := shadow.consume(record)) is not None:
                    self._metrics.of_memories.admitted(shadow.name, admission)
        # A step that only draws from the memory is a step of the encoder, too.
        if self._held_out and (finding := self._held_out.consume(record)) is not None:
            self._metrics.observe_held_out(finding)
        if (begun := self._clock()) >= self._next:
            self.survey()
            spent = self._clock() - begun
            self._next = begun + max(SURVEY_EVERY, min(spent / SURVEY_SHARE, SURVEY_SECONDS))

    def survey_memory(self) -> None:
        """Export what the working memory holds."""
        counts = class_counts(self._memory.labels)
        self._metrics.of_memories.observe(WORKING, self._memory.stats(), counts)
        self._metrics.of_memories.observe_producers(self._memory.holdings())

    def survey(self) -> None:
        """Export the numbers that are too expensive to compute at every step."""
        self.survey_memory()
        for shadow in self._shadows:
            counts = class_counts(shadow.memory.labels)
            self._metrics.of_memories.observe(shadow.name, shadow.memory.stats(), counts)
        self._metrics.observe_collisions(
            self._collisions.measure(self._memory), self._near_duplicates.survey()
        )
        self._metrics.observe_balance(self._balance)
        self._metrics.observe_effective_ranks(self._recent_rank)
        drift = self._drift
        self._metrics.observe_drift(
            drift.shift("embedding"), drift.shift("image"), drift.take_new()
        )
        self._metrics.observe_prequential(self._prequential)
        waiting, pending = self._batches.waiting(), self._batches.pending() + self._new
        rejected = self._batches.rejected()  # before `decoded`, so that no share is too large
        self._metrics.observe_journal(
            waiting, pending, self._reader.corrupt, rejected, self._batches.decoded()
        )
        self._metrics.observe_unkept("quarantine", self._batches.unkept())
        if self._device.type == "cuda":
            self._metrics.observe_gpu(
                {
                    "allocated": torch.cuda.memory_allocated(self._device),
                    "reserved": torch.cuda.memory_reserved(self._device),
                    "free": torch.cuda.mem_get_info(self._device)[0],
                }
            )
