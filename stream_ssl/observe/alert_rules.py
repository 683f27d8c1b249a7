"""A script that makes deploy/prometheus/alerts.yml from the table of conditions."""

from __future__ import annotations

import sys

from stream_ssl.observe.conditions import DOWN, TABLE, Condition

HEAD = """# `make docs` makes this file from conditions.py and alert_rules.py in stream_ssl/observe.
#
# Each process decides which conditions are present, by the thresholds in conditions.py, and exports
# them as stream_ssl_condition. This file decides only whether a process has died. A runbook's
# link opens on the page of the process itself. To have it open elsewhere, put the address of your
# copy of the repository in prometheus.yml, with its last slash:
#   global: {external_labels: {runbooks: "https://git.example/robots/stream-ssl/blob/main/"}}
groups:
  - name: stream-ssl
    rules:
"""

SILENT = (
    "up == 0 and on (job, instance) "
    '(up{job=~"stream-ssl.*"} or last_over_time(stream_ssl_build_info[1d]))'
)
"""A process that does not answer. A run may have a job of its own, which may have any name.

The metrics of the last day tell that a job of another name scrapes a process of a run.
"""
ABSENT = (
    'count without (instance, node) (max_over_time(up{job=~"stream-ssl.*"}[1d])) '
    'unless count without (instance, node) (up{job=~"stream-ssl.*"})'
)
"""A process that Prometheus found within a day and does not find now, such as an evicted pod.

A pod has another address after each start, so the addresses do not count.
"""
DOWN_SUMMARY = "{{ $labels.role }} {{ with $labels.instance }}at {{ . }} {{ end }}does not answer"
PRODUCER = "{{ with $labels.producer }}{{ . }}{{ else }}the producer{{ end }}"
LINK = (
    "{{ with $externalLabels.runbooks }}{{ . }}docs/runbooks/NAME.md"
    "{{ else }}{{ with $labels.instance }}http://{{ . }}/runbooks/NAME{{ end }}{{ end }}"
)


def alerts() -> str:
    """Return the text of deploy/prometheus/alerts.yml, in YAML."""
    down = _rule("down", f"{SILENT} or ({ABSENT})", "critical", DOWN_SUMMARY, DOWN, wait="90s")
    return HEAD + "\n".join([down, *map(_of_condition, TABLE)])


def _of_condition(one: Condition) -> str:
    present = f'stream_ssl_condition{{name="{one.name}"}} == 1'
    summary = one.summary.replace("{producer}", PRODUCER) + " (at {{ $labels.instance }})"
    return _rule(one.name, present, one.severity, summary, one.advice())


def _rule(
    name: str, expression: str, severity: str, summary: str, description: str, wait: str = ""
) -> str:
    """Return the rule of a condition, or of "down", whose name is also that of its runbook."""
    lines = (
        f"      - alert: StreamSsl{''.join(word.capitalize() for word in name.split('-'))}",
        f"        expr: {expression}",
        *([f"        for: {wait}"] if wait else []),
        f"        labels: {{severity: {severity}}}",
        "        annotations:",
        f'          runbook_url: "{LINK.replace("NAME", name)}"',
        f'          summary: "{summary}"',
        f'          description: "{description}"',
    )
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(alerts())
