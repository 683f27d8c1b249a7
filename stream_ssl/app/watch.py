"""Those who watch the learner: each takes its records, none changes what is learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from memory import WorkingMemory
from stream_ssl.ingest.batches import Batches
from stream_ssl.ingest.journal import JournalReader
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.observe.balance import Balance, class_counts
from stream_ssl.observe.drift import Drift
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.metrics import WORKING, LearnerMetrics
from stream_ssl.observe.prequential import Prequential
from stream_ssl.observe.shadow import Shadow

SURVEY_SHARE = 0.02
"""Share of the time that the dear numbers (spectra, histograms) may take, ..."""
SURVEY_SECONDS = 15.0
"""... unless they would be older than this."""


class Watch:
    """Metrics, balance, drift, probes and shadows, fed with the learner's records.

    Args:
        metrics: what is exported.
        memory: the working memory.
        shadows: memories fed beside it.
        batches, reader: asked how far behind the learner is.
        prequential: predicts the labels that the stream carries.
        held_out: probes a held-out labelled set, where one is given.
        least: seconds between two surveys of the dear numbers, at least.
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
        least: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._memory, self._shadows = metrics, memory, shadows
        self._batches, self._reader = batches, reader
        self._balance, self._drift = Balance(), Drift()
        self._prequential = prequential or Prequential()
        self._held_out = held_out
        self._least, self._clock = least, clock
        self._next = clock()

    def consume(self, record: StepRecord | Idle) -> None:
        """Take one record."""
        self._metrics.consume(record)
        if isinstance(record, StepRecord):
            self._balance.consume(record)
            self._drift.consume(record)
            self._prequential.consume(record)
            for shadow in self._shadows:
                if (admission := shadow.consume(record)) is not None:
                    self._metrics.admitted(shadow.name, admission)
            if self._held_out and (finding := self._held_out.consume(record)) is not None:
                self._metrics.observe_held_out(finding)
        if (begun := self._clock()) >= self._next:
            self.survey()
            spent = self._clock() - begun
            self._next = begun + max(self._least, min(spent / SURVEY_SHARE, SURVEY_SECONDS))

    def survey(self) -> None:
        """Look at what costs more than a step should bear."""
        memories = {WORKING: self._memory} | {s.name: s.memory for s in self._shadows}
        for name, memory in memories.items():
            counts = class_counts(memory.labels)
            self._metrics.observe_memory(name, memory.stats(), counts)
        self._metrics.observe_balance(self._balance)
        self._metrics.observe_drift(self._drift.shift, self._drift.take_new())
        self._metrics.observe_prequential(self._prequential.read(), self._prequential.take_new())
        self._metrics.observe_journal(self._batches.waiting(), self._reader.corrupt)
