"""Verdicts on the papers' claims, computed from the finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.experiments.findings import Found, Spread
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


class Verdict(NamedTuple):
    """A judged claim.

    `paper` is the paper's own figure. `word` is "agrees", "disagrees", "not settled" or "not run".
    """

    claim: Claim
    paper: float | None
    ours: Spread
    word: str


def verdicts(experiment: Experiment, found: Found) -> list[Verdict]:
    """Judge whether the sum of each claim is above 0.

    A claim agrees if its sum is above 0 by more than two standard errors. It disagrees if its sum
    is below 0 by as much. A claim with one seed is not settled if the test images give no error.
    """
    told = []
    for claim in experiment.claims:
        ours = total(found, claim)
        word = "not run"
        if ours.values:
            mean = ours.mean
            known = len(ours.values) > 1 or MEASURES[claim.measure].share
            settled = known and abs(mean) > 2 * error(found, claim, ours)
            word = ("agrees" if mean > 0 else "disagrees") if settled else "not settled"
        told.append(Verdict(claim, _paper(experiment, claim), ours, word))
    return told


def total(found: Found, claim: Claim) -> Spread:
    """Return the weighted sum of a claim's cells, for each seed that all the cells have."""
    weights = [weight for weight, _, _ in claim.terms]
    return found.paired(
        [(row, column) for _, row, column in claim.terms],
        claim.measure,
        lambda *numbers: sum(w * x for w, x in zip(weights, numbers, strict=True)),
    )


def error(found: Found, claim: Claim, ours: Spread) -> float:
    """Return the standard error of a claim's sum.

    With several seeds, the error is paired: each seed gives one sum of runs with the same data and
    test images. With one seed, it is the sampling error of accuracies on the finite test set. The
    result is 0 if neither is known.
    """
    if len(ours.values) > 1:
        return ours.error
    if not MEASURES[claim.measure].share:
        return 0.0
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
