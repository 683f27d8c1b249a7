"""Random draws of slots, and the results that they return.

Every random number is drawn on the CPU, so that the draws are the same for every device.

Shapes: B anchors, C cells, D embedding, N negatives, k occupied slots, n slots drawn, b block of
anchors, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.checks import (
    Array,
    check_count,
    check_embeddings,
    check_integers,
    check_way,
    check_weights,
)
from stream_ssl.memory.compute import in_full_precision, to_device, to_host
from stream_ssl.memory.index import cells_of, kmeans
from stream_ssl.memory.scores import BLOCK_ELEMENTS
from stream_ssl.memory.slots import Slots

DrawOrder = Literal["uniform", "inverse-count", "epochs"]
"""The order in which training samples are drawn, see `WorkingMemory.sample`."""
ORDERS: tuple[str, ...] = get_args(DrawOrder)

FEW = 32
"""Less than one number in this many is drawn without a permutation of all."""


@dataclass(frozen=True, slots=True)
class Negatives:
    """Negatives without gradient, with the data needed to mask an anchor's own copies.

    All anchors share the negatives, or each anchor has its own. In the second case every field has
    a leading dimension B.
    """

    z_ND: Tensor  # [N, D], or [B, N, D]
    ids_N: Tensor  # int64
    hashes_N: Tensor  # int64, 0: none

    def __len__(self) -> int:
        """Return the number of negatives, N."""
        return self.ids_N.shape[-1]

    def mask(self, ids_B: Array, hashes_B: Array | None) -> Tensor:
        """Return bool [B, N], True if negative n has the id or the content hash of anchor b.

        Args:
            ids_B: the anchors' ids, int64.
            hashes_B: the anchors' content hashes, int64, 0 for no hash. None compares ids only.

        Raises:
            ValueError: ids or hashes are not integers [B], or each anchor has its own negatives and
                B differs.
        """
        anchors = None if self.ids_N.ndim == 1 else len(self.ids_N)
        ids_B = check_integers("ids_B", ids_B, self.ids_N.device, anchors)
        if hashes_B is not None:
            hashes_B = check_integers("hashes_B", hashes_B, self.ids_N.device, len(ids_B))
        return same(ids_B, hashes_B, self.ids_N, self.hashes_N)


@dataclass(frozen=True, slots=True)
class Draw:
    """A training batch drawn from the memory."""

    slots: Tensor  # int64 [n]
    ids: Tensor  # int64 [n]
    images: Tensor | None  # uint8 [n, C, H, W], None if the memory keeps no images
    payload: dict[str, Tensor]  # [n, ...] by name


def same(ids_B: Tensor, hashes_B: Tensor | None, ids_N: Tensor, hashes_N: Tensor | None) -> Tensor:
    """Return bool [B, N], True for the same sample, or the same content if both have a hash."""
    mask_BN = ids_B[:, None] == ids_N
    if hashes_B is not None and hashes_N is not None:
        mask_BN |= (hashes_B[:, None] == hashes_N) & (hashes_B != 0)[:, None]
    return mask_BN


def uniform(count: int, total: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return `count` distinct numbers in [0, total), with every ordered choice equally likely.

    A few numbers of many are drawn one after the other, without repeats. This takes as long for any
    total, whereas a permutation of 500,000 slots takes 3 to 5 ms.
    """
    if FEW * count > total:
        return to_device(torch.randperm(total, generator=generator)[:count], device)
    found_n = np.empty(0, dtype=np.int64)
    while len(found_n) < count:
        more_n = torch.randint(total, (count,), generator=generator).numpy()
        found_n = np.concatenate([found_n, more_n])
        _, first_n = np.unique(found_n, return_index=True)
        found_n = found_n[np.sort(first_n)]
    return to_device(torch.from_numpy(found_n[:count]), device)


