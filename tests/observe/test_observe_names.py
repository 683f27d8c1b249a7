"""Names and help of the metrics follow Prometheus' rules, and the page follows the metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from observe_lint import problems
from observe_records import step
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from stream_ssl.ingest.records import ReceiverRecord
from stream_ssl.observe.catalogue import CATALOGUE, Spec
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page import exported, page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def registries() -> dict[str, CollectorRegistry]:
    receiver = ReceiverMetrics(CollectorRegistry(), {"a": 1})
    learner = LearnerMetrics(
        CollectorRegistry(), ("working", "queue"), classes=3, diagnostics=("clamp_rate",)
    )
    receiver.consume(ReceiverRecord(samples=3, rejected={"codec": 1}))
    learner.consume(step(collision_true=0.5))
    return {"receiver": receiver.registry, "learner": learner.registry}


@pytest.mark.parametrize("role", ["receiver", "learner"])
def test_names_follow_the_rules(role: str) -> None:
    assert problems(registries()[role].collect()) == []


@pytest.mark.parametrize("role", ["receiver", "learner"])
def test_promtool_agrees(role: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert problems(registries()[role].collect()) == []
        return
    text = generate_latest(registries()[role])
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_the_rules_find_what_is_wrong() -> None:
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


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_catalogue_entries_are_whole(spec: Spec) -> None:
    assert spec.help.endswith(".")
    assert spec.look.endswith(".")
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(spec.buckets)
    assert spec.full_name in exported()


def test_names_are_unique() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(names) == len(set(names))


def test_names_used_elsewhere_exist() -> None:
    """Displays and reports ask for metrics by name, as a string."""
    known = set(exported())
    known |= {name + part for name in exported() for part in ("_bucket", "_sum", "_count")}
    for file in sorted((ROOT / "stream_ssl").rglob("*.py")):
        asked = set(re.findall(r"""["'](stream_ssl_[a-z_]+[a-z])["']""", file.read_text()))
        assert asked <= known, f"{file}: {asked - known}"


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "docs/metrics.md is stale; run: make docs"
