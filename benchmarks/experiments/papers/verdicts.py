"""Verdicts on the papers' claims, computed from the finished runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.experiments.findings import Deviation, FinishedRuns, Spread, holm
from benchmarks.experiments.papers.arms import Claim, Experiment


class Measure(NamedTuple):
    """The heading of a number, the factor to the unit of the tables, and its decimals.

    `share` says whether the number is a share of the test images, and so has a sampling error.
    """

    heading: str
    scale: float = 1.0
    decimals: int = 3
    share: bool = False


MEASURES: Mapping[str, Measure] = {
    "linear": Measure("linear probe, %", 100, 1, True),
    "knn": Measure("kNN, %", 100, 1, True),
    "top1": Measure("top-1 retrieval, %", 100, 1, True),
    "top10": Measure("top-10 retrieval, %", 100, 1, True),
    "intra": Measure("cosine within a class", 1, 3),
    "inter": Measure("cosine between classes", 1, 3),
    "entropy": Measure("entropy of the memory's classes, % of the greatest", 100, 1),
    "clamp_rate": Measure("clamped anchors, %", 100, 1),
    "step_ms": Measure("time per step, ms", 1, 0),
    "loss": Measure("loss", 1, 3),
    "prior": Measure("tau+ used", 1, 3),
    "prior_true": Measure("tau+ true", 1, 3),
    "prior_measured": Measure("tau+ measured by the memory", 1, 3),
    "prior_error": Measure("mean error of tau+ used", 1, 3),
    "prior_correlation": Measure("correlation of tau+ measured with the truth", 1, 2),
    "label_error": Measure("label error, mean norm of y - y*", 1, 3),
    "even_error": Measure("label error of even smoothing", 1, 3),
    "nearer_than_even": Measure("label error of even smoothing - that of y", 1, 3),
    "accuracy": Measure("kNN of 1,000 test images, %", 100, 1),
    "mixed_error": Measure("label error after mixup", 1, 3),
    "label_mass": Measure("share of y on the anchor's class, %", 100, 1),
}


SIGNIFICANCE = 0.05


class Judgement(NamedTuple):
    """A judged claim.

    `paper` is the paper's own figure. `p` is the p-value after Holm's correction, None if unknown.
    `word` is "agrees", "disagrees", "not settled" or "not run".
    """

    claim: Claim
    paper: float | None
    ours: Spread
    p: float | None
    word: str


def verdicts(experiment: Experiment, found: FinishedRuns) -> list[Judgement]:
    """Judge whether the sum of each claim is above 0.

    A claim agrees if its sum is above 0 and differs from 0 with p < 0.05, and disagrees if it is
    below 0 with p < 0.05. p is of a two-sided t-test, corrected by Holm's method for all claims of
    the experiment that have a p-value.
    """
    sums = [total(found, claim) for claim in experiment.claims]
    known = {
        number: p
        for number, (claim, ours) in enumerate(zip(experiment.claims, sums, strict=True))
        if ours.values and (p := p_value(found, claim, ours, experiment.claims)) is not None
    }
    corrected = holm(known)
    judged = []
    for number, (claim, ours) in enumerate(zip(experiment.claims, sums, strict=True)):
        p = corrected.get(number)
        word = "not settled" if ours.values else "not run"
        if p is not None and p < SIGNIFICANCE:
            word = "agrees" if ours.mean > 0 else "disagrees"
        judged.append(Judgement(claim, _paper(experiment, claim), ours, p, word))
    return judged


def total(found: FinishedRuns, claim: Claim) -> Spread:
    """Return the weighted sum of a claim's cells, for each seed that all the cells have."""
    weights = [weight for weight, _, _ in claim.terms]
    return found.paired(
        [(row, column) for _, row, column in claim.terms],
        claim.measure,
        lambda *numbers: sum(w * x for w, x in zip(weights, numbers, strict=True)),
    )


def p_value(
    found: FinishedRuns, claim: Claim, ours: Spread, claims: Sequence[Claim]
) -> float | None:
    """Return the two-sided p-value of a claim's mean sum, or None if no error is known.

    The deviation over seeds is pooled over all claims about the same measure, because two or three
    seeds alone estimate it poorly. If no claim has two seeds, accuracies on a finite test set have
    its sampling error.
    """
    values = [value / _length(claim) for value in ours.values]
    if deviation := pooled(found, [one for one in claims if one.measure == claim.measure]):
        return deviation.p(values)
    if MEASURES[claim.measure].share:
        return Deviation(sampling_error(found, claim) / _length(claim), math.inf).p(values)
    return None


def pooled(found: FinishedRuns, claims: Sequence[Claim]) -> Deviation | None:
    """Return the deviation over seeds of a sum whose weights have length 1."""
    squares, freedom = 0.0, 0
    for claim in claims:
        values = total(found, claim).values
        if len(values) > 1:
            squares += statistics.variance(values) * (len(values) - 1) / _length(claim) ** 2
            freedom += len(values) - 1
    return Deviation(math.sqrt(squares / freedom), freedom) if freedom else None


def _length(claim: Claim) -> float:
    return math.hypot(*(weight for weight, _, _ in claim.terms))


def sampling_error(found: FinishedRuns, claim: Claim) -> float:
    """Return the standard error that the test images give the sum of one seed."""
    variance = 0.0
    for weight, row, column in claim.terms:
        one = next(iter(found.results[row, column].values()))
        p, queries = one.number(claim.measure), one.number("queries")
        assert p is not None
        assert queries is not None
        variance += weight**2 * p * (1 - p) / queries
    return math.sqrt(variance)


def _paper(experiment: Experiment, claim: Claim) -> float | None:
    figures = experiment.paper.get(claim.measure, {})
    cells = [(weight, figures.get((row, column))) for weight, row, column in claim.terms]
    known = [(weight, figure) for weight, figure in cells if figure is not None]
    if len(known) < len(cells):
        return None
    return sum(weight * figure for weight, figure in known)
