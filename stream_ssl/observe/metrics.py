"""Turns the loops' records into metrics: ReceiverMetrics and LearnerMetrics, one a process."""

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
    from stream_ssl.receiver.receiver import ReceiverRecord

# A `_created` series beside each counter would double their number; Prometheus does not use them.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER = "other"

FARTHEST = 2.0
"""The value that novelty_distance gets for a sample that no held picture comes near."""

LIMIT = 65
"""Values of one label that are told apart; later ones are counted as "other"."""

WORKING = "working"
"""Label of the memory that the learner trains from; shadows have names of their own."""

Family = Counter | Gauge | Histogram


class Measured(Collector):
    """A gauge without the values that nobody has set: none is told as 0."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def describe(self) -> Iterable[Metric]:
        """Its name and help, without a value."""
        return self._gauge.describe()

    def collect(self) -> Iterator[Metric]:
        """What has been set; the family itself in any case."""
        for family in self._gauge.collect():
            family.samples = [one for one in family.samples if not math.isnan(one.value)]
            yield family


class Labels:
    """The values of one label: those known in advance, then new ones up to `LIMIT`, then "other".

    A label's values come from outside (reasons, classes): without a bound, each new one would be
    a new series for the life of the process.
    """

    def __init__(self, known: Iterable[str] = (), limit: int = LIMIT) -> None:
        self.values = dict.fromkeys(known)
        self._limit = limit

    def fold(self, value: str) -> str:
        """The value, or "other" when there are too many already."""
        if value in self.values:
            return value
        if len(self.values) >= self._limit:
            return OTHER
        self.values[value] = None
        return value


class Families:
    """The metrics of one role.

    Args:
        registry: where they are registered; each process, and each test, has its own.
        role: "receiver" or "learner".
        known: values known in advance, by label name; counters by them are at 0 from the start.
        config: settings to export as labels of config_info.
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
        assert isinstance(child, Counter), f"{name} is no counter"
        child.inc(value)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), f"{name} is no gauge"
        child.set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add a value to a histogram."""
        child = self._child(name, labels)
        assert isinstance(child, Histogram), f"{name} is no histogram"
        child.observe(value)

    def light(self, lit: Mapping[tuple[str, str], bool]) -> None:
        """Tell which conditions are lit, by name and producer; all others are not."""
        shown = dict.fromkeys(
            {(one.name, "") for one in conditions.of_role(self.role)} | self._were_lit, False
        )
        self._were_lit |= set(lit)
        for (name, producer), value in {**shown, **lit}.items():
            if not value:  # first, for several producers may count as "other"
                self.set("condition", 0.0, name=name, producer=producer)
        for name, producer in lit:
            self.set("condition", 1.0, name=name, producer=producer)

    def describe(self, config: Mapping[str, object]) -> None:
        """Export settings that are known only now as labels of config_info."""
        self._config.info(settings(config))

    def fill(self, record: object, /, **labels: str) -> None:
        """Take the metrics that name a field of the record; one that is None, or no finite number,
        leaves its metric."""
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
        """The value of this label, or "other" where too many are told apart already."""
        return self._labels[name, label].fold(value)

    def compute(self, name: str, value: Callable[[], float], /, **labels: str) -> None:
        """Let a gauge be computed when it is read; NaN: it has no value then."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), f"{name} is no gauge"
        child.set_function(value)

    def watch(self, folders: Mapping[str, Path]) -> None:
        """Tell how much space is left where these folders are, by what they are for."""
        for name, folder in folders.items():
            self.compute("disk_free_bytes", partial(free, folder), folder=name)

    def _child(self, name: str, labels: Mapping[str, str]) -> Family:
        family = self._families[name]
        if not labels:
            return family
        bounded = {label: self._labels[name, label].fold(labels[label]) for label in labels}
        return family.labels(**bounded)

    def _create(self, spec: Spec) -> Family:
        # The library appends the unit itself; it appears as UNIT in OpenMetrics.
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
    """Bytes that are left to us there; NaN where that cannot be asked."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.nan


def set_aside(checkpoints: Path) -> float:
    """Damaged checkpoints that still lie there; NaN where that cannot be asked."""
    try:
        return float(sum(path.name.startswith("damaged-") for path in checkpoints.iterdir()))
    except OSError:
        return math.nan


def settings(config: Mapping[str, object], limit: int = 256) -> dict[str, str]:
    """Nested settings as labels: `{"loss": {"temperature": 0.2}}` becomes loss_temperature="0.2".

    At most `limit` of them, each cut to 128 characters; what looks like a secret is left out.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if re.search("secret|password|token", key):
            continue
        name = re.sub(r"[^a-z0-9_]", "_", key.lower()).strip("_") or "value"
        if name[0].isdigit():  # no label may begin so
            name = f"setting_{name}"
        if isinstance(value, Mapping):
            flat.update({f"{name}_{inner}": text for inner, text in settings(value).items()})
        elif value is not None:
            flat[name] = str(value)[:128]
    return dict(itertools.islice(flat.items(), limit))


