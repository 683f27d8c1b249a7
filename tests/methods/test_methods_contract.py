"""The properties of every method in the table, with every loss that fits the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from methods_small import (
    BATCH,
    SmallEncoder,
    SmallProjector,
    fitting,
    made,
    memory_of,
    plain,
    samples_of,
    step,
    views_of,
)
from table import table
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import (
    LOSSES,
    Debiased,
    Decoupled,
    HardNegative,
    InfoNCE,
    Loss,
    PositiveDebiased,
    SelfLabeling,
    SupervisedContrastive,
)
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import METHODS, Method

# Pairwise: each value of each option of a method meets the method; every loss is in several.
CASES: dict[str, tuple[str, Callable[[], Loss] | None, dict[str, object]]] = {
    "moco": ("moco", None, {}),
    "moco, average, 3 views": ("moco", Decoupled, {"key_statistics": "average", "views": 3}),
    "moco, prior of the memory": ("moco", lambda: Debiased(prior="memory"), {"negatives": 7}),
    "moco, oracle": (
        "moco",
        lambda: InfoNCE(false_negatives="exclude"),
        {"negatives": 7, "negatives_by": "stratified"},
    ),
    "moco, supervised": (
        "moco",
        SupervisedContrastive,
        {"negatives": 7, "negatives_by": "hardest", "views": 3},
    ),
    "simclr": ("simclr", None, {}),
    "simclr, average, 3 views": ("simclr", HardNegative, {"key_statistics": "average", "views": 3}),
    "simclr, prior of the labels": ("simclr", lambda: PositiveDebiased(prior="labels"), {}),
    "d-simclr": ("d-simclr", None, {}),
    "d-simclr, average, 3 views": (
        "d-simclr",
        lambda: Debiased(prior="memory"),
        {"key_statistics": "average", "views": 3, "negatives": 7, "negatives_by": "hardest"},
    ),
    "d-simclr, oracle": (
        "d-simclr",
        lambda: InfoNCE(false_negatives="exclude"),
        {"negatives": 7, "negatives_by": "stratified"},
    ),
    "d-simclr, few": ("d-simclr", SelfLabeling, {"negatives": 7, "negatives_by": "uniform"}),
    "simsiam": ("simsiam", None, {}),
    "simsiam, average, 3 views": ("simsiam", None, {"key_statistics": "average", "views": 3}),
    "byol": ("byol", None, {}),
    "byol, average, 3 views": ("byol", None, {"key_statistics": "average", "views": 3}),
    "self-labeling": ("self-labeling", None, {}),
    "self-labeling, average, 3 views": (
        "self-labeling",
        None,
        {"key_statistics": "average", "views": 3, "negatives": 7, "negatives_by": "hardest"},
    ),
    "self-labeling, few": ("self-labeling", None, {"negatives": 7, "negatives_by": "stratified"}),
}


def build(name: str) -> Method:
    kind, loss, settings = CASES[name]
    return made(kind, None if loss is None else loss(), **settings)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    return build(name)


def state_of(method: Method) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.state_dict().items()}


def test_every_method_is_under_this_contract() -> None:
    assert {kind for kind, _, _ in CASES.values()} == set(METHODS)


@table(("kind", "loss"), [*fitting()])
def test_every_method_makes_a_step_with_every_loss_that_fits(kind: str, loss: str) -> None:
    method = made(kind, LOSSES[loss]())
    out = step(method, memory_of(20))
    finite(method, out.loss.loss)
    assert all(parameter.grad is not None for parameter in method.trained)


def test_keys_are_detached_unit_rows(name: str) -> None:
    for slots in (0, 20):
        method = build(name)
        out = step(method, memory_of(slots))
        assert out.keys_BD.shape == (BATCH, method.dim)
        assert out.keys_BD.dtype == torch.float32
        assert not out.keys_BD.requires_grad
        torch.testing.assert_close(out.keys_BD.norm(dim=1), torch.ones(BATCH))
        assert torch.isfinite(out.loss.loss)


def test_the_gradient_reaches_all_trained_weights_and_no_others(method: Method) -> None:
    step(method, memory_of(20)).loss.loss.backward()
    trained = {id(parameter) for parameter in method.trained}
    assert trained
    for name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained), name


def test_a_step_does_not_change_the_memory(method: Method) -> None:
    memory = memory_of(20)
    method.prepare(memory, plain)
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    method(views_of(method.views), samples_of(BATCH), memory).loss.loss.backward()
    method.after_update()
    after = memory.state_dict()
    # The cells of stratified draws are found when they are first asked for.
    kept = [name for name in before if not name.startswith("strata.")]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not memory.embeddings.requires_grad


def test_preparing_changes_only_the_embeddings(method: Method) -> None:
    memory, before = memory_of(20), memory_of(20)
    state = state_of(method)
    method.prepare(memory, plain)
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
        method.prepare(memory, plain)
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
    assert torch.equal(keys_BD, method.eval().encode_keys(image_BCHW))


def test_keys_by_the_average_do_not_depend_on_the_batch() -> None:
    image_BCHW = views_of(1)[0]
    for kind in METHODS:
        for statistics in ("average", "batch"):
            method = made(kind, key_statistics=statistics)
            together, alone = method.encode_keys(image_BCHW), method.encode_keys(image_BCHW[:2])
            same = torch.allclose(together[:2], alone, atol=1e-6)
            assert same == (statistics == "average"), kind


@table("kind", METHODS)
def test_features_do_not_depend_on_the_batch(kind: str) -> None:
    method, image_BCHW = made(kind), views_of(1)[0]
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
    fresh = build(name)
    for parameter in fresh.parameters():
        parameter.data.normal_()
    fresh.load_state_dict(saved)
    for one, other in zip(go_on(method), go_on(fresh), strict=True):
        assert torch.equal(one, other)


def test_keys_computed_under_autocast_fit_the_memory(method: Method) -> None:
    memory = memory_of(20)
    with torch.autocast("cpu", torch.bfloat16):
        out = step(method, memory)
    memory.add(torch.arange(BATCH), out.keys_BD, images=torch.zeros(BATCH, 1, 6, 6).byte())
    assert memory.check_valid() == (True, "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_method_that_was_cast_makes_steps(method: Method, dtype: torch.dtype) -> None:
    method, memory = method.to(dtype), memory_of(20)
    method.begin(0)
    method.prepare(memory, plain)
    views = [view_BCHW.to(dtype) for view_BCHW in views_of(method.views)]
    out = method(views, samples_of(BATCH), memory)
    finite(method, out.loss.loss)
    memory.add(torch.arange(BATCH), out.keys_BD, images=torch.zeros(BATCH, 1, 6, 6).byte())


@table(
    ("samples", "message"),
    [
        (samples_of(4), "ids_B has 4 rows, and the views have 6 images: give one row for each"),
        (samples_of(7), "ids_B has 7 rows"),
        (Batch(torch.arange(6), torch.arange(5)), "hashes_B has 5 rows"),
        (Batch(torch.arange(6), None, torch.arange(2)), "labels_B has 2 rows"),
    ],
    ids=range(4),
)
def test_samples_of_another_number_than_the_images_are_refused(
    name: str, samples: Batch, message: str
) -> None:
    method = build(name)
    with pytest.raises(ValueError, match=message):
        method(views_of(method.views), samples, memory_of(20))


def test_views_of_different_numbers_of_images_are_refused(method: Method) -> None:
    views = [*views_of(method.views - 1), *views_of(1, batch=BATCH - 1)]
    with pytest.raises(ValueError, match="ids_B has 6 rows, and the views have 5 and 6 images"):
        method(views, samples_of(BATCH), memory_of(20))


def poor_batches(name: str) -> Iterator[tuple[Method, list[Tensor], Batch, WorkingMemory]]:
    """Yield batches with degenerate statistics or denominators."""
    for slots in (0, 1, 20):  # one sample
        method = build(name)
        yield method, views_of(method.views, batch=1), samples_of(1), memory_of(slots)
    method = build(name)  # one value a channel, which torch's own BatchNorm refuses
    pixels = [view[:1, :, :3, :3] for view in views_of(method.views)]
    yield method, pixels, samples_of(1), memory_of(0)

    alike_BCHW = views_of(1)[0][:1].expand(BATCH, -1, -1, -1)
    for slots in (0, 20):
        method = build(name)
        yield method, [alike_BCHW] * method.views, samples_of(BATCH), memory_of(slots)
    method = build(name)  # the memory holds equal images, too
    memory = WorkingMemory(20, method.dim, image_shape=(1, 6, 6))
    images = torch.full((20, 1, 6, 6), 128, dtype=torch.uint8)
    z = method.encode_keys(plain(images))
    memory.add(torch.arange(20) + 50, z, images=images, labels=torch.arange(20) % 3)
    yield method, [alike_BCHW] * method.views, samples_of(BATCH), memory

    ids_B, ones_B = torch.arange(BATCH), torch.ones(BATCH, dtype=torch.int64)
    for samples in (
        Batch(ones_B, ids_B, ones_B),  # one id
        Batch(ids_B, ones_B, ones_B),  # one content
        Batch(ids_B, ids_B + 1, ones_B),  # one class
    ):
        method = build(name)
        yield method, views_of(method.views), samples, memory_of(0)


def test_a_poor_batch_gives_finite_losses_gradients_and_keys(name: str) -> None:
    for method, views, samples, memory in poor_batches(name):
        method.begin(0)
        method.prepare(memory, plain)
        finite(method, method(views, samples, memory).loss.loss)
        assert torch.isfinite(method.encode_keys(views[0])).all()


def finite(method: Method, loss: Tensor) -> None:
    """The loss, its gradient, and the weights after a step."""
    assert torch.isfinite(loss)
    if loss.requires_grad:
        loss.backward()
    gradients = [p.grad for p in method.trained if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(torch.isfinite(v).all() for v in method.state_dict().values())


def test_only_oracles_read_labels(name: str, method: Method) -> None:
    if method.needs_labels:
        with pytest.raises(ValueError, match="reads labels and there are none"):
            step_of(method, False)
    else:
        assert torch.equal(step_of(method, False), step_of(build(name), True))


def step_of(method: Method, labelled: bool) -> Tensor:
    memory = memory_of(20)
    method.begin(0)
    method.prepare(memory, plain)
    torch.manual_seed(3)  # of the draws from the memory
    samples = samples_of(BATCH)
    if not labelled:
        samples = Batch(samples.ids_B, samples.hashes_B)
    return method(views_of(method.views, seed=0), samples, memory).loss.per_anchor


@table("kind", METHODS)
def test_methods_reject_settings_and_parts_that_do_not_fit(kind: str) -> None:
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


def test_methods_reject_a_memory_without_images_or_with_too_few_slots() -> None:
    bare = WorkingMemory(8, 4)
    with pytest.raises(ValueError, match="encodes the memory's images"):
        made("d-simclr").check(bare)
    made("simclr").check(bare)
    for kind in ("moco", "d-simclr"):
        with pytest.raises(ValueError, match="negatives is 9 and the memory holds 8"):
            made(kind, negatives=9).check(memory_of(8))


def test_a_method_has_the_dimension_of_its_projector() -> None:
    torch.manual_seed(0)
    method = METHODS["moco"](SmallEncoder(), SmallProjector(), InfoNCE(0.2))
    assert method.dim == SmallProjector.dim
