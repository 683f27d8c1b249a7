"""Every loss as the contract tests run it, beside its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import losses_naive as naive
import torch
from losses_cases import Case
from torch import Tensor

from stream_ssl.losses import (
    Debiased,
    Decoupled,
    HardNegative,
    InfoNCE,
    Loss,
    LossOutput,
    NegativeCosine,
    PositiveDebiased,
    SelfLabeling,
    SupervisedContrastive,
)

T = 0.4


class Variant(NamedTuple):
    """`smooth`: its gradient is the derivative of its value, nothing is detached."""

    build: Callable[[], Loss]
    twin: Callable[..., Tensor]
    smooth: bool = True


def _of_prior(row: naive.Row) -> Tensor:
    return naive.debiased(row, row.prior)


def _of_labels(row: naive.Row) -> Tensor:
    size = len(row.same)
    share = sum(row.same) / size
    return naive.debiased(row, min(max(share, 1 / (size + 1)), size / (size + 1)))


def _excluded(row: naive.Row) -> Tensor:
    left = naive.excluded(row)
    return naive.infonce(left) if left.negatives else 0 * row.z_D.sum()


def _split(row: naive.Row) -> Tensor:
    if all(row.same):
        return 0 * row.z_D.sum()
    return naive.positive_grouped(row, 0.2, split=True)


def _cosine(row: naive.Row) -> Tensor:
    return naive.mean([-(row.z_D @ p) for p in row.positives])


def _dclw(*arguments: Tensor | float | None) -> Tensor:
    return naive.dclw(*arguments, sigma=0.5)


def _labeled() -> Loss:
    loss = SelfLabeling(T, alpha=0.3, beta=0.2, sharpening=0.7, rise=100)
    loss.begin(100)
    return loss


per_row = naive.per_row
VARIANTS: dict[str, Variant] = {
    "infonce": Variant(lambda: InfoNCE(T), per_row(naive.infonce)),
    "infonce, excluded": Variant(lambda: InfoNCE(T, false_negatives="exclude"), per_row(_excluded)),
    "decoupled": Variant(lambda: Decoupled(T), per_row(naive.decoupled)),
    "decoupled, weighted": Variant(lambda: Decoupled(T, sigma=0.5), _dclw, smooth=False),
    "debiased": Variant(lambda: Debiased(T, 0.15), per_row(naive.debiased, tau=0.15)),
    "debiased, biased": Variant(
        lambda: Debiased(T, 0.15, floor="biased"),
        per_row(naive.debiased, tau=0.15, floor="biased"),
    ),
    "debiased, memory": Variant(lambda: Debiased(T, "memory"), per_row(_of_prior)),
    "debiased, labels": Variant(lambda: Debiased(T, "labels"), per_row(_of_labels)),
    "positive": Variant(lambda: PositiveDebiased(T, 0.2), per_row(naive.positive_grouped, tau=0.2)),
    "positive, combined": Variant(
        lambda: PositiveDebiased(T, 0.2, "loss-combination"),
        per_row(naive.positive_combined, tau=0.2),
    ),
    "positive, mixed": Variant(
        lambda: PositiveDebiased(T, 0.2, "mixed", alpha=0.3),
        per_row(naive.positive_mixed, tau=0.2, alpha=0.3),
    ),
    "positive, split": Variant(
        lambda: PositiveDebiased(T, 0.2, false_negatives="split"), per_row(_split)
    ),
    "hard": Variant(
        lambda: HardNegative(T, 0.1, beta=0.7),
        per_row(naive.debiased, tau=0.1, beta=0.7),
        smooth=False,
    ),
    "self-labeling": Variant(
        _labeled, per_row(naive.self_labeling, alpha=0.3, beta=0.2, sharp=0.7), smooth=False
    ),
    "supervised": Variant(lambda: SupervisedContrastive(T), per_row(naive.supervised)),
    "cosine": Variant(lambda: NegativeCosine(), per_row(_cosine)),
}
CONTRASTIVE = sorted(set(VARIANTS) - {"cosine"})

RICHEST = (
    *("infonce, excluded", "decoupled, weighted", "debiased, memory", "positive, combined"),
    *("hard", "self-labeling", "supervised", "cosine"),
)
"""One variant of each class, that with the most of its code: for what its options do not touch."""


class Known(NamedTuple):
    """The pairs of one class and the priors of a case."""

    same_BN: Tensor
    prior_B: Tensor


def known(case: Case, seed: int = 7) -> Known:
    """Seeded: a third of the negatives share their anchor's class; the first never does."""
    generator = torch.Generator().manual_seed(seed)
    same_BN = torch.rand(case.mask_BN.shape, generator=generator) < 0.33
    same_BN[:, 0] = False
    prior_B = 0.05 + 0.2 * torch.rand(len(same_BN), generator=generator, dtype=torch.float64)
    return Known(same_BN, prior_B)


def call(loss: Loss, case: Case, said: Known | None = None) -> LossOutput:
    same_BN, prior_B = said or known(case)
    return loss(*case, same_BN=same_BN, prior_B=prior_B)
