"""The same pass as attention: queries are the anchors, keys and values the negatives.

Attention returns just what is wanted, the softmax-weighted mean and the logsumexp, and holds no
logits. A batch of anchors is too few queries to fill a device, so the negatives are split into
parts that run side by side and are merged.

Shapes: B anchors, N negatives, C negatives of one chunk, D dimensions, S parts, P of one part.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from stream_ssl.losses.scan import Scan, chunks, counted, merge, scan

PARTS = 32  # run side by side
ALIGNED = 16  # the kernel reads masks in steps of so many
DIMS = 4  # and rows of float32 in steps of so many


def fits(anchor_BD: Tensor, negative: Tensor) -> bool:
    """Whether the kernel takes these: on a GPU, float32, shared negatives."""
    return (
        anchor_BD.is_cuda
        and anchor_BD.dtype == torch.float32
        and negative.ndim == 2
        and anchor_BD.shape[1] % DIMS == 0
        and sound(anchor_BD.device)
    )


@functools.cache
def sound(device: torch.device) -> bool:
    """Whether the kernel finds here what the chunks find: tried once, on few rows, since the
    operator is not of torch's public interface and its arithmetic depends on the device."""
    generator = torch.Generator().manual_seed(0)
    anchor_BD = F.normalize(torch.randn(40, 16, generator=generator), dim=1) / 0.05
    negative_ND = F.normalize(torch.randn(1100, 16, generator=generator), dim=1)
    mask_BN = torch.rand(40, 1100, generator=generator) < 0.3
    mask_BN[1] = True
    given = (anchor_BD.to(device), negative_ND.to(device), mask_BN.to(device))
    reason = "it finds another sum"
    try:
        pairs = zip(fused_scan(*given)[:4], scan(*given)[:4], strict=True)
        if all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in pairs):
            return True
    except (RuntimeError, AttributeError) as error:
        reason = str(error)
    warnings.warn(
        f"no attention kernel for losses on {device}, chunks are used: {reason}", stacklevel=2
    )
    return False


def fused_scan(anchor_BD: Tensor, negative_ND: Tensor, mask_BN: Tensor | None) -> Scan:
    """What `scan` finds, but the largest logit."""
    lse = [anchor_BD.new_full((1, len(anchor_BD)), -math.inf)]  # of no negative, to begin with
    means = [anchor_BD.new_zeros(1, *anchor_BD.shape)]
    total_B = anchor_BD.new_zeros(len(anchor_BD))
    for chunk in chunks(anchor_BD, len(negative_ND)):
        negative_CD = negative_ND[chunk].to(anchor_BD.dtype)
        mask_BC = None if mask_BN is None else mask_BN[:, chunk]
        total_B += _total(anchor_BD, negative_CD, mask_BC)
        for part, parts in _split(len(negative_CD)):
            mask_BP = None if mask_BC is None else mask_BC[:, part]
            lse_SB, mean_SBD = _attend(anchor_BD, negative_CD[part], mask_BP, parts)
            lse.append(lse_SB)
            means.append(mean_SBD)
    logsumexp_B, mean_BD = merge(torch.cat(lse), torch.cat(means))
    count_B = counted(anchor_BD, len(negative_ND), mask_BN)
    return Scan(logsumexp_B, mean_BD, count_B, total_B, None)


def _split(size: int) -> list[tuple[slice, int]]:
    """Slices and the number of equal, aligned parts of each: all but a rest, and the rest."""
    each = size // (PARTS * ALIGNED) * ALIGNED
    cut = each * PARTS
    pieces = [(slice(0, cut), PARTS), (slice(cut, size), 1)]
    return [(piece, parts) for piece, parts in pieces if piece.stop > piece.start]


def _attend(
    anchor_BD: Tensor, negative_CD: Tensor, mask_BC: Tensor | None, parts: int
) -> tuple[Tensor, Tensor]:
    """Logsumexp [S, B] and weighted mean [S, B, D] of each part."""
    batch, dim = anchor_BD.shape
    query = anchor_BD.expand(parts, 1, batch, dim).contiguous()
    key = negative_CD.reshape(parts, 1, -1, dim)
    bias = None
    if mask_BC is not None:
        hidden = mask_BC.reshape(batch, parts, -1).transpose(0, 1).unsqueeze(1)  # [S, 1, B, P]
        bias = _aligned(anchor_BD, hidden)
    mean, logsumexp = _attention(query, key, bias)
    lse_SB, mean_SBD = logsumexp[:, 0, :batch].to(anchor_BD.dtype), mean[:, 0]
    if mask_BC is None:
        return lse_SB, mean_SBD
    # Of a row without any negative the kernel returns what it likes.
    none_SB = hidden[:, 0].all(-1)
    return lse_SB.masked_fill(none_SB, -math.inf), mean_SBD.masked_fill(none_SB.unsqueeze(2), 0.0)


def _aligned(like: Tensor, hidden: Tensor) -> Tensor:
    """-inf where hidden, else 0, in rows that lie at multiples of ALIGNED."""
    *rows, size = hidden.shape
    padded = like.new_zeros(*rows, -(-size // ALIGNED) * ALIGNED)
    return padded[..., :size].masked_fill_(hidden, -math.inf)


def _attention(query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if query.is_cuda:
        found = aten._scaled_dot_product_efficient_attention(query, key, key, bias, True, scale=1.0)
    else:  # for the tests: the same algebra
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, key, attn_mask=bias, scale=1.0
        )
    return found[0], found[1]


def _total(anchor_BD: Tensor, negative_CD: Tensor, mask_BC: Tensor | None) -> Tensor:
    """Sum of the logits [B]."""
    if mask_BC is None:
        return anchor_BD @ negative_CD.sum(0)
    kept_BC = (~mask_BC).to(anchor_BD.dtype)
    return ((kept_BC @ negative_CD) * anchor_BD).sum(1)
