"""Tests of every method in the learner: it learns, rejects bad settings, and survives bad
batches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from learning_world import BATCH, SIZE, Repeatable, build, state_of, steps
from table import table

from stream_ssl.batch import START, Batch
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.views import Colour, Views
from stream_ssl.losses import Debiased, InfoNCE, PositiveDebiased, Ramp, SupervisedContrastive
from stream_ssl.methods import METHODS


class Few(Repeatable):
    """Batches of `size` samples, with identical images if `alike`."""

    def __init__(self, size: int, alike: bool = False) -> None:
        super().__init__(START)
        self.size, self.alike = size, alike

    def next(self, timeout: float) -> Batch:
        batch = super().next(timeout)
        assert batch is not None
        rows = np.zeros(self.size, dtype=np.int64) if self.alike else np.arange(self.size)
        return Batch(
            ids_B=batch.ids_B[: self.size],
            hashes_B=batch.hashes_B[: self.size],
            labels_B=batch.labels_B[rows],
            images_BCHW=batch.images_BCHW[rows],
            received_B=batch.received_B[: self.size],
            offset=batch.offset,
            rejected={},
        )


HOW = ("stream", "memory")
ANCHORED = [  # the other half is tested in test_resume.py, where methods are killed
    (kind, how)
    for number, kind in enumerate(METHODS)
    for how in HOW
    if how != HOW[number % len(HOW)]
]


@pytest.mark.parametrize(("kind", "anchors"), ANCHORED)
def test_every_method_updates_and_fills_the_memory(kind: str, anchors: str) -> None:
    learner = build(kind=kind, anchors=anchors, reencode=3, pace=Pace(1.5 / BATCH))
    before = [p.detach().clone() for p in learner.method.trained]
    records = steps(learner, 6)
    assert all(record.skipped is None for record in records)
    assert all(record.grad_norm > 0 for record in records[1:])
    after = list(learner.method.trained)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert learner.memory.check_valid() == (True, "")
    assert len(learner.memory) > BATCH


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_every_method_learns_to_tell_samples_apart(kind: str) -> None:
    # SimSiam has no negatives: it needs stronger views and a larger rate to learn in few steps.
    alone = kind == "simsiam"
    colour = Colour(1, 1, 0, 0) if alone else Colour()
    views = Views(SIZE, channels=1, crop=None, flip=0 if alone else 0.5, colour=colour)
    rate = OptimiserSettings(learning_rate=3e-2 if alone else 1e-2)
    learner = build(kind=kind, stream=Cycle(), optimiser=rate, views=views)
    before = told_apart(learner)
    steps(learner, 120 if alone else 60)
    assert told_apart(learner) > before + 0.1


def told_apart(learner: Learner) -> float:
    """Return how well the encoder separates samples.

    This is the mean cosine of two views of a sample minus that of two samples, in standard
    deviations of the latter, over 8 draws of the views.
    """
    torch.manual_seed(0)
    image_BCHW = torch.from_numpy(Few(BATCH).next(0).images_BCHW)
    own, others = [], []
    for _ in range(8):
        z_VBD = [learner.method.encode_keys(learner.views(image_BCHW)) for _ in range(2)]
        cosine_BB = z_VBD[0] @ z_VBD[1].T
        own.append(cosine_BB.diagonal())
        others.append(cosine_BB[~torch.eye(BATCH, dtype=torch.bool)])
    return float((torch.cat(own).mean() - torch.cat(others).mean()) / torch.cat(others).std())


class Cycle(Repeatable):
    """An endless stream that repeats four batches."""

    def next(self, timeout: float) -> Batch | None:
        self.record = (self.record - 1) % 4 + 1
        return super().next(timeout)


# Every method with every kind of batch, and with both kinds of anchors.
POOR = [
    (kind, alike, HOW[(number + alike) % 2])
    for number, kind in enumerate(sorted(METHODS))
    for alike in (False, True)
]


@pytest.mark.parametrize(("kind", "alike", "anchors"), POOR)
def test_batches_of_one_sample_or_of_equal_images_break_no_method(
    kind: str, alike: bool, anchors: str
) -> None:
    learner = build(kind=kind, anchors=anchors, stream=Few(BATCH if alike else 1, alike))
    records = steps(learner, 5)
    assert all(record.skipped in (None, "keys") for record in records)
    assert all(np.isfinite(record.loss) for record in records if record.skipped is None)
    assert all(torch.isfinite(v).all() for v in state_of(learner).values() if v.is_floating_point())
    assert learner.memory.check_valid() == (True, "")


def test_d_simclr_encodes_the_memory_before_each_update() -> None:
    learner = build(kind="d-simclr", plain_keys=True)
    steps(learner, 4)
    seen = []
    forward = learner.method.forward

    def spied(views, samples, memory):
        fresh_kD = learner.method.encode_keys(learner.views.plain(memory.images))
        seen.append(torch.equal(fresh_kD, memory.embeddings))
        return forward(views, samples, memory)

    learner.method.forward = spied
    steps(learner, 2)
    assert seen == [True, True]


def test_the_memory_is_augmented_in_full_precision() -> None:
    """Under bfloat16 only the networks compute in bfloat16.

    A crop whose corners were rounded to bfloat16 would be off by pixels.
    """
    learner = build(kind="d-simclr", precision="bfloat16")
    steps(learner, 3)
    method, seen = learner.method, []
    encode, prepare = method.encode_keys, method.prepare

    def encode_keys(view_BCHW):
        seen.append((view_BCHW, torch.is_autocast_enabled("cpu")))
        return encode(view_BCHW)

    def prepared(memory, see):
        state = torch.get_rng_state()
        slots = memory.stalest(len(memory)).sort().values
        with torch.autocast("cpu", enabled=False):
            expected_BCHW = see(memory.images[slots])
        torch.set_rng_state(state)
        method.encode_keys = encode_keys
        prepare(memory, see)
        method.encode_keys = encode
        view_BCHW, narrow = seen.pop()
        assert narrow
        assert torch.equal(view_BCHW, expected_BCHW)
        checked.append(True)

    checked: list[bool] = []
    method.prepare = prepared
    steps(learner, 2)
    assert checked == [True, True]


def test_the_loss_receives_the_step() -> None:
    learner = build(loss=Debiased(prior=Ramp(0.4, steps=8)))
    priors = [record.diagnostics["prior"] for record in steps(learner, 5)]
    assert priors == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_the_prior_of_the_memory_rises_once_the_memory_holds_samples() -> None:
    records = steps(build(loss=Debiased(prior="memory")), 5)
    priors = [record.diagnostics["prior"] for record in records]
    assert priors[0] == pytest.approx(1 / 24)  # empty memory: the least prior, 1 / capacity
    assert all(1 / 24 < prior <= 0.5 for prior in priors[1:])


def unlabelled(**settings) -> Learner:
    return build(stream=Repeatable(labelled=False), **settings)


@table(
    "loss",
    [SupervisedContrastive(), InfoNCE(false_negatives="exclude"), Debiased(prior="labels")],
    ids=["supervised", "exclude", "prior"],
)
def test_an_oracle_without_labels_is_refused(loss) -> None:
    learner = unlabelled(loss=loss)
    before = state_of(learner)
    with pytest.raises(ValueError, match="reads labels, as it is set, and there are none"):
        steps(learner, 1)
    assert all(torch.equal(before[name], value) for name, value in state_of(learner).items())
    assert all(record.skipped is None for record in steps(build(loss=loss), 3))


def test_too_many_negatives_for_a_loss_are_refused() -> None:
    learner = build(loss=PositiveDebiased())
    with pytest.raises(ValueError, match="made for batch-sized N, and this would be 1 x 8"):
        steps(learner, 1)
    assert steps(build(loss=PositiveDebiased(), slots=16), 1)[0].skipped is None


def test_methods_that_encode_the_memory_need_its_images() -> None:
    with pytest.raises(ValueError, match="encodes the memory's images"):
        build(kind="d-simclr", images=False)
    assert steps(build(kind="simclr", images=False), 2)[1].skipped is None


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_learner_has_the_losses_of_a_plain_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test traces the networks but generates no code: that would take minutes."""
    traced: list[object] = []

    def traces_only(subject: Callable, **_: object) -> Callable:
        traced.append(subject)
        return real(subject, backend="eager")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", traces_only)
    plain, compiled = build(), build(compile=True)
    assert len(traced) == 3, "a trial, the encoder and the key encoder"
    for one, other in zip(steps(plain, 3), steps(compiled, 3), strict=True):
        assert other.skipped is None
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
    names = state_of(compiled).keys()
    assert names == state_of(plain).keys()


def test_compile_is_refused_if_the_machine_cannot_compile_or_with_sync_batchnorm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", lambda _: refused)
    with pytest.raises(ValueError, match="cannot compile for cpu: No working"):
        build(compile=True)
    with pytest.raises(ValueError, match="compile and sync_batchnorm are both true"):
        build(compile=True, sync_batchnorm=True)
