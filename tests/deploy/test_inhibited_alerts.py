"""The alerts that Alertmanager holds back, by the rules of deploy/compose/alertmanager.yml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "compose" / "alertmanager.yml"
MATCHER = re.compile(r'(\w+) (!?=) "(.*)"')


def matches(matchers: list[str], labels: dict[str, str]) -> bool:
    """Whether labels match, as in Alertmanager: a missing label is an empty one."""
    for matcher in matchers:
        found = MATCHER.fullmatch(matcher)
        assert found is not None, matcher
        name, sign, value = found.groups()
        if (labels.get(name, "") == value) is (sign == "!="):
            return False
    return True


def inhibits(source: dict[str, str], target: dict[str, str]) -> bool:
    """Whether one alert holds back another one."""
    return any(
        matches(rule["source_matchers"], source)
        and matches(rule["target_matchers"], target)
        and all(source.get(name, "") == target.get(name, "") for name in rule["equal"])
        for rule in yaml.safe_load(FILE.read_text())["inhibit_rules"]
    )


DOWN = {"alertname": "StreamSslDown", "severity": "critical"}
LAG = {"alertname": "StreamSslLag", "severity": "warning", "instance": "learner:9109"}
WATCHDOG = {"alertname": "StreamSslWatchdog", "severity": "none"}


@pytest.mark.parametrize("instance", [None, "learner:9109"])
def test_the_alert_of_a_process_that_is_down_does_not_inhibit_the_watchdog(
    instance: str | None,
) -> None:
    """The alert has no instance if Prometheus no longer scrapes the process."""
    down = DOWN if instance is None else {**DOWN, "instance": instance}
    assert not inhibits(down, WATCHDOG)
    assert not inhibits(down, down)
    assert inhibits(down, LAG) is (instance is not None)
    assert not inhibits(down, {**LAG, "instance": "receiver:9108"})
