"""The conversion of records into metrics. Each process has ReceiverMetrics or LearnerMetrics."""

from __future__ import annotations

import math
import time
from collections import Counter as Counting
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from stream_ssl.learning.records import NOT_FINITE, PHASES
from stream_ssl.observe.catalogue import (
    BAD_SAMPLES,
    CLASSES,
    CLASSIFIERS,
    EXTREMES,
    PERCENTILES,
    REFUSALS,
    SIGNALS,
    SKIPS,
    WORKING,
)
from stream_ssl.observe.checkpoint_metrics import CheckpointMetrics
from stream_ssl.observe.families import OTHER, Families, class_label
from stream_ssl.observe.memory_metrics import MemoryMetrics
from stream_ssl.wire.messages import REASONS

if TYPE_CHECKING:
    from stream_ssl.batch import Origin
    from stream_ssl.learning.checkpoint import CheckpointRecord
    from stream_ssl.learning.divergence import Divergence
    from stream_ssl.learning.records import Idle, StepRecord
    from stream_ssl.memory.process_group import RankGroup
    from stream_ssl.observe.balance import Balance
    from stream_ssl.observe.held_out import HeldOutRecord
    from stream_ssl.observe.prequential import Prequential
    from stream_ssl.observe.recent_rank import RecentRank
    from stream_ssl.receiver.records import ReceiverRecord

COLLISIONS = 16
"""The number of batches that a collision probability covers."""
FARTHEST = 2.0
"""The largest value of novelty_distance: no picture in the memory is near the sample."""


