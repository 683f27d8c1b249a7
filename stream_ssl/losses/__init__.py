"""Contrastive losses on negatives from the batch, the memory, or both."""

from __future__ import annotations

from stream_ssl.losses.base import Diagnostics, Loss, LossOutput, Mix
from stream_ssl.losses.contrastive import AnchorLoss, Contrastive, Terms
from stream_ssl.losses.cosine import NegativeCosine
from stream_ssl.losses.debiased import Debiased
from stream_ssl.losses.decoupled import Decoupled
from stream_ssl.losses.hard_negative import HardNegative
from stream_ssl.losses.infonce import InfoNCE
from stream_ssl.losses.positive_debiased import PositiveDebiased
from stream_ssl.losses.schedules import OverSteps, Ramp
from stream_ssl.losses.self_labeling import SelfLabeling
from stream_ssl.losses.supervised import SupervisedContrastive

# SimCLR calls InfoNCE "NT-Xent". The method chooses the anchors and the masked rows.
NTXent = InfoNCE

# One line per loss; the contract tests run over this table.
LOSSES: dict[str, type[Loss]] = {
    "infonce": InfoNCE,
    "decoupled": Decoupled,
    "debiased": Debiased,
    "positive-debiased": PositiveDebiased,
    "hard-negative": HardNegative,
    "self-labeling": SelfLabeling,
    "supervised": SupervisedContrastive,
    "negative-cosine": NegativeCosine,
}

__all__ = [
    "LOSSES",
    "AnchorLoss",
    "Contrastive",
    "Debiased",
    "Decoupled",
    "Diagnostics",
    "HardNegative",
    "InfoNCE",
    "Loss",
    "LossOutput",
    "Mix",
    "NTXent",
    "NegativeCosine",
    "OverSteps",
    "PositiveDebiased",
    "Ramp",
    "SelfLabeling",
    "SupervisedContrastive",
    "Terms",
]
