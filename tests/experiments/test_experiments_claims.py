"""The figures of README.md and the docs are those of all stored runs."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
from table import table

from benchmarks.experiments.__main__ import REPORTS
from benchmarks.experiments.findings import Deviation, FinishedRuns, Spread, pooled_deviation
from benchmarks.experiments.results import RunResult
from benchmarks.experiments.study import claims

RUNS = REPORTS / "study" / "runs.jsonl"


@pytest.fixture(scope="module")
def stored() -> claims.StoredRuns:
    return claims.StoredRuns(RUNS)


@pytest.mark.parametrize("page", claims.PAGES)
def test_each_page_has_the_tables_of_all_stored_runs(page: str, stored: claims.StoredRuns) -> None:
    text = (claims.ROOT / page).read_text(encoding="utf-8")
    assert claims.PLACE.search(text)
    assert claims.made(text, stored) == text, "run: python -m benchmarks.experiments study --report"


def test_every_table_is_on_a_page() -> None:
    pages = "".join((claims.ROOT / page).read_text(encoding="utf-8") for page in claims.PAGES)
    assert {name for _, name, _ in claims.PLACE.findall(pages)} == {*claims.TABLES}


def test_the_page_of_the_study_states_the_pooled_deviations(stored: claims.StoredRuns) -> None:
    both = {probe: found for probe, found in stored.deviation.items() if found}
    told = (
        "({knn:.2f} points kNN and {linear:.2f} linear, with {freedom:.0f} degrees of freedom"
    ).format(
        **{probe: 100 * found.value for probe, found in both.items()}, freedom=both["knn"].freedom
    )
    page = (claims.ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert told in " ".join(page.split())


@pytest.mark.parametrize("page", ["README.md", "docs/study.md", "docs/duplicates.md"])
def test_every_difference_in_a_sentence_is_in_a_table(page: str) -> None:
    text = (claims.ROOT / page).read_text(encoding="utf-8")
    sentences = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    told = re.findall(r"(\d+\.\d ± \d+\.\d)", sentences)
    tables = (*(REPORTS / "footage").rglob("tables.md"), claims.ROOT / "docs" / "study.md")
    known = text + "".join(each.read_text(encoding="utf-8") for each in tables)
    assert told
    cells = set(re.findall(r"[+-](\d+\.\d ± \d+\.\d) [(/]", known))
    assert set(told) <= cells


def test_a_run_that_is_added_changes_the_tables(tmp_path: Path) -> None:
    shutil.copy(RUNS, tmp_path / "runs.jsonl")
    text = (claims.ROOT / "README.md").read_text(encoding="utf-8")
    lines = RUNS.read_text().splitlines()
    found = (line for line in lines if line.startswith('{"run": "parked queue/stream/stale'))
    best = next(line for line in found if '"steps": 2400' in line)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(re.sub(" seed[0-9]", " seed7", best) + "\n")
    made = claims.made(text, claims.StoredRuns(tmp_path / "runs.jsonl"))
    before, after = (
        int(re.findall(r"(?m)^\| a parked robot.*?\((\d+)\)", page)[0]) for page in (text, made)
    )
    assert after == before + 1


def found(**values: tuple[float, ...]) -> FinishedRuns:
    """Return arms, each with a value for each seed, on one stream."""
    return FinishedRuns(
        {
            (arm, "parked"): {
                seed: RunResult({"knn": value}, {}) for seed, value in enumerate(each)
            }
            for arm, each in values.items()
        }
    )


def naive(differences: list[list[float]]) -> float:
    squares = sum(sum((x - sum(each) / len(each)) ** 2 for x in each) for each in differences)
    return math.sqrt(squares / sum(len(each) - 1 for each in differences))


def test_the_pooled_deviation_uses_all_pairs_around_their_own_means() -> None:
    first = found(a=(0.1, 0.3, 0.2), b=(0.2, 0.2, 0.7), c=(0.5,))
    second = found(a=(0.4, 0.1), b=(0.9, 0.7))
    expected = naive([[-0.1, 0.1, -0.5], [-0.5, -0.6]])
    assert pooled_deviation([first, second], "knn") == (pytest.approx(expected), 3)


def test_the_pooled_deviation_counts_only_free_differences_of_three_arms() -> None:
    """Three arms have three differences, and two of them determine the third."""
    a, b, c = (0.1, 0.3, 0.2), (0.2, 0.2, 0.7), (0.5, 0.4, 0.4)
    pairs = [[x - y for x, y in zip(*each, strict=True)] for each in ((a, b), (a, c), (b, c))]
    pooled = pooled_deviation([found(a=a, b=b, c=c)], "knn")
    assert pooled == (pytest.approx(naive(pairs)), 4)


def test_a_difference_compares_only_runs_on_one_device() -> None:
    runs = found(a=(0.1, 0.3, 0.2), b=(0.2, 0.2, 0.7))
    runs.results["a", "parked"][2] = RunResult({"knn": 0.9}, {"device": "cuda:0 (a card)"})
    assert runs.gain(("b", "parked"), ("a", "parked"), "knn").values == pytest.approx((0.1, -0.1))
    expected = naive([[0.1, -0.1]])
    assert pooled_deviation([runs], "knn") == (pytest.approx(expected), 1)
    assert pooled_deviation([runs], "knn", "parked") == pooled_deviation([runs], "knn")
    assert pooled_deviation([runs], "knn", "crawl") is None
    assert pooled_deviation([runs], "linear") is None


def test_a_single_pair_has_no_deviation_and_no_error() -> None:
    assert pooled_deviation([found(a=(0.1,), b=(0.2,))], "knn") is None
    assert Spread((0.1,)).difference(None) == "+10.0 (1)"


@table(
    ("values", "told"),
    [((), ""), ((0.01,), "+1.0 ± 0.8 (1)"), ((0.01, -0.03, 0.01, -0.03), "-1.0 ± 0.4 (4)")],
)
def test_a_difference_has_the_pooled_error_of_its_seeds(
    values: tuple[float, ...], told: str
) -> None:
    assert Spread(values).difference(Deviation(0.008, 9)) == told


def test_a_page_that_names_an_unknown_table_raises_an_error(stored: claims.StoredRuns) -> None:
    with pytest.raises(KeyError, match="nothing"):
        claims.made("<!-- study: nothing -->\n<!-- end -->", stored)
