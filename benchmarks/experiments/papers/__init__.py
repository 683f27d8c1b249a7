"""The experiments of the papers. Each needs one file and one line in the table."""

from benchmarks.experiments.papers.aggregation import AGGREGATION
from benchmarks.experiments.papers.arms import Experiment
from benchmarks.experiments.papers.debiased import DEBIASED
from benchmarks.experiments.papers.decoupled import DECOUPLED
from benchmarks.experiments.papers.duel import DUEL
from benchmarks.experiments.papers.negatives import NEGATIVES
from benchmarks.experiments.papers.prior import PRIOR
from benchmarks.experiments.papers.self_labeling import SELF_LABELING

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (DUEL, DEBIASED, NEGATIVES, AGGREGATION, DECOUPLED, SELF_LABELING, PRIOR)
}

__all__ = ["EXPERIMENTS"]
