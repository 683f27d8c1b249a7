"""Naive float64 implementations of the eviction policies, as references for tests. They are slow.

A rule takes the held samples, in slot order, and the newcomer. It returns the slots that the
newcomer may take. There are several if they tie within rounding. The set {-1} means that the
newcomer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stream_ssl.memory.scores import Score


@dataclass(frozen=True)
class Sample:
    """One sample; `born` is its place in the stream."""

    z_D: Tensor
    label: int
    born: int


Rule = Callable[[Sequence[Sample], Sample], set[int]]


def oldest(held: Sequence[Sample], newcomer: Sample) -> set[int]:
    del newcomer
    return {min(range(len(held)), key=lambda slot: held[slot].born)}


def most_duplicated(score: Score) -> Rule:
    """Return the rule of DUEL's Algorithm 2: evict the largest count, with all counts computed
    again.
    """

    def rule(held: Sequence[Sample], newcomer: Sample) -> set[int]:
        del newcomer
        z_KD = torch.stack([sample.z_D for sample in held])
        count_K = score(z_KD @ z_KD.T).fill_diagonal_(0).sum(dim=1)
        return where(count_K >= count_K.max() - 1e-9 * len(held))

    return rule


def minimum_redundancy(held: Sequence[Sample], newcomer: Sample, rounding: float = 1e-13) -> set:
    """Return the slots of the closest pairs that also have the closest next-nearest neighbour.

    All cosines are computed again.
    """
    del newcomer
    z_KD = torch.stack([sample.z_D for sample in held]).to(torch.float64)
    cosine_KK = (z_KD @ z_KD.T).fill_diagonal_(-torch.inf)
    near_KK = torch.sort(cosine_KK, dim=1, descending=True).values
    nearest_K, next_K = near_KK[:, 0], near_KK[:, min(1, len(held) - 1)]
    surely_K = nearest_K >= nearest_K.max() - rounding / 100
    perhaps_K = nearest_K >= nearest_K.max() - rounding
    return where(perhaps_K & (next_K >= next_K[surely_K].max() - rounding))


def where(mask_K: Tensor) -> set[int]:
    return set(mask_K.nonzero()[:, 0].tolist())


def class_balanced(held: Sequence[Sample], newcomer: Sample) -> set[int]:
    """Return the oldest slot of the class with the most slots, the lowest label if classes tie."""
    del newcomer
    labels = [sample.label for sample in held]
    fullest = max(sorted(set(labels)), key=labels.count)
    members = [slot for slot, label in enumerate(labels) if label == fullest]
    return {min(members, key=lambda slot: held[slot].born)}


class Part:
    """Samples under a rule, with the memory's own evictions replayed and checked."""

    def __init__(self, rule: Rule, capacity: int, gone: Sequence[int]) -> None:
        self.rule, self.capacity = rule, capacity
        self.held: list[Sample] = []
        self.gone = list(reversed(gone))

    def offer(self, newcomer: Sample) -> None:
        """Add a newcomer. AssertionError if the memory evicted a sample that the rule does not
        allow.
        """
        if len(self.held) < self.capacity:
            self.held.append(newcomer)
            return
        allowed = self.rule(self.held, newcomer)
        if allowed == {-1}:
            return
        gone = self.gone.pop()
        slots = {slot for slot in allowed if self.held[slot].born == gone}
        assert slots, f"at {newcomer.born} left {gone}, not one of slots {sorted(allowed)}"
        self.held[slots.pop()] = newcomer


def follow(rule: Rule, capacity: int, stream: Sequence[Sample], gone: Sequence[int]) -> list[int]:
    """Return `born` of the held samples by slot, after the stream passed a memory with this rule.

    Args:
        rule: the expected behaviour of the policy.
        capacity: of the memory.
        stream: every sample.
        gone: `born` of the samples that the policy evicted, in order. If the rule allows several
            slots, the twin follows the policy. Otherwise a different choice is an AssertionError.
    """
    memory = Part(rule, capacity, gone)
    for newcomer in stream:
        memory.offer(newcomer)
    assert not memory.gone
    return [sample.born for sample in memory.held]
