"""What the observers compute, the obvious way."""

from __future__ import annotations

import math
from collections.abc import Sequence


def knn(
    query: Sequence[float],
    references: Sequence[Sequence[float]],
    labels: Sequence[int],
    k: int,
    temperature: float,
) -> int:
    """The class of one query by weighted nearest neighbours, in plain Python."""

    def cosine(a: Sequence[float], b: Sequence[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    near = sorted(
        (
            (cosine(query, reference), label)
            for reference, label in zip(references, labels, strict=True)
        ),
        reverse=True,
    )[:k]
    votes: dict[int, float] = {}
    for similarity, label in near:
        votes[label] = votes.get(label, 0.0) + math.exp(similarity / temperature)
    return min(votes, key=lambda label: (-votes[label], label))


def moment(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """sum_i w_i z_i z_i^T."""
    dim = len(rows[0])
    return [
        [sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) for j in range(dim)]
        for i in range(dim)
    ]