class ReceiverMetrics:
    """Metrics of the receiver.

    Args:
        registry: a registry of its own; `self.registry` is what the server exposes.
        config: the resolved settings, exported as config_info.
        folders: where it writes, by what for.
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
        """Tells which conditions are lit."""
        return self._families.light

    def started(self) -> None:
        """The process has reached its loop."""
        self._families.set("starting", 0.0)

    def consume(self, record: ReceiverRecord) -> None:
        """Take one record of `Receiver.run`."""
        self._ticked = time.monotonic()
        self._families.fill(record)
        # The record has the total since the journal was opened.
        damaged = max(0, record.journal_damaged - self._damaged)
        self._families.add("journal_damaged_segments_total", damaged)
        self._damaged = record.journal_damaged


class LearnerMetrics:
    """Metrics of the learner.

    Args:
        registry: a registry of its own; `self.registry` is what the server exposes.
        memories: names of all memories, the working one first; shadows after it.
        classes: number of classes when it is known in advance: their series start at 0.
        diagnostics: names that the loss reports, when known in advance.
        config: the resolved settings, exported as config_info.
        folders: where it writes, by what for.
        clock: seconds since the Unix epoch; only the age of a checkpoint needs them.
        monotonic: seconds that nobody sets.
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
            "quarantined_samples_total.producer": (OTHER,),
            "dropped_class_samples_total.twin": ("same", "other", "unknown"),
        }
        self._families = Families(registry, "learner", known, config)
        self._families.watch(folders or {})
        if (checkpoints := (folders or {}).get("checkpoints")) is not None:
            self._families.compute("checkpoints_damaged", lambda: set_aside(checkpoints))
        self._clock, self._monotonic = clock, monotonic
        self._checkpoint_time = clock()  # until there is one, the age counts from the start
        self._classes_held: dict[str, set[str]] = {}
        self._holders: set[str] = set()  # producers that held slots when that was told last
        self._unsaved_since = math.inf  # when the first step was made that no checkpoint holds
        self._step_number, self._ticked = 0, math.nan
        self._totals: dict[tuple[str, ...], float] = {}  # as last told
        compute = self._families.compute
        compute("checkpoint_age_seconds", lambda: max(0.0, self._clock() - self._checkpoint_time))
        compute("checkpoint_lag_seconds", lambda: max(0.0, monotonic() - self._unsaved_since))
        compute("loop_age_seconds", lambda: monotonic() - self._ticked)

    @property
    def light(self) -> Callable[[Mapping[tuple[str, str], bool]], None]:
        """Tells which conditions are lit."""
        return self._families.light

    def describe(self, config: Mapping[str, object]) -> None:
        """Export the settings, where they were not known at the start."""
        self._families.describe(config)

    def started(self) -> None:
        """The process has reached its loop."""
        self._families.set("starting", 0.0)

    def consume(self, record: StepRecord | Idle | CheckpointRecord) -> None:
        """Take one record of `Learner.run`, or what `Checkpointer.save` returned."""
        # Imported here: the receiver's process has no torch.
        from stream_ssl.learning.records import Idle, StepRecord

        self._ticked = self._monotonic()
        if isinstance(record, StepRecord | Idle):
            self._families.set("lag_seconds", record.lag_seconds)
        if isinstance(record, StepRecord):
            self._step(record)
        elif not isinstance(record, Idle):
            unsaved = self._unsaved_since
            self.resumed(record.step, record.created)
            if record.step < self._step_number:  # steps made while it was written
                self._unsaved_since = max(unsaved, self._ticked - record.seconds)
            self._families.fill(record)

    def admitted(self, memory: str, admission: Admission) -> None:
        """Count what a shadow's `consume` returns; the working memory's comes with its step."""
        add = self._families.add
        add("memory_inserted_total", admission.inserted, memory=memory)
        add("memory_evictions_total", len(admission.evicted), memory=memory)
        add("memory_refused_total", len(admission.refused), memory=memory)
        add("memory_near_duplicates_total", len(admission.duplicates), memory=memory)
        add("memory_merged_total", len(admission.merged), memory=memory)

    def observe_memory(
        self, memory: str, stats: MemoryStats, class_counts: Mapping[int, int] | None = None
    ) -> None:
        """Report the state of a memory. `stats()` has an eigen-decomposition: call it now and then.

        Args:
            memory: one of the names given at the start.
            stats: of `WorkingMemory.stats`.
            class_counts: labelled slots by class, of `balance.class_counts`; classes that left the
                memory go to 0.
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
        """Report what each producer holds of the working memory, of `WorkingMemory.holdings`. One
        that holds nothing any more goes to 0."""
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
        """Report the stream's balance."""
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
        """Report the shifts of embeddings and thumbnails, and the changes found since the call
        before, by signal."""
        self._families.set("embedding_shift", shift)
        self._families.set("image_shift", image_shift)
        for signal, found in detections.items():
            self._families.add("drift_detections_total", found, signal=signal)

    def observe_collisions(self, calibrated: float | None, near_copies: float | None) -> None:
        """Report what `collisions.py` found; None where it can tell nothing."""
        if calibrated is not None:
            self._families.set("collision_probability", calibrated, kind="calibrated")
        if near_copies is not None:
            self._families.set("memory_near_copies_ratio", near_copies)

    def observe_gpu(self, memory: Mapping[str, int]) -> None:
        """Report bytes of the GPU's memory, by kind."""
        for kind, value in memory.items():
            self._families.set("gpu_memory_bytes", value, kind=kind)

    def observe_prequential(
        self, found: Mapping[str, tuple[float, float, float]], samples: int
    ) -> None:
        """Report accuracy, balanced accuracy and kappa by classifier, and how many samples were
        predicted since the call before."""
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
            if label < CLASSES:  # the mean of all others would say nothing of any
                put("held_out_class_accuracy", accuracy, **{"class": _class_label(label)})

    def observe_journal(
        self,
        waiting: int,
        pending: int,
        corrupt: int,
        rejected: Mapping[tuple[str, str], int],
        decoded: Mapping[str, int],
    ) -> None:
        """Report how far the learner is behind the journal, and what it could not read.

        Args:
            waiting: records that were not read yet.
            pending: samples that were read and not trained on.
            corrupt: records left out as corrupt since the reader opened.
            rejected: samples that could not be decoded, by reason and producer, since then.
            decoded: samples that were decoded, by producer, since then.
        """
        self._families.set("lag_records", waiting)
        self._families.set("pending_samples", pending)
        self._raise_to("journal_corrupt_records_total", corrupt)
        for producer, samples in decoded.items():
            self._raise_to("producer_decoded_samples_total", samples, producer=producer)
        for (reason, producer), samples in rejected.items():
            self._raise_to("quarantined_samples_total", samples, reason=reason, producer=producer)

    def resumed(self, step: int, created: float) -> None:
        """The learner goes on from a checkpoint made at `created`, seconds since the Unix epoch."""
        self._checkpoint_time, self._unsaved_since = created, math.inf
        self._families.set("checkpoint_timestamp_seconds", created)
        self._families.set("checkpoint_step", step)
        self._families.set("step", max(step, self._step_number))

    def observe_ranks(self, busy: Sequence[float], slots: int, group: RankGroup) -> None:
        """What the ranks of a run have done so far.

        Args:
            busy: seconds by rank, of `stream_ssl.learning.ranks.Work`.
            slots: that all shards hold.
            group: the ranks, as this one has met them.
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
        """Report how many updates were skipped in a row, and what the learner did about it."""
        self._families.set("skipped_updates_in_a_row", divergence.skipped_in_a_row)
        self._raise_to("divergence_reloads_total", divergence.reloads)
        self._families.set("learner_halted", divergence.halted)

    def parked(self, journals: int) -> None:
        """So many journals of the run are read by no rank."""
        self._families.set("parked_journals", journals)

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be written."""
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
        self._by_producer("dropped_samples_total", record.turned_away, reason="near_duplicate")
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
        # The last loss stays when no update was due. It does not outlive an update that failed.
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
        """Count samples by who sent them."""
        for producer, count in Counting(
            one.producer if one is not None else OTHER for one in origins
        ).items():
            self._families.add(name, count, producer=producer, **labels)

    def _set_finite(self, name: str, value: float, /, **labels: str) -> None:
        if math.isfinite(value):
            self._families.set(name, value, **labels)

    def _class_slots(self, memory: str, counts: Mapping[int, int]) -> None:
        # Imported here: the receiver's process has no torch.
        from stream_ssl.observe.balance import entropy

        folded = dict.fromkeys(self._classes_held.get(memory, ()), 0)  # those that left, at 0
        for label, slots in counts.items():
            folded[_class_label(label)] = folded.get(_class_label(label), 0) + slots
        self._classes_held[memory] = {label for label, slots in folded.items() if slots}
        for name, slots in folded.items():
            self._families.set("memory_class_slots", slots, **{"memory": memory, "class": name})
        self._families.set("memory_class_entropy_nats", entropy(counts.values()), memory=memory)


def _class_label(label: int) -> str:
    return str(label) if 0 <= label < CLASSES else OTHER
