"""The shipped files for Prometheus and Grafana ask for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from observe_records import exported

from stream_ssl.observe.alert_rules import alerts

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "stream-ssl.json"
FLEET = DEPLOY / "grafana" / "fleet.json"
CASES = Path(__file__).parent / "alerts_cases.yml"


def series() -> set[str]:
    """Return the names of all series, with the parts of histograms."""
    names = set(exported())
    for name, family in exported().items():
        if family.type == "histogram":
            names |= {name + suffix for suffix in ("_bucket", "_sum", "_count")}
    return names


def panels() -> list[dict[str, Any]]:
    both = (json.loads(file.read_text())["panels"] for file in (DASHBOARD, FLEET))
    every = (
        inner for rows in both for panel in rows for inner in (panel, *panel.get("panels", []))
    )
    return [panel for panel in every if "targets" in panel]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for expression in re.findall(r"^ +expr: (.+)$", RULES.read_text(), re.MULTILINE):
        yield "alert", expression


def test_dashboards_and_alerts_ask_only_for_existing_metrics() -> None:
    known, found = series(), list(expressions())
    assert len(found) > 60
    for title, expression in found:
        asked = set(re.findall(r"\b(?:stream_ssl|process)_[a-z_]+", expression))
        assert asked <= known, f"{title}: {asked - known}"
        assert asked or "up{" in expression, title


def test_the_dashboards_equal_the_output_of_their_source() -> None:
    made = [sys.executable, str(DASHBOARD.with_name("dashboard.py"))]
    assert subprocess.check_output(made, text=True) == DASHBOARD.read_text(), "run `make docs`"
    assert subprocess.check_output([*made, "fleet"], text=True) == FLEET.read_text()


def test_every_metric_of_an_alert_is_on_a_panel() -> None:
    def asked(text: str) -> set[str]:
        return set(re.findall(r"\b(?:stream_ssl_[a-z_]+|up)\b(?={)", text))

    shown = {name for panel in panels() for one in panel["targets"] for name in asked(one["expr"])}
    alerts_ask = {
        name
        for expression in re.findall(r"^ +expr: (.+)$", RULES.read_text(), re.MULTILINE)
        for name in asked(expression)
    }
    assert alerts_ask == {"up", "stream_ssl_condition"}
    assert alerts_ask <= shown


def test_the_first_row_answers_five_questions() -> None:
    row, *answers = json.loads(DASHBOARD.read_text())["panels"][:6]
    assert row["title"] == "Five answers"
    for panel in answers:
        assert panel["type"] == "stat"
        assert panel["gridPos"]["y"] == 1
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]


def test_panels_name_only_conditions_that_hold_now() -> None:
    """A range contains every series with a value in it, even of a condition that has ended."""
    for panel in panels():
        named = any("stream_ssl_condition{" in one["expr"] for one in panel["targets"])
        if panel["type"] == "stat" and named and "count(" not in panel["targets"][-1]["expr"]:
            assert all(one.get("instant") for one in panel["targets"]), panel["title"]


def unit(panel: dict[str, Any], legend: str) -> str:
    """Return the unit of a line of a panel."""
    fields = panel["fieldConfig"]
    found = [fields["defaults"].get("unit", "")]
    for one in fields["overrides"]:
        if re.fullmatch(one["matcher"]["options"], legend):
            found += [each["value"] for each in one["properties"] if each["id"] == "unit"]
    return str(found[-1])


def test_only_rates_of_bytes_have_a_unit_of_bytes_per_second() -> None:
    for panel in panels():
        for one in panel["targets"]:
            if "legendFormat" in one:
                of_bytes = re.search(r"rate\(stream_ssl_\w*bytes", one["expr"]) is not None
                shown = unit(panel, one["legendFormat"])
                assert (shown == "Bps") == of_bytes, (panel["title"], one["legendFormat"], shown)


def test_a_learning_rate_is_not_drawn_on_the_axis_of_a_gradient() -> None:
    (panel,) = (one for one in panels() if one["title"] == "Gradient norm and learning rate")
    (right,) = panel["fieldConfig"]["overrides"]
    assert [re.fullmatch(right["matcher"]["options"], one["legendFormat"]) is not None
            for one in panel["targets"]] == [False, True]  # fmt: skip


def test_a_run_of_the_fleet_opens_with_the_same_data_source_and_time() -> None:
    (table,) = json.loads(FLEET.read_text())["panels"]
    properties = [one for each in table["fieldConfig"]["overrides"] for one in each["properties"]]
    ((link,),) = (one["value"] for one in properties if one["id"] == "links")
    given = dict(part.partition("=")[::2] for part in link["url"].partition("?")[2].split("&"))
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    names = {f"var-{one['name']}" for one in variables}
    assert given == {
        "var-job": "${__value.raw}",
        "var-datasource": "${datasource}",
        "${__url_time_range}": "",
    }
    assert {"var-job", "var-datasource"} <= names


def test_the_alert_rules_equal_the_rules_made_from_the_conditions() -> None:
    assert alerts() == RULES.read_text(), "run `make docs`"


def test_legends_use_only_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            if "legendFormat" not in target:
                continue  # a table, which has all labels
            grouped = re.findall(r"by \(([a-z_, ]+)\)", target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if grouped:  # the sum must keep the labels of the legend
                kept = {label.strip() for group in grouped for label in group.split(",")}
                assert shown <= kept | {"role"}, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert RULES.name in (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        return
    for command in (
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(CASES)],
    ):
        result = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_parses_the_dashboards_questions(tmp_path: Path) -> None:
    questions = [
        re.sub(r"\$(cluster|instance|producer)", ".*", expression)
        .replace("$__rate_interval", "5m")
        .replace("$job", "stream-ssl")
        for _, expression in expressions()
    ]
    assert not any("$" in question for question in questions)
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    rules = [
        {"record": f"question:{number}", "expr": question}
        for number, question in enumerate(questions)
    ]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_panel_on_use_shows_producers_that_never_sent_a_new_sample(tmp_path: Path) -> None:
    """A counter by producer has no series before its first sample."""
    (question,) = (
        expression.replace('cluster=~"$cluster",', "").replace(',instance=~"$instance"', "")
        for title, expression in expressions()
        if title == "Which producers are of no use?"
    )
    (tmp_path / "rules.yml").write_text(
        json.dumps({"groups": [{"name": "panel", "rules": [{"record": "use", "expr": question}]}]})
    )
    grown = {
        'producer_admitted_samples_total{job="$job",producer="good"}': 60,
        'producer_admitted_samples_total{job="$job",producer="poor"}': 5,
        'dropped_samples_total{job="$job",producer="poor",reason="near_duplicate"}': 95,
        'dropped_samples_total{job="$job",producer="parked",reason="near_duplicate"}': 60,
        'quarantined_samples_total{job="$job",producer="bad",reason="corrupt"}': 60,
    }
    series = [
        {"series": f"stream_ssl_{name}", "values": f"0+{rise}x30"} for name, rise in grown.items()
    ]
    shares = {"bad": 0, "parked": 0, "poor": 0.05}
    shown = [{"labels": f'use{{producer="{name}"}}', "value": use} for name, use in shares.items()]
    asked = {"expr": "use", "eval_time": "20m", "exp_samples": shown}
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    file = tmp_path / "case.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [case]}))
    promtool = shutil.which("promtool")
    if promtool is None:
        assert question.count("stream_ssl_dropped_samples_total") == 2
        return
    result = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
LINK = (
    "{{ with $externalLabels.runbooks }}{{ . }}docs/runbooks/NAME.md"
    "{{ else }}{{ with $labels.instance }}http://{{ . }}/runbooks/NAME{{ end }}{{ end }}"
)
PARTS = ["Symptom", "Look at", "Act", "Verify"]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    known, index = series(), (RUNBOOKS / "README.md").read_text()
    asked = {}
    for rule in group["rules"]:
        address = rule["annotations"]["runbook_url"]
        name = address.partition("/runbooks/")[2].partition(".md")[0]
        assert address == LINK.replace("NAME", name), "the page's own, or an operator's copy"
        file = RUNBOOKS / f"{name}.md"
        text = asked[file] = file.read_text()
        assert text.startswith(f"# {rule['alert']}\n"), file
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS, file
        assert set(re.findall(r"\bstream_ssl_[a-z_]+", text)) <= known, file
        for linked in re.findall(r"\]\(([^)]+)\)", text):
            assert (RUNBOOKS / linked.partition("#")[0]).exists(), f"{file}: {linked}"
        assert f"[{rule['alert']}]({file.name})" in index
    assert set(asked) == set(RUNBOOKS.glob("*.md")) - {RUNBOOKS / "README.md"}


def test_each_alert_has_a_case_that_fires_and_a_case_that_does_not() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    cases = CASES.read_text()
    for alert in (rule["alert"] for rule in group["rules"]):
        assert f"alertname: {alert}, exp_alerts: []" in cases, f"{alert} is not shown to be silent"
        fires = f'alertname="{alert}"' in cases or re.search(rf"alertname: {alert}\n", cases)
        assert fires, f"{alert} is not shown to fire"
