"""One chunked pass over the negatives: their logsumexp, and its gradient along the way.

The gradient of logsumexp_n(z . n / t) by the anchor z is the softmax-weighted mean of the
negatives over t, so the forward pass can keep that [B, D] instead of the [B, N] logits, and
the backward pass has nothing left to do. Everything in the debiased family is a closed form in
this one number.

Shapes: B anchors, N negatives, C negatives of one chunk, D dimensions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at a time: what stays in the cache of a core, and what keeps a GPU busy.
CHUNK_LOGITS_CPU = 1 << 19
CHUNK_LOGITS_GPU = 1 << 25


class NegativeSums(NamedTuple):
    """What one pass finds out for each anchor; only `logsumexp_B` carries a gradient."""

    logsumexp_B: Tensor  # of z . n / t over the negatives counted; -inf when there is none
    count_B: Tensor  # negatives counted
    largest_B: Tensor  # largest logit; -inf when there is none
    total_B: Tensor  # sum of the logits
    entropy_B: Tensor  # nats of the softmax over the negatives; 0 when there is none


def sum_negatives(
    z_BD: Tensor, negative: Tensor, mask_BN: Tensor | None, temperature: float
) -> NegativeSums:
    """`NegativeSums` of unit rows `z_BD` against `negative` [N, D] or [B, N, D].

    No [B, N] tensor outlives its chunk. Works in float64 if the anchors do, else in float32.
    """
    return NegativeSums(*_NegativeSums.apply(z_BD, negative, mask_BN, temperature))


class _NegativeSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z_BD: Tensor, negative: Tensor, mask_BN: Tensor | None, temperature: float
    ) -> tuple[Tensor, ...]:
        with torch.autocast(z_BD.device.type, enabled=False):
            sums, mean_BD = _scan(_wide(z_BD) / temperature, negative, mask_BN)
        ctx.temperature = temperature
        ctx.dtype = z_BD.dtype
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(mean_BD, z_BD, negative, mask_BN, sums.logsumexp_B)
        else:
            ctx.save_for_backward(mean_BD)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_B = grads[0]
        mean_BD, *rest = ctx.saved_tensors
        grad_z = grad_negative = None
        with torch.autocast(mean_BD.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_z = (grad_B.unsqueeze(1) * mean_BD / ctx.temperature).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                grad_negative = _negative_gradient(grad_B, ctx.temperature, *rest)
        return grad_z, grad_negative, None, None


def _scan(
    anchor_BD: Tensor, negative: Tensor, mask_BN: Tensor | None
) -> tuple[NegativeSums, Tensor]:
    """Running maximum, sum and weighted mean, as a streaming softmax keeps them."""
    batch, size = len(anchor_BD), negative.shape[-2]
    largest_B = anchor_BD.new_full((batch,), -math.inf)
    weight_B = anchor_BD.new_zeros(batch)
    total_B = anchor_BD.new_zeros(batch)
    mean_BD = torch.zeros_like(anchor_BD)
    count_B = anchor_BD.new_full((batch,), float(size))
    for chunk in _chunks(anchor_BD, size):
        negative_CD = negative[..., chunk, :].to(anchor_BD.dtype)
        logit_BC = _logits(anchor_BD, negative_CD)
        if mask_BN is None:
            total_B += logit_BC.sum(1)
        else:
            mask_BC = mask_BN[:, chunk]
            total_B += logit_BC.masked_fill_(mask_BC, 0.0).sum(1)
            count_B -= mask_BC.sum(1)
            logit_BC.masked_fill_(mask_BC, -math.inf)
        new_B = torch.maximum(largest_B, logit_BC.amax(1))
        # A row without any negative yet has -inf as its maximum, and -inf - -inf is no number.
        shift_B = new_B.masked_fill(new_B == -math.inf, 0.0)
        weight_BC = logit_BC.sub_(shift_B.unsqueeze(1)).exp_()
        rescale_B = torch.exp(largest_B - shift_B)
        weight_B = weight_B * rescale_B + weight_BC.sum(1)
        mean_BD = mean_BD * rescale_B.unsqueeze(1) + _weigh(weight_BC, negative_CD)
        largest_B = new_B
    empty_B = weight_B == 0
    mean_BD = (mean_BD / weight_B.unsqueeze(1)).masked_fill_(empty_B.unsqueeze(1), 0.0)
    logsumexp_B = largest_B + weight_B.log()
    # H = lse - E[logit], and the expectation is the anchor times the weighted mean.
    entropy_B = (logsumexp_B - (anchor_BD * mean_BD).sum(1)).masked_fill(empty_B, 0.0)
    return NegativeSums(logsumexp_B, count_B, largest_B, total_B, entropy_B), mean_BD


def _negative_gradient(
    grad_B: Tensor,
    temperature: float,
    z_BD: Tensor,
    negative: Tensor,
    mask_BN: Tensor | None,
    logsumexp_B: Tensor,
) -> Tensor:
    """d/dn: the softmax anew, chunk by chunk, so that here too nothing [B, N] is kept."""
    anchor_BD = _wide(z_BD) / temperature
    shift_B = logsumexp_B.masked_fill(logsumexp_B == -math.inf, 0.0)
    gradient = torch.empty_like(negative)
    for chunk in _chunks(anchor_BD, negative.shape[-2]):
        logit_BC = _logits(anchor_BD, negative[..., chunk, :].to(anchor_BD.dtype))
        if mask_BN is not None:
            logit_BC.masked_fill_(mask_BN[:, chunk], -math.inf)
        share_BC = logit_BC.sub_(shift_B.unsqueeze(1)).exp_() * grad_B.unsqueeze(1)
        if negative.ndim == 2:
            gradient[chunk] = (share_BC.T @ anchor_BD).to(negative.dtype)
        else:
            gradient[:, chunk] = (share_BC.unsqueeze(2) * anchor_BD.unsqueeze(1)).to(negative.dtype)
    return gradient


def _logits(anchor_BD: Tensor, negative_CD: Tensor) -> Tensor:
    if negative_CD.ndim == 2:
        return anchor_BD @ negative_CD.T
    return torch.bmm(negative_CD, anchor_BD.unsqueeze(2)).squeeze(2)


def _weigh(weight_BC: Tensor, negative_CD: Tensor) -> Tensor:
    if negative_CD.ndim == 2:
        return weight_BC @ negative_CD
    return torch.bmm(weight_BC.unsqueeze(1), negative_CD).squeeze(1)


def _chunks(anchor_BD: Tensor, size: int) -> list[slice]:
    budget = CHUNK_LOGITS_GPU if anchor_BD.is_cuda else CHUNK_LOGITS_CPU
    step = max(256, budget // len(anchor_BD))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _wide(z_BD: Tensor) -> Tensor:
    return z_BD if z_BD.dtype == torch.float64 else z_BD.float()
