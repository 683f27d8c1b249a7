"""The study's baselines against their papers' equations, one pair at a time in float64.

Shapes: V views, B samples of a batch, R samples of the memory, D embedding.
"""

from __future__ import annotations

import copy

import pytest
import torch
from methods_small import (
    BATCH,
    DIM,
    SmallEncoder,
    SmallProjector,
    memory_of,
    plain,
    samples_of,
    step,
    views_of,
)
from table import table
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.experiments.study.baselines import (
    METHODS,
    Aligned,
    Distilled,
    MultiPatches,
    Osiris,
    Replaying,
)
from stream_ssl.losses import InfoNCE
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import MethodOutput, MoCo

T, R, HELD = 0.3, 2, 9
NEW = BATCH - R


def noisy(image_RCHW: Tensor) -> Tensor:
    return plain(image_RCHW) + torch.randn(image_RCHW.shape)


def made(kind: type[MoCo], **options: object) -> MoCo:
    """Return a small method whose copies of the network all differ from it."""
    torch.manual_seed(0)
    if issubclass(kind, Replaying):
        options |= {"augment": noisy, "replayed": R}
    method = kind(SmallEncoder(), SmallProjector(), InfoNCE(T), **options).train()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return method


def row_loss(anchor_D: Tensor, target_D: Tensor, negatives: list[Tensor]) -> Tensor:
    up = torch.exp(anchor_D @ target_D / T)
    return -torch.log(up / (up + sum(torch.exp(anchor_D @ other_D / T) for other_D in negatives)))


