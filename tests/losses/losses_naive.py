"""Losses as loops over one pair at a time, for anyone to check by eye.

Every number is a float64 scalar of torch, so that gradients can be compared as well; what is to
carry none is detached where the equation says so. exp without any shift: for moderate logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """One anchor, and what it is compared with after masking."""

    z_D: Tensor
    positives: list[Tensor]
    negatives: list[Tensor]
    same: list[bool]  # of each negative
    prior: float
    t: float

    def e(self, other_D: Tensor, z_D: Tensor | None = None) -> Tensor:
        """e^{s}"""
        return torch.exp((self.z_D if z_D is None else z_D) @ other_D / self.t)


def rows(
    z_BD: Tensor,
    positive_BMD: Tensor,
    negative: Tensor,
    mask_BN: Tensor | None,
    t: float,
    same_BN: Tensor | None = None,
    prior_B: Tensor | None = None,
) -> list[Row]:
    found = []
    for b, z_D in enumerate(z_BD):
        of_anchor = negative if negative.ndim == 2 else negative[b]
        kept = [n for n in range(len(of_anchor)) if mask_BN is None or not mask_BN[b, n]]
        same = [same_BN is not None and bool(same_BN[b, n]) for n in kept]
        prior = 0.0 if prior_B is None else float(prior_B[b])
        found.append(Row(z_D, list(positive_BMD[b]), [of_anchor[n] for n in kept], same, prior, t))
    return found


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def excluded(row: Row) -> Row:
    kept = [n for n, same in zip(row.negatives, row.same, strict=True) if not same]
    return row._replace(negatives=kept, same=[False] * len(kept))


def infonce(row: Row) -> Tensor:
    """-log(e^{s+} / (e^{s+} + sum_i e^{s_i})), mean over positives."""
    total = sum(row.e(n) for n in row.negatives)
    return mean([-torch.log(row.e(p) / (row.e(p) + total)) for p in row.positives])


def decoupled(row: Row) -> Tensor:
    total = sum(row.e(n) for n in row.negatives)
    return mean([-row.z_D @ p / row.t + torch.log(total) for p in row.positives])


def debiased(row: Row, tau: float, floor: str = "clamp", beta: float = 0.0) -> Tensor:
    """Eq. 6-7; with beta the negatives weighted by e^{beta s}, the weights without gradient."""
    weights = [row.e(n).detach() ** beta for n in row.negatives]
    weighed = [w * row.e(n) for w, n in zip(weights, row.negatives, strict=True)]
    average = sum(weighed) / sum(weights)
    false = tau * mean([row.e(p) for p in row.positives])
    g = (average - false) / (1 - tau)
    if g <= math.exp(-1 / row.t):
        g = constant(math.exp(-1 / row.t)) if floor == "clamp" else average
    size = len(row.negatives)
    return mean([-torch.log(row.e(p) / (row.e(p) + size * g)) for p in row.positives])


def positive_pair(
    anchor_D: Tensor, positive: Tensor, row: Row, tau: float, split: bool = False
) -> Tensor:
    """Eq. 12-14 for e^{s+} = `positive`."""
    every = [row.e(n, anchor_D) for n in row.negatives]
    true = [e for e, same in zip(every, row.same, strict=True) if not (split and same)]
    p = (sum(every) + positive + math.exp(1 / row.t)) / (len(every) + 2)
    p_minus = sum(true) / len(true)
    r = (p - (1 - tau) * p_minus) / tau
    if r <= math.exp(-1 / row.t):
        r = constant(math.exp(-1 / row.t))
    return -torch.log(r / (r + len(true) * p_minus))


def positive_grouped(row: Row, tau: float, split: bool = False) -> Tensor:
    return positive_pair(row.z_D, mean([row.e(p) for p in row.positives]), row, tau, split)


def positive_combined(row: Row, tau: float) -> Tensor:
    """All ordered pairs of views of the sample."""
    views = [row.z_D, *row.positives]
    return mean(
        [
            positive_pair(a, row.e(b, a), row, tau)
            for i, a in enumerate(views)
            for j, b in enumerate(views)
            if i != j
        ]
    )


def positive_mixed(row: Row, tau: float, alpha: float) -> Tensor:
    return alpha * debiased(row, tau) + (1 - alpha) * positive_grouped(row, tau)


def supervised(row: Row) -> Tensor:
    """Mean outside the log, over the positives and the negatives of the class."""
    total = sum(row.e(key) for key in [*row.positives, *row.negatives])
    alike = [n for n, same in zip(row.negatives, row.same, strict=True) if same]
    return mean([-torch.log(row.e(p) / total) for p in [*row.positives, *alike]])


def labels(positive_D: Tensor, row: Row, alpha: float, beta: float, sharp: float) -> list[Tensor]:
    """y of one positive over the keys [positive, *negatives]."""
    keys = [positive_D, *row.negatives]
    e = [torch.exp(positive_D @ key / row.t / sharp).detach() for key in keys]
    p = [value / sum(e) for value in e]
    q = [constant(0.0), *(value / sum(e[1:]) for value in e[1:])]
    onehot = [1.0] + [0.0] * len(row.negatives)
    return [
        (1 - alpha - beta) * o + alpha * a + beta * b for o, a, b in zip(onehot, p, q, strict=True)
    ]


def self_labeling(
    row: Row, alpha: float, beta: float, sharp: float, x_D: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the anchor, or of `x_D` as this sample, with the soft labels."""
    losses = []
    for positive_D in row.positives:
        keys = [positive_D, *row.negatives]
        total = sum(row.e(key, x_D) for key in keys)
        y = labels(positive_D, row, alpha, beta, sharp)
        losses.append(
            -sum(w * torch.log(row.e(key, x_D) / total) for w, key in zip(y, keys, strict=True))
        )
    return mean(losses)


def per_row(twin: Callable[..., Tensor], **settings: float | str | bool) -> Callable[..., Tensor]:
    """A twin of all rows: takes what `rows` takes."""

    def of_rows(*arguments: Tensor | float | None) -> Tensor:
        return torch.stack([twin(row, **settings) for row in rows(*arguments)])

    return of_rows


def dclw(*arguments: Tensor | float | None, sigma: float) -> Tensor:
    """DCL with the positive term weighted by 2 - e^{cos / sigma} / mean of all pairs."""
    every = rows(*arguments)
    e = [[torch.exp(row.z_D @ p / sigma).detach() for p in row.positives] for row in every]
    average = mean([value for of_row in e for value in of_row])
    losses = []
    for row, of_row in zip(every, e, strict=True):
        total = torch.log(sum(row.e(n) for n in row.negatives))
        terms = [
            -(2 - value / average) * (row.z_D @ p) / row.t + total
            for value, p in zip(of_row, row.positives, strict=True)
        ]
        losses.append(mean(terms))
    return torch.stack(losses)
