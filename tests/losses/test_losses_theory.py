"""The lemmas of "Debiased contrastive learning" (appendix A), where all expectations are finite.

Shapes: B anchors, M positives, N negatives, C classes, P points, D dimensions.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from test_losses_known_classes import CLASSES, POINTS, TAU, World
from torch import Tensor
from torch.nn.functional import cross_entropy

from stream_ssl.losses import Debiased, Decoupled, InfoNCE, Loss

EVERY = CLASSES * POINTS  # points of the world, each of which is as likely as the others


@pytest.mark.parametrize("count", [4, 64, 1024])
@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_lemma_1_the_biased_loss_is_not_far_below_the_unbiased_one(
    count: int, spread: float
) -> None:
    """L_biased >= L_unbiased + E[min(0, log(E+ / E-))] - e^(3/2) sqrt(pi / (2 N))."""
    world = World(spread=spread, times=100)
    positive_BMD = world.positives(1)
    own_B = (world.z_BD * positive_BMD[:, 0]).sum(1).exp()
    biased = InfoNCE(1.0)(world.z_BD, positive_BMD, world.negatives(count)[0]).loss
    unbiased_B = torch.log1p(count * world.minus_B / own_B)
    slack_B = (world.plus_B / world.minus_B).log().clamp(max=0)
    bound = unbiased_B.mean() + slack_B.mean() - math.exp(1.5) * math.sqrt(math.pi / (2 * count))
    assert biased >= bound
    assert (slack_B < 0).any() or spread < 1, "the second term matters only for a poor embedding"


def test_lemma_2_true_negatives_with_a_fixed_weight_tend_to_the_debiased_loss() -> None:
    """The mean of N true negatives, times Q: for N to infinity it is the debiased loss."""
    world = World(spread=0.5, times=40)
    positive_BMD = world.every_positive()
    limit_B = Debiased(1.0, TAU)(world.z_BD, positive_BMD, world.point_PD).per_anchor
    other_P = torch.randint(POINTS, (len(world.z_BD), 8192), generator=world.generator)
    shift_P = torch.randint(1, CLASSES, other_P.shape, generator=world.generator)
    row_BN = (world.class_B[:, None] + shift_P) % CLASSES * POINTS + other_P
    e_BM = torch.einsum("bd,bmd->bm", world.z_BD, positive_BMD).exp()
    errors = []
    for count in (128, 8192):
        negative_B = torch.stack(
            [
                (world.point_PD[row_N[:count]] @ anchor_D).exp().mean()
                for anchor_D, row_N in zip(world.z_BD, row_BN, strict=True)
            ]
        )
        weighted_BM = torch.log1p(EVERY * negative_B[:, None] / e_BM)
        errors.append(float((weighted_BM.mean(1) - limit_B).abs().mean()))
    assert errors[1] < 0.01
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.3)  # N^{-1/2}


@pytest.mark.parametrize(("count", "positives"), [(256, 64), (2048, 256)])
def test_lemma_a2_large_errors_are_rare(count: int, positives: int) -> None:
    world = World(spread=0.5, times=50)
    one_B1D = world.positives(1)
    own_B = (world.z_BD * one_B1D[:, 0]).sum(1).exp()
    exact_B = torch.log1p(count * world.minus_B / own_B)
    # g of these negatives and positives, without the floor, which only reduces an error.
    negative_B = (world.z_BD[:, None] * world.negatives(count)[0]).sum(2).exp().mean(1)
    positive_B = (world.z_BD[:, None] * world.positives(positives)).sum(2).exp().mean(1)
    g_B = ((negative_B - TAU * positive_B) / (1 - TAU)).clamp(min=math.exp(-1))
    error_B = (torch.log1p(count * g_B / own_B) - exact_B).abs()
    seen = 0
    for limit in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        bound = 2 * math.exp(-count * limit**2 * (1 - TAU) ** 2 / (2 * math.e**3)) + 2 * math.exp(
            -positives * limit**2 * ((1 - TAU) / TAU) ** 2 / (2 * math.e**3)
        )
        assert (error_B >= limit).double().mean() <= bound
        seen += bound < 1
    assert seen, "a bound above 1 says nothing"


def supervised(world: World) -> tuple[float, float]:
    """Return the losses of the best linear classifier, and of the one of the classes' means."""
    mean_CD = world.point_PD.view(CLASSES, POINTS, -1).mean(dim=1)
    by_means = cross_entropy(world.point_PD @ mean_CD.T, world.class_P)
    weight_CD = mean_CD.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weight_CD], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(world.point_PD @ weight_CD.T, world.class_P)
        loss.backward()
        return loss

    optimiser.step(closure)
    return float(closure().detach()), float(by_means)


