"""Sums and differences of exponentials whose exponents do not fit into a float.

A gradient through what was not chosen is exactly 0, never 0 x infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# softplus(x) = x beyond this, exactly so in float64 as well.
LINEAR_FROM = 40.0


def log_mean_exp(logit_BM: Tensor) -> Tensor:
    """log of the mean of e^x over the last dimension, which is kept."""
    return logit_BM.logsumexp(-1, keepdim=True) - math.log(logit_BM.shape[-1])


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """log(e^larger - e^smaller); -inf, and no gradient, where that is not positive."""
    gap = larger - smaller
    overtaken = gap <= 0  # and so NaN goes on, for the caller's check to see
    safe = gap.masked_fill(overtaken, 1.0)
    found = larger + torch.log(-torch.expm1(-safe))
    return found.masked_fill(overtaken, -math.inf)


def minus_log_share(part: Tensor, rest: Tensor) -> Tensor:
    """-log(e^part / (e^part + e^rest)), whichever is the larger."""
    return F.softplus(rest - part, threshold=LINEAR_FROM)
