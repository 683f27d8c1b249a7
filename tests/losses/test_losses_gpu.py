"""Tests that losses on a simulated GPU equal those of the CPU, without waits of the host."""

from __future__ import annotations

import pytest
import torch
from losses_cases import Case, case
from losses_table import RICHEST, VARIANTS, Known, call, known

from benchmarks.simulated_gpu import GPU, SimulatedGpu
from stream_ssl.losses import Loss, LossOutput, negatives


def backward(loss: Loss, one: Case, said: Known) -> tuple[LossOutput, list[torch.Tensor]]:
    """The output, and the gradients of anchors and negatives."""
    leaves = [one.z_BD.requires_grad_(), one.negative.requires_grad_()]
    out = call(loss, one, said)
    out.loss.backward()
    return out, [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", RICHEST)
def test_a_loss_on_a_gpu_equals_that_of_the_cpu_and_waits_only_for_diagnostics(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for fused in (True, False):
        monkeypatch.setattr(negatives, "can_fuse", lambda *_, fused=fused: fused)
        one = case(batch=6, positives=2, negatives=300, dim=16, dtype=torch.float32)
        said = known(one)
        with SimulatedGpu() as gpu:
            there = Case(*(x.detach().to(GPU) for x in one))
            said_there = Known(*(x.to(GPU) for x in said))
            gpu.waits.clear()
            found, grads = backward(VARIANTS[name].build(), there, said_there)
            assert gpu.waits == []
            diagnostics = dict(found.diagnostics)
            assert len(gpu.waits) == 1
        expected, gradients = backward(VARIANTS[name].build(), one, said)
        assert torch.equal(found.per_anchor.value, expected.per_anchor)
        for grad, gradient in zip(grads, gradients, strict=True):
            assert torch.equal(getattr(grad, "value", grad), gradient)
        assert diagnostics == dict(expected.diagnostics)
