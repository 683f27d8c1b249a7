"""Obvious twins of the eviction policies, in float64, to judge them by. Slow on purpose.

A rule looks at the samples held, in slot order, and at the newcomer, and names the slots it lets
the newcomer take: one, or all that tie to rounding; -1 alone where it refuses the newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stream_ssl.memory.scores import Score


@dataclass(frozen=True)
class Sample:
    """One sample, as a twin knows it; `born` is its place in the stream."""

    z_D: Tensor
    label: int
    born: int


Rule = Callable[[Sequence[Sample], Sample], set[int]]


def oldest(held: Sequence[Sample], newcomer: Sample) -> set[int]:
    del newcomer
    return {min(range(len(held)), key=lambda slot: held[slot].born)}


def most_duplicated(score: Score) -> Rule:
    """DUEL's Algorithm 2: the largest count, all counted again for every newcomer."""

    def rule(held: Sequence[Sample], newcomer: Sample) -> set[int]:
        del newcomer
        z_KD = torch.stack([sample.z_D for sample in held])
        count_K = score(z_KD @ z_KD.T).fill_diagonal_(0).sum(dim=1)
        return where(count_K >= count_K.max() - 1e-9 * len(held))

    return rule


def minimum_redundancy(held: Sequence[Sample], newcomer: Sample, rounding: float = 1e-13) -> set:
    """All cosines again; the slots of the closest pairs; of these the closest next-nearest."""
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
    """The class of the most slots, the lowest label of those; of it the oldest."""
    del newcomer
    labels = [sample.label for sample in held]
    fullest = max(sorted(set(labels)), key=labels.count)
    members = [slot for slot, label in enumerate(labels) if label == fullest]
    return {min(members, key=lambda slot: held[slot].born)}


class Part:
    """A full or growing list of samples under a rule, that follows those who are said to leave."""

    def __init__(self, rule: Rule, capacity: int, gone: Sequence[int]) -> None:
        self.rule, self.capacity = rule, capacity
        self.held: list[Sample] = []
        self.gone = list(reversed(gone))

    def offer(self, newcomer: Sample) -> None:
        """AssertionError where another left than the rule lets leave."""
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
    """Who is held by slot after the stream passed a memory of this rule.

    Args:
        rule: what a policy is to do.
        capacity: of the memory.
        stream: every sample.
        gone: `born` of those whom the policy evicted, in order. The twin follows where ties leave
            a choice, and fails where the rule leaves none.
    """
    memory = Part(rule, capacity, gone)
    for newcomer in stream:
        memory.offer(newcomer)
    assert not memory.gone
    return [sample.born for sample in memory.held]
