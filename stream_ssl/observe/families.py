"""The metrics of one role for Prometheus, with a bound on the values of each label."""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

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

from stream_ssl.observe import conditions
from stream_ssl.observe.catalogue import CLASSES, PRODUCERS, RESTARTS, metrics_of
from stream_ssl.observe.metric_spec import Role, Spec
from stream_ssl.version import version

# Prometheus does not use the `_created` series, which would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER = "other"

LIMIT = 65
"""The most values of one label. Further values count as "other"."""

SETTINGS = 256
"""The most settings that config_info has as labels."""

Family = Counter | Gauge | Histogram
F = TypeVar("F", Counter, Gauge, Histogram)


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
        known: the values that are known in advance. They may exceed the limit.
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
    """

    def __init__(
        self, registry: CollectorRegistry, role: Role, known: Mapping[str, Iterable[str]]
    ) -> None:
        self.registry = registry
        self.role = role
        self._fields: dict[str, list[tuple[Spec, str]]] = defaultdict(list)  # by type of record
        self._known = {name: tuple(values) for name, values in known.items()}
        self._labels: dict[tuple[str, str], Labels] = {}
        self._families: dict[str, Family] = {}
        self._infos: dict[str, Info] = {}
        for spec in metrics_of(role):
            owner, _, name = spec.field.partition(".")
            self._fields[owner].append((spec, name))
            if spec.kind == "info":
                stem = spec.full_name.removesuffix("_info")
                self._infos[spec.name] = Info(stem, spec.help, registry=registry)
            else:
                self._families[spec.name] = self._create(spec)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        build = {"version": version(), "role": role, "python": platform.python_version()}
        if role == "learner":
            import torch  # the package of torch has another name on some systems, or none

            build["torch"] = str(torch.__version__)
        self._infos["build_info"].info(build)
        self.add("restarts_total", int(os.environ.get(RESTARTS, 0)))
        self.set("starting", 1.0)
        self._were_present: set[tuple[str, str]] = set()
        self.set_conditions(())

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Add to a counter."""
        self._child(Counter, name, labels).inc(value)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        self._child(Gauge, name, labels).set(value)

    def observe(self, name: str, /, *values: float, **labels: str) -> None:
        """Add values to a histogram."""
        child = self._child(Histogram, name, labels)
        for value in values:
            child.observe(value)

    def set_conditions(self, present: Collection[tuple[str, str]]) -> None:
        """Export the conditions that are present, by name and producer. All others are 0."""
        known = {(one.name, "") for one in conditions.conditions_of(self.role)} | self._were_present
        self._were_present |= set(present)
        # The 0s come before the 1s, because several producers may share "other".
        for name, producer in known - set(present):
            self.set("condition", 0.0, name=name, producer=producer)
        for name, producer in present:
            self.set("condition", 1.0, name=name, producer=producer)

    def describe(self, config: Mapping[str, object]) -> None:
        """Export settings as labels of config_info. They replace the earlier settings."""
        self._infos["config_info"].info(settings(config))

    def fill(self, record: object, /, **labels: str) -> None:
        """Fill the metrics whose `Spec.field` names an attribute of the record.

        A value that is None or not finite leaves its metric unchanged.
        """
        put = {"counter": self.add, "gauge": self.set, "histogram": self.observe}
        for spec, name in self._fields[type(record).__name__]:
            value = getattr(record, name)
            parts = value.items() if isinstance(value, Mapping) else [(None, value)]
            for label, part in parts:
                if part is not None and math.isfinite(part):
                    own = {} if label is None else {spec.labels[0]: label}
                    put[spec.kind](spec.name, part, **labels, **own)

    def fold(self, name: str, label: str, value: str) -> str:
        """Return the value, or "other" if this label already has too many values."""
        return self._labels[name, label].fold(value)

    def compute(self, name: str, value: Callable[[], float], /, **labels: str) -> None:
        """Compute a gauge whenever it is read. It has no value while the result is NaN."""
        self._child(Gauge, name, labels).set_function(value)

    def watch(self, folders: Mapping[str, Path]) -> None:
        """Export the free space of the disks of these folders, by name."""
        for name, folder in folders.items():
            self.compute("disk_free_bytes", partial(free, folder), folder=name)

    def _child(self, kind: type[F], name: str, labels: Mapping[str, str]) -> F:
        family = self._families[name]
        if labels:
            bounded = {label: self._labels[name, label].fold(labels[label]) for label in labels}
            family = family.labels(**bounded)
        assert isinstance(family, kind), f"{name} is not a {kind.__name__.lower()}"
        return family

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


def free(folder: Path) -> float:
    """Return the free bytes on the disk of a folder; NaN if the system gives an error."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.nan


def settings(config: Mapping[str, object]) -> dict[str, str]:
    """Return settings as labels: "loss.temperature" becomes loss_temperature.

    There are at most SETTINGS labels, of at most 128 characters each. Settings that look like a
    secret are left out.
    """
    labels: dict[str, str] = {}
    for key, value in config.items():
        if re.search("secret|password|token", key):
            continue
        name = re.sub(r"[^a-z0-9_]", "_", key.lower()).strip("_") or "value"
        if name[0].isdigit():  # a label must not begin with a digit
            name = f"setting_{name}"
        labels[name] = str(value)[:128]
    return dict(itertools.islice(labels.items(), SETTINGS))


def class_label(label: int) -> str:
    """Return the value of the label "class" for a class."""
    return str(label) if 0 <= label < CLASSES else OTHER
