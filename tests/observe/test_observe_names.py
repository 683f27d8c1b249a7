"""Names and help of the metrics follow Prometheus' rules, and the page follows the metrics."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from observe_records import exported, step
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric

from stream_ssl.learning.checkpoint import CheckpointRecord
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import MemoryStats
from stream_ssl.observe.catalogue import CATALOGUE
from stream_ssl.observe.catalogue_page import page
from stream_ssl.observe.held_out import HeldOutRecord
from stream_ssl.observe.metric_spec import PREFIX, Spec
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.receiver.records import ReceiverRecord

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
OBSERVE = ROOT / "stream_ssl" / "observe"
FILLING = "".join(
    (OBSERVE / f"{name}.py").read_text()
    for name in ("metrics", "checkpoint_metrics", "memory_metrics", "families")
)
RECORDS = {
    "receiver": (ReceiverRecord,),
    "learner": (StepRecord, CheckpointRecord, HeldOutRecord, MemoryStats),
    "both": (),
}

# -- the rules of `promtool check metrics`, for machines that have no promtool

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
    """Return one line for each fault of the metrics."""
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


def registries() -> dict[str, CollectorRegistry]:
    receiver = ReceiverMetrics(CollectorRegistry())
    receiver.describe({"a": 1})
    learner = LearnerMetrics(CollectorRegistry(), ("working", "queue"), classes=3)
    receiver.consume(ReceiverRecord(samples=3, rejected={"codec": 1}))
    learner.consume(step(collision_true=0.5, diagnostics={"clamp_rate": 0.25}))
    return {"receiver": receiver.registry, "learner": learner.registry}


def test_the_names_of_metrics_follow_the_rules_of_prometheus() -> None:
    promtool = shutil.which("promtool")
    for role, registry in registries().items():
        assert problems(registry.collect()) == [], role
        if promtool is not None:
            result = subprocess.run(
                [promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True
            )
            assert (result.returncode, result.stdout, result.stderr) == (0, b"", b""), role


def test_the_rules_find_wrong_names() -> None:
    registry = CollectorRegistry()
    Gauge("lag_ms", "", registry=registry)
    Gauge("wait_total", "Help.", registry=registry)
    Gauge("queueLength", "Help.", ["Kind"], registry=registry)
    Gauge("age_gauge", "Help.", ["quantile"], registry=registry).labels("0.5")
    Counter("lag_minutes", "Help.", registry=registry)
    found = "\n".join(problems(registry.collect()))
    for expected in (
        "lag_ms: no help text",
        "lag_ms: abbreviated unit 'ms'",
        "wait_total: only counters end in _total",
        "queueLength: camel case",
        "age_gauge: its type 'gauge' in its name",
        "age_gauge: label 'quantile' belongs to summaries",
        "lag_minutes: 'minutes' is no base unit",
    ):
        assert expected in found


def public_names(record: type) -> set[str]:
    """Return the names of a record's fields and properties."""
    properties = {name for name, value in vars(record).items() if isinstance(value, property)}
    return {field.name for field in fields(record)} | properties


def wrong(spec: Spec) -> Iterable[str]:
    """Yield each fault of an entry of the catalogue."""
    if not (spec.help.endswith(".") and spec.look.endswith(".")):
        yield "help and look are sentences"
    if spec.name.endswith("_total") != (spec.kind == "counter"):
        yield "counters, and no others, end in _total"
    if bool(spec.buckets) != (spec.kind == "histogram") or list(spec.buckets) != sorted(
        spec.buckets
    ):
        yield "a histogram has buckets, from small to large"
    if spec.full_name not in exported():
        yield "no process exports it"
    owner, _, name = spec.field.partition(".")
    records = {record.__name__: record for record in RECORDS[spec.role]}
    if spec.field and owner not in records:
        yield f"no record of the {spec.role} is {owner!r}"
    elif spec.field and name not in public_names(records[owner]):
        yield f"{owner} has no field {name!r}"
    if not (spec.field or f'"{spec.name}"' in FILLING):
        yield "neither a field nor a line of code fills it"


def test_the_entries_of_the_catalogue_are_complete() -> None:
    assert [f"{spec.name}: {text}" for spec in CATALOGUE for text in wrong(spec)] == []
    names = [spec.name for spec in CATALOGUE]
    assert len(names) == len(set(names))


def test_the_check_finds_a_wrong_entry_of_the_catalogue() -> None:
    bad = Spec("receiver", "gauge", "age_total", "", "Age", "Rises.", buckets=(2.0, 1.0), field="a")
    assert list(wrong(bad)) == [
        "help and look are sentences",
        "counters, and no others, end in _total",
        "a histogram has buckets, from small to large",
        "no process exports it",
        "no record of the receiver is 'a'",
    ]
    assert "neither a field nor a line of code fills it" in list(
        wrong(Spec("learner", "gauge", "age_seconds", "seconds", "Age.", "Rises."))
    )


def test_the_code_asks_only_for_existing_metrics() -> None:
    """Displays and reports ask for metrics by name, as a string."""
    known = set(exported())
    known |= {name + part for name in exported() for part in ("_bucket", "_sum", "_count")}
    for file in sorted((ROOT / "stream_ssl").rglob("*.py")):
        asked = set(re.findall(r"""["'](stream_ssl_[a-z_]+[a-z])["']""", file.read_text()))
        assert asked <= known, f"{file}: {asked - known}"


def test_the_page_of_metrics_is_current() -> None:
    assert PAGE.read_text() == page(), "docs/metrics.md is stale; run: make docs"
    of_library = set(re.findall(r"^- `(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert of_library == {name for name in exported() if not name.startswith(PREFIX)}


def test_the_learner_sets_every_field_of_its_record() -> None:
    """A field that the learner never sets would be exported with its default forever."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Learner)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    makers = StepRecord.__name__, replace.__name__
    made = [call for call in calls if getattr(call.func, "id", "") in makers]
    names = [keyword.arg for call in made for keyword in call.keywords]
    assert sorted(map(str, names)) == sorted(field.name for field in fields(StepRecord))
