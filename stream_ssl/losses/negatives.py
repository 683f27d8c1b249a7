"""Sums over the negatives that store no [B, N] tensor for the backward pass.

The gradient of logsumexp_n(z . n / t) by the anchor z is the softmax-weighted mean of the
negatives, divided by t. So the forward pass keeps this mean [B, D] instead of the logits [B, N].
Every loss of the debiased family is a closed form of this logsumexp.

Shapes: B anchors, N negatives, C negatives of one chunk, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stream_ssl.losses.fused import can_fuse, fused_scan
from stream_ssl.losses.group import Group, of_all
from stream_ssl.losses.scan import (
    Scan,
    logits,
    merge,
    negative_chunks,
    promote,
    scan,
    weighted_sum,
    weighted_sum_grad,
)


class NegativeSums(NamedTuple):
    """The results of one pass over the negatives. Only `logsumexp_B` carries a gradient."""

    logsumexp_B: Tensor  # logsumexp of z . n / t over the unmasked negatives; -inf without any
    count_B: Tensor  # number of unmasked negatives
    total_B: Tensor  # sum of the logits
    entropy_B: Tensor  # entropy of the softmax over the negatives, in nats; 0 without negatives
    mean_BD: Tensor  # mean of the negatives, weighted by the softmax; 0 without negatives
    largest_B: Tensor | None  # largest logit, -inf without negatives; None: not known (GPU)
    beside_B: Tensor | None  # logsumexp of `beside` times the logits; None if not requested

    @property
    def logsumexp_or_0_B(self) -> Tensor:
        """The logsumexp, with 0 for anchors without negatives, so that formulas stay finite."""
        return self.logsumexp_B.masked_fill(self.count_B == 0, 0.0)


def sum_negatives(
    z_BD: Tensor,
    negative: Tensor,
    mask_BN: Tensor | None,
    temperature: float,
    group: Group | None = None,
    beside: float | None = None,
) -> NegativeSums:
    """Return the `NegativeSums` of unit rows `z_BD` against `negative` [N, D] or [B, N, D].

    No [B, N] tensor outlives its chunk. The sums are float64 for float64 anchors, otherwise
    float32.

    Args:
        z_BD: anchors.
        negative: negatives; on several ranks the part of this rank [N, D].
        mask_BN: bool, True for a negative to leave out; on several ranks one row for each anchor of
            all ranks.
        temperature: t.
        group: the ranks; None for a single process.
        beside: a positive factor of the logits for a second logsumexp.
    """
    return NegativeSums(*_NegativeSums.apply(z_BD, negative, mask_BN, temperature, group, beside))


def sum_weighted(negative: Tensor, like_BD: Tensor, weight: Callable[[slice], Tensor]) -> Tensor:
    """Return the sums [B, D] of the negatives with constant weights.

    Args:
        negative: [N, D] or [B, N, D].
        like_BD: a tensor with the shape, type and device of the result.
        weight: returns the weights [B, C] of a chunk. The backward pass calls it again.
    """
    found: Tensor = _WeightedSum.apply(negative, like_BD.detach(), weight)
    return found


def merged(found: Scan, group: Group | None) -> Scan:
    """Merge the partial results of all ranks for this rank's anchors."""
    if group is None:
        return found
    largest_A = found.logsumexp_B if found.largest_B is None else found.largest_B
    beside_A = found.logsumexp_B if found.beside_B is None else found.beside_B
    numbers = [found.logsumexp_B, found.count_B, found.total_B, largest_A, beside_A]
    part_WBX = group.exchange(torch.cat([torch.stack(numbers, 1), found.mean_BD], 1))
    lse_WB, count_WB, total_WB, largest_WB, beside_WB = part_WBX[..., :5].unbind(-1)
    logsumexp_B, mean_BD = merge(lse_WB, part_WBX[..., 5:])
    largest_B = None if found.largest_B is None else largest_WB.amax(0)
    beside_B = None if found.beside_B is None else beside_WB.logsumexp(0)
    return Scan(logsumexp_B, mean_BD, count_WB.sum(0), total_WB.sum(0), largest_B, beside_B)


