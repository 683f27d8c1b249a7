"""The contract of every loss in the table, in each of its variants."""

from __future__ import annotations

import math

import losses_naive as naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_cases import Case, case
from losses_table import CONTRASTIVE, RICHEST, VARIANTS, Known, T, call, known
from table import table
from torch.nn import functional as F

from stream_ssl.losses import LOSSES, Debiased, HardNegative, Mix, PositiveDebiased

by_name = table("name", sorted(VARIANTS))
by_class = table("name", RICHEST)
contrastive = table("name", CONTRASTIVE)


def test_every_loss_is_under_this_contract() -> None:
    for names in (VARIANTS, RICHEST):
        assert {type(VARIANTS[name].build()) for name in names} == set(LOSSES.values())


@pytest.mark.parametrize("name", sorted(VARIANTS))
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 5),
    positives=st.integers(1, 3),
    count=st.integers(1, 9),
    temperature=st.floats(0.05, 2.0),
    shared=st.booleans(),
)
def test_every_loss_equals_its_twin(
    name: str, seed: int, batch: int, positives: int, count: int, temperature: float, shared: bool
) -> None:
    loss, one = VARIANTS[name].build(), case(seed, batch, positives, count, shared=shared)
    loss.temperature = temperature
    said = known(one, seed)
    expected = VARIANTS[name].twin(*one, temperature, *said)
    assert call(loss, one, said).per_anchor.tolist() == pytest.approx(
        expected.tolist(), rel=1e-8, abs=1e-10
    )


@by_name
def test_the_gradients_of_every_loss_equal_those_of_its_twin(name: str) -> None:
    loss = VARIANTS[name].build()
    for shared, positives in ((True, 3), (False, 1)):
        one = case(shared=shared, positives=positives)
        said, pulled = known(one), torch.rand(5, generator=torch.Generator().manual_seed(3))
        grads = []
        for ours in (True, False):
            inputs = [x.clone().requires_grad_() for x in one[:3]]
            again = Case(*inputs, one.mask_BN)
            if ours:
                per_anchor = call(loss, again, said).per_anchor
            else:
                per_anchor = VARIANTS[name].twin(*again, T, *said)
            (per_anchor * pulled).sum().backward()
            grads.append([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs])
        for mine, plain in zip(*grads, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)
        assert grads[0][0].abs().sum() > 0


@table("name", ["decoupled", *(n for n in RICHEST if VARIANTS[n].smooth)])
def test_every_smooth_loss_passes_gradcheck(name: str) -> None:
    loss = VARIANTS[name].build()
    for shared in (True, False):
        # Each number of the inputs costs two forward passes.
        one = case(batch=3, positives=2, negatives=5, dim=3, shared=shared)
        inputs = [x.clone().requires_grad_() for x in one[: 3 if loss.uses_negatives else 2]]
        assert torch.autograd.gradcheck(
            lambda *x, one=one: call(loss, Case(*x, *one[len(x) :])).per_anchor, inputs
        )


@by_name
def test_a_second_derivative_is_refused(name: str) -> None:
    """A second derivative would lack the term of the negatives."""
    loss = VARIANTS[name].build()
    if not loss.uses_negatives:
        return
    one = case()
    z_BD = one.z_BD.clone().requires_grad_()
    value = call(loss, one._replace(z_BD=z_BD), known(one)).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, z_BD, create_graph=True)


@table("name", ["self-labeling"])
def test_self_labeling_passes_gradcheck_by_its_anchors(name: str) -> None:
    loss = VARIANTS[name].build()
    for shared in (True, False):
        one = case(shared=shared, positives=2)
        z_BD = one.z_BD.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z, one=one: call(loss, one._replace(z_BD=z)).per_anchor, (z_BD,)
        )


