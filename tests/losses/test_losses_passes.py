"""The passes over the negatives: chunked, fused and weighted, against plain autograd."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from forked import Forked, run_script
from losses_cases import case, unit
from losses_table import RICHEST, VARIANTS, call
from table import table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stream_ssl.losses import fused, negatives, scan
from stream_ssl.losses.negatives import sum_negatives, sum_weighted


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


@pytest.mark.parametrize("shared", [True, False])
def test_weighted_sums_agree_with_plain_autograd(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(scan, "CHUNK_LOGITS_CPU", 1)
    z_BD, _, negative, mask_BN = case(batch=6, negatives=600, dim=8, shared=shared)
    weight_BN = mask_BN.double() / 7
    grads = []
    for ours in (True, False):
        n = negative.clone().requires_grad_()
        if ours:
            sum_BD = sum_weighted(n, z_BD, lambda chunk: weight_BN[:, chunk])
        else:
            sum_BD = weight_BN @ n if shared else torch.einsum("bn,bnd->bd", weight_BN, n)
        (sum_BD * z_BD).sum().backward()
        grads.append((sum_BD.detach(), n.grad))
    for ours_value, plain_value in zip(*grads, strict=True):
        torch.testing.assert_close(ours_value, plain_value, rtol=1e-12, atol=1e-12)


@table("cuts", [(0, 300), (0, 1, 300), (0, 100, 100, 250, 300)])
def test_partial_sums_merge_exactly(cuts: tuple[int, ...]) -> None:
    z_BD, _, negative_ND, mask_BN = case(batch=6, negatives=300, dim=8)
    mask_BN[1] = True  # no negative in any part
    mask_BN[2, :100] = True  # none in some
    whole = sum_negatives(z_BD, negative_ND, mask_BN, 0.1)
    parts = [sum_negatives(z_BD, negative_ND[a:b], mask_BN[:, a:b], 0.1) for a, b in pairwise(cuts)]
    logsumexp_B, mean_BD = scan.merge(
        torch.stack([part.logsumexp_B for part in parts]),
        torch.stack([part.mean_BD for part in parts]),
    )
    torch.testing.assert_close(logsumexp_B, whole.logsumexp_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean_BD, whole.mean_BD, rtol=1e-12, atol=1e-12)


@table("count", [0, 1, 7, 250, 1000, 5003])
def test_the_fused_pass_equals_the_chunked_pass(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(scan, "CHUNK_LOGITS_CPU", 6 * 1500)  # several chunks, a rest in each
    generator = torch.Generator().manual_seed(0)
    z_BD = unit(6, 16, generator=generator, dtype=torch.float32)
    negative_ND = unit(count, 16, generator=generator, dtype=torch.float32)
    mask_BN = torch.rand(6, count, generator=generator) < 0.3
    mask_BN[1] = True
    mask_BN[2, : count // 2] = True
    for temperature in (0.02, 0.5):
        for mask in (mask_BN, None):
            arguments = (z_BD / temperature, negative_ND, mask)
            one, other = fused.fused_scan(*arguments), scan.scan(*arguments)
            assert one.largest_B is None
            for name in ("logsumexp_B", "mean_BD", "count_B", "total_B"):
                torch.testing.assert_close(
                    getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4, msg=name
                )


@table("name", [name for name in RICHEST if name != "cosine"])
def test_losses_on_the_fused_pass_equal_losses_on_chunks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = case(batch=6, positives=2, negatives=700, dim=16, dtype=torch.float32)
    found = []
    for fits in (True, False):
        monkeypatch.setattr(negatives, "can_fuse", lambda *_, fits=fits: fits)
        z_BD = one.z_BD.clone().requires_grad_()
        out = call(VARIANTS[name].build(), one._replace(z_BD=z_BD))
        out.loss.backward()
        assert ("first" in out.diagnostics) is not fits
        told = {name: value for name, value in out.diagnostics.items() if name != "first"}
        found.append((out.per_anchor.detach(), z_BD.grad, told))
    (loss_B, grad, told), (plain_B, plain_grad, plain_told) = found
    torch.testing.assert_close(loss_B, plain_B, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-3, atol=1e-5)
    assert told == pytest.approx(plain_told, rel=1e-3, abs=1e-5)


def test_the_fused_pass_makes_no_floating_tensor_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No floating tensor holds more than an eighth of the pairs, with or without a mask."""
    monkeypatch.setattr(scan, "CHUNK_LOGITS_CPU", 1 << 30)  # all at once, but for the masks
    monkeypatch.setattr(fused, "MASKED", 1 << 18)
    generator = torch.Generator().manual_seed(0)
    z_BD = unit(64, 8, generator=generator, dtype=torch.float32) / 0.2
    negative_ND = unit(40_000, 8, generator=generator, dtype=torch.float32)
    for mask_BN in (None, torch.rand(64, 40_000, generator=generator) < 0.01):
        with Largest() as largest:
            one = fused.fused_scan(z_BD, negative_ND, mask_BN)
        assert largest.floats <= 64 * 40_000 / 8
        other = scan.scan(z_BD, negative_ND, mask_BN)
        torch.testing.assert_close(one[:4], other[:4], rtol=1e-3, atol=1e-3)


class Largest(TorchDispatchMode):
    """The largest floating tensor that an operator made."""

    floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.floats = max([self.floats, *(x.numel() for x in made if x.is_floating_point())])
        return found


def test_the_fused_pass_is_not_used_on_a_cpu() -> None:
    z_BD, negative_ND = torch.zeros(2, 8), torch.zeros(3, 8)
    assert not fused.can_fuse(z_BD, negative_ND)  # on a CPU the chunks are as fast


def test_a_kernel_with_wrong_sums_or_an_error_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    untried, cpu = fused.sound.__wrapped__, torch.device("cpu")
    assert untried(cpu)
    right = fused._attention

    def coarse(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, logsumexp = right(*arguments)
        return mean, logsumexp * 1.01

    def missing(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no kernel")

    for kernel, reason in ((coarse, "another sum"), (missing, "no kernel")):
        monkeypatch.setattr(fused, "_attention", kernel)
        with pytest.warns(UserWarning, match=f"chunks are used: .*{reason}"):
            assert not untried(cpu)


PEAK = """
import torch
from pathlib import Path
from torch.nn.functional import normalize
from stream_ssl.losses import Debiased

torch.manual_seed(0)
z_BD = normalize(torch.randn(256, 8), dim=1).requires_grad_()
positive_BMD = z_BD.detach().unsqueeze(1)
negative_ND = normalize(torch.randn(1 << 20, 8), dim=1)
loss = Debiased(0.5)
loss(z_BD, positive_BMD, negative_ND[:5000]).loss.backward()  # what is allocated once


def held(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024


Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS:")
loss(z_BD, positive_BMD, negative_ND).loss.backward()
print(held("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_million_negatives_take_little_memory(tmp_path: Path) -> None:
    """256 x 2^20 logits would take a gigabyte."""
    script, output = tmp_path / "peak.py", tmp_path / "output"
    script.write_text(PEAK)
    process = Forked(run_script, script, output=output)
    try:
        assert process.wait(150) == 0, output.read_text()
    finally:
        process.kill()
    assert float(output.read_text()) < 200
