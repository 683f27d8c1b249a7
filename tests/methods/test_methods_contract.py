"""What holds for every method in the table, with every loss that fits it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from methods_small import (
    BATCH,
    SmallEncoder,
    SmallProjector,
    fitting,
    made,
    memory_of,
    samples_of,
    see,
    step,
    views_of,
)
from torch import Tensor, nn

from memory import WorkingMemory
from stream_ssl.losses import LOSSES, Debiased, InfoNCE, PositiveDebiased
from stream_ssl.methods import METHODS, Method, Samples

BUILD: dict[str, Callable[[], Method]] = {
    **{
        f"{method} with {loss}": lambda method=method, loss=loss: made(method, LOSSES[loss]())
        for method, loss in fitting()
    },
    **{
        f"{method} with {name}": lambda method=method, loss=loss: made(method, loss())
        for method in ("moco", "simclr", "d-simclr")
        for name, loss in {
            "prior of the memory": lambda: Debiased(prior="memory"),
            "prior of the labels": lambda: PositiveDebiased(prior="labels"),
            "an oracle": lambda: InfoNCE(false_negatives="exclude"),
        }.items()
    },
    **{
        f"{method} by average": lambda method=method: made(method, key_statistics="average")
        for method in METHODS
    },
    **{
        f"{method} of {how}": lambda method=method, how=how: made(
            method, negatives=7, negatives_by=how
        )
        for method in ("moco", "d-simclr", "self-labeling")
        for how in ("uniform", "hardest", "stratified")
    },
    **{f"{method} of 3 views": lambda method=method: made(method, views=3) for method in METHODS},
}


@pytest.fixture(params=sorted(BUILD))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    return BUILD[name]()


def state_of(method: Method) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.state_dict().items()}


def test_every_method_and_loss_is_under_this_contract() -> None:
    assert {name.split()[0] for name in BUILD} == set(METHODS)
    assert {loss for _, loss in fitting()} == set(LOSSES)


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
    method.prepare(memory, see)
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    method(views_of(method.views), samples_of(BATCH), memory).loss.loss.backward()
    method.after_update()
    after = memory.state_dict()
    # The cells of stratified draws are found when they are first asked for.
    kept = [name for name in before if not name.startswith("strata.")]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not memory.embeddings.requires_grad


def test_preparing_changes_embeddings_alone(method: Method) -> None:
    memory, before = memory_of(20), memory_of(20)
    state = state_of(method)
    method.prepare(memory, see)
    assert torch.equal(memory.ids, before.ids)
    assert torch.equal(memory.images, before.images)
    assert torch.equal(memory.embeddings, before.embeddings) != method.needs_images
    assert memory.check_valid() == (True, "")
    assert all(torch.equal(state[name], value) for name, value in method.state_dict().items())


def test_steps_lower_the_loss(method: Method) -> None:
    memory, optimiser = memory_of(20), torch.optim.SGD(list(method.trained), lr=0.05)
    losses = []
    for _ in range(12):
        torch.manual_seed(7)  # the same draws at every step
        method.prepare(memory, see)
        loss = method(views_of(method.views), samples_of(BATCH), memory).loss.loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()  # keys stay: the momentum encoder is not told
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_encoding_keys_and_features_changes_no_state(method: Method) -> None:
    before = state_of(method)
    image_BCHW = views_of(1)[0]
    keys_BD, feature_BF = method.encode_keys(image_BCHW), method.features(image_BCHW)
    assert not keys_BD.requires_grad
    assert not feature_BF.requires_grad
    assert feature_BF.shape[0] == BATCH
    assert method.training
    assert all(module.training for module in method.encoder.modules())
    assert all(torch.equal(before[name], v) for name, v in method.state_dict().items())


def test_keys_are_the_same_in_evaluation(method: Method) -> None:
    image_BCHW = views_of(1)[0]
    training = method.encode_keys(image_BCHW)
    assert torch.equal(training, method.eval().encode_keys(image_BCHW))


def test_features_do_not_depend_on_the_batch(method: Method) -> None:
    image_BCHW = views_of(1)[0]
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
    saved = state_of(method)
    fresh = BUILD[name]()
    for parameter in fresh.parameters():
        parameter.data.normal_()
    fresh.load_state_dict(saved)
    for one, other in zip(go_on(method), go_on(fresh), strict=True):
        assert torch.equal(one, other)


def test_autocast_gives_keys_that_the_memory_takes(method: Method) -> None:
    memory = memory_of(20)
    with torch.autocast("cpu", torch.bfloat16):
        out = step(method, memory)
    memory.add(torch.arange(BATCH), out.keys_BD, images=torch.zeros(BATCH, 1, 6, 6).byte())
    assert memory.check_valid() == (True, "")


@pytest.mark.parametrize("held", [0, 1, 20])
def test_a_batch_of_one_is_finite(method: Method, held: int) -> None:
    memory = memory_of(held)
    finite(method, step(method, memory, batch=1).loss.loss)


@pytest.mark.parametrize("held", ["nothing", "others", "the same"])
def test_a_batch_of_equal_samples_is_finite(method: Method, held: str) -> None:
    image_BCHW = views_of(1)[0][:1].expand(BATCH, -1, -1, -1)
    memory = memory_of(20 if held == "others" else 0)
    if held == "the same":
        memory = WorkingMemory(20, method.dim, image_shape=(1, 6, 6))
        images = torch.full((20, 1, 6, 6), 128, dtype=torch.uint8)
        z = method.encode_keys(see(images))
        memory.add(torch.arange(20) + 50, z, images=images, labels=torch.arange(20) % 3)
    method.prepare(memory, see)
    views = [image_BCHW] * method.views
    finite(method, method(views, samples_of(BATCH), memory).loss.loss)


@pytest.mark.parametrize("copies", ["id", "hash", "label"])
def test_a_batch_of_one_id_content_or_class_is_finite(method: Method, copies: str) -> None:
    ids_B, ones_B = torch.arange(BATCH), torch.ones(BATCH, dtype=torch.int64)
    samples = {
        "id": Samples(ones_B, ids_B, ones_B),
        "hash": Samples(ids_B, ones_B, ones_B),
        "label": Samples(ids_B, ids_B + 1, ones_B),
    }[copies]
    finite(method, method(views_of(method.views), samples, memory_of(0)).loss.loss)


def finite(method: Method, loss: Tensor) -> None:
    """The loss, its gradient, and the weights after a step."""
    assert torch.isfinite(loss)
    if loss.requires_grad:
        loss.backward()
    gradients = [p.grad for p in method.trained if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(torch.isfinite(v).all() for v in method.state_dict().values())


def test_a_single_value_a_channel_is_finite(name: str) -> None:
    method = BUILD[name]()
    # Without the average every channel has one value: what torch's own BatchNorm refuses.
    views = [view[:1, :, :3, :3] for view in views_of(method.views)]
    memory = memory_of(0)
    method.prepare(memory, see)
    finite(method, method(views, samples_of(1), memory).loss.loss)
    assert torch.isfinite(method.encode_keys(views[0])).all()


def test_labels_are_only_read_by_oracles(name: str, method: Method) -> None:
    if method.needs_labels:
        with pytest.raises(ValueError, match="reads labels and there are none"):
            step_of(method, False)
    else:
        assert torch.equal(step_of(method, False), step_of(BUILD[name](), True))


def step_of(method: Method, labelled: bool) -> Tensor:
    memory = memory_of(20)
    method.begin(0)
    method.prepare(memory, see)
    torch.manual_seed(3)  # of the draws from the memory
    samples = samples_of(BATCH)
    if not labelled:
        samples = Samples(samples.ids_B, samples.hashes_B)
    return method(views_of(method.views, seed=0), samples, memory).loss.per_anchor


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_what_does_not_fit_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="views is 1"):
        made(kind, views=1)
    with pytest.raises(ValueError, match="key_statistics is 'none'"):
        made(kind, key_statistics="none")
    with pytest.raises(ValueError, match="Linear has no `dim`"):
        METHODS[kind](SmallEncoder(), nn.Linear(8, 4), made(kind).loss)
    wrong = "negative-cosine" if METHODS[kind].contrasts else "infonce"
    with pytest.raises(ValueError, match=r"negatives|labels no mixed images"):
        made(kind, LOSSES[wrong]())
    with pytest.raises(ValueError, match="got 5 views: this method wants 2"):
        made(kind)(views_of(5), samples_of(BATCH), memory_of(0))
    with pytest.raises(ValueError, match="embeds in 4 dimensions, the memory holds 5"):
        made(kind).check(memory_of(3, dim=5))


def test_what_the_memory_must_have() -> None:
    bare = WorkingMemory(8, 4)
    with pytest.raises(ValueError, match="encodes the memory's images"):
        made("d-simclr").check(bare)
    made("simclr").check(bare)
    for kind in ("moco", "d-simclr"):
        with pytest.raises(ValueError, match="negatives is 9 and the memory holds 8"):
            made(kind, negatives=9).check(memory_of(8))


def test_a_projector_says_what_it_embeds_in() -> None:
    torch.manual_seed(0)
    method = METHODS["moco"](SmallEncoder(), SmallProjector(), InfoNCE(0.2))
    assert method.dim == SmallProjector.dim
