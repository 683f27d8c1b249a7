"""Methods: how views become a loss. One file and one line each."""

from __future__ import annotations

from stream_ssl.batch import Batch
from stream_ssl.methods.base import Method, MethodOutput
from stream_ssl.methods.byol import BYOL
from stream_ssl.methods.d_simclr import DSimCLR
from stream_ssl.methods.moco import MoCo
from stream_ssl.methods.self_labeling import SelfLabelingMoCo
from stream_ssl.methods.simclr import SimCLR
from stream_ssl.methods.simsiam import SimSiam

# One line per method; the contract tests run over this table. MoCo under DUEL's eviction policy is
# D-MoCo: the same class.
METHODS: dict[str, type[Method]] = {
    "moco": MoCo,
    "simclr": SimCLR,
    "d-simclr": DSimCLR,
    "simsiam": SimSiam,
    "byol": BYOL,
    "self-labeling": SelfLabelingMoCo,
}

Samples = Batch
"""The name of this type in earlier versions."""

__all__ = [
    "BYOL",
    "METHODS",
    "Batch",
    "DSimCLR",
    "Method",
    "MethodOutput",
    "MoCo",
    "Samples",
    "SelfLabelingMoCo",
    "SimCLR",
    "SimSiam",
]