class ProcessMetrics:
    """The metrics that both roles have.

    Args:
        folders: the folders that the process writes, by purpose.

    Attributes:
        registry: the registry of the metrics, which the server exposes.
        set_conditions: exports which conditions are present; see `Families`.
    """

    def __init__(
        self,
        families: Families,
        folders: Mapping[str, Path] | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._families, self._monotonic = families, monotonic
        self.registry, self.set_conditions = families.registry, families.set_conditions
        self._ticked = math.nan
        self._totals: dict[tuple[str, ...], float] = {}  # of counters, as last reported
        families.watch(folders or {})
        families.compute("loop_age_seconds", lambda: monotonic() - self._ticked)

    def describe(self, config: Mapping[str, object]) -> None:
        """Export the settings, by names such as "memory.capacity", as config_info."""
        self._families.describe(config)

    def started(self) -> None:
        """Report that the process has reached its main loop."""
        self._families.set("starting", 0.0)

    def _raise_to(self, name: str, total: float, /, **labels: str) -> None:
        """Add the rise of a total since the last call to its counter. A fall adds nothing."""
        key = (name, *labels.values())
        self._families.add(name, max(0.0, total - self._totals.get(key, 0.0)), **labels)
        self._totals[key] = total


class ReceiverMetrics(ProcessMetrics):
    """The metrics of the receiver, in a registry for them alone."""

    def __init__(
        self, registry: CollectorRegistry, folders: Mapping[str, Path] | None = None
    ) -> None:
        known = {
            "reason": (*REASONS, OTHER),
            "refused_connections_total.reason": (*REASONS, *REFUSALS, OTHER),
        }
        super().__init__(Families(registry, "receiver", known), folders)

    def consume(self, record: ReceiverRecord) -> None:
        """Take one record of `Receiver.run`."""
        self._ticked = self._monotonic()
        self._families.fill(record)
        self._raise_to("journal_damaged_segments_total", record.journal_damaged)


class LearnerMetrics(ProcessMetrics):
    """The metrics of the learner.

    Args:
        registry: a registry for these metrics alone.
        memories: the names of all memories: the working memory first, then the shadows.
        classes: the number of classes if it is known in advance; their series then start at 0.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        memories: Sequence[str] = (WORKING,),
        classes: int = 0,
        folders: Mapping[str, Path] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        known: dict[str, Iterable[str]] = {
            "memory": memories,
            "phase": PHASES,
            "percentile": PERCENTILES,
            "statistic": EXTREMES,
            "signal": SIGNALS,
            "classifier": CLASSIFIERS,
            "class": dict.fromkeys(class_label(label) for label in range(min(classes, CLASSES))),
            "skipped_updates_total.reason": (*SKIPS, OTHER),
            "skipped_samples_total.reason": (*SKIPS, OTHER),
            "quarantined_samples_total.reason": (*BAD_SAMPLES, OTHER),
            "unkept_samples_total.folder": ("originals", "quarantine"),
            "unkept_samples_total.reason": ("budget", "rate", "disk"),
            "quarantined_samples_total.producer": (OTHER,),
            "dropped_class_samples_total.twin": ("same", "other", "unknown"),
        }
        super().__init__(Families(registry, "learner", known), folders, monotonic)
        self.of_memories = MemoryMetrics(self._families)
        self.of_checkpoints = CheckpointMetrics(
            self._families, (folders or {}).get("checkpoints"), clock, monotonic
        )
        self._collisions: dict[str, tuple[float, int]] = {}  # by kind: (mean, batches)

    def consume(self, record: StepRecord | Idle | CheckpointRecord) -> None:
        """Take one record of `Learner.run`, or the record that `Checkpointer.save` returned."""
        # Imported here, because the receiver's process has no torch.
        from stream_ssl.learning.records import Idle, StepRecord

        self._ticked = self._monotonic()
        if isinstance(record, StepRecord | Idle):
            self._families.set("lag_seconds", record.lag_seconds)
        if isinstance(record, StepRecord):
            self._step(record)
        elif not isinstance(record, Idle):
            self.of_checkpoints.saved(record)

    def observe_balance(self, balance: Balance) -> None:
        """Report the effective rank and the classes of the stream."""
        put = self._families.set
        if (rank := balance.effective_rank) is not None:  # 0 would look like a collapse
            put("stream_effective_rank", rank)
        put("stream_class_entropy_nats", balance.class_entropy)
        for label, samples in balance.take_new().items():
            self._families.add(
                "stream_class_samples_total", samples, **{"class": class_label(label)}
            )

    def observe_effective_ranks(self, recent: RecentRank) -> None:
        """Report the effective ranks of recent keys and images, and their maxima."""
        names = {
            "keys": ("recent_effective_rank", "effective_rank_peak"),
            "images": ("recent_image_rank", "image_rank_peak"),
        }
        for kind, rank in recent.measure().items():
            for name, value in zip(names[kind], (rank, recent.peaks[kind]), strict=True):
                self._families.set(name, value)

    def observe_drift(
        self, shift: float, image_shift: float, detections: Mapping[str, int]
    ) -> None:
        """Report the shifts of embeddings and thumbnails, and the new detections by signal."""
        self._families.set("embedding_shift", shift)
        self._families.set("image_shift", image_shift)
        for signal, found in detections.items():
            self._families.add("drift_detections_total", found, signal=signal)

    def observe_collisions(self, calibrated: float | None, near_duplicates: float | None) -> None:
        """Report the results of `collisions.py`. None leaves a metric unchanged."""
        if calibrated is not None:
            self._add_collision("calibrated", calibrated)
        if near_duplicates is not None:
            self._families.set("memory_near_duplicates_ratio", near_duplicates)

    def observe_gpu(self, memory: Mapping[str, int]) -> None:
        """Report the GPU's memory in bytes, by kind."""
        for kind, value in memory.items():
            self._families.set("gpu_memory_bytes", value, kind=kind)

    def observe_prequential(self, probe: Prequential) -> None:
        """Report the results of the online probe."""
        self._families.add("prequential_samples_total", probe.take_new())
        self._families.set("prequential_covered_samples", probe.covered)
        names = ("prequential_accuracy", "prequential_balanced_accuracy", "prequential_kappa")
        for classifier, values in probe.read().items():
            for name, value in zip(names, values, strict=True):
                self._set_finite(name, value, classifier=classifier)

    def started_at(self, accuracy: float | None) -> None:
        """Report the accuracy on the held-out set at the start of the run; None if unknown."""
        if accuracy is not None:
            self._families.set("held_out_first_accuracy", accuracy)

    def observe_held_out(self, record: HeldOutRecord) -> None:
        """Report a probe of the held-out set."""
        put = self._families.set
        self._families.fill(record)
        put("held_out_accuracy", record.result.accuracy)
        for label, accuracy in record.result.per_class.items():
            if label < CLASSES:  # a mean of all other classes would mean nothing
                put("held_out_class_accuracy", accuracy, **{"class": class_label(label)})

    def observe_journal(
        self,
        waiting: int,
        pending: int,
        corrupt: int,
        rejected: Mapping[tuple[str, str], int],
        decoded: Mapping[str, int],
    ) -> None:
        """Report how far the learner is behind the journal, and the data that it could not read.

        Args:
            waiting: records that the learner has not read yet.
            pending: samples that the learner has read but not trained on.
            corrupt: corrupt records that were skipped since the reader was opened.
            rejected: samples that could not be decoded since then, by reason and producer.
            decoded: samples that were decoded since then, by producer.
        """
        self._families.set("lag_records", waiting)
        self._families.set("pending_samples", pending)
        self._raise_to("journal_corrupt_records_total", corrupt)
        for producer, samples in decoded.items():
            self._raise_to("producer_decoded_samples_total", samples, producer=producer)
        for (reason, producer), samples in rejected.items():
            self._raise_to("quarantined_samples_total", samples, reason=reason, producer=producer)

    def counts_failures_of(self, logger: str) -> Callable[[], None]:
        """Return a function that counts a failure of a logger. The count begins at 0."""
        self._families.add("logger_failures_total", 0.0, logger=logger)
        return lambda: self._families.add("logger_failures_total", logger=logger)

    def observe_originals(self, size: int, unkept: Mapping[str, int]) -> None:
        """Report the bytes of the kept originals, and the samples that were not kept, by reason."""
        self._families.set("originals_bytes", size)
        self.observe_unkept("originals", unkept)

    def observe_unkept(self, folder: str, unkept: Mapping[str, int]) -> None:
        """Report the samples that a folder of the run should hold and does not, by reason."""
        for reason, samples in unkept.items():
            self._raise_to("unkept_samples_total", samples, folder=folder, reason=reason)

    def observe_ranks(self, busy: Sequence[float], slots: Sequence[int], group: RankGroup) -> None:
        """Report the busy seconds and the slots of each rank, and the group's totals."""
        for rank, (seconds, held) in enumerate(zip(busy, slots, strict=True)):
            self._raise_to("rank_busy_seconds_total", seconds, rank=str(rank))
            self._families.set("rank_shard_slots", held, rank=str(rank))
        self._raise_to("rank_waited_seconds_total", group.waited)
        self._raise_to("rank_sent_bytes_total", group.bytes)
        self._raise_to("rank_collectives_total", group.collectives)

    def observe_divergence(self, divergence: Divergence) -> None:
        """Report updates skipped in a row, reloads, and whether the learner has halted."""
        self._families.set("skipped_updates_in_a_row", divergence.skipped_in_a_row)
        self._raise_to("divergence_reloads_total", divergence.reloads)
        self._families.set("learner_halted", divergence.halted)

    def parked(self, journals: int) -> None:
        """Report the number of the run's journals that no rank reads."""
        self._families.set("parked_journals", journals)

    def _step(self, record: StepRecord) -> None:
        add = self._families.add
        self._families.fill(record)
        self.of_checkpoints.stepped(record.step)
        if record.skipped is None:
            add("steps_total")
        else:
            add("skipped_updates_total", 1, reason=record.skipped)
        self._novelty(record)
        if record.skipped is None:
            name = "replayed_samples_total" if record.replay else "trained_samples_total"
            add(name, record.batch)
        elif not record.replay:
            add("skipped_samples_total", record.batch, reason=record.skipped)
        # The last loss stays if no update was due. A failed update removes it.
        if record.skipped in NOT_FINITE:
            self._families.set("loss", math.nan)
            self._families.set("gradient_norm", math.nan)
        if record.skipped is None:
            self._set_finite("loss", record.loss)
            self._set_finite("gradient_norm", record.grad_norm)
            self._set_finite("learning_rate", record.learning_rate)
        if record.collision_true is not None:
            self._add_collision("true", record.collision_true)
        if record.admission is not None:
            self.of_memories.admitted(WORKING, record.admission)

    def _novelty(self, record: StepRecord) -> None:
        """Count the samples that the near-duplicate test dropped or admitted, with distances."""
        self._by_producer("dropped_samples_total", record.dropped_origins, reason="near_duplicate")
        self._by_producer("producer_admitted_samples_total", record.new_origins)
        distances: dict[str, list[float]] = {}
        for origin, distance in record.novelty:
            producer = origin.producer if origin is not None else OTHER
            distances.setdefault(producer, []).append(min(distance, FARTHEST))
        for producer, each in distances.items():
            self._families.observe("novelty_distance", *each, producer=producer)
        for one in record.dropped:
            if one.label >= 0:
                twin = "same" if one.twin_label == one.label else "other"
                twin = twin if one.twin_label >= 0 else "unknown"
                labels = {"class": class_label(one.label), "twin": twin}
                self._families.add("dropped_class_samples_total", 1, **labels)

    def _by_producer(self, name: str, origins: Iterable[Origin | None], /, **labels: str) -> None:
        """Count samples by producer."""
        for producer, count in Counting(
            one.producer if one is not None else OTHER for one in origins
        ).items():
            self._families.add(name, count, producer=producer, **labels)

    def _add_collision(self, kind: str, probability: float) -> None:
        """Export the mean of the last measurements, because one batch alone has few classes."""
        if math.isfinite(probability):
            before, count = self._collisions.get(kind, (0.0, 0))
            count = min(count + 1, COLLISIONS)
            mean = before + (probability - before) / count
            self._collisions[kind] = (mean, count)
            self._families.set("collision_probability", mean, kind=kind)

    def _set_finite(self, name: str, value: float, /, **labels: str) -> None:
        if math.isfinite(value):
            self._families.set(name, value, **labels)
