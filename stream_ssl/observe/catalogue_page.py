"""A script that makes docs/metrics.md from the catalogue."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from stream_ssl.observe.catalogue import CATALOGUE, CLASSES, PRODUCERS
from stream_ssl.observe.families import LIMIT
from stream_ssl.observe.metric_spec import Spec

PAGE_HEAD = f"""# Metrics

`make docs` makes this page from the code. To change it, edit `stream_ssl/observe/catalogue.py`.

Receiver and learner each serve `/metrics` on a port of their own, on loopback by default.
[deploy/prometheus](../deploy/prometheus) has a scrape configuration and alerts, and
[deploy/grafana](../deploy/grafana) a dashboard. Counters count from the start of the process, so
use `rate`. A counter whose labels are known in advance starts at 0. A gauge is absent until it has
a value, such as the loss before the first update. The label `producer` has at most {PRODUCERS}
values, and each other label {LIMIT}. Further values count as `other`. The label `class`
distinguishes the classes up to `{CLASSES - 1}`.
"""

PAGE_SECTIONS = {"receiver": "Receiver", "learner": "Learner", "both": "Both"}


def page() -> str:
    """Return the text of docs/metrics.md, in Markdown."""
    lines = [PAGE_HEAD]
    for role, title in PAGE_SECTIONS.items():
        lines += [f"## {title}", ""]
        for spec in CATALOGUE:
            if spec.role == role:
                lines += _entry(spec)
    lines += ["## From the client library", "", "Both roles also export these metrics.", ""]
    lines += [f"- `{name}` ({kind}): {text}" for name, kind, text in _library()]
    return "\n".join(lines) + "\n"


def _entry(spec: Spec) -> list[str]:
    facts: list[str] = [spec.kind]
    if spec.unit:
        facts.append(spec.unit)
    if spec.labels:
        facts.append("by " + ", ".join(f"`{label}`" for label in spec.labels))
    return [f"**`{spec.full_name}`** ({', '.join(facts)})", "", f"{spec.help} *{spec.look}*", ""]


def _library() -> Iterator[tuple[str, str, str]]:
    """Yield name, kind and help of each metric that the client library exports."""
    # Imported here, because `stream-ssl run` needs the catalogue but not the client library.
    from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    for family in registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        yield family.name + suffix, family.type, family.documentation


if __name__ == "__main__":
    sys.stdout.write(page())
