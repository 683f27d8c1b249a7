"""Grafana's dashboards: `make docs` writes stream-ssl.json, and fleet.json with the argument fleet.

dashboard.yaml beside this file lists the panels of the dashboard of one run. The fleet is a table
with one row for each run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8  # columns of the grid, and rows of a panel
LOOK: dict[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}


def dashboard(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rows of panels as Grafana's JSON.

    Each row has these entries:

    - `row`: its title.
    - `kind`: the kind of its panels, "timeseries" by default.
    - `collapsed`: whether the row is closed, because most runs have no data for it.
    - `panels`: its panels.

    A panel has `title`, `unit` (a name of Grafana's) and `queries` (PromQL by legend). It may have:

    - `note`: its description.
    - `width`: its columns, 8 by default.
    - `min`: the least value of the axis, 0 by default; null: none.
    - `right`: a pattern of legends that use an axis of their own, on the right.
    - `right_unit`: the unit of that axis, `unit` by default.
    - `stacked`: whether the series are stacked.
    - `thresholds`: pairs of a value and a colour; the first value is null.
    - `plain`: a pattern of legends that do not take the colours of the thresholds.
    - `now`: whether only the newest values are queried, so that no ended series is shown.
    - `names`: whether the names of series are shown in place of values.
    - `nothing`: the text that is shown without any series.
    """
    panels: list[dict[str, Any]] = []
    top, number = 0, 1
    for row in rows:
        kind = row.get("kind", "timeseries")
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        inside: list[dict[str, Any]] = []
        collapsed = row.get("collapsed", False)
        head = {"type": "row", "title": row["row"], "collapsed": collapsed, "panels": inside}
        panels.append({"id": number, **head, "gridPos": place})
        number, left, top = number + 1, 0, top + 1
        end = top
        for panel in row["panels"]:
            width = panel.get("width", 8)
            if left + width > WIDTH:
                left, top = 0, top + HEIGHT
            place = {"h": HEIGHT, "w": width, "x": left, "y": top}
            where = inside if collapsed else panels
            where.append({"id": number, "gridPos": place, **_panel(panel, kind)})
            number, left = number + 1, left + width
        top = end if collapsed else top + HEIGHT
    return {**_frame(), "panels": panels}


def _panel(panel: dict[str, Any], kind: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel["unit"]}
    stacked = panel.get("stacked", False)
    if kind == "timeseries":
        lines = {"lineWidth": 1, "fillOpacity": 60 if stacked else 10}
        defaults["custom"] = {**lines, "showPoints": "never", "spanNulls": False}
        if stacked:
            defaults["custom"]["stacking"] = {"mode": "percent", "group": "A"}
        elif (least := panel.get("min", 0)) is not None:
            defaults["min"] = least
    options = LOOK[kind]
    if (steps := panel.get("thresholds")) is not None:
        marks = [{"value": value, "color": color} for value, color in steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": marks}
    if (nothing := panel.get("nothing")) is not None:
        defaults["noValue"] = nothing
    if panel.get("names"):
        options = {**options, "textMode": "name"}
    now = {"instant": True, "range": False} if panel.get("now") else {}
    if now:
        options = {**options, "graphMode": "none"}
    overrides = []
    if "plain" in panel:
        fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}}
        matcher = {"id": "byRegexp", "options": panel["plain"]}
        overrides.append({"matcher": matcher, "properties": [fixed]})
    if "right" in panel:
        properties = [{"id": "custom.axisPlacement", "value": "right"}]
        if "right_unit" in panel:
            properties.append({"id": "unit", "value": panel["right_unit"]})
        matcher = {"id": "byRegexp", "options": panel["right"]}
        overrides.append({"matcher": matcher, "properties": properties})
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("note", ""),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
        "targets": [
            {**_target(n, _of_instances(expr)), "legendFormat": legend, **now}
            for n, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }


def _target(number: int, expr: str) -> dict[str, Any]:
    return {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr}


def _of_instances(expr: str) -> str:
    """Return a query limited to the chosen processes.

    The value "All" also matches a series without the label `cluster`.
    """
    return expr.replace('job="$job"', 'cluster=~"$cluster",job="$job",instance=~"$instance"')


ONE = {"hide": 0, "includeAll": False, "multi": False, "options": [], "current": {}}
ALL = {**ONE, "includeAll": True, "multi": True, "allValue": ".*"}
DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource"}


def _variable(name: str, label: str, question: str, choice: dict[str, Any]) -> dict[str, Any]:
    query = {"query": question, "refId": name}
    named = {"name": name, "label": label, "type": "query", "datasource": SOURCE}
    return {**named, "query": query, "refresh": 2, "sort": 1, **choice}