@by_class
def test_outputs_have_the_documented_shapes_and_diagnostics(name: str) -> None:
    loss = VARIANTS[name].build()
    for shared, positives in ((True, 3), (False, 1)):
        out = call(loss, case(shared=shared, positives=positives))
        assert out.loss.shape == ()
        assert out.per_anchor.shape == (5,)
        assert out.loss.dtype == out.per_anchor.dtype == torch.float64
        assert torch.equal(out.loss, out.per_anchor.mean())
        assert "positive_similarity" in out.diagnostics
        if loss.uses_negatives:
            wanted = {"negative_similarity", "negatives", "effective_negatives", "clamp_rate"}
            assert wanted <= set(out.diagnostics)
        assert all(isinstance(value, float) for value in out.diagnostics.values())
        assert all(math.isfinite(value) for value in out.diagnostics.values())


@contrastive
def test_rates_count_only_anchors_with_a_negative(name: str) -> None:
    """Compare with a loop over single anchors. Half of the anchors have no negative."""
    loss, one = VARIANTS[name].build(), case(seed=2, batch=6)
    said = known(one)
    one.mask_BN[1::2] = True  # every other anchor is left without a negative
    found = call(loss, one, said).diagnostics
    for rate in {"clamp_rate", "first", "prior"} & set(found):
        total = 0.0
        for b in range(0, 6, 2):
            alone = Case(*(x[b : b + 1] for x in one[:2]), one.negative, one.mask_BN[b : b + 1])
            its = Known(*(None if x is None else x[b : b + 1] for x in said))
            total += call(loss, alone, its).diagnostics[rate]
        assert found[rate] == pytest.approx(total / 3, abs=1e-12), rate


def test_the_clamp_rate_equals_that_of_a_loop() -> None:
    tau, t = 0.4, 0.3
    one = case(seed=5, batch=40, negatives=3)
    one.mask_BN[::3] = True
    clamped = []
    for row in naive.rows(*one, t):
        if row.negatives:
            average = sum(float(row.e(n)) for n in row.negatives) / len(row.negatives)
            g = (average - tau * float(row.e(row.positives[0]))) / (1 - tau)
            clamped.append(g <= math.exp(-1 / t))
    assert 0 < sum(clamped) < len(clamped) < 40
    for loss in (Debiased(t, tau), HardNegative(t, tau, beta=0.0)):
        found = loss(*one).diagnostics["clamp_rate"]
        assert found == pytest.approx(sum(clamped) / len(clamped))


def test_the_clamp_rate_is_0_if_no_anchor_has_a_negative() -> None:
    for loss in (Debiased(0.1), HardNegative(0.1), PositiveDebiased(0.1, 0.01)):
        one = case(batch=4)
        one.mask_BN[:] = True
        assert call(loss, one).diagnostics["clamp_rate"] == 0


@by_class
def test_the_order_and_the_layout_of_negatives_do_not_change_a_loss(name: str) -> None:
    loss = VARIANTS[name].build()
    one = case(negatives=50)
    said = known(one)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    moved = one._replace(negative=one.negative[order], mask_BN=one.mask_BN[:, order])
    own = one._replace(negative=one.negative.expand(5, -1, -1))
    expected_B = call(loss, one, said).per_anchor
    for other in (
        call(loss, moved, said._replace(same_BN=said.same_BN[:, order])),
        call(loss, own, said),
    ):
        torch.testing.assert_close(other.per_anchor, expected_B, rtol=1e-12, atol=1e-12)


@by_name
def test_masked_negatives_equal_absent_negatives(name: str) -> None:
    loss = VARIANTS[name].build()
    one, mask_BN = case(negatives=12), torch.zeros(5, 12, dtype=torch.bool)
    said = known(one)
    mask_BN[:, 4:9] = True
    kept = ~mask_BN[0]
    masked = call(loss, one._replace(mask_BN=mask_BN), said)
    absent = loss(
        one.z_BD,
        one.positive_BMD,
        one.negative[kept],
        same_BN=said.same_BN[:, kept],
        prior_B=said.prior_B,
    )
    torch.testing.assert_close(masked.per_anchor, absent.per_anchor, rtol=1e-12, atol=1e-12)
    assert masked.diagnostics == pytest.approx(absent.diagnostics)


