"""The conversion of records into metrics. Each process has ReceiverMetrics or LearnerMetrics."""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import shutil
import time
from collections import Counter as Counting
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stream_ssl import __version__
from stream_ssl.learning.checkpoint_layout import DAMAGED
from stream_ssl.learning.records import NOT_FINITE, PHASES
from stream_ssl.observe import conditions
from stream_ssl.observe.catalogue import (
    BAD_SAMPLES,
    CLASSES,
    CLASSIFIERS,
    EXTREMES,
    PERCENTILES,
    PRODUCERS,
    REFUSALS,
    RESTARTS,
    SIGNALS,
    SKIPS,
    of_role,
)
from stream_ssl.observe.metric_spec import PREFIX, Role, Spec
from stream_ssl.wire.messages import REASONS

if TYPE_CHECKING:
    from stream_ssl.batch import Origin
    from stream_ssl.learning.checkpoint import CheckpointRecord
    from stream_ssl.learning.divergence import Divergence
    from stream_ssl.learning.records import Idle, StepRecord
    from stream_ssl.memory import Admission, MemoryStats
    from stream_ssl.memory.process_group import RankGroup
    from stream_ssl.memory.shares import Holding
    from stream_ssl.observe.balance import Balance
    from stream_ssl.observe.held_out import HeldOutRecord
    from stream_ssl.observe.recent_rank import RecentRank
    from stream_ssl.receiver.records import ReceiverRecord

# Prometheus does not use the `_created` series, which would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER = "other"

FARTHEST = 2.0
"""The largest value of novelty_distance: no picture in the memory is near the sample."""

LIMIT = 65
"""The most values of one label. Further values count as "other"."""

WORKING = "working"
"""The label of the memory that the learner trains from. Shadows have their own names."""

Family = Counter | Gauge | Histogram


