"""docs/numbers.md says what the recorded runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr

ROOT = Path(__file__).parents[2]
STUDIES = {"one class too frequent": ("x",), "a parked robot": ("parked", "shuffled")}
RUNS = ROOT / "benchmarks" / "reports" / "study" / "runs.jsonl"
WITH = ("entropy", "distinct", "copies_mean")


def runs(study: str) -> list[dict[str, Any]]:
    """The numbers of its runs. Later ones, which tell their frames, are none of the page's."""
    lines = map(json.loads, RUNS.read_text().splitlines())
    found = [line["numbers"] for line in lines if line["run"].startswith(STUDIES[study])]
    return [n for n in found if "effective_classes" in n and "frames" not in n]


def correlation(numbers: list[dict[str, Any]], truth: str) -> float | None:
    """Spearman's, of the effective rank with the truth; None where no run recorded that."""
    pairs = [(one["effective_classes"], one[truth]) for one in numbers if truth in one]
    return float(spearmanr(pairs).statistic) if pairs else None


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_effective_rank_moves_as_documented(name: str) -> None:
    numbers = runs(name)
    told = [correlation(numbers, truth) for truth in WITH]
    cells = ["-" if one is None else f"{one:+.2f}" for one in told]
    row = f"| {name}, {len(numbers)} runs | {' | '.join(cells)} |"
    page = (ROOT / "docs" / "numbers.md").read_text()
    assert row in page, f"docs/numbers.md, the effective rank: {row}"


def test_the_page_claims_no_more_than_that() -> None:
    """Of distinct images it tells, of classes it does not."""
    assert (correlation(runs("a parked robot"), "distinct") or 0) > 0.8
    assert abs(correlation(runs("one class too frequent"), "entropy") or 0) < 0.5
    assert re.search("not classes", (ROOT / "docs" / "numbers.md").read_text())