@by_class
def test_losses_of_equal_and_single_rows_are_finite(name: str) -> None:
    loss = VARIANTS[name].build()
    z_BD = torch.full((1, 4), 0.5, requires_grad=True)
    row_BD = z_BD.detach()
    said = {"same_BN": torch.tensor([[False]]), "prior_B": torch.tensor([0.1])}
    for negative_ND in (row_BD, row_BD[:0]):
        mine = {**said, "same_BN": said["same_BN"][:, : len(negative_ND)]}
        out = loss(z_BD, row_BD.unsqueeze(1), negative_ND, **mine)
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.isfinite(z_BD.grad).all()


@contrastive
def test_an_anchor_without_negatives_has_no_loss_and_no_gradient(name: str) -> None:
    loss = VARIANTS[name].build()
    one = case(positives=2)
    one.mask_BN[1] = True
    z_BD = one.z_BD.requires_grad_()
    positive_BMD = one.positive_BMD.requires_grad_()
    out = call(loss, one)
    out.loss.backward()
    assert out.per_anchor[1] == 0
    assert not z_BD.grad[1].any()
    assert not positive_BMD.grad[1].any()
    assert torch.isfinite(z_BD.grad).all()
    assert (z_BD.grad[[0, 2, 3, 4]].abs().sum(1) > 0).all()


TEMPERATURES, DTYPES = (0.02, 0.2, 2.0), (torch.float32, torch.bfloat16, torch.float16)


@by_name
def test_narrow_inputs_are_computed_in_float32(name: str) -> None:
    """Each loss meets each temperature and each type once. All losses meet every pair."""
    loss = VARIANTS[name].build()
    first = sorted(VARIANTS).index(name)
    for number, dtype in enumerate(DTYPES):
        loss.temperature = TEMPERATURES[(first + number) % 3]
        one = case(batch=16, negatives=300, dim=32)
        said = known(one)
        narrow = [x.to(dtype) for x in one[:3]]
        z = narrow[0].requires_grad_()
        with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype):
            out = call(loss, Case(z, *narrow[1:], one.mask_BN), said)
        out.loss.backward()
        wide = Case(*(x.detach().double() for x in narrow), one.mask_BN)
        exact_z = wide.z_BD.requires_grad_()
        exact = call(loss, wide, said)
        exact.loss.backward()
        assert out.loss.dtype == torch.float32
        assert z.grad.dtype == dtype
        torch.testing.assert_close(out.per_anchor.double(), exact.per_anchor, rtol=1e-4, atol=1e-4)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(
            z.grad.double(), exact_z.grad, rtol=max(step, 1e-3), atol=max(step, 1e-4)
        )


@by_class
def test_no_tensor_as_large_as_the_negatives_is_kept_for_the_backward_pass(name: str) -> None:
    loss = VARIANTS[name].build()
    size, one = 2000, case(batch=8, negatives=2000, dim=16, dtype=torch.float32)
    said = known(one)
    inputs = [*one, *said]
    one.z_BD.requires_grad_()
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if all(tensor.data_ptr() != x.data_ptr() for x in inputs):
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call(loss, one, said)
    views = 2  # each may be an anchor
    assert max(kept, default=0) <= 8 * 16 * views < size


@by_class
def test_a_nan_in_the_inputs_gives_a_nan_loss(name: str) -> None:
    loss = VARIANTS[name].build()
    one = case()
    one.z_BD[2, 1] = math.nan
    out = call(loss, one._replace(z_BD=F.normalize(one.z_BD, dim=1)))
    assert torch.isnan(out.loss)
    if name != "decoupled, weighted":  # its weight is a mean over the batch
        assert torch.isfinite(out.per_anchor[[0, 1, 3, 4]]).all()
    if loss.uses_negatives:
        other = case()
        other.negative[0, 1] = math.nan
        assert torch.isnan(call(loss, other).loss)


