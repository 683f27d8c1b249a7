"""The experiments, one file and one line in the table each."""

from stream_ssl.reproduction.arms import Experiment
from stream_ssl.reproduction.experiments.aggregation import AGGREGATION
from stream_ssl.reproduction.experiments.debiased import DEBIASED
from stream_ssl.reproduction.experiments.decoupled import DECOUPLED
from stream_ssl.reproduction.experiments.duel import DUEL
from stream_ssl.reproduction.experiments.prior import PRIOR
from stream_ssl.reproduction.experiments.self_labeling import SELF_LABELING

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (DUEL, DEBIASED, AGGREGATION, DECOUPLED, SELF_LABELING, PRIOR)
}

__all__ = ["EXPERIMENTS"]
