"""Degenerate inputs whose loss is known, limits, and diagnostics by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from losses_cases import Case, case
from losses_table import call, known
from table import table
from torch import Tensor

from stream_ssl.losses import (
    Debiased,
    Decoupled,
    HardNegative,
    InfoNCE,
    Loss,
    Mix,
    NegativeCosine,
    NTXent,
    PositiveDebiased,
    Ramp,
    SelfLabeling,
    SupervisedContrastive,
)

ALIKE: dict[str, tuple[Callable[[], Loss], Callable[[int], float]]] = {
    "infonce": (lambda: InfoNCE(0.1), lambda n: math.log(n + 1)),
    "decoupled": (lambda: Decoupled(0.1), lambda n: math.log(n)),
    "dclw": (lambda: Decoupled(0.1, sigma=0.5), lambda n: math.log(n)),
    "debiased": (lambda: Debiased(0.1, 0.3), lambda n: math.log(n + 1)),
    "positive": (lambda: PositiveDebiased(0.1, 0.3), lambda n: math.log(n + 1)),
    "combined": (
        lambda: PositiveDebiased(0.1, 0.3, "loss-combination"),
        lambda n: math.log(n + 1),
    ),
    "hard": (lambda: HardNegative(0.1, 0.3, beta=2), lambda n: math.log(n + 1)),
    "self-labeling": (lambda: SelfLabeling(0.1, 0.2, 0.2, rise=0), lambda n: math.log(n + 1)),
    "supervised": (lambda: SupervisedContrastive(0.1), lambda n: math.log(n + 1)),
    "simsiam": (NegativeCosine, lambda n: -1.0),
    "byol": (lambda: NegativeCosine("byol"), lambda n: 0.0),
}


@table("name", sorted(ALIKE))
def test_equal_embeddings_have_the_loss_of_the_closed_form(name: str) -> None:
    build, expected = ALIKE[name]
    row_D = torch.tensor([0.6, 0.8], dtype=torch.float64)
    for count in (1, 7, 1000):
        same_BN = torch.zeros(3, count, dtype=torch.bool)
        out = build()(
            row_D.expand(3, 2), row_D.expand(3, 1, 2), row_D.expand(count, 2), same_BN=same_BN
        )
        assert out.per_anchor.tolist() == pytest.approx([expected(count)] * 3, rel=1e-9, abs=1e-9)
        assert out.diagnostics["positive_similarity"] == pytest.approx(1)
        if "negatives" in out.diagnostics:
            assert out.diagnostics["effective_negatives"] == pytest.approx(count)
            assert out.diagnostics["negative_similarity"] == pytest.approx(1)


def orthogonal(count: int, t: float = 0.5) -> tuple[Case, float]:
    """Positives on their anchors, negatives orthogonal to them: s+ = 1/t, s_i = 0."""
    z_BD = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    negative_ND = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64).expand(count, 3)
    return Case(z_BD, z_BD.unsqueeze(1), negative_ND, torch.zeros(1, count).bool()), math.exp(1 / t)


def test_orthogonal_negatives_have_the_loss_of_the_closed_form() -> None:
    one, top = orthogonal(10)
    assert float(InfoNCE(0.5)(*one).loss) == pytest.approx(math.log(1 + 10 / top))
    assert float(Decoupled(0.5)(*one).loss) == pytest.approx(math.log(10 / top))
    g = (1 - 0.1 * top) / 0.9
    assert float(Debiased(0.5, 0.1)(*one).loss) == pytest.approx(math.log(1 + 10 * g / top))
    # At N = 10 and tau+ = 1/6 the class is the pair itself: R is the mean of e^{s+} and e^{1/t}.
    assert float(PositiveDebiased(0.5, 1 / 6)(*one).loss) == pytest.approx(math.log(1 + 10 / top))


def test_an_estimate_below_its_floor_is_clamped_and_its_negatives_get_no_gradient() -> None:
    one, top = orthogonal(10)
    clamped, biased = Debiased(0.5, 0.2), Debiased(0.5, 0.2, floor="biased")  # 0.2 e^2 > 1
    for loss, g in ((clamped, 1 / top), (biased, 1.0)):
        negative_ND = one.negative.clone().requires_grad_()
        z_BD = one.z_BD.clone().requires_grad_()
        out = loss(z_BD, one.positive_BMD, negative_ND)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(math.log(1 + 10 * g / top))
        assert out.diagnostics["clamp_rate"] == 1
        assert bool(negative_ND.grad.any()) == (loss is biased)
        assert torch.isfinite(z_BD.grad).all()


@pytest.mark.parametrize("kind", [Debiased, HardNegative])
def test_no_estimate_is_clamped_without_a_prior(kind: Any) -> None:
    z_BD = torch.tensor([[0.6, 0.8]], dtype=torch.float64).requires_grad_()
    negative_ND = -z_BD.detach().expand(10, 2)  # as unlike as can be: at the floor
    out = (kind(0.5, 0.0) if kind is Debiased else kind(0.5, 0.0, beta=0.0))(
        z_BD, z_BD.detach().unsqueeze(1), negative_ND
    )
    plain = InfoNCE(0.5)(z_BD, z_BD.detach().unsqueeze(1), negative_ND)
    (grad_BD,) = torch.autograd.grad(out.loss, z_BD, retain_graph=True)
    (plain_BD,) = torch.autograd.grad(plain.loss, z_BD)
    assert out.diagnostics["clamp_rate"] == 0
    torch.testing.assert_close(grad_BD, plain_BD)


def test_an_estimate_of_positives_below_its_floor_is_clamped() -> None:
    z_BD = torch.tensor([[1.0, 0.0]], dtype=torch.float64).requires_grad_()
    opposite_BMD = -z_BD.detach().unsqueeze(1)
    out = PositiveDebiased(0.1, 0.01)(z_BD, opposite_BMD, z_BD.detach().expand(10, 2))
    out.loss.backward()
    assert out.diagnostics["clamp_rate"] == 1
    assert out.loss.item() == pytest.approx(math.log(1 + 10 * math.exp(20)))
    assert torch.isfinite(z_BD.grad).all()


@pytest.mark.parametrize(("tau", "floor"), [(0.0, "clamp"), (1e-9, "biased")])
def test_debiased_without_a_prior_is_infonce(tau: float, floor: str) -> None:
    one = case(positives=2)
    for loss in (Debiased(0.1, tau, floor), HardNegative(0.1, tau, beta=0.0, floor=floor)):
        z_BD, plain_BD = (one.z_BD.clone().requires_grad_() for _ in range(2))
        out = loss(z_BD, *one[1:])
        plain = InfoNCE(0.1)(plain_BD, *one[1:])
        out.loss.backward()
        plain.loss.backward()
        torch.testing.assert_close(out.per_anchor, plain.per_anchor, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(z_BD.grad, plain_BD.grad, rtol=1e-5, atol=1e-7)


def test_harder_weights_make_a_larger_loss() -> None:
    one = case(negatives=200, dim=16)
    found = [float(HardNegative(0.5, 0.0, beta=b)(*one).loss) for b in (0.0, 0.5, 1.0, 2.0)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


def test_self_labeling_without_soft_labels_is_infonce() -> None:
    one = case(positives=2)
    out = SelfLabeling(0.2)(*one)  # at step 0 alpha and beta are 0
    torch.testing.assert_close(out.per_anchor, InfoNCE(0.2)(*one).per_anchor, rtol=1e-9, atol=1e-12)


def test_nt_xent_over_both_views_equals_the_formula_of_simclr() -> None:
    """SimCLR's formula in a loop, self-similarity left out of the denominator."""
    one = case(batch=4)
    view_VD = torch.cat([one.z_BD, one.positive_BMD[:, 0]])
    expected = []
    for k in range(8):
        e = [math.exp(float(view_VD[k] @ view_VD[j]) / 0.3) for j in range(8)]
        other = (k + 4) % 8
        total = sum(value for j, value in enumerate(e) if j != k)
        expected.append(-math.log(e[other] / total))
    own_VV = torch.eye(4).repeat(2, 2).bool()
    out = NTXent(0.3)(view_VD, view_VD.roll(4, 0).unsqueeze(1), view_VD, own_VV)
    assert out.per_anchor.tolist() == pytest.approx(expected, rel=1e-9)
    assert out.diagnostics["negatives"] == 6  # 2 (B - 1)


