"""Tests of the warnings about options that have no effect under the other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import config_file
from table import table

from stream_ssl.app.commands import check
from stream_ssl.config import options
from stream_ssl.config.idle_options import without_effect

ROOT = Path(__file__).parents[2]
LOSS = "stream_ssl.losses.PositiveDebiased"
QUIET: dict[str, Any] = {
    "decoder": {"size": 16, "channels": 3},
    "views": {"grey": 0.3},
    "learner": {"anchors": "memory", "draw": "inverse-count"},
    "loss": {"class_path": LOSS, "init_args": {"aggregation": "mixed", "alpha": 0.1}},
}


@table(
    ("sections", "without"),
    [
        ({}, set()),
        (QUIET, set()),
        ({"views": {"grey": 0.0}}, {"grey"}),
        ({"learner": {"anchors": "stream", "draw": "inverse-count"}}, {"draw"}),
        ({"learner": {"draw": "inverse-count"}, "pace": {"updates_per_sample": 1.0}}, set()),
        ({"pace": {"counts": "new"}}, {"counts"}),
        ({"pace": {"counts": "new"}, "learner": {"novelty": "auto"}}, set()),
        (
            {
                "pace": {"counts": "new"},
                "learner": {"novelty": "auto"},
                "vectors": {"dim": 24},
                "encoder": {},
            },
            {"counts"},
        ),
        (
            {"loss": {"class_path": LOSS, "init_args": {"alpha": 0.1, "floor": "biased"}}},
            {"alpha", "floor"},
        ),
    ],
)
def test_each_option_without_effect_has_a_line(
    tmp_path: Path, sections: dict[str, Any], without: set[str]
) -> None:
    parser = options.learner_parser()
    settings = options.read(parser, [config_file(tmp_path, **sections)])
    lines = without_effect(options.resolved(parser, settings))
    assert {line.split()[0].partition(".")[2] for line in lines} == without
    assert all(" has no effect: " in line for line in lines)


def test_check_logs_why_an_option_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = config_file(tmp_path, learner={"anchors": "stream", "draw": "inverse-count"})
    assert check.main([file]) == 0
    told = "learner.draw 'inverse-count' has no effect: nothing is drawn from the memory"
    assert told in caplog.text


def test_the_shipped_configurations_have_no_option_without_effect() -> None:
    parser = options.learner_parser()
    for file in (ROOT / "deploy" / "configs").glob("*.yaml"):
        settings = options.read(parser, [str(file)])
        assert without_effect(options.resolved(parser, settings)) == [], file