def without_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that refuses `create_graph=True`.

    Its result would lack a term. `once_differentiable` alone does not see this if the incoming
    gradients are constants, or if `autograd.grad` does not ask for a path through the result.
    """
    once = once_differentiable(backward)

    def guarded(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss has no second derivative, because its sums over the negatives keep no "
                "graph: differentiate it without create_graph=True"
            )
        return once(ctx, *grads)

    return guarded


class _NegativeSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z_BD: Tensor,
        negative: Tensor,
        mask_BN: Tensor | None,
        temperature: float,
        group: Group | None,
        beside: float | None,
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(z_BD.device.type, enabled=False):
            anchor_BD = promote(z_BD) / temperature
            scan_by = fused_scan if can_fuse(anchor_BD, negative) else scan
            asking_AD = of_all(anchor_BD, group)
            found = merged(scan_by(asking_AD, negative, mask_BN, beside), group)
            # H = lse - E[logit], and the expectation is the anchor times the weighted mean.
            entropy_B = found.logsumexp_B - (anchor_BD * found.mean_BD).sum(1)
            entropy_B.masked_fill_(found.logsumexp_B == -math.inf, 0.0)
        ctx.temperature = temperature
        ctx.dtype, ctx.group = z_BD.dtype, group
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(found.mean_BD, asking_AD, negative, mask_BN, found.logsumexp_B)
        else:
            ctx.save_for_backward(found.mean_BD)
        constant = (
            found.count_B,
            found.total_B,
            entropy_B,
            found.mean_BD,
            found.largest_B,
            found.beside_B,
        )
        ctx.mark_non_differentiable(*[tensor for tensor in constant if tensor is not None])
        return found.logsumexp_B, *constant

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_B = grads[0]
        mean_BD, *rest = ctx.saved_tensors
        grad_z = grad_negative = None
        with torch.autocast(mean_BD.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_z = (grad_B.unsqueeze(1) * mean_BD / ctx.temperature).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                grad_negative = _negative_gradient(grad_B, ctx.group, *rest)
        return grad_z, grad_negative, None, None, None, None


def _negative_gradient(
    grad_B: Tensor,
    group: Group | None,
    anchor_BD: Tensor,
    negative: Tensor,
    mask_BN: Tensor | None,
    logsumexp_B: Tensor,
) -> Tensor:
    """Return the gradient by the negatives, in their shape.

    The softmax is computed again chunk by chunk, so that no [B, N] tensor is kept. `anchor_BD` has
    the anchors of all ranks, divided by t.
    """
    if group is not None:
        grad_B, logsumexp_B = group.gather_equal(torch.stack([grad_B, logsumexp_B], 1)).unbind(1)
    share = softmax_of(anchor_BD, negative, mask_BN, logsumexp_B)
    gradient = torch.empty_like(negative)
    for chunk in negative_chunks(anchor_BD, negative):
        share_BC = share(chunk).mul_(grad_B.unsqueeze(1))
        gradient[..., chunk, :] = weighted_sum_grad(share_BC, anchor_BD, negative).to(
            negative.dtype
        )
    return gradient


def softmax_of(
    anchor_BD: Tensor, negative: Tensor, mask_BN: Tensor | None, logsumexp_B: Tensor
) -> Callable[[slice], Tensor]:
    """Return a function that computes the softmax over the negatives for one chunk [B, C]."""
    shift_B1 = logsumexp_B.masked_fill(logsumexp_B == -math.inf, 0.0).unsqueeze(1)

    def share(chunk: slice) -> Tensor:
        logit_BC = logits(anchor_BD, negative[..., chunk, :].to(anchor_BD.dtype))
        if mask_BN is not None:
            logit_BC.masked_fill_(mask_BN[:, chunk], -math.inf)
        return logit_BC.sub_(shift_B1).exp_()

    return share


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, negative: Tensor, like_BD: Tensor, weight: Callable[[slice], Tensor]
    ) -> Tensor:
        ctx.weight = weight
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(negative)
        sum_BD = torch.zeros_like(like_BD)
        for chunk in negative_chunks(like_BD, negative):
            sum_BD += weighted_sum(weight(chunk), negative[..., chunk, :].to(like_BD.dtype))
        return sum_BD

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BD,) = grads
        (negative,) = ctx.saved_tensors
        gradient = torch.empty_like(negative)
        for chunk in negative_chunks(grad_BD, negative):
            found = weighted_sum_grad(ctx.weight(chunk), grad_BD, negative)
            gradient[..., chunk, :] = found.to(negative.dtype)
        return gradient, None, None