def test_excluded_negatives_equal_masked_negatives() -> None:
    one = case()
    said = known(one)
    masked = one._replace(mask_BN=one.mask_BN | said.same_BN)
    for build in (InfoNCE, Decoupled, Debiased, PositiveDebiased, HardNegative, SelfLabeling):
        out = call(build(0.5, false_negatives="exclude"), one, said)
        other = build(0.5)(*masked)
        torch.testing.assert_close(out.per_anchor, other.per_anchor, rtol=1e-12, atol=1e-12)
        assert out.diagnostics["negatives"] == other.diagnostics["negatives"]


def mixed_by_loop(one: Case, mix: Mix, weights: tuple[float, float, float], t: float) -> Tensor:
    """The poster's y'_i on the keys that all share: the positives of the batch and the rest."""
    alpha, beta, sharp = weights
    key_KD = torch.cat([one.positive_BMD[:, 0], one.negative])
    y_BK = []
    for i, positive_D in enumerate(one.positive_BMD[:, 0]):
        e_K = (key_KD @ positive_D / t / sharp).exp()
        others_K = e_K.clone()
        others_K[i] = 0
        onehot_K = torch.eye(len(key_KD), dtype=torch.float64)[i]
        y_BK.append(
            (1 - alpha - beta) * onehot_K
            + alpha * e_K / e_K.sum()
            + beta * others_K / others_K.sum()
        )
    losses = []
    for i, z_D in enumerate(one.z_BD):
        k, theta = int(mix.permutation_B[i]), float(mix.theta_B[i])
        y_K = theta * y_BK[i] + (1 - theta) * y_BK[k]
        losses.append(-(y_K * (key_KD @ z_D / t).log_softmax(0)).sum())
    return torch.stack(losses)


