"""InfoNCE against a loop, closed forms, and plain autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_cases import case, unit
from losses_naive import infonce

from stream_ssl.losses import InfoNCE, scan
from stream_ssl.losses.negatives import sum_negatives


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 6),
    positives=st.integers(1, 3),
    count=st.integers(1, 12),
    temperature=st.floats(0.05, 2.0),
    shared=st.booleans(),
)
def test_equals_the_loop(
    seed: int, batch: int, positives: int, count: int, temperature: float, shared: bool
) -> None:
    given_case = case(seed, batch, positives, count, shared=shared)
    out = InfoNCE(temperature)(*given_case)
    expected = infonce(*given_case, temperature)
    assert out.per_anchor.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_all_embeddings_equal_gives_log_of_n_plus_1(count: int) -> None:
    row_D = torch.tensor([0.6, 0.8], dtype=torch.float64)
    out = InfoNCE(0.1)(row_D.expand(3, 2), row_D.expand(3, 1, 2), row_D.expand(count, 2))
    assert out.per_anchor.tolist() == pytest.approx([math.log(count + 1)] * 3, rel=1e-12)
    assert out.diagnostics["effective_negatives"] == pytest.approx(count)
    assert out.diagnostics["positive_similarity"] == pytest.approx(1)
    assert out.diagnostics["negative_similarity"] == pytest.approx(1)


def test_an_anchor_without_negatives_has_no_loss_and_no_gradient() -> None:
    z_BD, positive_BMD, negative_ND, mask_BN = case()
    mask_BN[1] = True
    z_BD.requires_grad_()
    out = InfoNCE(0.2)(z_BD, positive_BMD, negative_ND, mask_BN)
    out.loss.backward()
    assert out.per_anchor[1] == 0
    assert torch.equal(z_BD.grad[1], torch.zeros(4, dtype=torch.float64))
    assert torch.isfinite(z_BD.grad).all()
    assert (z_BD.grad[[0, 2, 3, 4]].abs().sum(1) > 0).all()


def test_no_negatives_at_all_is_finite() -> None:
    z_BD, positive_BMD, negative_ND, _ = case()
    out = InfoNCE(0.2)(z_BD.requires_grad_(), positive_BMD, negative_ND[:0])
    out.loss.backward()
    assert out.loss == 0
    assert torch.equal(z_BD.grad, torch.zeros_like(z_BD))
    assert out.diagnostics["negatives"] == out.diagnostics["effective_negatives"] == 0


@pytest.mark.parametrize("shared", [True, False])
def test_chunks_agree_with_plain_autograd(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(scan, "CHUNK_LOGITS_CPU", 1)  # 256 negatives a chunk, the least
    z_BD, _, negative, mask_BN = case(batch=6, negatives=1000, dim=8, shared=shared)
    mask_BN[2, :256] = True  # a first chunk without any negative
    pulled = torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grads = []
    for ours in (True, False):
        z, n = z_BD.clone().requires_grad_(), negative.clone().requires_grad_()
        if ours:
            value_B = sum_negatives(z, n, mask_BN, 0.1).logsumexp_B
        else:
            cosine_BN = z @ n.T if shared else torch.einsum("bd,bnd->bn", z, n)
            value_B = (cosine_BN / 0.1).masked_fill(mask_BN, -math.inf).logsumexp(1)
        (value_B * pulled).sum().backward()
        grads.append((value_B.detach(), z.grad, n.grad))
    for ours_value, plain_value in zip(*grads, strict=True):
        torch.testing.assert_close(ours_value, plain_value, rtol=1e-12, atol=1e-12)


def test_nothing_of_size_n_is_kept_for_the_backward_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    z_BD = unit(8, 16, generator=generator, dtype=torch.float32).requires_grad_()
    negative_ND = unit(5000, 16, generator=generator, dtype=torch.float32)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        InfoNCE(0.2)(z_BD, z_BD.detach().unsqueeze(1), negative_ND)
    assert kept
    assert max(kept) <= 8 * 16


def test_diagnostics_by_hand() -> None:
    z_BD = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    positive_BMD = torch.tensor([[[0.6, 0.8]], [[0.0, 1.0]]], dtype=torch.float64)
    negative_ND = torch.tensor([[0.8, 0.6], [-1.0, 0.0]], dtype=torch.float64)
    mask_BN = torch.tensor([[False, False], [True, False]])
    found = InfoNCE(0.5)(z_BD, positive_BMD, negative_ND, mask_BN).diagnostics
    weights = torch.tensor([0.8, -1.0], dtype=torch.float64).div(0.5).softmax(0)
    entropy = float(-(weights * weights.log()).sum())
    assert found == pytest.approx(
        {
            "positive_similarity": 0.8,
            "negative_similarity": (0.8 - 1.0 + 0.0) / 3,
            "negatives": 1.5,
            "effective_negatives": (math.exp(entropy) + 1) / 2,
            "clamp_rate": 0.0,
            "first": 0.5,
        }
    )
