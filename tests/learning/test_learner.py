"""Tests of the learner's loop: what enters the memory, what is skipped, and when it replays."""

from __future__ import annotations

import math
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from learning_world import BATCH, SLOTS, Repeatable, build, differing, state_of, steps
from table import table

from stream_ssl.batch import START, Offset
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.records import PHASES, Idle, StepRecord
from stream_ssl.learning.schedule import Constant
from stream_ssl.losses import LossOutput
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import MethodOutput


def test_the_record_of_a_step_describes_the_step() -> None:
    learner = build(schedule=Constant(warmup=4))
    first, second = steps(learner, 2)
    assert (first.step, first.samples, first.batch) == (1, BATCH, BATCH)
    assert (second.step, second.samples, second.offset) == (2, 2 * BATCH, Offset(3, 0))
    assert not first.replay
    assert first.skipped is None
    assert set(first.seconds) == set(PHASES)
    assert all(seconds > 0 for seconds in first.seconds.values())
    assert second.learning_rate == pytest.approx(5e-4)
    assert second.grad_norm > 0
    assert second.lag_seconds == 1.5
    assert second.diagnostics["negatives"] == BATCH - 1 + BATCH
    assert first.collision_expected == 0
    assert first.collision_true is None
    assert 0 < second.collision_expected <= 1
    assert 0 <= second.collision_true <= 1


def test_the_memory_holds_keys_images_labels_and_hashes() -> None:
    learner = build()
    record = steps(learner, 1)[0]
    batch = Repeatable(START).next(0)
    memory = learner.memory
    assert torch.equal(memory.embeddings, record.keys_BD)
    assert memory.ids.tolist() == batch.ids_B.tolist()
    assert memory.labels.tolist() == batch.labels_B.tolist()
    assert memory.hashes.tolist() == batch.hashes_B.tolist()
    assert torch.equal(memory.images, torch.from_numpy(batch.images_BCHW))
    assert record.admission.slots.tolist() == list(range(BATCH))


def test_a_batch_enters_the_memory_after_its_loss() -> None:
    counts = [record.diagnostics["negatives"] for record in steps(build(), 5)]
    held = [0, BATCH, 2 * BATCH, SLOTS, SLOTS]
    assert counts == [BATCH - 1 + slots for slots in held]


def test_the_learner_separates_positives_from_negatives() -> None:
    records = steps(build(stream=Cycle(), optimiser=OptimiserSettings(learning_rate=1e-2)), 60)
    first = np.mean([record.diagnostics["positive_similarity"] for record in records[:5]])
    gap = [
        record.diagnostics["positive_similarity"] - record.diagnostics["negative_similarity"]
        for record in records
    ]
    assert np.mean(gap[-5:]) > np.mean(gap[:5]) + 0.1, first


class Cycle(Repeatable):
    """An endless stream that repeats four batches."""

    def next(self, timeout):
        self.record = (self.record - 1) % 4 + 1
        return super().next(timeout)


def test_a_stream_without_labels_has_no_true_collision() -> None:
    record = steps(build(stream=Repeatable(labelled=False)), 3)[-1]
    assert record.collision_true is None


def test_records_contain_the_counts_of_rejected_samples() -> None:
    records = steps(build(), 6)
    assert [dict(record.rejected) for record in records] == [{}, {}, {}, {"image": 1}, {}, {}]


def spoil(learner, at: int, how: str) -> None:
    """Make a loss, gradient or key non-finite once, at step `at`."""
    plain, state = learner.method.forward, {"step": 0}

    def forward(*inputs) -> MethodOutput:
        out = plain(*inputs)
        state["step"] += 1
        if state["step"] != at:
            return out
        loss, keys = out.loss.loss, out.keys_BD
        if how == "loss":
            loss = loss * math.inf
        if how == "gradient":
            loss = loss + (loss - loss.detach()).abs().sqrt()  # value 0, infinite slope
        if how == "keys":
            keys = torch.zeros_like(keys)
        if how in ("everything", "assigned"):
            for module in learner.method.encoder.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    if how == "assigned":  # as some networks do
                        module.running_mean = module.running_mean.clone()
                    module.running_mean.data.fill_(math.nan)
            loss, keys = loss * math.nan, keys * math.nan
        return MethodOutput(LossOutput(loss, out.loss.per_anchor), keys)

    learner.method.forward = forward