def test_momentum_mixup_on_shared_keys_equals_the_formula_of_the_poster() -> None:
    one = case(batch=4, negatives=6)
    mix = Mix(torch.tensor([2, 0, 1, 3]), torch.tensor([0.9, 0.3, 0.5, 1.0], dtype=torch.float64))
    loss = SelfLabeling(0.3, 0.3, 0.2, sharpening=0.7, rise=0)
    negative_ND = torch.cat([one.positive_BMD[:, 0], one.negative])
    mask_BN = torch.cat([torch.eye(4), torch.zeros(4, 6)], 1).bool()
    z_BD, plain_BD = (one.z_BD.clone().requires_grad_() for _ in range(2))
    out = loss(z_BD, one.positive_BMD, negative_ND, mask_BN, mix=mix)
    expected_B = mixed_by_loop(one._replace(z_BD=plain_BD), mix, (0.3, 0.2, 0.7), 0.3)
    torch.testing.assert_close(out.per_anchor, expected_B, rtol=1e-10, atol=1e-12)
    out.loss.backward()
    expected_B.mean().backward()
    torch.testing.assert_close(z_BD.grad, plain_BD.grad, rtol=1e-10, atol=1e-12)


def test_diagnostics_equal_values_computed_by_hand() -> None:
    z_BD = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    positive_BMD = torch.tensor([[[0.6, 0.8]], [[0.0, 1.0]]], dtype=torch.float64)
    negative_ND = torch.tensor([[0.8, 0.6], [-1.0, 0.0]], dtype=torch.float64)
    mask_BN = torch.tensor([[False, False], [True, False]])
    found = Debiased(0.5, 0.1)(z_BD, positive_BMD, negative_ND, mask_BN).diagnostics
    weights = torch.tensor([0.8, -1.0], dtype=torch.float64).div(0.5).softmax(0)
    entropy = float(-(weights * weights.log()).sum())
    assert found == pytest.approx(
        {
            "positive_similarity": 0.8,
            "negative_similarity": (0.8 - 1.0 + 0.0) / 3,
            "negatives": 1.5,
            "effective_negatives": (math.exp(entropy) + 1) / 2,
            "clamp_rate": 0.0,  # (1 - 0.1 e^2) / 0.9 > e^-2 for the second anchor
            "prior": 0.1,
            "first": 0.5,
        }
    )


def test_schedules_depend_only_on_the_step() -> None:
    one = case()
    loss = Debiased(0.5, Ramp(0.3, steps=100, begin=10))
    for step, tau in ((0, 0.0), (10, 0.0), (60, 0.15), (110, 0.3), (10**6, 0.3), (60, 0.15)):
        loss.begin(step)
        out = loss(*one)
        assert out.diagnostics["prior"] == pytest.approx(tau)
        assert torch.equal(out.per_anchor, Debiased(0.5, tau)(*one).per_anchor)
    assert Ramp(1.0, 4, shape="cosine").at(1) == pytest.approx((1 - math.cos(math.pi / 4)) / 2)
    labels = SelfLabeling(0.5, 0.4, Ramp(0.1, 7), rise=100)
    labels.begin(50)
    expected = SelfLabeling(0.5, 0.2, 0.1, rise=0)(*one).per_anchor
    torch.testing.assert_close(labels(*one).per_anchor, expected)