def mean_loss(anchor_BD: Tensor, target_BD: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the mean over anchors; the negatives are the other targets, or `others`."""
    losses = []
    for b, anchor_D in enumerate(anchor_BD):
        rest = [target_BD[i] for i in range(len(target_BD)) if i != b]
        losses.append(row_loss(anchor_D, target_BD[b], rest if others is None else list(others)))
    return torch.stack(losses).mean()


def moco(z_BD: Tensor, key_BD: Tensor, held: list[list[Tensor]]) -> Tensor:
    """Return MoCo's loss, where `held[b]` are the memory's negatives of anchor b."""
    losses = []
    for b, z_D in enumerate(z_BD):
        rest = [key_BD[i] for i in range(len(key_BD)) if i != b]
        losses.append(row_loss(normalize(z_D, dim=0), key_BD[b], rest + held[b]))
    return torch.stack(losses).mean()


@torch.no_grad()
def keys(twin: MoCo, view_BCHW: Tensor) -> Tensor:
    return normalize(twin.key_projector(twin.key_encoder(view_BCHW)), dim=1)


def distilled(twin: Distilled, views: list[Tensor], memory: WorkingMemory, **_: object) -> Tensor:
    held = list(memory.embeddings.double())
    z_BD = twin.projector(twin.encoder(views[0]))
    loss = moco(z_BD, keys(twin, views[1]), [held] * BATCH)
    with torch.no_grad():
        past_BD = normalize(twin.past(views[0]), dim=1)
    guess_BD = normalize(twin.predictor(z_BD), dim=1)
    return loss + twin.weight * mean_loss(guess_BD, past_BD)


def aligned(twin: Aligned, views: list[Tensor], memory: WorkingMemory, drawn: list[int]) -> Tensor:
    rows = dict(zip(memory.ids.tolist(), memory.embeddings.double(), strict=True))
    held = [list(rows.values())] * NEW
    held += [[row for other, row in rows.items() if other != own] for own in drawn]
    z_BD = twin.projector(twin.encoder(views[0]))
    loss = moco(z_BD, keys(twin, views[1]), held)
    with torch.no_grad():
        past_RD = normalize(twin.past(views[0][NEW:]), dim=1)
    guess_RD = normalize(twin.predictor(z_BD[NEW:]), dim=1)
    return loss + twin.weight * mean_loss(guess_RD, past_RD)


def osiris(twin: Osiris, views: list[Tensor], **_: object) -> Tensor:
    feature_BF = twin.encoder(views[0])
    with torch.no_grad():
        key_feature_BF = twin.key_encoder(views[1])
        key_BD = normalize(twin.key_projector(key_feature_BF), dim=1)[:NEW]
        z_key_BD, u_key_RD = normalize(twin.key_second(key_feature_BF), dim=1).split((NEW, R))
    current = mean_loss(normalize(twin.projector(feature_BF), dim=1)[:NEW], key_BD)
    z_BD, u_RD = normalize(twin.second(feature_BF), dim=1).split((NEW, R))
    cross = (mean_loss(z_BD, z_key_BD, u_key_RD) + mean_loss(u_RD, u_key_RD, z_key_BD)) / 2
    return current + (cross + mean_loss(u_RD, u_key_RD)) / 2


def many_views(
    twin: MultiPatches, views: list[Tensor], memory: WorkingMemory, **_: object
) -> Tensor:
    held, whole = list(memory.embeddings.double()), torch.cat(views)
    z_AD, key_AD = normalize(twin.projector(twin.encoder(whole)), dim=1), keys(twin, whole)
    target_BD = torch.stack(
        [normalize(sum(key_AD[b::BATCH]) / twin.views, dim=0) for b in range(BATCH)]
    )
    losses, rates = [], []
    for z_BD in z_AD.split(BATCH):
        losses.append(moco(z_BD, target_BD, [held] * BATCH))
        spread_DD = sum(torch.outer(z_D, z_D) for z_D in z_BD) * DIM / (BATCH * 0.2**2)
        rates.append(torch.linalg.slogdet(torch.eye(DIM) + spread_DD).logabsdet / 2)
    return (sum(losses) - twin.weight * sum(rates)) / twin.views


TWINS = {"cassle": distilled, "cla": aligned, "osiris": osiris, "cmp": many_views}
OPTIONS = {"cassle": {"period": 2}, "cmp": {"views": 3, "weight": 0.5}}


def both(kind: str) -> tuple[MoCo, MoCo, MethodOutput, Tensor]:
    """Return a method and its twin after a backward pass, the output and the twin's loss."""
    # At step 3 CaSSLe distils from a copy that is not renewed, so that the copy still differs.
    method = made(METHODS[kind], **OPTIONS.get(kind, {}))
    memory = memory_of(HELD)
    twin = copy.deepcopy(method).double()
    out = step(method, memory, seed=3)
    out.loss.loss.backward()
    views, drawn = views_of(method.views, seed=3), []
    if isinstance(method, Replaying):
        views, _, batch = method.mixed(views, samples_of(BATCH))
        drawn = batch.ids_B.tolist()
    expected = TWINS[kind](twin, [view.double() for view in views], memory=memory, drawn=drawn)
    expected.backward()
    return method, twin, out, expected


def test_every_method_has_a_twin() -> None:
    assert {*TWINS, "moco"} == {*METHODS}


@table("kind", sorted(TWINS))
def test_a_step_equals_that_of_the_paper_in_float64(kind: str) -> None:
    method, twin, out, expected = both(kind)
    torch.testing.assert_close(out.loss.loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss.per_anchor.mean(), out.loss.loss)
    for (name, ours), theirs in zip(method.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(
                ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-5, msg=name
            )


@table("kind", sorted(TWINS))
def test_every_sample_of_the_stream_gets_a_key(kind: str) -> None:
    out = both(kind)[2]
    torch.testing.assert_close(out.keys_BD.norm(dim=1), torch.ones(BATCH))
    assert len(out.keys_BD.unique(dim=0)) == BATCH


@table("kind", ["cla", "osiris"])
def test_a_memory_with_too_few_samples_is_not_drawn_from(kind: str) -> None:
    method, memory = made(METHODS[kind]), memory_of(R - 1)
    out = step(method, memory)
    assert method.replay is None
    assert len(out.loss.per_anchor) == len(out.keys_BD) == BATCH


def test_cassle_distils_from_the_copy_of_the_last_renewal() -> None:
    method, memory = made(Distilled, period=2), memory_of(HELD)
    out = step(method, memory, seed=1)
    torch.manual_seed(0)
    alone = made(MoCo)
    for ours, theirs in ((method.encoder, alone.encoder), (method.projector, alone.projector)):
        theirs.load_state_dict(ours.state_dict())
    for ours, theirs in zip(method.key_networks, alone.key_networks, strict=True):
        theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(out.loss.loss, step(alone, memory, seed=1).loss.loss)
    method.begin(2)
    renewed = copy.deepcopy(method.past.state_dict())
    assert torch.equal(renewed["1.layer.weight"], method.projector.layer.weight)
    assert torch.equal(renewed["0.norm.running_mean"], method.encoder.norm.running_mean)
    with torch.no_grad():
        method.projector.layer.weight.add_(1)
    step(method, memory, seed=3)
    assert method.distils
    torch.testing.assert_close(method.past.state_dict(), renewed)
    assert not any(parameter.requires_grad for parameter in method.past.parameters())


def test_cassle_refuses_a_period_of_no_updates() -> None:
    with pytest.raises(ValueError, match="period is 0"):
        made(Distilled, period=0)


def test_slow_averages_follow_after_an_update() -> None:
    for kind, slow, fast, share in (
        (Aligned, "past.1.layer.weight", "projector.layer.weight", 0.001),
        (Osiris, "key_second.layer.weight", "second.layer.weight", 0.01),
    ):
        method = made(kind)
        before = {name: value.clone() for name, value in method.state_dict().items()}
        method.after_update()
        expected = before[slow].lerp(before[fast], share)
        torch.testing.assert_close(method.state_dict()[slow], expected)
