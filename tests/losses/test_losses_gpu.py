"""Losses on a simulated GPU: what they find on the CPU, and nothing that the host waits for."""

from __future__ import annotations

import pytest
import torch
from losses_cases import Case, case
from losses_table import VARIANTS, Known, call, known
from simulated_gpu import GPU, SimulatedGpu

from stream_ssl.losses import Loss, LossOutput, negatives


def learnt(loss: Loss, given: Case, said: Known) -> tuple[LossOutput, list[torch.Tensor]]:
    """The output, and the gradients of anchors and negatives."""
    leaves = [given.z_BD.requires_grad_(), given.negative.requires_grad_()]
    out = call(loss, given, said)
    out.loss.backward()
    return out, [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "chunked"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, name: str, fused: bool) -> None:
    monkeypatch.setattr(negatives, "can_fuse", lambda *_: fused)
    given = case(batch=6, positives=2, negatives=300, dim=16, dtype=torch.float32)
    said = known(given)
    with SimulatedGpu() as gpu:
        there = Case(*(one.detach().to(GPU) for one in given))
        said_there = Known(*(one.to(GPU) for one in said))
        gpu.waits.clear()
        found, grads = learnt(VARIANTS[name].build(), there, said_there)
        assert gpu.waits == []
        diagnostics = dict(found.diagnostics)
        assert len(gpu.waits) == 1
    expected, gradients = learnt(VARIANTS[name].build(), given, said)
    assert torch.equal(found.per_anchor.value, expected.per_anchor)
    for grad, gradient in zip(grads, gradients, strict=True):
        assert torch.equal(getattr(grad, "value", grad), gradient)
    assert diagnostics == dict(expected.diagnostics)