@table(
    ("how", "reason", "inserted"),
    [
        ("loss", "loss", True),
        ("gradient", "gradient", True),
        ("keys", "keys", False),
        ("everything", "loss", False),
        ("assigned", "loss", False),
    ],
)
def test_an_update_with_numbers_that_are_not_finite_is_skipped(
    how: str, reason: str, inserted: bool
) -> None:
    learner = build()
    spoil(learner, 3, how)
    steps(learner, 2)
    before = state_of(learner)
    bad = steps(learner, 1)[0]
    after = state_of(learner)
    assert bad.skipped == reason
    assert (bad.admission is not None) == inserted
    assert len(learner.memory) == (3 if inserted else 2) * BATCH
    for name, value in before.items():
        if name.startswith(("model/", "optimiser/")):
            assert torch.equal(value, after[name]), name
    assert steps(learner, 1)[0].skipped is None
    assert all(torch.isfinite(v).all() for v in state_of(learner).values() if v.is_floating_point())


def test_a_clipped_gradient_changes_the_weights_less() -> None:
    def moved(clip: float | None) -> float:
        settings = OptimiserSettings("sgd", learning_rate=1.0, weight_decay=0, clip=clip)
        learner = build(optimiser=settings)
        before = [p.detach().clone() for p in learner.method.trained]
        steps(learner, 1)
        pairs = zip(learner.method.trained, before, strict=True)
        return float(sum(((p.detach() - b) ** 2).sum() for p, b in pairs)) ** 0.5

    assert moved(0.01) == pytest.approx(0.01, rel=1e-3)
    assert moved(None) > 0.02


def test_a_pace_of_two_replays_the_memory() -> None:
    learner = build(pace=Pace(2 / BATCH))
    records = steps(learner, 7)
    assert [record.replay for record in records] == [False, True] * 3 + [False]
    assert [record.samples for record in records] == [8, 8, 16, 16, 24, 24, 32]
    assert all(record.skipped is None for record in records)
    replay = records[3]
    assert replay.admission is None
    assert replay.batch == BATCH
    assert set(replay.ids_B.tolist()) <= set(range(BATCH, 3 * BATCH))
    assert learner.memory.check_valid() == (True, "")


def test_a_replay_refreshes_the_drawn_slots() -> None:
    learner = build(pace=Pace(2 / BATCH))
    steps(learner, 1)
    before = learner.memory.embeddings.clone()
    replay = steps(learner, 1)[0]
    assert replay.replay
    assert not torch.equal(before, learner.memory.embeddings)
    rows = {tuple(row) for row in learner.memory.embeddings.tolist()}
    assert rows == {tuple(row) for row in replay.keys_BD.tolist()}


def until_idle(learner) -> list[StepRecord]:
    records = []
    for record in learner.run(threading.Event()):
        if isinstance(record, Idle):
            assert record.lag_seconds == 1.5
            return records
        records.append(record)
    raise AssertionError("the run ended without being idle")


def test_the_learner_yields_an_idle_record_after_a_second_without_samples() -> None:
    started = time.monotonic()
    assert until_idle(build(stream=Waiting())) == []
    assert 0.9 < time.monotonic() - started < 10


class Waiting(Repeatable):
    """A stream without samples. Each call takes the whole timeout."""

    def next(self, timeout):
        threading.Event().wait(timeout)


def test_stop_ends_the_run_between_records() -> None:
    stop, seen = threading.Event(), 0
    for _ in build().run(stop):
        seen += 1
        if seen == 3:
            stop.set()
    assert seen == 3


