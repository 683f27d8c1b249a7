"""Which slots are drawn, and what a draw hands out.

Every random number is drawn on the CPU, so that every device draws the same.

Shapes: B anchors, C cells, D embedding, N negatives, k occupied slots, n slots drawn, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.scores import BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class Negatives:
    """Negatives without gradient, and what is needed to leave an anchor's own copies out.

    All anchors share them, or each has its own: then every field has a dimension B in front.
    """

    z_ND: Tensor  # [N, D], or [B, N, D]
    ids_N: Tensor  # int64
    hashes_N: Tensor  # int64, 0: none

    def __len__(self) -> int:
        """N"""
        return self.ids_N.shape[-1]

    def mask(self, ids_B: Tensor, hashes_B: Tensor | None) -> Tensor:
        """bool [B, N], True where negative n is anchor b itself (id) or the same picture (hash)."""
        return same(ids_B, hashes_B, self.ids_N, self.hashes_N)


@dataclass(frozen=True, slots=True)
class Draw:
    """A training batch drawn from the memory."""

    slots: Tensor  # int64 [n]
    ids: Tensor  # int64 [n]
    images: Tensor | None  # uint8 [n, C, H, W], None where the memory keeps none


def same(ids_B: Tensor, hashes_B: Tensor | None, ids_N: Tensor, hashes_N: Tensor) -> Tensor:
    """bool [B, N]: the same sample, or the same content where both carry a hash."""
    mask_BN = ids_B[:, None] == ids_N
    if hashes_B is not None:
        mask_BN |= (hashes_B[:, None] == hashes_N) & (hashes_B != 0)[:, None]
    return mask_BN


def uniform(count: int, total: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`count` distinct numbers of [0, total), every ordered choice equally likely."""
    return torch.randperm(total, generator=generator)[:count].to(device)


def weighted(count: int, weight_k: Tensor, generator: torch.Generator) -> Tensor:
    """`count` numbers of [0, k) in proportion to their weights, int64 on the CPU.

    Distinct while count <= k: as if drawn one after the other, each in proportion among those left,
    which is the order of exponential waiting times of these rates (Efraimidis and Spirakis 2006).
    Else with replacement.

    Args:
        count: n.
        weight_k: positive and finite, float64 on the CPU.
        generator: a CPU generator.
    """
    if count > len(weight_k):
        bound_k = weight_k.cumsum(0)
        drawn_n = torch.rand(count, generator=generator, dtype=torch.float64) * bound_k[-1]
        return torch.searchsorted(bound_k, drawn_n, right=True).clamp_(max=len(weight_k) - 1)
    waiting_k = torch.empty_like(weight_k).exponential_(generator=generator).div_(weight_k)
    return torch.argsort(waiting_k, stable=True)[:count]


def stratified(count: int, cell_k: Tensor, cells: int, generator: torch.Generator) -> Tensor:
    """`count` <= k distinct numbers of [0, k), from each cell as many as from any other as far as
    it has them; within a cell uniformly, int64 on the CPU.

    Cells take turns; which of them have one more than others is drawn anew each time.

    Args:
        count: n.
        cell_k: the cell of each, int64 on the CPU.
        cells: C, above every cell.
        generator: a CPU generator.
    """
    shuffled_k = torch.randperm(len(cell_k), generator=generator)
    turn_C = torch.randperm(cells, generator=generator)
    grouped = torch.argsort(cell_k[shuffled_k], stable=True)
    cell_of_k = cell_k[shuffled_k][grouped]
    size_C = torch.bincount(cell_k, minlength=cells)
    round_k = torch.arange(len(cell_k)) - (size_C.cumsum(0) - size_C)[cell_of_k]
    order = torch.argsort(round_k * cells + turn_C[cell_of_k])
    return shuffled_k[grouped[order[:count]]]


def hardest(
    count: int,
    anchor_BD: Tensor,
    z_kD: Tensor,
    barred: tuple[Tensor, Tensor | None, Tensor, Tensor] | None,
    each: bool,
) -> Tensor:
    """The slots most similar to any anchor, int64 [n]; or to each, int64 [B, n].

    The most similar first; ties go to the lowest slot. A slot barred for an anchor is not compared
    with it: it comes last, where nothing else is left.

    Args:
        count: n <= k.
        anchor_BD: unit rows.
        z_kD: the occupied slots.
        barred: arguments of `same`, which tells what is barred; None for nothing.
        each: choose for each anchor, rather than for all together by the most similar anchor.
    """
    chosen, most_k = [], z_kD.new_full((len(z_kD),), -torch.inf)
    step = max(1, BLOCK_ELEMENTS // max(1, len(z_kD)))
    for start in range(0, len(anchor_BD), step):
        near_bk = anchor_BD[start : start + step] @ z_kD.T
        if barred is not None:
            ids_B, hashes_B, ids_k, hashes_k = barred
            hashes_b = None if hashes_B is None else hashes_B[start : start + step]
            near_bk[same(ids_B[start : start + step], hashes_b, ids_k, hashes_k)] = -torch.inf
        if each:
            chosen.append(largest(near_bk, count))
        else:
            most_k = torch.maximum(most_k, near_bk.max(dim=0).values)
    if not each:
        return largest(most_k[None], count)[0]
    return torch.cat(chosen) if chosen else most_k.new_empty((0, count), dtype=torch.int64)


def largest(value_bk: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest values of each row, the largest first, int64 [b, n].

    Ties go to the lowest column, which `torch.topk` does not promise.

    >>> largest(torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    if count == 0:
        return torch.empty(len(value_bk), 0, dtype=torch.int64, device=value_bk.device)
    least_b1 = torch.topk(value_bk, count, dim=1).values[:, -1:]
    above_bk, equal_bk = value_bk > least_b1, value_bk == least_b1
    room_b1 = count - above_bk.sum(dim=1, keepdim=True)
    above_bk |= equal_bk & (equal_bk.cumsum(dim=1) <= room_b1)
    column_bn = above_bk.nonzero()[:, 1].reshape(len(value_bk), count)
    order_bn = torch.argsort(value_bk.gather(1, column_bn), dim=1, descending=True, stable=True)
    return column_bn.gather(1, order_bn)