class Measured(Collector):
    """A collector for a gauge that leaves out values that nobody has set.

    The client library would export them as 0.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def describe(self) -> Iterable[Metric]:
        """Return the name and the help of the gauge, without a value."""
        return self._gauge.describe()

    def collect(self) -> Iterator[Metric]:
        """Yield the family with the values that have been set."""
        for family in self._gauge.collect():
            family.samples = [one for one in family.samples if not math.isnan(one.value)]
            yield family


class Labels:
    """A bounded set of the values of one label: known values, new values, then "other".

    Values such as classes and producers come from outside. Without a bound, each new value would
    add a series for the life of the process.

    Args:
        known: values that are known in advance.
        limit: the most values. Further values become "other".
    """

    def __init__(self, known: Iterable[str] = (), limit: int = LIMIT) -> None:
        self.values = dict.fromkeys(known)
        self._limit = limit

    def fold(self, value: str) -> str:
        """Return the value, or "other" if there are already too many values."""
        if value in self.values:
            return value
        if len(self.values) >= self._limit:
            return OTHER
        self.values[value] = None
        return value


class Families:
    """The metrics of one role.

    Args:
        registry: the registry for the metrics. Each process, and each test, has its own.
        role: "receiver" or "learner".
        known: the label values that are known in advance, by label name or "metric.label". Counters
            with these values start at 0.
        config: the settings to export as labels of config_info.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        role: Role,
        known: Mapping[str, Iterable[str]],
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.registry = registry
        self.role = role
        self._specs = of_role(role)
        self._known = {name: tuple(values) for name, values in known.items()}
        self._labels: dict[tuple[str, str], Labels] = {}
        self._families: dict[str, Family] = {}
        for spec in self._specs:
            if spec.kind != "info":
                self._families[spec.name] = self._create(spec)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._describe(config or {})
        self.add("restarts_total", int(os.environ.get(RESTARTS, 0)))
        self.set("starting", 1.0)
        self._were_lit: set[tuple[str, str]] = set()
        self.light({})

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Add to a counter."""
        child = self._child(name, labels)
        assert isinstance(child, Counter), f"{name} is not a counter"
        child.inc(value)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), f"{name} is not a gauge"
        child.set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add a value to a histogram."""
        child = self._child(name, labels)
        assert isinstance(child, Histogram), f"{name} is not a histogram"
        child.observe(value)

    def light(self, lit: Mapping[tuple[str, str], bool]) -> None:
        """Export the conditions that are present, by name and producer. All others are 0."""
        shown = dict.fromkeys(
            {(one.name, "") for one in conditions.of_role(self.role)} | self._were_lit, False
        )
        self._were_lit |= set(lit)
        for (name, producer), value in {**shown, **lit}.items():
            if not value:  # before the 1s, because several producers may share "other"
                self.set("condition", 0.0, name=name, producer=producer)
        for name, producer in lit:
            self.set("condition", 1.0, name=name, producer=producer)

    def describe(self, config: Mapping[str, object]) -> None:
        """Export settings as labels of config_info. They replace the earlier settings."""
        self._config.info(settings(config))

    def fill(self, record: object, /, **labels: str) -> None:
        """Fill the metrics whose `Spec.field` names an attribute of the record.

        A value that is None or not finite leaves its metric unchanged.

        Args:
            record: a record of the class that `Spec.field` names.
            labels: further labels of the metrics.
        """
        put = {"counter": self.add, "gauge": self.set, "histogram": self.observe}
        for spec in self._specs:
            owner, _, name = spec.field.partition(".")
            value = getattr(record, name) if owner == type(record).__name__ else None
            if isinstance(value, Mapping):
                for label, part in value.items():
                    put[spec.kind](spec.name, part, **labels, **{spec.labels[0]: label})
            elif value is not None and math.isfinite(value):
                put[spec.kind](spec.name, value, **labels)

    def fold(self, name: str, label: str, value: str) -> str:
        """Return the value, or "other" if this label already has too many values."""
        return self._labels[name, label].fold(value)

    def compute(self, name: str, value: Callable[[], float], /, **labels: str) -> None:
        """Compute a gauge whenever it is read. It has no value while the result is NaN."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), f"{name} is not a gauge"
        child.set_function(value)

    def watch(self, folders: Mapping[str, Path]) -> None:
        """Export the free space of the disks of these folders, by name."""
        for name, folder in folders.items():
            self.compute("disk_free_bytes", partial(free, folder), folder=name)

    def _child(self, name: str, labels: Mapping[str, str]) -> Family:
        family = self._families[name]
        if not labels:
            return family
        bounded = {label: self._labels[name, label].fold(labels[label]) for label in labels}
        return family.labels(**bounded)

    def _create(self, spec: Spec) -> Family:
        # The library appends the unit itself, and shows it as UNIT in OpenMetrics.
        stem = spec.full_name.removesuffix("_total")
        unit = spec.unit if spec.unit and stem.endswith(f"_{spec.unit}") else ""
        family: Family
        if spec.kind == "counter":
            family = Counter(stem, spec.help, spec.labels, registry=self.registry, unit=unit)
        elif spec.kind == "gauge":
            family = Gauge(stem, spec.help, spec.labels, registry=None, unit=unit)
            self.registry.register(Measured(family))
        else:
            family = Histogram(
                stem,
                spec.help,
                spec.labels,
                registry=self.registry,
                unit=unit,
                buckets=spec.buckets,
            )
        for label in spec.labels:
            known = self._known.get(f"{spec.name}.{label}", self._known.get(label, ()))
            limit = PRODUCERS if label == "producer" else LIMIT
            self._labels[spec.name, label] = Labels(known, limit)
        if isinstance(family, Gauge):
            if not spec.labels:
                family.set(math.nan)
            return family
        values = [tuple(self._labels[spec.name, label].values) for label in spec.labels]
        if spec.labels:
            for combination in itertools.product(*values):
                family.labels(*combination)
        return family

    def _describe(self, config: Mapping[str, object]) -> None:
        specs = {spec.name: spec for spec in of_role(self.role) if spec.kind == "info"}
        build = {"version": __version__, "role": self.role, "python": platform.python_version()}
        if self.role == "learner":
            build["torch"] = metadata.version("torch")
        for name, values in (("build_info", build), ("config_info", settings(config))):
            stem = PREFIX + name.removesuffix("_info")
            info = Info(stem, specs[name].help, registry=self.registry)
            info.info(values)
        self._config = info


def free(folder: Path) -> float:
    """Return the free bytes on the disk of a folder; NaN if the system gives an error."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.nan


