"""What the runs say together: spreads over seeds, gains over a baseline, verdicts on claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stream_ssl.reproduction.arms import Arm, Claim, Experiment, Run
from stream_ssl.reproduction.results import Result, Results
from stream_ssl.reproduction.spread import Spread


class Measure(NamedTuple):
    """How a number is told: its heading, the factor to the unit of the tables, decimals.

    `share`: it is a share of the test images, which alone make it uncertain.
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


@dataclass(frozen=True)
class Found:
    """Finished runs of an experiment, by cell and seed."""

    experiment: Experiment
    results: Mapping[tuple[str, str], Mapping[int, Result]]

    @classmethod
    def of(cls, experiment: Experiment, runs: Sequence[Run], results: Results) -> Found:
        """Those of `runs` that are done."""
        cells: dict[tuple[str, str], dict[int, Result]] = {}
        for run in runs:
            result = results.get(run)
            if result is not None:
                cells.setdefault(run.arm.cell, {})[run.seed] = result
        return cls(experiment, cells)

    def arms(self) -> Iterator[Arm]:
        """With at least one run, by column and then in the experiment's order."""
        for column in self.experiment.columns:
            for arm in self.experiment.arms:
                if arm.column == column and arm.cell in self.results:
                    yield arm

    def seeds(self, arm: Arm) -> int:
        """How many are done."""
        return len(self.results.get(arm.cell, {}))

    def spread(self, arm: Arm, measure: str) -> Spread:
        """Over the seeds."""
        values = [one.number(measure) for _, one in sorted(self.results[arm.cell].items())]
        return Spread(tuple(value for value in values if value is not None))

    def gain(self, arm: Arm, measure: str) -> Spread:
        """Over the arm's baseline in the same column, seed by seed."""
        if arm.against is None:
            return Spread(())
        return self.sum(((1.0, *arm.cell), (-1.0, arm.against, arm.column)), measure)

    def sum(self, terms: Sequence[tuple[float, str, str]], measure: str) -> Spread:
        """The weighted sum of cells for each seed that all of them have."""
        cells = [self.results.get((row, column), {}) for _, row, column in terms]
        seeds = sorted(set.intersection(*(set(cell) for cell in cells)))
        values = []
        for seed in seeds:
            numbers = [cell[seed].number(measure) for cell in cells]
            known = [number for number in numbers if number is not None]
            if len(known) == len(terms):
                weights = (weight for weight, _, _ in terms)
                values.append(sum(w * x for w, x in zip(weights, known, strict=True)))
        return Spread(tuple(values))

    def error(self, claim: Claim, spread: Spread) -> float:
        """Standard error of a claim's sum, paired: over seeds, each of which gives one sum from
        runs with the same data and the same test images. With one seed that which the finite test
        gives accuracies; 0 where neither is known."""
        if len(spread.values) > 1:
            return statistics.stdev(spread.values) / math.sqrt(len(spread.values))
        if not MEASURES[claim.measure].share:
            return 0.0
        variance = 0.0
        for weight, row, column in claim.terms:
            one = next(iter(self.results[row, column].values()))
            p, queries = one.number(claim.measure), one.number("queries")
            assert p is not None
            assert queries is not None
            variance += weight**2 * p * (1 - p) / queries
        return math.sqrt(variance)


class Verdict(NamedTuple):
    """On a claim. `paper`: the paper's own figure; `word`: "agrees", "disagrees", "not settled",
    or "not run"."""

    claim: Claim
    paper: float | None
    ours: Spread
    word: str


def verdicts(found: Found) -> list[Verdict]:
    """Whether each claim's sum is above 0: by more than two standard errors it agrees, below 0 by
    as much it disagrees. One seed settles nothing where the test images give no error."""
    told = []
    for claim in found.experiment.claims:
        ours = found.sum(claim.terms, claim.measure)
        word = "not run"
        if ours.values:
            error = 2 * found.error(claim, ours)
            mean = ours.mean
            known = len(ours.values) > 1 or MEASURES[claim.measure].share
            settled = known and abs(mean) > error
            word = ("agrees" if mean > 0 else "disagrees") if settled else "not settled"
        told.append(Verdict(claim, _paper(found.experiment, claim), ours, word))
    return told


def _paper(experiment: Experiment, claim: Claim) -> float | None:
    figures = experiment.paper.get(claim.measure, {})
    cells = [(weight, figures.get((row, column))) for weight, row, column in claim.terms]
    known = [(weight, figure) for weight, figure in cells if figure is not None]
    if len(known) < len(cells):
        return None
    return sum(weight * figure for weight, figure in known)
