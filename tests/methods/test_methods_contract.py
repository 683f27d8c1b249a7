"""What holds for every method in the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from methods_small import SmallEncoder, SmallProjector, memory_of
from torch import Tensor

from memory import WorkingMemory
from stream_ssl.losses import InfoNCE
from stream_ssl.methods import METHODS, Method, MethodOutput, MoCo

BUILD: dict[str, Callable[[], Method]] = {
    "moco": lambda: MoCo(SmallEncoder(), SmallProjector(), InfoNCE(0.2)),
    "moco by average": lambda: MoCo(
        SmallEncoder(), SmallProjector(), InfoNCE(0.2), key_statistics="average"
    ),
    **{
        f"moco of {how}": lambda how=how: MoCo(
            SmallEncoder(), SmallProjector(), InfoNCE(0.2), negatives=7, negatives_by=how
        )
        for how in ("uniform", "hardest", "stratified")
    },
}
BATCH = 6


@pytest.fixture(params=sorted(BUILD))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    torch.manual_seed(0)
    return BUILD[name]().train()


def views_of(method: Method, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, 1, 6, 6, generator=generator) for _ in range(method.views)]


def step(method: Method, memory: WorkingMemory, seed: int = 0) -> MethodOutput:
    ids_B = torch.arange(BATCH)
    return method(views_of(method, seed), ids_B, ids_B + 1, memory)


def test_every_method_is_under_this_contract() -> None:
    assert {name.split()[0] for name in BUILD} == set(METHODS)


@pytest.mark.parametrize("held", [0, 20])
def test_keys_are_detached_unit_rows(method: Method, held: int) -> None:
    out = step(method, memory_of(held))
    assert out.keys_BD.shape == (BATCH, method.dim)
    assert out.keys_BD.dtype == torch.float32
    assert not out.keys_BD.requires_grad
    torch.testing.assert_close(out.keys_BD.norm(dim=1), torch.ones(BATCH))
    assert torch.isfinite(out.loss.loss)


def test_the_gradient_reaches_what_is_trained_and_nothing_else(method: Method) -> None:
    step(method, memory_of(20)).loss.loss.backward()
    trained = {id(parameter) for parameter in method.trained}
    assert trained
    for name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained), name


def test_the_memory_is_only_read(method: Method) -> None:
    memory = memory_of(20)
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    step(method, memory).loss.loss.backward()
    method.after_update()
    after = memory.state_dict()
    # The cells of stratified draws are found when they are first asked for.
    kept = [name for name in before if not name.startswith("strata.")]
    assert all(torch.equal(before[name], after[name]) for name in kept)


def test_encoding_keys_and_features_changes_no_state(method: Method) -> None:
    before = {name: value.clone() for name, value in method.state_dict().items()}
    image_BCHW = views_of(method)[0]
    keys_BD, feature_BF = method.encode_keys(image_BCHW), method.features(image_BCHW)
    assert not keys_BD.requires_grad
    assert not feature_BF.requires_grad
    assert feature_BF.shape[0] == BATCH
    assert method.training
    assert all(torch.equal(before[name], v) for name, v in method.state_dict().items())


def test_features_do_not_depend_on_the_batch(method: Method) -> None:
    image_BCHW = views_of(method)[0]
    together, alone = method.features(image_BCHW), method.features(image_BCHW[:1])
    torch.testing.assert_close(together[:1], alone)


def test_a_method_resumes_from_its_state(name: str, method: Method) -> None:
    def go_on(other: Method) -> list[Tensor]:
        optimiser = torch.optim.SGD(list(other.trained), lr=0.1)
        torch.manual_seed(5)  # of what a method draws, as the learner's checkpoint would have it
        for seed in range(3):
            optimiser.zero_grad()
            step(other, memory_of(20), seed).loss.loss.backward()
            optimiser.step()
            other.after_update()
        return list(other.state_dict().values())

    go_on(method)
    saved = {name: value.clone() for name, value in method.state_dict().items()}
    torch.manual_seed(99)
    fresh = BUILD[name]().train()
    fresh.load_state_dict(saved)
    for one, other in zip(go_on(method), go_on(fresh), strict=True):
        assert torch.equal(one, other)


def test_autocast_gives_keys_that_the_memory_takes(method: Method) -> None:
    memory = memory_of(20)
    with torch.autocast("cpu", torch.bfloat16):
        out = step(method, memory)
    memory.add(torch.arange(BATCH), out.keys_BD)
    assert memory.check_valid() == (True, "")


def test_a_batch_of_one_is_finite(method: Method) -> None:
    views = [view[:1] for view in views_of(method)]
    out = method(views, torch.tensor([1]), torch.tensor([1]), memory_of(0))
    out.loss.loss.backward()
    assert torch.isfinite(out.loss.loss)
    gradients = [p.grad for p in method.trained if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