@pytest.mark.parametrize("spread", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lemma_4_the_debiased_loss_bounds_the_supervised_one(spread: float, seed: int) -> None:
    """L_sup <= L_sup of the means <= L_debiased, for N >= C - 1 negatives."""
    world = World(spread=spread, times=1, seed=seed)
    best, by_means = supervised(world)
    e_BM = torch.einsum("bd,bmd->bm", world.z_BD, world.every_positive()).exp()
    losses = [
        float(torch.log1p(count * world.minus_B[:, None] / e_BM).mean())
        for count in (CLASSES - 1, EVERY)
    ]
    given = Debiased(1.0, TAU)(world.z_BD, world.every_positive(), world.point_PD)
    if not (world.minus_B < math.exp(-1)).any():  # above the floor, the estimate is exact
        assert float(given.loss) == pytest.approx(losses[1], rel=1e-5)
    assert best <= by_means + 1e-9
    assert by_means <= losses[0] <= losses[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_derivation_a6_inclusion_and_exclusion_give_the_loss_of_true_negatives(count: int) -> None:
    """The loss over true negatives is an alternating sum over N + 1 mixtures (eq. 4)."""
    world = World(spread=0.5, times=1)
    anchor_D, positive_D, own = world.point_PD[0], world.point_PD[1], world.class_P == 0

    def expected(kinds: list[Tensor]) -> float:
        """Return the mean loss over all choices, one point of each kind."""
        rows = itertools.product(*(kind.nonzero()[:, 0].tolist() for kind in kinds))
        row_TN = torch.tensor(list(rows))
        anchor_TD = anchor_D.expand(len(row_TN), -1)
        positive_TMD = positive_D.expand(len(row_TN), 1, -1)
        return float(InfoNCE(1.0)(anchor_TD, positive_TMD, world.point_PD[row_TN]).loss)

    anything = torch.ones_like(own)
    total = sum(
        math.comb(count, same)
        * (-TAU) ** same
        * expected([own] * same + [anything] * (count - same))
        for same in range(count + 1)
    )
    assert total / (1 - TAU) ** count == pytest.approx(expected([~own] * count), rel=1e-5)


def test_decoupling_removes_the_multiplier_of_the_gradient() -> None:
    """Slides, eq. 3: the gradient of InfoNCE is q_B times the gradient of DCL.

    q_B is 1 minus the softmax share of the positive.
    """
    world = World(spread=1.0, times=1, t=0.2)
    positive_B1D, (negative_BND, _) = world.positives(1), world.negatives(32)

    def per_anchor(loss: Loss) -> tuple[Tensor, Tensor]:
        anchor_BD = world.z_BD.clone().requires_grad_()
        loss_B = loss(anchor_BD, positive_B1D, negative_BND).per_anchor
        (gradient_BD,) = torch.autograd.grad(loss_B.sum(), anchor_BD)
        return loss_B.detach(), gradient_BD

    loss_B, coupled_BD = per_anchor(InfoNCE(0.2))
    _, decoupled_BD = per_anchor(Decoupled(0.2))
    multiplier_B = 1 - (-loss_B).exp()
    assert torch.allclose(coupled_BD, multiplier_B[:, None] * decoupled_BD, atol=1e-6)
    assert multiplier_B.min() < 0.9, "otherwise the two losses do not differ"