def weighted(count: int, weight_k: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `count` numbers in [0, k) in proportion to their weights, int64 on the CPU.

    If count <= k, the numbers are distinct, as if drawn one after the other, each in proportion
    among those left. This is the order of exponential waiting times with these rates (Efraimidis
    and Spirakis 2006). If count > k, the draw is with replacement.

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


def by_epochs(count: int, epoch_k: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `count` <= k distinct numbers in [0, k), as a training set is shuffled in epochs.

    Numbers that were never drawn come first, then those not yet drawn in this epoch, then others.
    Among equals the draw is uniform. Each number is therefore drawn once in an epoch, in a new
    order each time.

    Args:
        count: n.
        epoch_k: int64, the epoch of each number's last draw; 0 for never.
        generator: a CPU generator.

    Returns:
        int64 [n] on the device of `epoch_k`, computed without waiting for the device.
    """
    below_one_k = torch.rand(len(epoch_k), generator=generator, dtype=torch.float64)
    key_k = epoch_k + to_device(below_one_k, epoch_k.device)
    return key_k.topk(count, largest=False).indices


def stratified(count: int, cell_k: Tensor, cells: int, generator: torch.Generator) -> Tensor:
    """Draw `count` <= k distinct numbers in [0, k), equally from all cells, int64 on the CPU.

    A cell with too few numbers gives all that it has. Within a cell the draw is uniform. If the
    cells cannot all give the same number, each draw selects at random which cells give one more.

    Args:
        count: n.
        cell_k: the cell of each number, int64 on the CPU.
        cells: C, larger than every cell number.
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
    held: Negatives,
    ids_B: Tensor | None,
    hashes_B: Tensor | None,
    each: bool,
) -> Tensor:
    """Return the `count` <= k slots most similar to any anchor, most similar first, int64 [n].

    With `each`, return the most similar slots for each anchor, int64 [B, n].

    Args:
        count: n.
        anchor_BD: unit rows.
        held: all occupied slots.
        ids_B, hashes_B: ids and hashes of the anchors. Slots with the same sample or content come
            last. Without ids nothing is excluded. Without hashes only ids are compared.
        each: choose for each anchor.
    """
    most_k = held.z_ND.new_full((len(held),), -torch.inf)
    found = [held.ids_N.new_empty(0, count)]
    step = max(1, BLOCK_ELEMENTS // max(1, len(held)))
    for start in range(0, len(anchor_BD), step):
        part = slice(start, start + step)
        near_bk = anchor_BD[part] @ held.z_ND.T
        if ids_B is not None:
            hashes_b = None if hashes_B is None else hashes_B[part]
            barred_bk = same(ids_B[part], hashes_b, held.ids_N, held.hashes_N)
            near_bk.masked_fill_(barred_bk, -torch.inf)
        if each:
            found.append(near_bk.topk(count, dim=1).indices)
        else:
            most_k = torch.maximum(most_k, near_bk.amax(dim=0))
    return torch.cat(found) if each else most_k.topk(count).indices


class Strata:
    """The cells of stratified draws, fitted again after many rows have changed.

    The centres are fitted again after as many rows have changed as there were at the last fit.
    Between fits, each draw assigns the rows to the current centres. Only the centres are stored, so
    a draw depends only on the rows and on this state.

    Args:
        seed: the base seed of the clusterings. Each clustering has its own seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._centre_CD = torch.zeros(0, 0, dtype=torch.float32)
        self._wanted = self._changed = self._limit = self._times = 0

    def changed(self, rows: int) -> None:
        """Record that this number of rows was written or encoded again."""
        self._changed += rows if self._wanted else 0

    def cells(self, z_kD: Tensor, cells: int) -> tuple[Tensor, int]:
        """Return the cell of each row, int64 [k], and the number of cells, at most k."""
        if cells != self._wanted or self._changed >= self._limit:
            self._times += 1
            self._centre_CD, cell_k = kmeans(z_kD, cells, self.seed + self._times)
            self._wanted, self._changed, self._limit = cells, 0, len(z_kD)
            return cell_k, len(self._centre_CD)
        return cells_of(z_kD, self._centre_CD), len(self._centre_CD)

    def state(self) -> dict[str, Tensor]:
        numbers = [self._wanted, self._changed, self._limit, self._times, self.seed]
        return {"centres": self._centre_CD.clone(), "numbers": torch.tensor(numbers)}

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Restore a result of `state`.

        An empty state belongs to a memory that was never drawn from.
        """
        self._centre_CD = state.get("centres", torch.zeros(0, 0)).clone().to(device)
        numbers = state["numbers"].tolist() if "numbers" in state else [0, 0, 0, 0, self.seed]
        self._wanted, self._changed, self._limit, self._times, self.seed = numbers


class RandomDraws(Slots):
    """The part of a memory that draws negatives and training batches from its slots."""

    _strata: Strata
    _generator: torch.Generator

    @in_full_precision
    def negatives(
        self,
        n: int | None = None,
        generator: torch.Generator | None = None,
        how: Literal["uniform", "hardest", "stratified"] = "uniform",
        anchors: Array | None = None,
        ids_B: Array | None = None,
        hashes_B: Array | None = None,
        each: bool = False,
        cells: int = 64,
    ) -> Negatives:
        """Return negatives: all occupied slots as views, or copies of n distinct slots.

        Fewer than n slots are returned if fewer are occupied. `Negatives.mask` marks the slots that
        hold the anchor itself.

        Args:
            n: the number of negatives. None returns all occupied slots, in slot order.
            generator: a CPU generator. None uses the memory's own.
            how: "uniform" draws every choice with equal probability. "hardest" takes the slots with
                the largest cosine to any anchor, hardest first, without randomness. "stratified"
                draws equally from all k-means cells of the descriptors, as far as a cell has enough
                rows, and uniformly within a cell. The cells are fitted again after as many rows
                have changed as there were at the last fit.
            anchors: unit rows [B, D], for "hardest".
            ids_B: ids of the anchors, for "hardest". Slots with the same id or content hash are
                excluded before the choice.
            hashes_B: content hashes of the anchors, for "hardest".
            each: for "hardest", choose n slots for each anchor instead of n for all together. Every
                field of the result then has a leading dimension B. An anchor with fewer than n
                allowed slots also gets excluded slots, which `mask` marks.
            cells: the number of k-means cells, for "stratified".

        Raises:
            ValueError: "hardest" without anchors, a choice without n, or an argument that is out of
                range.
        """
        check_way(how, ("uniform", "hardest", "stratified"))
        if how == "hardest" and anchors is None:
            raise ValueError('how="hardest" compares with anchors: pass anchors=')
        if each and how != "hardest":
            raise ValueError(f'each=True with how={how!r}: only how="hardest" chooses for each')
        check_count("cells", cells, least=1)
        columns, k = self._columns, len(self)
        if n is None:
            if how != "uniform":
                raise ValueError(f"how={how!r} chooses among the slots: say how many with n=")
            return Negatives(columns.z_kD, self.ids, self.hashes)
        n, chosen = min(check_count("n", n, least=0), k), generator or self._generator
        if anchors is not None and how == "hardest":
            z_BD = check_embeddings(anchors, self.dim, self.device, "anchor").to(self.dtype)
            if ids_B is None and hashes_B is not None:
                raise ValueError("hashes_B without ids_B: pass the anchors' ids as well")
            barred = [
                None if given is None else check_integers(name, given, self.device, len(z_BD))
                for name, given in (("ids_B", ids_B), ("hashes_B", hashes_B))
            ]
            slots = hardest(n, z_BD, self.negatives(), barred[0], barred[1], each)
        elif how == "stratified" and n:
            cell_k, found = self._strata.cells(columns.descriptor_kA, cells)
            slots = to_device(stratified(n, to_host(cell_k), found, chosen), self.device)
        else:
            slots = uniform(n, k, chosen, self.device)
        return Negatives(columns.embeddings[slots], columns.ids[slots], columns.hashes[slots])

    @in_full_precision
    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        how: DrawOrder = "uniform",
        weights: Array | None = None,
    ) -> Draw:
        """Draw a training batch of n slots, and count the draws in `draws`.

        The slots are distinct while n <= k, and drawn with replacement otherwise.

        Args:
            n: the number of slots.
            generator: a CPU generator. None uses the memory's own.
            how: "uniform" draws with equal probability. "inverse-count" draws one slot after the
                other, in proportion to 1 / (1 + N(j)), and costs as much as `counts`. "epochs"
                first draws slots that were never drawn, then each slot once before any slot comes
                again, in a new order each time.
            weights: [k], at least 0, for "uniform": draw one slot after the other in proportion to
                these weights. A slot of weight 0 is never drawn and does not count in k.

        Raises:
            ValueError: the memory is empty, or an argument is out of range.
        """
        check_way(how, ORDERS)
        n = check_count("n", n, least=0)
        columns, chosen = self._columns, generator or self._generator
        k = len(self)
        if k == 0:
            raise ValueError("cannot sample from an empty memory: add samples first")
        if weights is not None:
            if how != "uniform":
                raise ValueError(f"weights with how={how!r}: use one of them")
            weight_k = check_weights(weights, k)
            drawable = weight_k.nonzero().flatten()
            slots = to_device(drawable[weighted(n, weight_k[drawable], chosen)], self.device)
        elif how == "inverse-count":
            weight_k = to_host(1 / (1 + self.eviction.counts().clamp(min=0)))
            slots = to_device(weighted(n, weight_k, chosen), self.device)
        elif n > k:
            slots = to_device(torch.randint(k, (n,), generator=chosen), self.device)
        elif how == "epochs":
            slots = by_epochs(n, columns.drawn_epoch[:k], chosen)
        else:
            slots = uniform(n, k, chosen, self.device)
        columns.count_draws(slots)
        images = None if columns.images is None else columns.images.read(slots)
        payload = {name: column[slots] for name, column in columns.payload.items()}
        return Draw(slots, columns.ids[slots], images, payload)