def _frame() -> dict[str, Any]:
    variables = [
        {**DATASOURCE, "query": "prometheus", "refresh": 1, **ONE},
        _variable("cluster", "Cluster", "label_values(stream_ssl_build_info, cluster)", ALL),
        _variable(
            "job", "Run", 'label_values(stream_ssl_build_info{cluster=~"$cluster"}, job)', ONE
        ),
        _variable(
            "instance",
            "Process",
            'label_values(stream_ssl_build_info{cluster=~"$cluster",job="$job"}, instance)',
            ALL,
        ),
        _variable(
            *("producer", "Producer"),
            'label_values(stream_ssl_producer_samples_total{job="$job"}, producer)',
            ALL,
        ),
    ]
    return {
        "uid": "stream-ssl",
        "title": "stream-ssl",
        "description": "One run of stream-ssl: the received samples, the training, and the balance "
        "of the memory.",
        **_common(variables),
        "links": [{"type": "dashboards", "tags": ["stream-ssl"], "title": "Fleet"}],
    }


def _common(variables: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tags": ["stream-ssl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": variables},
    }


FLEET: dict[str, tuple[str, str, list[tuple[float | None, str]]]] = {
    "processes down": (
        'count by (job) (up{job=~"$job"} == 0) or 0 * count by (job) (up{job=~"$job"})',
        "short",
        [(None, "green"), (1, "red")],
    ),
    "conditions": (
        (
            'count by (job) (count by (job, name) (stream_ssl_condition{job=~"$job"} == 1)) '
            'or 0 * count by (job) (up{job=~"$job"})'
        ),
        "short",
        [(None, "green"), (1, "red")],
    ),
    "held-out accuracy": (
        'max by (job) (stream_ssl_held_out_accuracy{job=~"$job"})',
        "percentunit",
        [],
    ),
    "loss": ('max by (job) (stream_ssl_loss{job=~"$job"})', "none", []),
    "received": (
        'sum by (job) (rate(stream_ssl_received_samples_total{job=~"$job"}[5m]))',
        "cps",
        [],
    ),
    "producers": ('sum by (job) (stream_ssl_producers_connected{job=~"$job"})', "short", []),
    "lag": (
        'max by (job) (stream_ssl_lag_seconds{job=~"$job"})',
        "s",
        [(None, "green"), (60, "orange"), (600, "red")],
    ),
    "near-duplicate slots": (
        'max by (job) (stream_ssl_memory_near_duplicates_ratio{job=~"$job"})',
        "percentunit",
        [(None, "green"), (0.1, "orange"), (0.5, "red")],
    ),
    "in no checkpoint": (
        'max by (job) (stream_ssl_checkpoint_lag_seconds{job=~"$job"})',
        "s",
        [(None, "green"), (3600, "red")],
    ),
}
"""The columns of the fleet: query, unit and thresholds."""


def fleet() -> dict[str, Any]:
    """Return Grafana's JSON of all runs: a table with one row a run, which links its dashboard."""
    columns, targets, names = [], [], {"job": "run"}
    for number, (title, (expr, unit, steps)) in enumerate(FLEET.items()):
        targets.append({**_target(number, expr), "format": "table", "instant": True})
        names[f"Value #{targets[-1]['refId']}"] = title
        properties: list[dict[str, Any]] = [{"id": "unit", "value": unit}]
        if steps:
            marks = [{"value": value, "color": color} for value, color in steps]
            background = {"type": "color-background", "mode": "basic"}
            properties += [
                {"id": "thresholds", "value": {"mode": "absolute", "steps": marks}},
                {"id": "custom.cellOptions", "value": background},
            ]
        columns.append({"matcher": {"id": "byName", "options": title}, "properties": properties})
    chosen = "var-job=${__value.raw}&var-datasource=${datasource}&${__url_time_range}"
    link = {"title": "the run", "url": f"/d/stream-ssl?{chosen}"}
    columns.append(
        {
            "matcher": {"id": "byName", "options": "run"},
            "properties": [{"id": "links", "value": [link]}],
        }
    )
    table = {
        "id": 1,
        "type": "table",
        "title": "Runs",
        "description": "One row a run. Select a run to see its dashboard.",
        "gridPos": {"h": 20, "w": WIDTH, "x": 0, "y": 0},
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {}, "overrides": columns},
        "options": {"showHeader": True},
        "targets": targets,
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ],
    }
    variables = [
        {**DATASOURCE, "query": "prometheus", "refresh": 1, **ONE},
        _variable("job", "Runs", "label_values(stream_ssl_build_info, job)", ALL),
    ]
    return {
        "uid": "stream-ssl-fleet",
        "title": "stream-ssl fleet",
        "description": "All runs of stream-ssl, one row a run.",
        **_common(variables),
        "panels": [table],
    }


def main() -> None:
    """Write the dashboard of one run or of the fleet to standard output."""
    if sys.argv[1:] == ["fleet"]:
        made = fleet()
    else:
        made = dashboard(yaml.safe_load(Path(__file__).with_name("dashboard.yaml").read_text()))
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
