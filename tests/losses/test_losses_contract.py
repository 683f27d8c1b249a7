"""What holds for every loss in the table."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from losses_cases import case
from torch.nn import functional as F

from stream_ssl.losses import LOSSES, Loss

BUILD: dict[str, Callable[[], Loss]] = {"infonce": lambda: LOSSES["infonce"](temperature=0.3)}


@pytest.fixture(params=sorted(LOSSES))
def loss(request: pytest.FixtureRequest) -> Loss:
    return BUILD[request.param]()


def test_every_loss_is_under_this_contract() -> None:
    assert set(BUILD) == set(LOSSES)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("positives", [1, 3])
def test_outputs_have_the_shapes_promised(loss: Loss, shared: bool, positives: int) -> None:
    given = case(shared=shared, positives=positives)
    out = loss(*given)
    assert out.loss.shape == ()
    assert out.per_anchor.shape == (5,)
    assert torch.equal(out.loss, out.per_anchor.mean())
    assert all(isinstance(value, float) for value in out.diagnostics.values())
    assert all(math.isfinite(value) for value in out.diagnostics.values())


def test_order_of_negatives_changes_nothing(loss: Loss) -> None:
    z_BD, positive_BMD, negative_ND, mask_BN = case(negatives=50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    one = loss(z_BD, positive_BMD, negative_ND, mask_BN).per_anchor
    other = loss(z_BD, positive_BMD, negative_ND[order], mask_BN[:, order]).per_anchor
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_masked_negatives_are_as_if_absent(loss: Loss) -> None:
    z_BD, positive_BMD, negative_ND, _ = case(negatives=12)
    mask_BN = torch.zeros(5, 12, dtype=torch.bool)
    mask_BN[:, 4:9] = True
    kept_ND = negative_ND[~mask_BN[0]]
    masked = loss(z_BD, positive_BMD, negative_ND, mask_BN)
    absent = loss(z_BD, positive_BMD, kept_ND)
    torch.testing.assert_close(masked.per_anchor, absent.per_anchor, rtol=1e-12, atol=1e-12)
    assert masked.diagnostics == pytest.approx(absent.diagnostics)


def test_shared_negatives_equal_the_same_per_anchor(loss: Loss) -> None:
    z_BD, positive_BMD, negative_ND, mask_BN = case()
    negative_BND = negative_ND.expand(5, -1, -1)
    one = loss(z_BD, positive_BMD, negative_ND, mask_BN)
    other = loss(z_BD, positive_BMD, negative_BND, mask_BN)
    torch.testing.assert_close(one.per_anchor, other.per_anchor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("positives", [1, 2])
def test_gradients_of_all_inputs(loss: Loss, shared: bool, positives: int) -> None:
    z_BD, positive_BMD, negative, mask_BN = case(shared=shared, positives=positives)
    inputs = tuple(x.clone().requires_grad_() for x in (z_BD, positive_BMD, negative))
    assert torch.autograd.gradcheck(lambda *x: loss(*x, mask_BN).per_anchor, inputs)


def test_all_alike_and_single_rows_stay_finite(loss: Loss) -> None:
    z_BD = torch.full((1, 4), 0.5, requires_grad=True)
    out = loss(z_BD, z_BD.detach().unsqueeze(1), z_BD.detach())
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(z_BD.grad).all()


@pytest.mark.parametrize("temperature", [0.02, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_wide(
    loss: Loss, temperature: float, dtype: torch.dtype
) -> None:
    loss.temperature = temperature
    z_BD, positive_BMD, negative_ND, mask_BN = case(batch=16, negatives=300, dim=32)
    narrow = [x.to(dtype) for x in (z_BD, positive_BMD, negative_ND)]
    z = narrow[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = loss(z, *narrow[1:], mask_BN)
    out.loss.backward()
    exact = loss(*(x.detach().double() for x in narrow), mask_BN)
    assert out.loss.dtype == torch.float32
    assert z.grad.dtype == dtype
    assert torch.isfinite(z.grad).all()
    torch.testing.assert_close(out.per_anchor.double(), exact.per_anchor, rtol=1e-4, atol=1e-4)


def test_bad_shapes_are_named(loss: Loss) -> None:
    z_BD, positive_BMD, negative_ND, mask_BN = case()
    with pytest.raises(ValueError, match=r"positives have shape \(5, 4\)"):
        loss(z_BD, positive_BMD[:, 0], negative_ND)
    with pytest.raises(ValueError, match="M = 0"):
        loss(z_BD, positive_BMD[:, :0], negative_ND)
    with pytest.raises(ValueError, match=r"negatives have shape \(9, 3\)"):
        loss(z_BD, positive_BMD, negative_ND[:, :3])
    with pytest.raises(ValueError, match=r"negatives have shape \(4, 9, 4\)"):
        loss(z_BD, positive_BMD, negative_ND.expand(4, -1, -1))
    with pytest.raises(ValueError, match=r"mask has shape \(5, 8\)"):
        loss(z_BD, positive_BMD, negative_ND, mask_BN[:, :8])
    with pytest.raises(ValueError, match="B >= 1"):
        loss(z_BD[:0], positive_BMD[:0], negative_ND)


@pytest.mark.parametrize("temperature", [0.0, -0.1, math.inf, math.nan])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_temperature_must_be_positive(name: str, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        LOSSES[name](temperature=temperature)


def test_numbers_that_are_not_finite_show(loss: Loss) -> None:
    z_BD, positive_BMD, negative_ND, _ = case()
    z_BD[2, 1] = math.nan
    out = loss(F.normalize(z_BD, dim=1), positive_BMD, negative_ND)
    assert torch.isnan(out.loss)
    assert torch.isfinite(out.per_anchor[[0, 1, 3, 4]]).all()
