"""The arms of every experiment learn, and its tables and claims name only cells that exist."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from table import table
from tiny_reproduction import CLASSES, DATA, TINY

from benchmarks.experiments import __main__ as command
from benchmarks.experiments.__main__ import REPORTS
from benchmarks.experiments.network import encoder
from benchmarks.experiments.papers import EXPERIMENTS
from benchmarks.experiments.papers.arms import Experiment, PaperArm, PaperRun
from benchmarks.experiments.papers.presets import PRESETS
from benchmarks.experiments.papers.training import build, run_once, views_of
from benchmarks.experiments.papers.verdicts import MEASURES
from benchmarks.experiments.results import entries

EVERY = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS.keys())
TIMES = ("train_s", "evaluate_s", "step_ms")


def kinds(experiment: Experiment) -> list[PaperArm]:
    """Return the first arm of each row, with tiny batches."""
    firsts: dict[str, PaperArm] = {}
    for arm in experiment.arms:
        firsts.setdefault(arm.row, arm)
    return [replace(arm, batch=None, share=min(1.0, arm.share)) for arm in firsts.values()]


ARMS = [
    pytest.param(experiment, arm, id=f"{name}-{arm.row}")
    for name, experiment in EXPERIMENTS.items()
    for arm in kinds(experiment)
]


@table(("experiment", "arm"), ARMS)
def test_an_arm_learns_and_is_measured(experiment: Experiment, arm: PaperArm) -> None:
    before = torch.random.get_rng_state()
    try:
        numbers = run_once(experiment, TINY, PaperRun(arm, 0), DATA)
    finally:
        torch.random.set_rng_state(before)
    plain = [value for value in numbers.values() if not isinstance(value, list)]
    assert all(math.isfinite(value) for value in plain)
    assert all(0 <= numbers[name] <= 1 for name in ("linear", "knn", "top1", "top10"))
    assert numbers["queries"] == len(DATA.test)
    if arm.share == 0:
        assert numbers["steps"] == 0
        assert "loss" not in numbers
        return
    assert numbers["steps"] == 3
    assert [step for step, _ in numbers["trace.loss"]] == [1, 2, 3]
    if "clamp_rate" in experiment.measures:
        assert "clamp_rate" in numbers
    if experiment.name == "self-labeling":
        assert 0 < numbers["label_error"] < math.sqrt(2)
        assert ("mixed_error" in numbers) == (arm.row in ("mixup", "both"))
    if experiment.name == "prior" and arm.loss == "debiased":
        assert 0 < numbers["prior"] <= 1
        assert (numbers["prior_error"] < 1e-9) == (arm.loss_options["prior"] == "labels")


@EVERY
def test_tables_and_claims_name_only_cells_that_are_run(experiment: Experiment) -> None:
    cells = [arm.cell for arm in experiment.arms]
    assert len(set(cells)) == len(cells)
    assert {column for _, column in cells} == set(experiment.columns)
    for arm in experiment.arms:
        assert arm.against is None or (arm.against, arm.column) in cells
    for claim in experiment.claims:
        assert {(row, column) for _, row, column in claim.terms} <= set(cells), claim.text
        assert claim.measure in MEASURES
    for measure, figures in experiment.paper.items():
        assert measure in experiment.measures
        assert set(figures) <= set(cells)
    assert {*experiment.measures, *experiment.curves, *experiment.traces} <= set(MEASURES)


@EVERY
@pytest.mark.parametrize("repeat_all", [False, True])
def test_a_plan_has_every_arm_before_any_repeats(experiment: Experiment, repeat_all: bool) -> None:
    runs = experiment.plan(3, repeat_all)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    assert [run.arm for run in runs[: len(experiment.arms)]] == list(experiment.arms)
    assert all(run.seed for run in runs[len(experiment.arms) :])
    repeated = len(experiment.arms) if repeat_all else sum(arm.key for arm in experiment.arms)
    assert len(runs) == len(experiment.arms) + 2 * repeated


@EVERY
def test_the_preset_cpu_small_is_sized_for_a_quarter_of_an_hour(experiment: Experiment) -> None:
    preset = PRESETS["cpu-small"]
    samples = preset.of(experiment.name)["samples"]
    # Core-seconds of a sample that is an anchor or a positive, and of an evaluation; both were
    # measured: D-SimCLR takes a fifth more, MoCo a fifth less.
    of = {"moco": 0.4e-3, "d-simclr": 0.6e-3}
    seconds = sum(
        6
        + (samples * run.arm.share)
        * run.arm.method_options.get("views", 2)
        * of.get(run.arm.method, 0.5e-3)
        for run in experiment.plan(preset.seeds, preset.repeat_all)
    )
    assert seconds <= 2 * 15 * 60


def test_the_page_of_the_reproduction_states_the_numbers_and_minutes_of_runs() -> None:
    page = (REPORTS.parents[1] / "docs" / "reproduction.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([\w-]+)` \| (\d+), ([\d.]+) \|", page, re.MULTILINE)
    assert len(told) == 7
    for name, runs, minutes in told:
        found = entries(REPORTS / "reproduction" / f"{name}-cpu-small.jsonl")
        seconds = sum(one["numbers"]["train_s"] + one["numbers"]["evaluate_s"] for one in found)
        assert (int(runs), float(minutes)) == (len(found), round(seconds / 120, 1))


def test_the_page_of_the_papers_states_the_lead_of_positive_debiased() -> None:
    """The traces have the kNN accuracy on a few images, at every tenth update of 200."""
    page = (REPORTS.parents[1] / "docs" / "papers.md").read_text(encoding="utf-8")
    traces = {
        entry["run"]: dict(entry["numbers"]["trace.accuracy"])
        for entry in entries(REPORTS / "reproduction" / "debiased-cpu-small.jsonl")
        if "trace.accuracy" in entry["numbers"]
    }
    told = []
    for rival in ("biased", "negative-debiased"):
        for half in (range(10, 101, 10), range(110, 201, 10)):
            ahead = []
            for seed in range(3):
                ours, theirs = (
                    traces[f"as they are / {row} / seed{seed}"]
                    for row in ("positive-debiased", rival)
                )
                ahead.append(100 * fmean(ours[at] - theirs[at] for at in half))
            told.append(f"{fmean(ahead):.1f} ± {stdev(ahead):.1f}")
    early, late, *others = told
    assert f"biased by {early} points in the first half of a run and by {late} in" in page
    assert f"ahead of negative-debiased by {' and '.join(others)}." in page


def test_the_command_knows_every_experiment_and_preset() -> None:
    assert list(command.NAMES) == [*EXPERIMENTS, "study"]
    assert list(command.PRESETS) == list(PRESETS)


def test_a_repeated_run_gives_the_same_numbers() -> None:
    experiment = EXPERIMENTS["self-labeling"]
    run = PaperRun(experiment.arms[3], 1)
    first, again = (run_once(experiment, TINY, run, DATA) for _ in range(2))
    for name in TIMES:
        del first[name], again[name]
    assert first == again


def test_arms_of_a_seed_share_weights_and_stream() -> None:
    experiment = EXPERIMENTS["duel"]
    settings = TINY.of("duel")
    arms = [arm for arm in experiment.arms if arm.column == "x27" and arm.row != "SimSiam"][:2]
    learners = [build(PaperRun(arm, 1), settings, DATA, views_of(arm, settings)) for arm in arms]
    weights = [next(iter(one.method.encoder.parameters())) for one in learners]
    batches = [one.batches.next(0.0) for one in learners]
    assert torch.equal(*weights)
    assert batches[0].hashes_B.tolist() == batches[1].hashes_B.tolist()
    other = build(PaperRun(arms[0], 2), settings, DATA, views_of(arms[0], settings))
    assert not torch.equal(weights[0], next(iter(other.method.encoder.parameters())))


@pytest.mark.parametrize(
    ("name", "features"), [("conv", 192), ("resnet18", 512), ("resnet50", 2048)]
)
def test_networks_have_the_number_of_features_that_they_state(name: str, features: int) -> None:
    net, stated = encoder(name)  # type: ignore[arg-type]
    with torch.no_grad():
        found = net.eval()(torch.zeros(1, 3, 32, 32))
    assert stated == features == found.shape[1]


def test_the_classes_of_the_data_are_counted() -> None:
    assert DATA.classes == CLASSES
