"""The estimates against what they estimate, where classes and so all expectations are known.

Anchors, positives and negatives are drawn from a few points on a sphere, so that every expectation
is a finite sum. Rates and bounds are stated at t = 1, as in the papers.

Shapes: B anchors, M positives, N negatives, C classes, A points of a class, P = C A points, D.
"""

from __future__ import annotations

import math

import pytest
import torch
from table import table
from torch import Tensor
from torch.nn import functional as F

from stream_ssl.losses import Debiased, InfoNCE, PositiveDebiased

CLASSES, POINTS, DIM = 4, 5, 3
TAU = 1 / CLASSES


class World:
    """Points of each class around its centre; anchors are all points, `times` over."""

    def __init__(self, spread: float, times: int = 20, t: float = 1.0, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        centre_CD = torch.tensor(
            [[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64
        )
        noise_CAD = torch.randn(CLASSES, POINTS, DIM, generator=self.generator, dtype=torch.float64)
        point_CAD = F.normalize(F.normalize(centre_CD, dim=1)[:, None] + spread * noise_CAD, dim=2)
        self.point_PD = point_CAD.flatten(0, 1)
        self.class_P = torch.arange(CLASSES).repeat_interleave(POINTS)
        self.z_BD = self.point_PD.repeat(times, 1)
        self.class_B = self.class_P.repeat(times)
        self.t = t
        e_BP = (self.z_BD @ self.point_PD.T / t).exp()
        same_BP = self.class_B[:, None] == self.class_P
        self.plus_B = (e_BP * same_BP).sum(1) / POINTS  # E_{p+} e^s
        self.minus_B = (e_BP * ~same_BP).sum(1) / (POINTS * (CLASSES - 1))  # E_{p-} e^s

    def negatives(self, count: int) -> tuple[Tensor, Tensor]:
        """[B, N, D] of all classes, and whether each shares its anchor's class [B, N]."""
        index_BN = torch.randint(
            CLASSES * POINTS, (len(self.z_BD), count), generator=self.generator
        )
        return self.point_PD[index_BN], self.class_P[index_BN] == self.class_B[:, None]

    def positives(self, count: int) -> Tensor:
        """[B, M, D] of each anchor's class."""
        index_BM = torch.randint(POINTS, (len(self.z_BD), count), generator=self.generator)
        return self.point_PD[index_BM + POINTS * self.class_B[:, None]]

    def every_positive(self) -> Tensor:
        """All points of the class, whose mean is the expectation."""
        return self.point_PD.view(CLASSES, POINTS, DIM)[self.class_B]

    def false_positives(self, positive_BMD: Tensor, share: float) -> Tensor:
        """The same, some replaced by points of another class."""
        shift_BM = torch.randint(1, CLASSES, positive_BMD.shape[:2], generator=self.generator)
        other_BM = (self.class_B[:, None] + shift_BM) % CLASSES
        index_BM = other_BM * POINTS + torch.randint(
            POINTS, other_BM.shape, generator=self.generator
        )
        hit_BM1 = torch.rand(other_BM.shape, generator=self.generator)[..., None] < share
        return torch.where(hit_BM1, self.point_PD[index_BM], positive_BMD)


def error_of_debiased(world: World, positive_BMD: Tensor, negative: Tensor) -> float:
    """Mean |L - L~|, where L~ has the expectation in the place of g (Theorem 3)."""
    out = Debiased(world.t, TAU)(world.z_BD, positive_BMD, negative)
    e_BM = torch.einsum("bd,bmd->bm", world.z_BD, positive_BMD).div(world.t).exp()
    exact_BM = torch.log1p(negative.shape[-2] * world.minus_B[:, None] / e_BM)
    return float((out.per_anchor - exact_BM.mean(1)).abs().mean())


def bound_of_debiased(count: float, positives: float) -> float:
    """The bound at the end of the proof of Theorem 3."""
    return (
        math.exp(1.5)
        / (1 - TAU)
        * (math.sqrt(2 * math.pi / count) + TAU * math.sqrt(2 * math.pi / positives))
    )


def test_the_error_of_debiased_falls_with_the_negatives() -> None:
    world = World(spread=0.5)
    errors = []
    for count in (64, 1024):
        error = error_of_debiased(world, world.every_positive(), world.negatives(count)[0])
        assert error < bound_of_debiased(count, math.inf)
        errors.append(error)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)  # N^{-1/2}


def test_the_error_of_debiased_falls_with_the_positives() -> None:
    world = World(spread=0.5)
    errors = []
    for positives in (4, 64):  # negatives are every point once: no error from N
        error = error_of_debiased(world, world.positives(positives), world.point_PD)
        assert error < bound_of_debiased(math.inf, positives)
        errors.append(error)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)  # M^{-1/2}


@table(("count", "positives"), [(8, 8), (64, 1), (512, 8)])
def test_the_error_of_debiased_stays_under_its_bound(count: int, positives: int) -> None:
    world = World(spread=0.8)
    error = error_of_debiased(world, world.positives(positives), world.negatives(count)[0])
    assert error < bound_of_debiased(count, positives)


def error_of_positive(world: World, count: int) -> float:
    """Mean |L - L~|, where L~ (eq. 11) has the expectations for P and P-."""
    negative_BND, same_BN = world.negatives(count)
    loss = PositiveDebiased(world.t, TAU, most_negatives=count, false_negatives="split")
    out = loss(world.z_BD, world.positives(1), negative_BND, same_BN=same_BN)
    true_B = (~same_BN).sum(1)
    exact_B = torch.log1p(true_B * world.minus_B / world.plus_B)
    return float((out.per_anchor - exact_B).abs().mean())


def test_positive_debiased_approaches_the_limit_of_lemma_1() -> None:
    """P of all classes and P- of the others, as the lemma supposes; error O(N^{-1/2})."""
    world, errors = World(spread=0.5), []
    for count in (512, 8192):
        error = error_of_positive(world, count)
        true = count * (1 - TAU)
        bound = math.exp(1.5) * (
            (1 + (1 - TAU) / TAU) * math.sqrt(math.pi / (2 * true))
            + (1 + 1 / TAU) * math.sqrt(math.pi / (2 * true + 2))
        )
        assert error < bound  # Theorem 2.1
        errors.append(error)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    assert errors[1] < 0.05


def test_without_labels_positive_debiased_tends_to_a_constant() -> None:
    """P and P- come from the same rows, so the pair loses its weight: N must be batch-sized."""
    world = World(spread=0.5)
    loss = PositiveDebiased(1.0, TAU, most_negatives=8192)
    out = loss(world.z_BD, world.positives(1), world.negatives(8192)[0])
    assert out.per_anchor.tolist() == pytest.approx([math.log(8193)] * 400, abs=0.01)


@pytest.mark.parametrize(("t", "prior"), [(0.5, TAU), (1.0, "labels")], ids=str)
def test_debiased_is_closer_to_the_unbiased_loss_than_the_biased_one(
    t: float, prior: float | str
) -> None:
    world = World(spread=0.2, times=100, t=t)
    positive_BMD, (negative_BND, same_BN) = world.positives(1), world.negatives(256)
    unbiased = torch.log1p(
        256 * world.minus_B / (world.z_BD * positive_BMD[:, 0]).sum(1).div(t).exp()
    ).mean()
    biased = InfoNCE(t)(world.z_BD, positive_BMD, negative_BND).loss
    debiased = Debiased(t, prior)(world.z_BD, positive_BMD, negative_BND, same_BN=same_BN).loss
    assert biased > unbiased
    assert (debiased - unbiased).abs() < 0.2 * (biased - unbiased)


def test_positive_debiased_is_closer_to_the_unbiased_loss_if_positives_are_false() -> None:
    """Three in ten positives of another class, as blur makes them (Fig. 3)."""
    world = World(spread=0.1, times=100, t=0.5)
    clean_BMD, (negative_BND, same_BN) = world.positives(1), world.negatives(1024)
    given = (world.z_BD, world.false_positives(clean_BMD, 0.3), negative_BND)
    truth = InfoNCE(0.5, false_negatives="exclude")
    unbiased = truth(world.z_BD, clean_BMD, negative_BND, same_BN=same_BN).loss
    biased = truth(*given, same_BN=same_BN).loss
    loss = PositiveDebiased(0.5, TAU, most_negatives=1024, false_negatives="split")
    debiased = loss(*given, same_BN=same_BN).loss
    assert (debiased - unbiased).abs() < 0.2 * (biased - unbiased).abs()