def test_reencoding_refreshes_stale_slots() -> None:
    learner = build(reencode=4)
    records = steps(learner, 8)
    assert all(-1 <= record.diagnostics["drift_cosine"] <= 1 for record in records)
    assert learner.memory.check_valid() == (True, "")
    without = build()
    steps(without, 8)
    assert learner.memory.encoded.min() > without.memory.encoded.min()


def test_reencoding_refreshes_exactly_the_stalest_slots() -> None:
    learner, taken = build(reencode=3), []
    refresh = learner.memory.refresh

    def spied(slots, z):
        encoded = learner.memory.encoded.tolist()
        oldest = sorted(range(len(encoded)), key=encoded.__getitem__)
        taken.append((slots.tensor.tolist(), oldest[:3]))
        return refresh(slots, z)

    learner.memory.refresh = spied
    steps(learner, 8)
    assert all(found == stalest for found, stalest in taken)
    assert len({tuple(found) for found, _ in taken}) > 3


def test_random_draws_of_the_consumer_do_not_change_the_learner() -> None:
    quiet, noisy = build(), build()
    steps(quiet, 6)
    for _ in islice(noisy.run(threading.Event()), 6):
        torch.rand(5)
        np.random.rand(3)
    assert differing(quiet, noisy) == []


def test_the_learner_does_not_change_the_generators_of_the_consumer() -> None:
    learner = build()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    steps(learner, 2)
    assert torch.equal(torch.rand(3), expected)


def test_a_learner_in_bfloat16_keeps_float32_keys_and_weights() -> None:
    learner = build(precision="bfloat16")
    records = steps(learner, 3)
    assert all(record.skipped is None for record in records)
    assert records[-1].keys_BD.dtype == torch.float32
    assert {p.dtype for p in learner.method.parameters()} == {torch.float32}


@table("name", ["adam", "adamw", "sgd"])
def test_the_learner_works_with_each_optimiser(name: str) -> None:
    learner = build(optimiser=OptimiserSettings(name))
    assert steps(learner, 2)[-1].skipped is None
    assert learner.capture().tensors["optimiser"]


@table("name", ["adam", "adamw", "sgd"])
def test_weights_decay_without_a_gradient(name: str) -> None:
    """Without a gradient, the first step consists of the weight decay alone.

    Under Adam the step is the sign of the decay, because Adam scales it. Under the other optimisers
    it is proportional to the weight.
    """
    weight = torch.nn.Parameter(torch.tensor([2.0, -0.5]))
    optimiser = OptimiserSettings(name, learning_rate=0.1, weight_decay=0.2).build([weight])
    weight.grad = torch.zeros(2)
    optimiser.step()
    expected = [1.9, -0.4] if name == "adam" else [2.0 * 0.98, -0.5 * 0.98]
    assert weight.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_learner_and_the_optimiser_reject_wrong_settings() -> None:
    with pytest.raises(ValueError, match="precision is 'float16'"):
        build(precision="float16")
    with pytest.raises(ValueError, match="reencode is -1"):
        build(reencode=-1)
    with pytest.raises(ValueError, match="reencode=2 encodes images"):
        build(images=False, reencode=2)
    with pytest.raises(ValueError, match="threads is 0"):
        build(threads=0)
    with pytest.raises(ValueError, match="embeds in 6 dimensions, the memory holds 5"):
        build().__class__(**parts(memory=WorkingMemory(8, 5)))
    with pytest.raises(ValueError, match="more updates than batches of 8"):
        steps(build(images=False, pace=Pace(1.0)), 1)
    with pytest.raises(ValueError, match="optimiser is 'lion'"):
        OptimiserSettings("lion")
    with pytest.raises(ValueError, match="learning_rate is 0"):
        OptimiserSettings(learning_rate=0)
    with pytest.raises(ValueError, match="weight_decay is -1"):
        OptimiserSettings(weight_decay=-1)
    with pytest.raises(ValueError, match="clip is 0"):
        OptimiserSettings(clip=0)


def parts(**changed):
    learner = build()
    given = {
        "method": learner.method,
        "memory": learner.memory,
        "views": learner.views,
        "batches": learner.batches,
    }
    return {**given, **changed}
