"""The measures the obvious way, in plain Python and float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Row = Sequence[float]


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(a: Row) -> list[float]:
    length = math.sqrt(dot(a, a))
    return [x / length for x in a]


def cosine(a: Row, b: Row) -> float:
    return dot(unit(a), unit(b))


def nearest(query: Row, references: Sequence[Row]) -> list[int]:
    """Rows by falling cosine."""
    return sorted(range(len(references)), key=lambda n: -cosine(query, references[n]))


def vote(
    query: Row, references: Sequence[Row], labels: Sequence[int], k: int, temperature: float
) -> int:
    votes: dict[int, float] = {}
    for n in nearest(query, references)[:k]:
        weight = math.exp(cosine(query, references[n]) / temperature)
        votes[labels[n]] = votes.get(labels[n], 0.0) + weight
    return min(votes, key=lambda label: (-votes[label], label))


def retrieved(
    queries: Sequence[Row],
    truth: Sequence[int],
    references: Sequence[Row] | None,
    labels: Sequence[int],
    k: int,
) -> float:
    hits = 0
    for q, query in enumerate(queries):
        order = nearest(query, queries if references is None else references)
        if references is None:
            order.remove(q)
        hits += any(labels[n] == truth[q] for n in order[:k])
    return hits / len(queries)


def similarity(rows: Sequence[Row], labels: Sequence[int]) -> tuple[float, float]:
    intra, inter = [], []
    for a, b in itertools.permutations(range(len(rows)), 2):
        (intra if labels[a] == labels[b] else inter).append(cosine(rows[a], rows[b]))
    return sum(intra) / len(intra), sum(inter) / len(inter)


def alignment(xs: Sequence[Row], ys: Sequence[Row], alpha: float) -> float:
    lengths = [math.dist(unit(x), unit(y)) ** alpha for x, y in zip(xs, ys, strict=True)]
    return sum(lengths) / len(lengths)


def uniformity(rows: Sequence[Row], t: float) -> float:
    values = [
        math.exp(-t * math.dist(unit(a), unit(b)) ** 2) for a, b in itertools.permutations(rows, 2)
    ]
    return math.log(sum(values) / len(values))


def softmax_loss(
    weight: Sequence[Row], bias: Row, rows: Sequence[Row], labels: Sequence[int]
) -> float:
    total = 0.0
    for row, label in zip(rows, labels, strict=True):
        logits = [dot(w, row) + b for w, b in zip(weight, bias, strict=True)]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[label]
    return total / len(rows)
