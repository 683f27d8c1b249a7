"""A naive implementation of shares, which counts every producer again for each newcomer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from stream_ssl.memory.scores import Score


@dataclass(frozen=True)
class Sent:
    """One sample; `born` is its place in the stream, `producer` is None if there is none."""

    z_D: Tensor
    label: int
    born: int
    producer: str | None


Choice = Callable[[Sequence[Sent], Sent, set[int]], set[int]]
"""Choose the slots that may be evicted among the open slots. {-1} refuses the newcomer."""


def guarantees(
    names: set[str | None], part: float, weights: Mapping[str, float], capacity: int
) -> dict[str | None, int]:
    """Return the guaranteed slots of each producer by name, in exact arithmetic."""
    weight = {n: Fraction(0) if n is None else Fraction(weights.get(n, 1)) for n in names}
    total = sum(weight.values())
    if not total:
        return dict.fromkeys(names, 0)
    return {n: int(Fraction(part) * capacity * weight[n] / total) for n in names}


def open_slots(
    held: Sequence[Sent], newcomer: Sent, part: float, weights: Mapping[str, float]
) -> tuple[set[int], bool]:
    """Return the slots that the newcomer may take, and whether the newcomer may be refused."""
    counts = Counter([sample.producer for sample in held] + [newcomer.producer])
    kept = guarantees(set(counts), part, weights, len(held))
    rich = {name for name in counts if counts[name] > kept[name]}
    slots = {slot for slot, sample in enumerate(held) if sample.producer in rich}
    return slots, newcomer.producer in rich


def of_largest(value: Callable[[Sequence[Sent]], Tensor], slack: float) -> Choice:
    """Return a choice of the open slots with the largest value, within the rounding `slack`."""

    def choice(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
        value_K = value(held)
        most = max(float(value_K[slot]) for slot in slots)
        return {slot for slot in slots if float(value_K[slot]) >= most - slack}

    return choice


def counts(score: Score) -> Callable[[Sequence[Sent]], Tensor]:
    """Return a function that computes N(j) of every slot."""

    def value(held: Sequence[Sent]) -> Tensor:
        z_KD = torch.stack([sample.z_D for sample in held])
        return score(z_KD @ z_KD.T).fill_diagonal_(0).sum(dim=1)

    return value


def compete(score: Score) -> Choice:
    """Return the choice of Algorithm 1: -1 is the newcomer, which is counted with the slots."""

    def choice(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
        value_W = counts(score)([*held, newcomer])
        own = {slot % len(value_W): slot for slot in slots}
        most = max(float(value_W[column]) for column in own)
        return {own[c] for c in own if float(value_W[c]) >= most - 1e-9 * len(held)}

    return choice


def redundant(score: Score, at_least: float, slack: float) -> Choice:
    """Return a choice of the most duplicated open slot if it reaches `at_least`, else any."""
    by_count = of_largest(counts(score), slack)

    def choice(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
        most = max(float(counts(score)(held)[slot]) for slot in slots)
        return by_count(held, newcomer, slots) if most >= at_least else slots

    return choice


def oldest(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
    return {min(slots, key=lambda slot: held[slot].born)}


def anyone(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
    return slots


def minimum_redundancy(held: Sequence[Sent], newcomer: Sent, slots: set[int]) -> set[int]:
    z_KD = torch.stack([sample.z_D for sample in held])
    near_KK = (z_KD @ z_KD.T).fill_diagonal_(-torch.inf).sort(dim=1, descending=True).values
    most = max(float(near_KK[slot, 0]) for slot in slots)
    nearest = {slot for slot in slots if float(near_KK[slot, 0]) >= most - 1e-13}
    after = max(float(near_KK[slot, 1]) for slot in nearest)
    return {slot for slot in nearest if float(near_KK[slot, 1]) >= after - 1e-13}


def follow(
    choice: Choice,
    capacity: int,
    stream: Sequence[Sent],
    gone: Sequence[int],
    refused: set[int],
    part: float,
    weights: Mapping[str, float],
    refuses: bool,
) -> list[Sent]:
    """Return the held samples by slot after the stream.

    Args:
        choice: the expected behaviour of the policy.
        capacity: of the memory.
        stream: every sample.
        gone: `born` of the samples that the memory evicted, in order.
        refused: `born` of the samples that the memory refused.
        part: guaranteed share of the slots.
        weights: of producers.
        refuses: whether the policy itself may refuse; the slots then include -1.

    Raises:
        AssertionError: the memory evicted or refused a wrong sample.
    """
    held: list[Sent] = []
    left = iter(gone)
    for newcomer in stream:
        if len(held) < capacity:
            held.append(newcomer)
            continue
        slots, refusable = open_slots(held, newcomer, part, weights)
        allowed = choice(held, newcomer, slots | ({-1} if refuses and refusable else set()))
        if newcomer.born in refused:
            assert -1 in allowed, f"{newcomer.born} may not be refused"
            continue
        who = next(left)
        slot = next((s for s in allowed if s >= 0 and held[s].born == who), None)
        assert slot is not None, f"at {newcomer.born} left {who}, not of slots {sorted(allowed)}"
        held[slot] = newcomer
    assert next(left, None) is None
    return held
