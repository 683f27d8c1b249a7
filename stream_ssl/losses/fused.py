"""The pass of `scan` on an attention kernel.

The anchors are the queries. The negatives are the keys and the values.

Attention returns the softmax-weighted mean and the logsumexp, and stores no logits. A batch of
anchors has too few queries to use the whole device. So the negatives are split into parts that run
in parallel, and the results are merged.

The kernel takes a float bias for each pair instead of a bool mask. So masked negatives are
processed in chunks, and the biases of a chunk take at most `MASKED` floats.

Shapes: B anchors, N negatives, C negatives of one chunk, D dimensions, S parts, P of one part.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from stream_ssl.losses.scan import Scan, chunks, count_negatives, merge, scan

PARTS = 32  # parts that run in parallel
ALIGNED = 16  # the kernel reads masks in multiples of this number
DIMS = 4  # the kernel reads rows of float32 in multiples of this number
MASKED = 1 << 25  # largest number of bias floats in one chunk: 134 MB, and few launches


def can_fuse(anchor_BD: Tensor, negative: Tensor) -> bool:
    """Return whether the kernel accepts the tensors: on a GPU, float32, shared negatives."""
    return (
        anchor_BD.is_cuda
        and anchor_BD.dtype == torch.float32
        and negative.ndim == 2
        and anchor_BD.shape[1] % DIMS == 0
        and sound(anchor_BD.device)
    )


@functools.cache
def sound(device: torch.device) -> bool:
    """Return whether the kernel agrees with `scan` on this device.

    The kernel is tried once, on few rows, because the operator is not in torch's public interface
    and its arithmetic depends on the device. A disagreement or an error gives a warning.
    """
    generator = torch.Generator().manual_seed(0)
    anchor_BD = F.normalize(torch.randn(40, 16, generator=generator), dim=1) / 0.05
    negative_ND = F.normalize(torch.randn(1100, 16, generator=generator), dim=1)
    mask_BN = torch.rand(40, 1100, generator=generator) < 0.3
    mask_BN[1] = True
    inputs = (anchor_BD.to(device), negative_ND.to(device), mask_BN.to(device))
    reason = "it finds another sum"
    try:
        pairs = zip(fused_scan(*inputs)[:4], scan(*inputs)[:4], strict=True)
        if all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in pairs):
            return True
    except (RuntimeError, AttributeError) as error:
        reason = str(error)
    warnings.warn(
        f"no attention kernel for losses on {device}, chunks are used: {reason}", stacklevel=2
    )
    return False


def fused_scan(
    anchor_BD: Tensor, negative_ND: Tensor, mask_BN: Tensor | None, beside: float | None = None
) -> Scan:
    """Return the same as `scan`, but without the largest logit. `beside` costs a second pass."""
    lse = [anchor_BD.new_full((1, len(anchor_BD)), -math.inf)]  # the result without negatives
    means = [anchor_BD.new_zeros(1, *anchor_BD.shape)]
    total_B = anchor_BD.new_zeros(len(anchor_BD))
    for chunk in chunks(anchor_BD, len(negative_ND), most=None if mask_BN is None else MASKED):
        negative_CD = negative_ND[chunk].to(anchor_BD.dtype)
        for part, parts in _split(len(negative_CD)):
            key_SPD = negative_CD[part].reshape(parts, -1, anchor_BD.shape[1])
            mask_BP = None if mask_BN is None else mask_BN[:, chunk][:, part]
            lse_SB, mean_SBD, total_part_B = _attend(anchor_BD, key_SPD, mask_BP)
            lse.append(lse_SB)
            means.append(mean_SBD)
            total_B += total_part_B
    logsumexp_B, mean_BD = merge(torch.cat(lse), torch.cat(means))
    count_B = count_negatives(anchor_BD, len(negative_ND), mask_BN)
    beside_B = None
    if beside is not None:
        beside_B = fused_scan(beside * anchor_BD, negative_ND, mask_BN).logsumexp_B
    return Scan(logsumexp_B, mean_BD, count_B, total_B, None, beside_B)


def _split(size: int) -> list[tuple[slice, int]]:
    """Return slices and the number of equal, aligned parts in each.

    The first slice holds most columns in `PARTS` parts; the second holds the rest as one part.
    """
    each = size // (PARTS * ALIGNED) * ALIGNED
    cut = each * PARTS
    pieces = [(slice(0, cut), PARTS), (slice(cut, size), 1)]
    return [(piece, parts) for piece, parts in pieces if piece.stop > piece.start]


def _attend(
    anchor_BD: Tensor, key_SPD: Tensor, mask_BC: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp [S, B] and weighted mean [S, B, D] of each part, and all logits' sum [B]."""
    (batch, dim), parts = anchor_BD.shape, len(key_SPD)
    query, key = anchor_BD.expand(parts, 1, batch, dim).contiguous(), key_SPD.unsqueeze(1)
    if mask_BC is None:
        mean, logsumexp = _attention(query, key, None)
        lse_SB = logsumexp[:, 0, :batch].to(anchor_BD.dtype)
        return lse_SB, mean[:, 0], anchor_BD @ key_SPD.sum((0, 1))
    mask_SBP = mask_BC.reshape(batch, parts, -1).transpose(0, 1)
    kept_SBP = _kept(anchor_BD, mask_SBP)
    total_B = ((kept_SBP @ key_SPD).sum(0) * anchor_BD).sum(1)
    mean, logsumexp = _attention(query, key, kept_SBP.log_().unsqueeze(1))  # bias -inf or 0
    lse_SB = logsumexp[:, 0, :batch].to(anchor_BD.dtype)
    # The kernel's result for a row without negatives is undefined.
    none_SB = mask_SBP.all(-1)
    lse_SB = lse_SB.masked_fill(none_SB, -math.inf)
    return lse_SB, mean[:, 0].masked_fill(none_SB.unsqueeze(2), 0.0), total_B


def _kept(like: Tensor, mask_SBP: Tensor) -> Tensor:
    """Return 1 for kept and 0 for masked entries, in rows whose size is a multiple of ALIGNED."""
    *rows, size = mask_SBP.shape
    padded = like.new_ones(*rows, -(-size // ALIGNED) * ALIGNED)
    return padded[..., :size].masked_fill_(mask_SBP, 0.0)


def _attention(query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if query.is_cuda:
        found = aten._scaled_dot_product_efficient_attention(query, key, key, bias, True, scale=1.0)
    else:  # the tests use the CPU kernel, which computes the same
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, key, attn_mask=bias, scale=1.0
        )
    return found[0], found[1]
