"""The rules of `promtool check metrics`, for machines that have no promtool."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

CAMEL = re.compile("[a-z][A-Z]")
TYPES = ("gauge", "counter", "summary", "histogram")
ABBREVIATIONS = {
    *("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"),
}
NOT_BASE = {
    *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks"),
    *("kilobytes", "megabytes", "gigabytes", "kibibytes", "mebibytes", "bits", "percent"),
}


def problems(families: Iterable[Metric]) -> list[str]:
    """What is wrong with metrics, a line each; empty when nothing is."""
    return [f"{family.name}: {text}" for family in families for text in _of(family)]


def _of(family: Metric) -> Iterable[str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    parts = name.split("_")
    if not family.documentation:
        yield "no help text"
    if name.endswith("_total") and family.type != "counter":
        yield "only counters end in _total"
    if name.endswith(("_count", "_sum", "_bucket", "_created")):
        yield "a suffix that histograms and summaries use"
    if name.endswith("_info") and family.type != "info" and name != "python_info":
        yield "only infos end in _info"
    if CAMEL.search(name):
        yield "camel case"
    if not re.fullmatch("[a-z_][a-z0-9_]*", name):
        yield "characters other than a-z, 0-9 and _"
    for part in parts:
        if part in ABBREVIATIONS:
            yield f"abbreviated unit {part!r}"
        if part in NOT_BASE:
            yield f"{part!r} is no base unit"
        if part in TYPES:
            yield f"its type {part!r} in its name"
    yield from _labels(family)


def _labels(family: Metric) -> Iterable[str]:
    for label in sorted({label for sample in family.samples for label in sample.labels}):
        if CAMEL.search(label) or not re.fullmatch("[a-z][a-z0-9_]*", label):
            yield f"label {label!r} is not lower case with underscores"
        if label == "le" and family.type != "histogram":
            yield "label 'le' belongs to histograms"
        if label == "quantile" and family.type != "summary":
            yield "label 'quantile' belongs to summaries"
        if label in family.name.split("_") and label not in ("memory", "class"):
            yield f"label {label!r} repeated in the name"
