"""Grafana's dashboard from dashboard.yaml beside this: `make docs` writes stream-ssl.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8  # of the grid, and of a panel in it
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
    """Rows of panels, as Grafana's JSON.

    Args:
        rows: `row` its title, `kind` of its panels (timeseries if not said), and `panels`: each of
            `title`, `unit` (Grafana's name of one), `queries` (PromQL by legend), and where wanted
            `note`, `width` of 24 (8), `min` of the axis (0; null: none), `right` (a pattern of
            legends that are drawn against an axis of their own) and `stacked`.
    """
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        kind = row.get("kind", "timeseries")
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        head = {"type": "row", "title": row["row"], "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **head, "gridPos": place})
        left, top = 0, top + 1
        for panel in row["panels"]:
            width = panel.get("width", 8)
            if left + width > WIDTH:
                left, top = 0, top + HEIGHT
            place = {"h": HEIGHT, "w": width, "x": left, "y": top}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel, kind)})
            left += width
        top += HEIGHT
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
    overrides = []
    if "right" in panel:
        properties = [{"id": "custom.axisPlacement", "value": "right"}]
        matcher = {"id": "byRegexp", "options": panel["right"]}
        overrides.append({"matcher": matcher, "properties": properties})
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("note", ""),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": LOOK[kind],
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for n, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }


def _frame() -> dict[str, Any]:
    choice = {"hide": 0, "includeAll": False, "multi": False, "options": [], "current": {}}
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    job = {"name": "job", "label": "Job", "type": "query", "datasource": SOURCE}
    jobs = {"query": "label_values(stream_ssl_build_info, job)", "refId": "job"}
    variables = [
        {**source, "query": "prometheus", "refresh": 1, **choice},
        {**job, "query": jobs, "refresh": 1, "sort": 1, **choice},
    ]
    return {
        "uid": "stream-ssl",
        "title": "stream-ssl",
        "description": "One run of stream-ssl: what comes in, what is learnt, how balanced the "
        "memory is.",
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


def main() -> None:
    """The dashboard to standard output."""
    rows = yaml.safe_load(Path(__file__).with_name("dashboard.yaml").read_text())
    sys.stdout.write(json.dumps(dashboard(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
