"""Naive float64 implementations of the memory around its eviction policy. They are slow.

Shapes: B newcomers or anchors, D embedding, K slots, k occupied slots, n slots drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Slot:
    """The content of one slot of the queue."""

    name: int
    row_D: Tensor
    stands_for: int = 1


@dataclass
class Outcome:
    """The result of a batch, with the fields of `Admission`."""

    slots: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)


class DeduplicatedQueue:
    """A queue that compares each newcomer with all earlier samples, one by one.

    Args:
        capacity: K.
        threshold: cosine from which a newcomer is a duplicate, less the tolerance `unit`.
        action: "count", "refuse" or "merge".
        unit: rounding error of a cosine.
    """

    def __init__(self, capacity: int, threshold: float, action: str, unit: float) -> None:
        self.capacity, self.threshold, self.action, self.unit = capacity, threshold, action, unit
        self.held: list[Slot] = []
        self._head = 0

    def add(self, names: Sequence[int], x_BD: Tensor) -> Outcome:
        seen, offered, merged_into = list(self.held), [], []
        outcome = Outcome()
        for name, x_D in zip(names, x_BD.to(torch.float64), strict=True):
            newcomer = Slot(name, x_D)
            offered.append(newcomer)
            cosines = [float(x_D @ other.row_D) for other in seen]
            most = max(cosines, default=-math.inf)
            duplicate = most >= self.threshold - self.unit
            if duplicate:
                outcome.duplicates.append(name)
            if duplicate and self.action == "merge":
                like = next(o for o, c in zip(seen, cosines, strict=True) if c >= most - self.unit)
                like.stands_for += 1
                merged_into.append(like)
            if duplicate and self.action != "count":
                outcome.refused.append(name)
                continue
            seen.append(newcomer)
            outcome.evicted.extend(self._push(newcomer))
        outcome.slots = [self._slot_of(newcomer) for newcomer in offered]
        outcome.merged = [self._slot_of(like) for like in merged_into]
        return outcome

    def _push(self, newcomer: Slot) -> list[int]:
        if len(self.held) < self.capacity:
            self.held.append(newcomer)
            return []
        gone, self.held[self._head] = self.held[self._head].name, newcomer
        self._head = (self._head + 1) % self.capacity
        return [gone]

    def _slot_of(self, wanted: Slot) -> int:
        return next((n for n, slot in enumerate(self.held) if slot is wanted), -1)


def hardest_one_by_one(
    anchor_BD: Tensor, z_kD: Tensor, barred_Bk: Tensor, count: int
) -> tuple[list[list[int]], list[int]]:
    """Return the slots most similar to each anchor, and to any anchor. Barred slots come last."""
    near_Bk = [
        [
            -math.inf if barred else float(a_D @ z_D)
            for z_D, barred in zip(z_kD, barred_k, strict=True)
        ]
        for a_D, barred_k in zip(anchor_BD, barred_Bk.tolist(), strict=True)
    ]
    each = [sorted(range(len(z_kD)), key=lambda s: (-near_k[s], s))[:count] for near_k in near_Bk]
    most_k = [max(column) for column in zip(*near_Bk, strict=True)]
    return each, sorted(range(len(z_kD)), key=lambda s: (-most_k[s], s))[:count]


def ordered_choice_law(weights: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every ordered choice of `count` items.

    Items are drawn one after the other, each in proportion to its weight among the remaining items.
    """
    law = {}
    for choice in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, float(sum(weights))
        for item in choice:
            probability *= weights[item] / left
            left -= weights[item]
        law[choice] = probability
    return law


def stratified_law(sizes: Sequence[int], count: int) -> list[float]:
    """Return, for each cell, the probability that a given member is drawn.

    Cells take turns until `count` members are drawn.
    """
    taken = [0.0] * len(sizes)
    left = count
    while left:
        open_cells = [c for c, size in enumerate(sizes) if taken[c] < size]
        share = min(1.0, left / len(open_cells))
        for cell in open_cells:
            taken[cell] += share
        left -= min(left, len(open_cells))
    return [t / size if size else 0.0 for t, size in zip(taken, sizes, strict=True)]


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of the values."""
    ordered = sorted(values)
    return next(v for n, v in enumerate(ordered, 1) if n >= share * len(ordered))


def chi_square_bound(freedom: int) -> float:
    """Return a bound that a chi-square of this many degrees exceeds about once in 100,000 times."""
    return freedom + 4.5 * math.sqrt(2 * freedom) + 9
