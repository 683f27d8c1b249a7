"""Obvious twins of the eviction policies, in float64, to compare with. Slow on purpose.

A rule looks at the samples held, in slot order, and at the newcomer, and names the slot to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memory.scores import Score


@dataclass(frozen=True)
class Sample:
    """One sample, as a twin knows it; `born` is its place in the stream."""

    z_D: Tensor
    label: int
    born: int


Rule = Callable[[Sequence[Sample], Sample], int]


def oldest(held: Sequence[Sample], newcomer: Sample) -> int:
    del newcomer
    return min(range(len(held)), key=lambda slot: held[slot].born)


def most_duplicated(score: Score) -> Rule:
    """DUEL's Algorithm 2: the largest count anew for every newcomer."""

    def rule(held: Sequence[Sample], newcomer: Sample) -> int:
        del newcomer
        z_KD = torch.stack([sample.z_D for sample in held])
        h_KK = score(z_KD @ z_KD.T).fill_diagonal_(0)
        return int(first_of_the_largest(h_KK.sum(dim=1), 1e-9 * len(held)))

    return rule


def minimum_redundancy(held: Sequence[Sample], newcomer: Sample) -> int:
    """All cosines anew; the slots of the closest pairs; of these the closest next-nearest."""
    del newcomer
    z_KD = torch.stack([sample.z_D for sample in held])
    cosine_KK = z_KD @ z_KD.T
    cosine_KK.fill_diagonal_(-torch.inf)
    near_KK = torch.sort(cosine_KK, dim=1, descending=True).values
    nearest_K = near_KK[:, 0]
    next_K = near_KK[:, 1] if len(held) > 1 else nearest_K
    tied_K = nearest_K >= nearest_K.max() - 1e-14
    return first_of_the_largest(next_K.masked_fill(~tied_K, -torch.inf), 1e-14, tied_K)


def first_of_the_largest(value_K: Tensor, tie: float, among_K: Tensor | None = None) -> int:
    """The lowest slot within `tie` of the largest value."""
    near_K = value_K >= value_K.max() - tie
    if among_K is not None:
        near_K &= among_K
    return int(near_K.nonzero()[0, 0])


def class_balanced(held: Sequence[Sample], newcomer: Sample) -> int:
    """The class of the most slots, the lowest label of those; of it the oldest."""
    del newcomer
    labels = [sample.label for sample in held]
    fullest = max(sorted(set(labels)), key=labels.count)
    members = [slot for slot, label in enumerate(labels) if label == fullest]
    return min(members, key=lambda slot: held[slot].born)


def refuse_odd(rule: Rule) -> Rule:
    """A rule that refuses every newcomer of odd label."""
    return lambda held, newcomer: -1 if newcomer.label % 2 else rule(held, newcomer)


def aged(rule: Rule, cap: int) -> Rule:
    """The oldest slot where it is older than the cap, else as the rule says."""

    def with_cap(held: Sequence[Sample], newcomer: Sample) -> int:
        slot = oldest(held, newcomer)
        return slot if newcomer.born - held[slot].born > cap else rule(held, newcomer)

    return with_cap


def run(rule: Rule, capacity: int, stream: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """The stream through a memory of this rule: who was evicted in order, who is held by slot."""
    held: list[Sample] = []
    gone = []
    for newcomer in stream:
        if len(held) < capacity:
            held.append(newcomer)
            continue
        slot = rule(held, newcomer)
        if slot >= 0:
            gone.append(held[slot].born)
            held[slot] = newcomer
    return gone, [sample.born for sample in held]


def run_with_front(
    rule: Rule, capacity: int, front: int, stream: Sequence[Sample]
) -> tuple[list[int], set[int]]:
    """The stream through a queue, and what leaves it through a smaller memory of this rule.

    Who left the memory in order, and who is in it at the end.
    """
    queue: list[Sample] = []
    body: list[Sample] = []
    gone = []
    for newcomer in stream:
        queue.append(newcomer)
        if len(queue) <= front:
            continue
        moving = queue.pop(0)
        if len(body) < capacity - front:
            body.append(moving)
            continue
        slot = rule(body, moving)
        gone.append(moving.born if slot < 0 else body[slot].born)
        if slot >= 0:
            body[slot] = moving
    return gone, {sample.born for sample in (*queue, *body)}
