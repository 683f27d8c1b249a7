"""Naive float64 implementations of the memory's parts, as references for tests. They are slow.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.scores import Score


def printed_algorithm_2(score: Score, z_KD: Tensor, x_BD: Tensor) -> list[int]:
    """Return the slots that DUEL's Algorithm 2 evicts, as printed: O(K^2 D) for each sample.

    All counts are computed again for every sample.
    """
    memory_KD = z_KD.clone()
    slots = []
    for x_D in x_BD:
        h_KK = score(memory_KD @ memory_KD.T)
        h_KK.fill_diagonal_(0)
        slot = int(h_KK.sum(dim=1).argmax())
        memory_KD[slot] = x_D
        slots.append(slot)
    return slots


class IncrementalDuel:
    """Algorithm 2 with float64 counts that are updated at each step in O(K D).

    It computes the regret of a step that the memory chose. With `compete` it implements Algorithm
    1: the newcomer joins first and may be evicted itself.
    """

    def __init__(self, score: Score, z_KD: Tensor, compete: bool = False) -> None:
        self.score, self.compete = score, compete
        self.z_KD = z_KD.to(torch.float64).clone()
        self.count_K = self.counts_anew()

    def counts_anew(self) -> Tensor:
        blocks = [self.score(part_bD @ self.z_KD.T).sum(dim=1) for part_bD in self.z_KD.split(256)]
        return torch.cat(blocks) - self.score((self.z_KD * self.z_KD).sum(dim=1))

    def judged(self, x_D: Tensor) -> Tensor:
        """Return the counts of the candidates. With `compete` the newcomer's count is last."""
        if not self.compete:
            return self.count_K
        near_K = self.score(self.z_KD @ x_D.to(torch.float64))
        return torch.cat([self.count_K + near_K, near_K.sum()[None]])

    def step(self, x_D: Tensor, slot: int) -> None:
        """Put the newcomer into `slot`; -1 means that it was refused."""
        if slot < 0:
            return
        self.count_K -= self.score(self.z_KD @ self.z_KD[slot])
        self.z_KD[slot] = x_D.to(torch.float64)
        near_K = self.score(self.z_KD @ self.z_KD[slot])
        near_K[slot] = 0
        self.count_K += near_K
        self.count_K[slot] = near_K.sum()

    def regret(self, slot: int, x_D: Tensor) -> float:
        """Return how far this slot's count is below the largest; slot -1 is the newcomer."""
        judged = self.judged(x_D)
        return float(judged.max() - judged[slot])


class Queue:
    """A first-in, first-out queue as a list of ids."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    def add(self, ids: Sequence[int]) -> list[int]:
        """Add ids and return the evicted ids in the order in which they left."""
        self.ids.extend(ids)
        gone = self.ids[: max(0, len(self.ids) - self.capacity)]
        self.ids = self.ids[len(gone) :]
        return gone


def replay_ids(
    slots_before: Sequence[int], plan: Sequence[int], newcomers: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return ids by slot after newcomers took the slots of `plan` in turn, and the evicted ids."""
    ids, evicted = list(slots_before), []
    for slot, newcomer in zip(plan, newcomers, strict=True):
        evicted.append(ids[slot])
        ids[slot] = newcomer
    return ids, evicted


def reservoir_law(capacity: int, seen: int) -> float:
    """Return the probability that one of `seen` samples is in the reservoir."""
    return min(1.0, capacity / seen)


def unit_rows(rng: np.random.Generator, kind: str, count: int, dim: int) -> Tensor:
    """Return a test stream of float64 unit rows. Eviction rules differ on these kinds of stream."""
    if kind == "one-hot":  # every cosine is 0 or 1, so counts tie exactly and often
        return torch.eye(dim, dtype=torch.float64)[torch.from_numpy(rng.integers(dim, size=count))]
    z_ND = rng.standard_normal((count, dim))
    if kind == "clustered":
        weight_C = np.array([0.6, 0.2, 0.1, 0.1])
        centre_CD = rng.standard_normal((4, dim))
        z_ND = 2 * centre_CD[rng.choice(4, size=count, p=weight_C)] + 0.5 * z_ND
    elif kind == "one class":
        z_ND = z_ND * 0.05 + 1.0
    elif kind == "duplicates":
        z_ND = z_ND[rng.integers(1 + count // 4, size=count)]
    elif kind != "uniform":
        raise ValueError(f"unknown kind of stream {kind!r}")
    z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
    return torch.from_numpy(z_ND)


STREAMS = ("uniform", "clustered", "one class", "duplicates", "one-hot")