def set_aside(checkpoints: Path) -> float:
    """Return the number of damaged checkpoints in a folder; NaN if the folder is unreadable."""
    try:
        return float(sum(path.name.startswith(DAMAGED) for path in checkpoints.iterdir()))
    except OSError:
        return math.nan


def settings(config: Mapping[str, object], limit: int = 256) -> dict[str, str]:
    """Return nested settings as labels.

    `{"loss": {"temperature": 0.2}}` becomes loss_temperature="0.2". There are at most `limit`
    labels, of at most 128 characters each. Settings that look like a secret are left out.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if re.search("secret|password|token", key):
            continue
        name = re.sub(r"[^a-z0-9_]", "_", key.lower()).strip("_") or "value"
        if name[0].isdigit():  # a label must not begin with a digit
            name = f"setting_{name}"
        if isinstance(value, Mapping):
            flat.update({f"{name}_{inner}": text for inner, text in settings(value).items()})
        elif value is not None:
            flat[name] = str(value)[:128]
    return dict(itertools.islice(flat.items(), limit))


class ReceiverMetrics:
    """The metrics of the receiver.

    Args:
        registry: a registry for these metrics alone. The server exposes it as `self.registry`.
        config: the resolved settings, exported as config_info.
        folders: the folders that the receiver writes, by purpose.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        config: Mapping[str, object] | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        self.registry = registry
        known = {
            "reason": (*REASONS, OTHER),
            "refused_connections_total.reason": (*REASONS, *REFUSALS, OTHER),
        }
        self._families = Families(registry, "receiver", known, config)
        self._families.watch(folders or {})
        self._damaged = 0
        self._ticked = math.nan
        self._families.compute("loop_age_seconds", lambda: time.monotonic() - self._ticked)

    @property
    def light(self) -> Callable[[Mapping[tuple[str, str], bool]], None]:
        """The function that exports which conditions are present."""
        return self._families.light

    def started(self) -> None:
        """Report that the process has reached its main loop."""
        self._families.set("starting", 0.0)

    def consume(self, record: ReceiverRecord) -> None:
        """Take one record of `Receiver.run`."""
        self._ticked = time.monotonic()
        self._families.fill(record)
        # The record has the total since the journal was opened, and a counter needs the rise.
        damaged = max(0, record.journal_damaged - self._damaged)
        self._families.add("journal_damaged_segments_total", damaged)
        self._damaged = record.journal_damaged


