"""Creates the metrics of one role in a registry of its own, and keeps their labels bounded."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

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

from stream_ssl import __version__
from stream_ssl.observe.catalogue import PREFIX, Role, Spec, of_role

# A `_created` series beside each counter would double their number; Prometheus does not use them.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER = "other"
LIMIT = 65
"""Values of one label that are told apart; later ones are counted as "other"."""

Family = Counter | Gauge | Histogram


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
        known: values known in advance, by label name; they are exported at 0 from the start.
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
        self._known = {name: tuple(values) for name, values in known.items()}
        self._labels: dict[tuple[str, str], Labels] = {}
        self._families: dict[str, Family] = {}
        for spec in of_role(role):
            if spec.kind != "info":
                self._families[spec.name] = self._create(spec)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._describe(config or {})

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

    def gauge(self, name: str) -> Gauge:
        """A gauge without labels, for one that is computed when it is read."""
        family = self._families[name]
        assert isinstance(family, Gauge), f"{name} is no gauge"
        return family

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
            family = Gauge(stem, spec.help, spec.labels, registry=self.registry, unit=unit)
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
            self._labels[spec.name, label] = Labels(known)
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
            Info(stem, specs[name].help, registry=self.registry).info(values)


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
