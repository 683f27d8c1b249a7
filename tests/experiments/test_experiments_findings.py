"""Results through kills, and verdicts that follow from them alone."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp
from table import table
from tiny_reproduction import EXPERIMENT, MADE, reproduction, results

from benchmarks.experiments.findings import Spread, holm
from benchmarks.experiments.papers import report
from benchmarks.experiments.papers.arms import PaperRun
from benchmarks.experiments.papers.verdicts import p_value, pooled, total, verdicts

BASE, BETTER = ("base", "x1"), ("better", "x1")
PLANNED = 9


def judged(folder: Path, linear: dict[tuple[str, str, int], float], **more: object) -> list[str]:
    stored = results(folder, linear, **more)
    return [verdict.word for verdict in verdicts(EXPERIMENT, stored.found())]


@table(
    ("better", "word"),
    # Two standard errors of a difference near 0.5 on 10,000 images are 0.0141.
    [(0.52, "agrees"), (0.51, "not settled"), (0.49, "not settled"), (0.48, "disagrees")],
)
def test_the_verdict_on_one_seed_uses_the_error_of_the_test_images(
    tmp_path: Path, better: float, word: str
) -> None:
    found = judged(tmp_path, {(*BASE, 0): 0.5, (*BETTER, 0): better})
    assert found[:2] == [word, "not run"]


def test_a_smaller_test_set_leaves_the_same_difference_unsettled(tmp_path: Path) -> None:
    linear = {(*BASE, 0): 0.5, (*BETTER, 0): 0.52}
    assert judged(tmp_path, linear, queries=1000)[0] == "not settled"


def test_seeds_with_a_large_spread_settle_no_claim(tmp_path: Path) -> None:
    gains = (0.08, -0.02, 0.03)
    linear = {(*BASE, seed): 0.5 for seed in range(3)}
    linear |= {(*BETTER, seed): 0.5 + gain for seed, gain in enumerate(gains)}
    found = results(tmp_path, linear).found()
    verdict = verdicts(EXPERIMENT, found)[0]
    assert verdict.word == "not settled"
    assert verdict.ours.mean == pytest.approx(0.03)
    assert verdict.p == pytest.approx(2 * float(ttest_1samp(gains, 0.0).pvalue))  # two claims


def test_the_deviation_is_pooled_over_the_claims_about_a_number(tmp_path: Path) -> None:
    linear = {(*BASE, seed): 0.5 for seed in range(3)}
    linear |= {(*BETTER, seed): 0.5 + gain for seed, gain in enumerate((0.02, 0.03, 0.04))}
    linear |= {("base", "x2", seed): 0.5 - gain for seed, gain in enumerate((0.1, 0.1, 0.4))}
    found = results(tmp_path, linear).found()
    first, second = EXPERIMENT.claims[:2]
    variance = (2 * 0.01**2 + 2 * statistics.variance((0.1, 0.1, 0.4))) / 2 / 4
    assert pooled(found, [first, second]) == (pytest.approx(math.sqrt(variance)), 4)
    error = math.sqrt(variance) * math.sqrt(2) / math.sqrt(3)
    expected = 2 * student.sf(0.03 / error, 4)
    found_p = p_value(found, first, total(found, first), EXPERIMENT.claims)
    assert found_p == pytest.approx(float(expected))


def test_p_values_are_corrected_for_their_number(tmp_path: Path) -> None:
    values = {0: 0.2, 1: 0.001, 2: 0.04, 3: 0.03}
    assert holm(values) == pytest.approx({1: 0.004, 3: 0.09, 2: 0.09, 0: 0.2})
    assert holm({}) == {}


@table(("flat", "word"), [(0.6, "agrees"), (0.4, "disagrees"), (0.5, None)])
def test_a_measure_without_test_images_needs_two_seeds_for_a_verdict(
    tmp_path: Path, flat: float, word: str | None
) -> None:
    entropy = {"base": 0.5, "better": flat}
    one = {(*BASE, 0): 0.5, (*BETTER, 0): 0.5}
    assert judged(tmp_path / "one", one, entropy=entropy)[2] == "not settled"
    two = one | {(*BASE, 1): 0.5, (*BETTER, 1): 0.5}
    assert judged(tmp_path / "two", two, entropy=entropy)[2] == (word or "not settled")


def test_the_difference_of_a_paper_comes_from_its_figures(tmp_path: Path) -> None:
    found = results(tmp_path, {(*BASE, 0): 0.5}).found()
    assert [verdict.paper for verdict in verdicts(EXPERIMENT, found)] == [3.5, None, None]


def test_only_seeds_of_both_arms_are_compared(tmp_path: Path) -> None:
    linear = {(*BASE, 0): 0.4, (*BASE, 1): 0.5, (*BETTER, 1): 0.6, (*BETTER, 2): 0.9}
    found = results(tmp_path, linear).found()
    assert found.gain(BETTER, BASE, "linear").values == pytest.approx((0.1,))
    assert found.share(BETTER, BASE, "linear").values == pytest.approx((1.2,))


def test_a_cell_without_a_run_is_empty(tmp_path: Path) -> None:
    found = results(tmp_path, {(*BETTER, 0): 0.5}).found()
    table = report.by_measure(EXPERIMENT, found, "linear")
    assert table.headings[2:] == ["seeds", "ours", "gain", "paper", "paper's gain"]
    assert table.rows == [["x1", "better", "1", "50.0", "", "53.5", "+3.5"]]


@table(
    ("values", "sign", "text"),
    [
        ((), False, ""),
        ((0.456,), False, "45.6"),
        ((0.456,), True, "+45.6"),
        ((-0.01, 0.01), True, "+0.0 ± 1.4"),
    ],
    ids=["none", "one", "signed", "spread"],
)
def test_a_number_is_shown_with_its_spread(
    values: tuple[float, ...], sign: bool, text: str
) -> None:
    assert Spread(values).text(sign=sign) == text


def test_a_report_that_is_written_again_has_the_same_bytes(tmp_path: Path) -> None:
    linear = {(*BASE, 0): 0.5, (*BASE, 1): 0.52, (*BETTER, 0): 0.55, ("base", "x2", 0): 0.4}
    results(tmp_path / "runs", linear)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        stored = reproduction(tmp_path / "runs", data=None)
        settings = {"data": stored.results.settings["data"]}
        report.write(EXPERIMENT, stored.found(), PLANNED, "tiny", settings, folder)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == [f"2026-01-02-duel-tiny-abacus-2-cores.{end}" for end in ("md", "png")]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    text = (folders[0] / names[0]).read_text()
    assert f"4 of {PLANNED} planned runs are done (2026-01-02; Abacus, 2 cores)" in text
    assert "Results of 3 claims: 2 hold here, 0 do not, 1 are not settled, 0 have not" in text


def test_results_of_other_settings_are_not_used(tmp_path: Path) -> None:
    results(tmp_path, {(*BASE, 0): 0.5})
    run = PaperRun(EXPERIMENT.arms[0], 0)
    assert reproduction(tmp_path).results.get(run) is not None
    assert reproduction(tmp_path, dim=9).results.get(run) is None
    assert reproduction(tmp_path, data="another").results.get(run) is None
    changed = PaperRun(replace(run.arm, bias=5), 0)
    assert reproduction(tmp_path).results.get(changed) is None


def test_results_of_several_data_sets_need_the_option_data(tmp_path: Path) -> None:
    for data in ("one", "two"):
        results(tmp_path, {(*BASE, 0): 0.5}, data=data)
    assert len(reproduction(tmp_path, "one").found().results) == 1
    with pytest.raises(ValueError, match="runs on one, two: say which with --data"):
        reproduction(tmp_path, data=None)


def test_a_torn_line_is_ignored_and_other_results_are_kept(tmp_path: Path) -> None:
    stored = results(tmp_path, {(*BASE, 0): 0.5, (*BETTER, 0): 0.6}).results
    content = stored.path.read_bytes()
    stored.path.write_bytes(content[:-20])
    again = reproduction(tmp_path)
    assert len(again.found().results) == 1
    again.results.add(PaperRun(EXPERIMENT.arms[1], 0), {"linear": 0.7}, MADE)
    lines = stored.path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["numbers"] == {"linear": 0.7}
    assert len(reproduction(tmp_path).found().results) == 2


def test_a_report_replaces_only_older_reports_of_its_kind(tmp_path: Path) -> None:
    kept = ["2025-01-01-duel-cpu-other.md", "2025-01-01-duel-tiny.jsonl", "duel-tiny.jsonl"]
    older = [f"2025-01-01-duel-tiny-abacus-1-cores.{end}" for end in ("md", "svg", "png")]
    for name in (*kept, *older):
        (tmp_path / name).touch()
    found = results(tmp_path / "runs", {(*BASE, 0): 0.5}).found()
    report.write(EXPERIMENT, found, PLANNED, "tiny", {}, tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {*kept, *(f"2026-01-02-duel-tiny-abacus-2-cores.{end}" for end in ("md", "png"))}
