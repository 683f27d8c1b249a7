"""Which slots are drawn, and what a draw hands out.

Every random number is drawn on the CPU, so that every device draws the same.

Shapes: B anchors, C cells, D embedding, N negatives, k occupied slots, n slots drawn, b c block of
anchors and slots, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.blocks import columns_at_a_time
from memory.checks import Array, check_integers
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

    def mask(self, ids_B: Array, hashes_B: Array | None) -> Tensor:
        """bool [B, N], True where negative n is anchor b itself (id) or the same picture (hash).

        Raises:
            ValueError: ids or hashes that are no integers [B].
        """
        ids_B = check_integers("ids_B", ids_B, self.ids_N.device)
        if hashes_B is not None:
            hashes_B = check_integers("hashes_B", hashes_B, self.ids_N.device, len(ids_B))
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


@dataclass(frozen=True, slots=True)
class Contrast:
    """Anchors and slots to be compared, but for those pairs that are of the same sample.

    Args:
        anchor_BD: unit rows.
        z_kD: the occupied slots, of the same dtype.
        ids_k, hashes_k: of the slots.
        ids_B, hashes_B: of the anchors; None where nothing is barred, by the hash or at all.
    """

    anchor_BD: Tensor
    z_kD: Tensor
    ids_k: Tensor
    hashes_k: Tensor
    ids_B: Tensor | None
    hashes_B: Tensor | None

    def near(self, anchors: slice, slots: slice) -> Tensor:
        """Cosines [b, c] of a block; -inf where a pair is barred."""
        near_bc = self.anchor_BD[anchors] @ self.z_kD[slots].T
        if self.ids_B is not None:
            hashes_b = None if self.hashes_B is None else self.hashes_B[anchors]
            barred_bc = same(self.ids_B[anchors], hashes_b, self.ids_k[slots], self.hashes_k[slots])
            near_bc.masked_fill_(barred_bc, -torch.inf)
        return near_bc


def hardest(count: int, contrast: Contrast) -> Tensor:
    """The `count` <= k slots most similar to any anchor, int64 [n].

    The most similar first; ties go to the lowest slot. A slot barred for an anchor is not compared
    with it; one barred for all comes last.
    """
    z_kD, everyone = contrast.z_kD, slice(None)
    most_k = z_kD.new_full((len(z_kD),), -torch.inf)
    if len(contrast.anchor_BD):
        step = columns_at_a_time(len(contrast.anchor_BD), z_kD.device)
        for start in range(0, len(z_kD), step):
            slots = slice(start, start + step)
            most_k[slots] = contrast.near(everyone, slots).amax(dim=0)
    return largest(most_k[None], count)[0]


def hardest_each(count: int, contrast: Contrast) -> Tensor:
    """The `count` <= k slots most similar to each anchor, int64 [B, n], as `hardest` orders them.

    A slot barred for the anchor comes last.
    """
    every, anchors = slice(None), len(contrast.anchor_BD)
    step = max(1, BLOCK_ELEMENTS // max(1, len(contrast.z_kD)))
    blocks = [
        largest(contrast.near(slice(start, start + step), every), count)
        for start in range(0, anchors, step)
    ]
    return torch.cat([contrast.ids_k.new_empty((0, count)), *blocks])


def largest(value_bk: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest values of each row, the largest first, int64 [b, n].

    Ties go to the lowest column, which `torch.topk` does not promise.

    >>> largest(torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    if count == 0:
        return torch.empty(len(value_bk), 0, dtype=torch.int64, device=value_bk.device)
    top = torch.topk(value_bk, min(count + 1, value_bk.shape[1]), dim=1)
    column_bn = top.indices[:, :count]
    least_b1 = top.values[:, count - 1 : count]
    tied_b = (top.values[:, count:] == least_b1).any(dim=1).nonzero()[:, 0]
    if len(tied_b):  # a tie reaches beyond the last place
        value_tk, least_t1 = value_bk[tied_b], least_b1[tied_b]
        chosen_tk, equal_tk = value_tk > least_t1, value_tk == least_t1
        room_t1 = count - chosen_tk.sum(dim=1, keepdim=True)
        chosen_tk |= equal_tk & (equal_tk.cumsum(dim=1) <= room_t1)
        column_bn[tied_b] = chosen_tk.nonzero()[:, 1].reshape(len(tied_b), count)
    column_bn = column_bn.sort(dim=1).values
    order_bn = torch.argsort(value_bk.gather(1, column_bn), dim=1, descending=True, stable=True)
    return column_bn.gather(1, order_bn)
