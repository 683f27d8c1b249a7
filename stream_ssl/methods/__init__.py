"""Methods of self-supervised learning. Each method is one file and one line of `METHODS`."""

from __future__ import annotations

from stream_ssl.batch import Batch
from stream_ssl.methods.base import Method, MethodOutput
from stream_ssl.methods.byol import BYOL
from stream_ssl.methods.d_simclr import DSimCLR
from stream_ssl.methods.moco import MoCo
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.self_labeling import SelfLabelingMoCo
from stream_ssl.methods.simclr import SimCLR
from stream_ssl.methods.simsiam import SimSiam

# One line per method; the contract tests run over this table. D-MoCo is the class MoCo with DUEL's
# eviction policy in the memory.
METHODS: dict[str, type[Method]] = {
    "moco": MoCo,
    "simclr": SimCLR,
    "d-simclr": DSimCLR,
    "simsiam": SimSiam,
    "byol": BYOL,
    "self-labeling": SelfLabelingMoCo,
}

__all__ = [
    "BYOL",
    "METHODS",
    "Batch",
    "DSimCLR",
    "Method",
    "MethodOutput",
    "MoCo",
    "Momentum",
    "SelfLabelingMoCo",
    "SimCLR",
    "SimSiam",
]