REFUSED: dict[str, list[tuple[Callable[[], object], str]]] = {
    "Debiased": [
        (lambda: Debiased(prior=1.0), r"tau\+ is a probability in \[0, 1\)"),
        (lambda: Debiased(prior=1 - 1e-9), "at most 1 - 2"),  # 1 in float32
        (lambda: Debiased(prior=-0.1), "prior is -0.1"),
        (lambda: Debiased(prior=Ramp(1.5, 10)), "prior is Ramp"),
        (lambda: Debiased(prior="mem"), "choose a number, a schedule"),
        (lambda: Debiased(floor="zero"), 'choose "clamp" or "biased"'),
        (lambda: Debiased(false_negatives="split"), 'choose "keep" or "exclude"'),
    ],
    "PositiveDebiased": [
        (lambda: PositiveDebiased(prior=0.0), "divides by tau"),
        (lambda: PositiveDebiased(prior=Ramp(0.1, 10)), "divides by tau"),
        (lambda: PositiveDebiased(floor="zero"), 'choose "clamp" or "biased"'),
        (lambda: PositiveDebiased(aggregation="mean"), 'choose "pos-grouping", "loss-combination"'),
        (lambda: PositiveDebiased(alpha=1.5), "alpha is 1.5"),
        (lambda: PositiveDebiased(most_negatives=0), "at least 1"),
    ],
    "HardNegative": [
        (lambda: HardNegative(prior=math.nan), "prior is nan"),
        (lambda: HardNegative(beta=-1), "beta is -1"),
    ],
    "Decoupled": [(lambda: Decoupled(sigma=0.0), "sigma is 0.0")],
    "SelfLabeling": [
        (lambda: SelfLabeling(alpha=0.6, beta=0.5), "together at most 1"),
        (lambda: SelfLabeling(alpha=Ramp(0.5, 9, first=-0.1)), "at least 0"),
        (lambda: SelfLabeling(sharpening=0.0), "sharpening is 0.0"),
        (lambda: SelfLabeling(rise=-1), "rise is -1"),
    ],
    "InfoNCE": [(lambda: InfoNCE(false_negatives="drop"), 'choose "keep" or "exclude"')],
    "NegativeCosine": [(lambda: NegativeCosine("moco"), "form is 'moco'")],
    "Ramp": [
        (lambda: Ramp(0.5, 0), "steps is at least 1"),
        (lambda: Ramp(math.inf, 5), "must be finite"),
        (lambda: Ramp(0.5, 5, shape="square"), "shape is 'square'"),
    ],
}


@table("name", REFUSED)
def test_losses_reject_wrong_settings(name: str) -> None:
    for build, reason in REFUSED[name]:
        with pytest.raises(ValueError, match=reason):
            build()


def test_positive_debiased_refuses_more_negatives_than_its_limit() -> None:
    one = case(negatives=65)
    assert torch.isfinite(PositiveDebiased(most_negatives=65)(*one).loss)
    with pytest.raises(ValueError, match=r"65 negatives .* at most 64.* Draw a batch-sized"):
        PositiveDebiased(most_negatives=64)(*one)


@table(("count", "share"), [(126, 0.25), (1022, 0.05), (65_536, 0.0008)])
def test_the_weight_of_the_pair_in_positive_debiased_falls_with_the_negatives(
    count: int, share: float
) -> None:
    """Compare the gradient by the positive with that of InfoNCE."""
    generator = torch.Generator().manual_seed(0)
    one = case(batch=64, negatives=1, dim=64)
    angle = torch.nn.functional.normalize(
        torch.randn(count, 64, generator=generator, dtype=torch.float64), dim=1
    )
    grads = []
    for loss in (PositiveDebiased(0.5, 0.1, most_negatives=count), InfoNCE(0.5)):
        positive_BMD = one.positive_BMD.clone().requires_grad_()
        loss(one.z_BD, positive_BMD, angle).loss.backward()
        grads.append(float(positive_BMD.grad.norm()))
    assert grads[0] / grads[1] == pytest.approx(share, rel=0.5)