class LearnerMetrics:
    """The metrics of the learner.

    Args:
        registry: a registry for these metrics alone. The server exposes it as `self.registry`.
        memories: the names of all memories: the working memory first, then the shadows.
        classes: the number of classes if it is known in advance; their series then start at 0.
        diagnostics: the names of the loss's diagnostics if they are known in advance.
        config: the resolved settings, exported as config_info.
        folders: the folders that the learner writes, by purpose.
        clock: returns seconds since the Unix epoch, for the age of a checkpoint.
        monotonic: returns monotonic seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        memories: Sequence[str] = (WORKING,),
        classes: int = 0,
        diagnostics: Iterable[str] = (),
        config: Mapping[str, object] | None = None,
        folders: Mapping[str, Path] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        known: dict[str, Iterable[str]] = {
            "memory": memories,
            "phase": PHASES,
            "percentile": PERCENTILES,
            "statistic": EXTREMES,
            "signal": SIGNALS,
            "classifier": CLASSIFIERS,
            "class": dict.fromkeys(_class_label(label) for label in range(classes)),
            "name": diagnostics,
            "skipped_updates_total.reason": (*SKIPS, OTHER),
            "skipped_samples_total.reason": (*SKIPS, OTHER),
            "quarantined_samples_total.reason": (*BAD_SAMPLES, OTHER),
            "originals_unkept_total.reason": ("budget", "disk"),
            "quarantined_samples_total.producer": (OTHER,),
            "dropped_class_samples_total.twin": ("same", "other", "unknown"),
        }
        self._families = Families(registry, "learner", known, config)
        self._families.watch(folders or {})
        if (checkpoints := (folders or {}).get("checkpoints")) is not None:
            self._families.compute("checkpoints_damaged", lambda: set_aside(checkpoints))
        self._clock, self._monotonic = clock, monotonic
        self._checkpoint_time = clock()  # without a checkpoint, its age counts from the start
        self._classes_held: dict[str, set[str]] = {}
        self._holders: set[str] = set()  # producers that held slots at the last report
        self._unsaved_since = math.inf  # time of the first step that no checkpoint holds
        self._step_number, self._ticked = 0, math.nan
        self._totals: dict[tuple[str, ...], float] = {}  # as last reported
        compute = self._families.compute
        compute("checkpoint_age_seconds", lambda: max(0.0, self._clock() - self._checkpoint_time))
        compute("checkpoint_lag_seconds", lambda: max(0.0, monotonic() - self._unsaved_since))
        compute("loop_age_seconds", lambda: monotonic() - self._ticked)

    @property
    def light(self) -> Callable[[Mapping[tuple[str, str], bool]], None]:
        """The function that exports which conditions are present."""
        return self._families.light

    def describe(self, config: Mapping[str, object]) -> None:
        """Export settings that were not known at the start."""
        self._families.describe(config)

    def started(self) -> None:
        """Report that the process has reached its main loop."""
        self._families.set("starting", 0.0)

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
            unsaved = self._unsaved_since
            self.resumed(record.step, record.created)
            if record.step < self._step_number:  # steps during the writing of the checkpoint
                self._unsaved_since = max(unsaved, self._ticked - record.seconds)
            self._families.fill(record)

    def admitted(self, memory: str, admission: Admission) -> None:
        """Count the result of a shadow's `consume`. `consume` counts that of the working memory."""
        add = self._families.add
        add("memory_inserted_total", admission.inserted, memory=memory)
        add("memory_evictions_total", len(admission.evicted), memory=memory)
        add("memory_refused_total", len(admission.refused), memory=memory)
        add("memory_near_duplicates_total", len(admission.duplicates), memory=memory)
        add("memory_merged_total", len(admission.merged), memory=memory)

    def observe_memory(
        self, memory: str, stats: MemoryStats, class_counts: Mapping[int, int] | None = None
    ) -> None:
        """Report the state of a memory.

        `WorkingMemory.stats` makes an eigendecomposition, so do not call it at every step.

        Args:
            memory: a name from `memories` of the constructor.
            stats: the result of `WorkingMemory.stats`.
            class_counts: labelled slots by class, from `balance.class_counts`. Classes that left
                the memory become 0.
        """
        put = self._families.set
        self._families.fill(stats, memory=memory)
        percentiles = {
            "memory_age_samples": (stats.age_p50, stats.age_p90, stats.age_max),
            "memory_staleness_samples": (stats.stale_p50, stats.stale_p90, stats.stale_max),
            "memory_slot_duplicates": (stats.count_p50, stats.count_p90, stats.count_max),
        }
        for metric, of_slots in percentiles.items():
            for percentile, value in zip(PERCENTILES, of_slots, strict=True):
                put(metric, value, memory=memory, percentile=percentile)
        shifts = (1 - stats.drift_mean, 1 - stats.drift_min)
        for statistic, shift in zip(EXTREMES, shifts, strict=True):
            put("memory_reencoding_shift", shift, memory=memory, statistic=statistic)
        if class_counts is not None:
            self._class_slots(memory, class_counts)

    def observe_producers(self, holdings: Mapping[str | None, Holding]) -> None:
        """Report the slots of each producer, from `WorkingMemory.holdings`.

        Producers that no longer hold slots become 0.
        """
        slots, guaranteed = (Counting(dict.fromkeys(self._holders, 0)) for _ in range(2))
        for producer, holding in holdings.items():
            label = OTHER if producer is None else producer
            label = self._families.fold("producer_slots", "producer", label)
            slots[label] += holding.slots
            guaranteed[label] += holding.guaranteed
        self._holders = set(slots)
        for label in slots:
            self._families.set("producer_slots", slots[label], producer=label)
            self._families.set("producer_guaranteed_slots", guaranteed[label], producer=label)

    def observe_balance(self, balance: Balance) -> None:
        """Report the effective rank and the classes of the stream."""
        put = self._families.set
        put("stream_effective_rank", balance.effective_rank)
        put("stream_class_entropy_nats", balance.class_entropy)
        for label, samples in balance.take_new().items():
            self._families.add(
                "stream_class_samples_total", samples, **{"class": _class_label(label)}
            )

    def observe_ranks_of(self, recent: RecentRank) -> None:
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
        """Report the drift of the stream.

        Args:
            shift: the shift of the embeddings.
            image_shift: the shift of the thumbnails.
            detections: changes found since the last call, by signal.
        """
        self._families.set("embedding_shift", shift)
        self._families.set("image_shift", image_shift)
        for signal, found in detections.items():
            self._families.add("drift_detections_total", found, signal=signal)

    def observe_collisions(self, calibrated: float | None, near_duplicates: float | None) -> None:
        """Report the results of `collisions.py`. None leaves a metric unchanged."""
        if calibrated is not None:
            self._families.set("collision_probability", calibrated, kind="calibrated")
        if near_duplicates is not None:
            self._families.set("memory_near_duplicates_ratio", near_duplicates)

    def observe_gpu(self, memory: Mapping[str, int]) -> None:
        """Report the GPU's memory in bytes, by kind."""
        for kind, value in memory.items():
            self._families.set("gpu_memory_bytes", value, kind=kind)

    def observe_prequential(
        self, found: Mapping[str, tuple[float, float, float]], samples: int
    ) -> None:
        """Report the results of the online probe.

        Args:
            found: (accuracy, balanced accuracy, kappa) by classifier.
            samples: samples predicted since the last call.
        """
        self._families.add("prequential_samples_total", samples)
        names = ("prequential_accuracy", "prequential_balanced_accuracy", "prequential_kappa")
        for classifier, values in found.items():
            for name, value in zip(names, values, strict=True):
                self._set_finite(name, value, classifier=classifier)

    def observe_held_out(self, record: HeldOutRecord) -> None:
        """Report a probe of the held-out set."""
        put = self._families.set
        put("held_out_accuracy", record.result.accuracy)
        put("held_out_step", record.step)
        put("held_out_probe_seconds", record.seconds)
        for label, accuracy in record.result.per_class.items():
            if label < CLASSES:  # a mean of all other classes would mean nothing
                put("held_out_class_accuracy", accuracy, **{"class": _class_label(label)})

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

    def observe_originals(self, size: int, unkept: Mapping[str, int]) -> None:
        """Report the bytes of the kept originals, and the samples that were not kept, by reason."""
        self._families.set("originals_bytes", size)
        for reason, samples in unkept.items():
            self._raise_to("originals_unkept_total", samples, reason=reason)

    def resumed(self, step: int, created: float) -> None:
        """Report the newest checkpoint: its step, and the Unix time of its creation."""
        self._checkpoint_time, self._unsaved_since = created, math.inf
        self._families.set("checkpoint_timestamp_seconds", created)
        self._families.set("checkpoint_step", step)
        self._families.set("step", max(step, self._step_number))

    def observe_ranks(self, busy: Sequence[float], slots: int, group: RankGroup) -> None:
        """Report the work of the ranks so far.

        Args:
            busy: busy seconds by rank, from `stream_ssl.learning.ranks.Work`.
            slots: the occupied slots of all shards.
            group: the group that this rank belongs to.
        """
        for rank, seconds in enumerate(busy):
            self._raise_to("rank_busy_seconds_total", seconds, rank=str(rank))
            held = -(-(slots - rank) // group.size)
            self._families.set("rank_shard_slots", held, rank=str(rank))
        self._raise_to("rank_waited_seconds_total", group.waited)
        self._raise_to("rank_sent_bytes_total", group.bytes)
        self._raise_to("rank_collectives_total", group.collectives)

    def _raise_to(self, name: str, total: float, /, **labels: str) -> None:
        key = (name, *labels.values())
        self._families.add(name, max(0.0, total - self._totals.get(key, 0.0)), **labels)
        self._totals[key] = total

    def observe_divergence(self, divergence: Divergence) -> None:
        """Report updates skipped in a row, reloads, and whether the learner has halted."""
        self._families.set("skipped_updates_in_a_row", divergence.skipped_in_a_row)
        self._raise_to("divergence_reloads_total", divergence.reloads)
        self._families.set("learner_halted", divergence.halted)

    def parked(self, journals: int) -> None:
        """Report the number of the run's journals that no rank reads."""
        self._families.set("parked_journals", journals)

    def checkpoint_failed(self) -> None:
        """Count a checkpoint that could not be written."""
        self._families.add("checkpoint_failures_total")

    def _step(self, record: StepRecord) -> None:
        add = self._families.add
        self._families.fill(record)
        self._unsaved_since = min(self._unsaved_since, self._monotonic())
        self._step_number = record.step
        if record.skipped is None:
            add("steps_total")
        else:
            add("skipped_updates_total", 1, reason=record.skipped)
        self._by_producer("dropped_samples_total", record.dropped_origins, reason="near_duplicate")
        for origin, distance in record.novelty:
            producer = origin.producer if origin is not None else OTHER
            self._families.observe("novelty_distance", min(distance, FARTHEST), producer=producer)
        for one in record.dropped:
            if one.label >= 0:
                twin = "same" if one.twin_label == one.label else "other"
                twin = twin if one.twin_label >= 0 else "unknown"
                labels = {"class": _class_label(one.label), "twin": twin}
                add("dropped_class_samples_total", 1, **labels)
        if not record.replay:
            self._by_producer("producer_admitted_samples_total", record.origins_B or ())
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
        for phase, seconds in record.seconds.items():
            self._families.observe("step_seconds", seconds, phase=phase)
        for name, value in record.diagnostics.items():
            self._set_finite("loss_diagnostic", value, name=name)
        if record.collision_true is not None:
            self._set_finite("collision_probability", record.collision_true, kind="true")
        if record.admission is not None:
            self.admitted(WORKING, record.admission)

    def _by_producer(self, name: str, origins: Iterable[Origin | None], /, **labels: str) -> None:
        """Count samples by producer."""
        for producer, count in Counting(
            one.producer if one is not None else OTHER for one in origins
        ).items():
            self._families.add(name, count, producer=producer, **labels)

    def _set_finite(self, name: str, value: float, /, **labels: str) -> None:
        if math.isfinite(value):
            self._families.set(name, value, **labels)

    def _class_slots(self, memory: str, counts: Mapping[int, int]) -> None:
        # Imported here, because the receiver's process has no torch.
        from stream_ssl.observe.balance import entropy

        folded = dict.fromkeys(self._classes_held.get(memory, ()), 0)  # classes that left are 0
        for label, slots in counts.items():
            folded[_class_label(label)] = folded.get(_class_label(label), 0) + slots
        self._classes_held[memory] = {label for label, slots in folded.items() if slots}
        for name, slots in folded.items():
            self._families.set("memory_class_slots", slots, **{"memory": memory, "class": name})
        self._families.set("memory_class_entropy_nats", entropy(counts.values()), memory=memory)


def _class_label(label: int) -> str:
    return str(label) if 0 <= label < CLASSES else OTHER