@table("name", ["infonce", "cosine"])
def test_losses_reject_wrong_shapes_and_types(name: str) -> None:
    loss = VARIANTS[name].build()
    z_BD, positive_BMD, negative_ND, mask_BN = one = case()
    same_BN, prior_B = known(one)
    with pytest.raises(ValueError, match=r"positives have shape \(5, 4\)"):
        loss(z_BD, positive_BMD[:, 0], negative_ND)
    with pytest.raises(ValueError, match="M = 0"):
        loss(z_BD, positive_BMD[:, :0], negative_ND)
    with pytest.raises(ValueError, match=r"negatives have shape \(9, 3\)"):
        loss(z_BD, positive_BMD, negative_ND[:, :3])
    with pytest.raises(ValueError, match=r"negatives have shape \(4,\)"):
        loss(z_BD, positive_BMD, negative_ND[0])
    with pytest.raises(TypeError, match=r"anchors are torch.int64"):
        loss(z_BD.long(), positive_BMD, negative_ND)
    with pytest.raises(ValueError, match=r"negatives have shape \(4, 9, 4\)"):
        loss(z_BD, positive_BMD, negative_ND.expand(4, -1, -1))
    with pytest.raises(ValueError, match=r"mask has shape \(5, 8\)"):
        loss(z_BD, positive_BMD, negative_ND, mask_BN[:, :8])
    with pytest.raises(ValueError, match=r"mask has .* of torch.float32"):
        loss(z_BD, positive_BMD, negative_ND, mask_BN.float())
    with pytest.raises(ValueError, match=r"same_BN has shape \(4, 9\)"):
        loss(z_BD, positive_BMD, negative_ND, same_BN=same_BN[:4])
    with pytest.raises(ValueError, match=r"prior_B has shape \(4,\)"):
        loss(z_BD, positive_BMD, negative_ND, prior_B=prior_B[:4])
    with pytest.raises(TypeError, match="anchors are of type ndarray: pass a torch tensor"):
        loss(z_BD.numpy(), positive_BMD, negative_ND)
    with pytest.raises(ValueError, match="B >= 1"):
        loss(z_BD[:0], positive_BMD[:0], negative_ND)


@table("name", sorted(set(LOSSES) - {"negative-cosine"}))
def test_temperature_must_be_positive(name: str) -> None:
    for temperature in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature is"):
            LOSSES[name](temperature=temperature)
    for number in (np.float32(0.5), np.int64(1)):  # of a sweep
        assert LOSSES[name](temperature=number).temperature == float(number)


@by_name
def test_losses_reject_calls_without_the_labels_or_the_prior_that_they_need(name: str) -> None:
    loss = VARIANTS[name].build()
    one = case()
    same_BN, prior_B = known(one)
    if loss.needs_labels:
        with pytest.raises(ValueError, match="needs labels"):
            loss(*one, prior_B=prior_B)
    if loss.needs_prior:
        with pytest.raises(ValueError, match="prior_B was not given"):
            loss(*one, same_BN=same_BN)
    if not loss.needs_labels and not loss.needs_prior:
        assert torch.equal(loss(*one).per_anchor, call(loss, one).per_anchor)


@by_class
def test_only_self_labeling_accepts_mixed_anchors(name: str) -> None:
    loss = VARIANTS[name].build()
    one, said = case(), known(case())
    mix = Mix(torch.arange(5).roll(1), torch.full((5,), 0.5))
    if loss.takes_mix:
        assert torch.isfinite(loss(*one, mix=mix).loss)
        with pytest.raises(ValueError, match=r"mix has shapes \(3,\) and \(5,\)"):
            loss(*one, mix=Mix(torch.arange(3), mix.theta_B))
    else:
        with pytest.raises(ValueError, match="cannot label mixed anchors"):
            loss(*one, same_BN=said.same_BN, prior_B=said.prior_B, mix=mix)


@by_class
def test_a_loss_holds_no_state_but_its_step(name: str) -> None:
    loss = VARIANTS[name].build()
    one = case()
    said: Known = known(one)
    first = call(loss, one, said).per_anchor
    call(loss, case(seed=1))
    assert torch.equal(call(loss, one, said).per_anchor, first)
    assert not loss.state_dict()
