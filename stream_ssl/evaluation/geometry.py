"""The geometry of features on the sphere: classes, views, spread and rank.

Shapes: N rows, F features, C classes, P pairs. Sums are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stream_ssl.evaluation.checks import Array, as_labels, as_rows, as_unit_rows

BLOCK = 1 << 22
"""Largest number of elements in a block of a pairwise matrix."""


@dataclass(frozen=True, slots=True)
class ClassSimilarity:
    """Mean cosines over pairs of distinct rows, in [-1, 1].

    Attributes:
        intra: mean over pairs of the same class.
        inter: mean over pairs of different classes.
        per_class: mean over the pairs of each class; classes with only one row are missing.
    """

    intra: float
    inter: float
    per_class: dict[int, float]


def class_similarity(feature_NF: Array, label_N: Array) -> ClassSimilarity:
    """Return the mean intra- and inter-class cosine similarity (DUEL, section 4 and appendix).

    The result is exact over all pairs. It uses the sum S_c of each class's unit rows: the cosines
    of all ordered pairs of a class sum to |S_c|^2, minus the pairs of a row with itself. The cost
    is O(N F), without an N x N matrix.

    Raises:
        ValueError: shapes or labels do not fit, there is only one class, or no class has two rows.
    """
    z_NF = as_unit_rows(feature_NF).double()
    label_N = as_labels(label_N, z_NF)
    found, index_N, count_C = torch.unique(label_N, return_inverse=True, return_counts=True)
    if len(found) < 2:
        raise ValueError(
            f"all rows are of class {int(found[0])}: pairs of two classes need at least two; "
            "pass rows of more"
        )
    if int(count_C.max()) < 2:
        raise ValueError("no class has two rows, so none has a pair; pass more rows of each class")
    sum_CF = z_NF.new_zeros(len(found), z_NF.shape[1]).index_add_(0, index_N, z_NF)
    own_C = z_NF.new_zeros(len(found)).index_add_(0, index_N, z_NF.square().sum(dim=1))
    square_C = sum_CF.square().sum(dim=1)
    pairs_C = (count_C * (count_C - 1)).double()
    within_C = square_C - own_C
    apart = float(sum_CF.sum(dim=0).square().sum() - square_C.sum())
    pairs_apart = len(z_NF) ** 2 - int(count_C.square().sum())
    return ClassSimilarity(
        intra=float(within_C.sum() / pairs_C.sum()),
        inter=apart / pairs_apart,
        per_class={
            int(label): float(within / pairs)
            for label, within, pairs in zip(found, within_C, pairs_C, strict=True)
            if pairs > 0
        },
    )


def pair_similarities(
    feature_NF: Array, label_N: Array, pairs: int = 100_000, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines of random pairs of distinct rows: (same class, different classes).

    Each result has at most `pairs` values. For pairs of the same class, a row is drawn and then
    another row of its class. Other pairs are drawn evenly from all rows, and only those of
    different classes are kept.
    """
    z_NF = as_unit_rows(feature_NF).cpu()
    label_N = as_labels(label_N, z_NF)
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.argsort(label_N, stable=True)
    found, count_C = torch.unique(label_N, return_counts=True)
    start_C = torch.cumsum(count_C, 0) - count_C
    a_P = torch.randint(len(z_NF), (pairs,), generator=generator)
    class_P = torch.searchsorted(found, label_N[a_P])
    offset_P = (torch.rand(pairs, generator=generator) * count_C[class_P]).long()
    b_P = order_N[start_C[class_P] + offset_P]
    other_P = torch.randint(len(z_NF), (pairs,), generator=generator)
    same_P, apart_P = a_P != b_P, label_N[a_P] != label_N[other_P]
    return (
        (z_NF[a_P] * z_NF[b_P]).sum(dim=1)[same_P],
        (z_NF[a_P] * z_NF[other_P]).sum(dim=1)[apart_P],
    )


def alignment(x_NF: Array, y_NF: Array, alpha: float = 2.0) -> float:
    """Return the mean of |x - y|^alpha over positive pairs of unit norm; 0 (best) to 2^alpha.

    Wang and Isola, Understanding Contrastive Representation Learning through Alignment and
    Uniformity on the Hypersphere, 2020, section 4.1 (L_align). The rows are first scaled to unit
    norm.

    Args:
        x_NF: one view of each sample.
        y_NF: another view of the same samples, row by row.
        alpha: the exponent, above 0.

    Raises:
        ValueError: the shapes differ, or alpha is not above 0.
    """
    x_NF, y_NF = as_unit_rows(x_NF).double(), as_unit_rows(y_NF).double()
    if x_NF.shape != y_NF.shape:
        raise ValueError(
            f"views of shape {list(x_NF.shape)} and {list(y_NF.shape)}: row n of each is a view of "
            "sample n, so the shapes must be the same"
        )
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}: must be above 0")
    return float((x_NF - y_NF.to(x_NF)).norm(dim=1).pow(alpha).mean())


def uniformity(feature_NF: Array, t: float = 2.0) -> float:
    """Return log(mean(exp(-t |x - y|^2))) over pairs of distinct unit rows, in [-4t, 0].

    Lower is more uniform; 0 means collapse. Wang and Isola, 2020, section 4.1 (L_uniform). The
    result is exact over all pairs and is computed one block of rows at a time, in O(N^2 F).

    Raises:
        ValueError: there are fewer than two rows, or t is not above 0.
    """
    z_NF = as_unit_rows(feature_NF)
    count = len(z_NF)
    if count < 2:
        raise ValueError("uniformity is over pairs of rows: pass at least 2")
    if not t > 0:
        raise ValueError(f"t is {t}: must be above 0")
    sums = []
    step = max(1, BLOCK // count)
    square_N = z_NF.square().sum(dim=1)
    for start in range(0, count, step):
        block_bF = z_NF[start : start + step]
        distance_bN = square_N[start : start + step, None] + square_N - 2 * block_bF @ z_NF.T
        exponent_bN = -t * distance_bN.clamp_min(0.0)
        rows = torch.arange(len(block_bF), device=z_NF.device)
        exponent_bN[rows, rows + start] = -math.inf  # no row pairs with itself
        sums.append(exponent_bN.double().logsumexp(dim=1))
    return float(torch.cat(sums).logsumexp(dim=0)) - math.log(count * (count - 1))


def rank_me(feature_NF: Array) -> float:
    """Return the exponential of the entropy of the singular values' shares.

    The result is in [1, min(N, F)], or 0 if all features are zero. RankMe (Garrido et al., 2023)
    uses the features without centring or scaling. The effective rank that a run reports
    (`memory.stats`) is smaller: it uses the squares of the singular values.
    """
    row_NF = as_rows(feature_NF).double()
    gram = row_NF.T @ row_NF if row_NF.shape[1] <= len(row_NF) else row_NF @ row_NF.T
    spectrum = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    # Smaller eigenvalues are rounding errors, whose square roots would count as directions.
    spectrum[spectrum < spectrum.max() * len(spectrum) * torch.finfo(torch.float64).eps] = 0.0
    singular = spectrum.sqrt()
    total = float(singular.sum())
    if total == 0.0:
        return 0.0
    return math.exp(float(torch.special.entr(singular / total).sum()))
