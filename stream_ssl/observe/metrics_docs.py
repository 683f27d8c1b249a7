"""docs/metrics.md, made from the metrics: `python -m stream_ssl.observe.metrics_docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from stream_ssl.observe.catalogue import CATALOGUE, PREFIX, Spec
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics

HEAD = """# Metrics

Made from the code by `make docs`; edit `stream_ssl/observe/catalogue.py` instead.

Receiver and learner each serve `/metrics` from a port of their own, on loopback unless they are
told otherwise: [deploy/prometheus](../deploy/prometheus) has a scrape configuration and alerts,
[deploy/grafana](../deploy/grafana) a dashboard. Counters count from the start of the process: use
`rate`. Series whose labels are known in advance are there from the start, at 0; so is a gauge that
nothing has set yet, such as the loss before the first step. A label has at most 65 values; what
goes beyond is counted under `other`. Classes are told apart up to `63`.
"""

SECTIONS = {
    "receiver": "Receiver",
    "learner": "Learner",
    "both": "Both",
}


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for role, title in SECTIONS.items():
        lines += [f"## {title}", ""]
        for spec in CATALOGUE:
            if spec.role == role:
                lines += _entry(spec)
    lines += ["## From the client library", "", "Both roles export these too.", ""]
    lines += [f"- `{name}` ({kind}): {text}" for name, kind, text in _library()]
    return "\n".join(lines) + "\n"


def exported() -> dict[str, Metric]:
    """Every family that the two roles export, by name; counters with their `_total`."""
    found: dict[str, Metric] = {}
    for metrics in (ReceiverMetrics(CollectorRegistry()), LearnerMetrics(CollectorRegistry())):
        for family in metrics.registry.collect():
            found[family.name + _suffix(family)] = family
    return found


def _entry(spec: Spec) -> list[str]:
    facts: list[str] = [spec.kind]
    if spec.unit:
        facts.append(spec.unit)
    if spec.labels:
        facts.append("by " + ", ".join(f"`{label}`" for label in spec.labels))
    return [f"**`{spec.full_name}`** ({', '.join(facts)})", "", f"{spec.help} *{spec.look}*", ""]


def _library() -> Iterator[tuple[str, str, str]]:
    for name, family in exported().items():
        if not name.startswith(PREFIX):
            yield name, family.type, family.documentation


def _suffix(family: Metric) -> str:
    return {"counter": "_total", "info": "_info"}.get(family.type, "")


if __name__ == "__main__":
    sys.stdout.write(page())
