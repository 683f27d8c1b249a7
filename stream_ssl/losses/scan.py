"""One pass over the negatives in chunks, as a streaming softmax.

Shapes: B anchors, N negatives, C negatives of one chunk, D dimensions, S parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Logits per chunk: few enough for the cache of a CPU core, and enough to keep a GPU busy.
CHUNK_LOGITS_CPU = 1 << 19
CHUNK_LOGITS_GPU = 1 << 25


class Scan(NamedTuple):
    """The results of one pass for each anchor. Without negatives they are -inf or 0."""

    logsumexp_B: Tensor  # logsumexp of the unmasked negatives' logits
    mean_BD: Tensor  # mean of the negatives, weighted by the softmax of their logits
    count_B: Tensor  # number of unmasked negatives
    total_B: Tensor  # sum of the logits
    largest_B: Tensor | None  # largest logit; None if the pass does not compute it
    beside_B: Tensor | None = None  # logsumexp of `beside` times the logits; None: not requested


def scan(
    anchor_BD: Tensor, negative: Tensor, mask_BN: Tensor | None, beside: float | None = None
) -> Scan:
    """Return the `Scan` of the logits anchor . negative, with a running maximum, sum and mean.

    The anchors are already divided by the temperature.
    """
    batch, size = len(anchor_BD), negative.shape[-2]
    largest_B = anchor_BD.new_full((batch,), -math.inf)
    weight_B, beside_weight_B = anchor_BD.new_zeros(2, batch)
    total_B = anchor_BD.new_zeros(batch)
    mean_BD = torch.zeros_like(anchor_BD)
    for chunk in negative_chunks(anchor_BD, negative):
        negative_CD = negative[..., chunk, :].to(anchor_BD.dtype)
        logit_BC = logits(anchor_BD, negative_CD)
        if mask_BN is None:
            total_B += logit_BC.sum(1)
        else:
            mask_BC = mask_BN[:, chunk]
            total_B += logit_BC.masked_fill_(mask_BC, 0.0).sum(1)
            logit_BC.masked_fill_(mask_BC, -math.inf)
        new_B = torch.maximum(largest_B, logit_BC.amax(1))
        # A row without negatives so far has the maximum -inf, and -inf - -inf would be NaN.
        shift_B = new_B.masked_fill(new_B == -math.inf, 0.0)
        logit_BC.sub_(shift_B.unsqueeze(1))
        rescale_B = torch.exp(largest_B - shift_B)
        if beside is not None:
            beside_sum_B = (beside * logit_BC).exp_().sum(1)
            beside_weight_B = beside_weight_B * rescale_B**beside + beside_sum_B
        weight_BC = logit_BC.exp_()
        weight_B = weight_B * rescale_B + weight_BC.sum(1)
        mean_BD = mean_BD * rescale_B.unsqueeze(1) + weighted_sum(weight_BC, negative_CD)
        largest_B = new_B
    mean_BD = (mean_BD / weight_B.unsqueeze(1)).masked_fill_((weight_B == 0).unsqueeze(1), 0.0)
    count_B = count_negatives(anchor_BD, size, mask_BN)
    beside_B = None if beside is None else beside * largest_B + beside_weight_B.log()
    return Scan(largest_B + weight_B.log(), mean_BD, count_B, total_B, largest_B, beside_B)


def merge(logsumexp_SB: Tensor, mean_SBD: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the logsumexps and means of S parts exactly; return [B] and [B, D]."""
    logsumexp_B = logsumexp_SB.logsumexp(0)
    finite_B = logsumexp_B.masked_fill(logsumexp_B == -math.inf, 0.0)
    share_SB = (logsumexp_SB - finite_B).exp()
    return logsumexp_B, torch.einsum("sb,sbd->bd", share_SB, mean_SBD)


def count_negatives(anchor_BD: Tensor, size: int, mask_BN: Tensor | None) -> Tensor:
    """Return the number of unmasked negatives of each anchor [B], in the anchors' float type."""
    count_B = anchor_BD.new_full((len(anchor_BD),), float(size))
    if mask_BN is not None:
        for chunk in chunks(anchor_BD, size):
            count_B -= _count_true(mask_BN[:, chunk])
    return count_B


def same_and_kept(same_BN: Tensor, mask_BN: Tensor | None, chunk: slice) -> Tensor:
    """Return a bool [B, C]: the negative is of the anchor's class and not masked."""
    same_BC = same_BN[:, chunk]
    return same_BC if mask_BN is None else same_BC & ~mask_BN[:, chunk]


def count_same(anchor_BD: Tensor, same_BN: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the number of unmasked negatives of the anchor's class [B], as `count_negatives`."""
    count_B = anchor_BD.new_zeros(len(anchor_BD))
    for chunk in chunks(anchor_BD, same_BN.shape[1]):
        count_B += _count_true(same_and_kept(same_BN, mask_BN, chunk))
    return count_B


def _count_true(flag_BC: Tensor) -> Tensor:
    # torch sums bools through an int64 copy of the tensor. A view as bytes avoids the copy.
    return flag_BC.view(torch.uint8).sum(1, dtype=torch.int32)


def logits(anchor_BD: Tensor, negative_CD: Tensor) -> Tensor:
    """Return the logits anchor . negative [B, C]."""
    if negative_CD.ndim == 2:
        return anchor_BD @ negative_CD.T
    return torch.bmm(negative_CD, anchor_BD.unsqueeze(2)).squeeze(2)


def weighted_sum(weight_BC: Tensor, negative_CD: Tensor) -> Tensor:
    """Return the weighted sums of the negatives [B, D]."""
    if negative_CD.ndim == 2:
        return weight_BC @ negative_CD
    return torch.bmm(weight_BC.unsqueeze(1), negative_CD).squeeze(1)


def weighted_sum_grad(weight_BC: Tensor, anchor_BD: Tensor, negative: Tensor) -> Tensor:
    """Return the gradient of `weighted_sum` by the negatives, [C, D] or [B, C, D]."""
    if negative.ndim == 2:
        return weight_BC.T @ anchor_BD
    return weight_BC.unsqueeze(2) * anchor_BD.unsqueeze(1)


def chunks(anchor_BD: Tensor, size: int, numbers: int = 1, most: int | None = None) -> list[slice]:
    """Return slices of columns such that B x columns x numbers fits one chunk.

    `most` limits the size of a chunk further. A slice has at least 256 columns, except the last
    one.
    """
    budget = CHUNK_LOGITS_GPU if anchor_BD.is_cuda else CHUNK_LOGITS_CPU
    budget = budget if most is None else min(budget, most)
    step = max(256, budget // (len(anchor_BD) * numbers))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def negative_chunks(anchor_BD: Tensor, negative: Tensor) -> list[slice]:
    """Return the `chunks` of the negatives. With negatives per anchor, each takes D numbers."""
    return chunks(anchor_BD, negative.shape[-2], negative.shape[-1] if negative.ndim == 3 else 1)


def promote(z_BD: Tensor) -> Tensor:
    """Return the tensor as float32; a float64 tensor is returned unchanged."""
    return z_BD if z_BD.dtype == torch.float64 else z_BD.float()
