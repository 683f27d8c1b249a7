"""Tests of divergence: when weights count as diverged, what is reloaded, and when learning
stops.
"""

from __future__ import annotations

import math
import threading
from itertools import islice
from pathlib import Path

import torch
from learning_world import build, state_of, steps
from table import table

from stream_ssl.learning.capture import Copies
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.divergence import FAULTS, ROW, WITHIN, Divergence
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.records import NOT_FINITE, Idle, ReloadDue, StepRecord
from stream_ssl.losses import Debiased, LossOutput
from stream_ssl.methods import MethodOutput

CONFIG = {"a": 1}


class Told(Divergence):
    """A `Divergence` that takes reasons instead of records; each is a step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def take(self, skipped: str | None, count: int = 1) -> None:
        record = object.__new__(StepRecord)
        for _ in range(count):
            self.step += 1
            object.__setattr__(record, "step", self.step)
            object.__setattr__(record, "skipped", skipped)
            self.consume(record)


@table("reason", NOT_FINITE)
def test_twenty_skipped_updates_in_a_row_are_a_fault(reason: str) -> None:
    told = Told()
    told.take(None, 3)
    for number in range(1, ROW + 1):
        assert told.healthy
        assert not told.due
        told.take(reason)
        told.take("pace")
        told.take("novelty")
        assert told.skipped_in_a_row == number
    assert told.due
    assert not told.healthy
    assert "20 updates in a row were skipped" in str(told)
    assert told.updated == told.limit == 3


def test_a_good_update_ends_a_row_of_skipped_updates() -> None:
    told = Told()
    for _ in range(5):
        told.take("loss", ROW - 1)
        assert not told.savable
        told.take(None)
        assert told.skipped_in_a_row == 0
        assert told.savable
    assert told.healthy
    assert str(told) == ""


def fault(told: Told, updated: int) -> None:
    told.take("loss", ROW)
    assert told.due
    told.reloaded(updated)


def test_a_reload_ends_after_twenty_good_updates_in_a_row() -> None:
    told = Told()
    told.take(None)
    fault(told, updated=0)
    told.take(None, ROW - 1)
    told.take("loss")
    told.take(None, ROW - 1)
    assert not told.healthy
    told.take(None)
    assert told.healthy
    assert not told.halted


def test_three_faults_within_a_thousand_updates_halt() -> None:
    told = Told()
    for number in range(FAULTS):
        assert not told.halted
        told.take(None, ROW)
        fault(told, updated=0)
        assert told.reloads == number + 1
    assert told.halted
    assert not told.due
    assert "lower optimiser.learning_rate" in str(told)


def test_faults_that_are_far_apart_do_not_halt() -> None:
    told = Told()
    for _ in range(2 * FAULTS):
        told.take(None, WITHIN // 2 - ROW + 1)
        fault(told, updated=0)
    assert told.reloads == 2 * FAULTS
    assert not told.halted


def test_weights_that_failed_soon_are_not_reloaded_again() -> None:
    told = Told()
    told.take(None, 50)
    fault(told, updated=40)
    told.take(None, ROW - 1)
    told.take("keys", ROW)
    assert told.limit == 40, "older than those that were tried"
    told.reloaded(30)
    told.take(None, ROW)
    told.take("keys", ROW)
    assert told.limit == told.updated > 50, "the newest before this fault"


# A learner with checkpoints. Its learning rate is too high, or its samples are harmful.


def diverging(rate: float = 1e12, **settings) -> Learner:
    return build(optimiser=OptimiserSettings(learning_rate=rate), **settings)


def until_reload(learner: Learner) -> list[StepRecord]:
    """Return the records until the learner asks for a reload."""
    records = []
    for record in learner.run(threading.Event()):
        if isinstance(record, ReloadDue):
            break
        records.append(record)
    return records


def reload(learner: Learner, checkpointer: Checkpointer):
    saved = checkpointer.before(learner.divergence.limit)
    learner.reload(saved.capture(0, 1, learner.offset))
    return saved


def test_the_weights_after_the_destructive_update_are_not_reloaded(tmp_path: Path) -> None:
    checkpointer, learner = Checkpointer(tmp_path), build()
    checkpointer.save(Copies().take(learner.capture()), CONFIG)
    steps(learner, 3)
    good = checkpointer.save(learner, CONFIG)
    before = {name: value for name, value in state_of(learner).items() if "rng" not in name}
    learner._step.weights._optimisation = OptimiserSettings(learning_rate=1e12)
    steps(learner, 1)
    bad = checkpointer.save(learner, CONFIG)
    until_reload(learner)
    offset, step, samples = learner.offset, learner.step, learner.samples
    assert learner.divergence.skipped_in_a_row == ROW
    assert reload(learner, checkpointer).path == good.path
    for name, value in before.items():
        assert torch.equal(state_of(learner)[name], value), name
    assert (learner.offset, learner.step, learner.samples) == (offset, step, samples)
    assert (tmp_path / "latest").resolve() == good.path.resolve()
    learner._step.weights._optimisation = OptimiserSettings()
    records = steps(learner, ROW)
    assert all(record.skipped is None for record in records)
    assert learner.divergence.healthy
    checkpointer.discard_between(learner.divergence.reloaded_from, step)
    assert not bad.path.exists()
    assert good.path.exists()


def test_a_lower_rate_repairs_a_run_that_restarts_on_destroyed_weights(tmp_path: Path) -> None:
    learner = diverging()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(Copies().take(learner.capture()), CONFIG)
    steps(learner, 1)
    bad = checkpointer.save(learner, CONFIG)
    restarted = Checkpointer(tmp_path)
    found = restarted.newest()
    assert found.path == bad.path
    other = build(found.offset)
    found.restore(other)
    until_reload(other)
    assert reload(other, restarted).step == 0
    assert all(record.skipped is None for record in steps(other, ROW))
    assert other.divergence.healthy


def test_training_continues_with_new_samples_after_a_reload(tmp_path: Path) -> None:
    checkpointer, learner = Checkpointer(tmp_path), build()
    steps(learner, 2)
    checkpointer.save(learner, CONFIG)
    steps(learner, 1)
    plain = learner.method.forward
    learner.method.forward = lambda *inputs: poisoned(plain(*inputs))
    ids = [int(record.ids_B[0]) for record in until_reload(learner)]
    reload(learner, checkpointer)
    learner.method.forward = plain
    following = steps(learner, 1)[0]
    assert int(following.ids_B[0]) > max(ids)
    assert following.skipped is None
    assert following.step == 3 + ROW + 1


def poisoned(output):
    loss = output.loss
    return MethodOutput(LossOutput(loss.loss * math.nan, loss.per_anchor), output.keys_BD)


@table("value", [math.nan, 0.0])
@table("reads", ["hardest", "prior"])
def test_nan_and_zero_weights_do_not_end_a_run_whose_loss_reads_the_memory(
    reads: str, value: float
) -> None:
    learner = build(loss=Debiased(prior="memory") if reads == "prior" else None)
    if reads == "hardest":
        drawn = learner.method.memory_negatives
        drawn.negatives, drawn.negatives_by = 5, "hardest"
    steps(learner, 3)
    with torch.no_grad():
        for weight in learner.method.parameters():
            weight.fill_(value)
    assert {record.skipped for record in steps(learner, 3)} <= set(NOT_FINITE)


def test_a_halted_learner_reads_no_batches_and_stays_up() -> None:
    learner = build()
    steps(learner, 2)
    learner.divergence.halt()
    learner.batches.next = None  # a call would raise
    assert isinstance(next(learner.run(threading.Event())), Idle)
    stop = threading.Event()
    stop.set()
    assert list(learner.run(stop)) == []


def test_a_diverged_learner_without_a_reload_continues() -> None:
    records = list(islice(diverging().run(threading.Event()), 3 * ROW))
    assert sum(isinstance(record, StepRecord) for record in records) > 2 * ROW - 2


def test_a_checkpoint_stores_the_last_step_that_updated_the_weights(tmp_path: Path) -> None:
    checkpointer, learner = Checkpointer(tmp_path), build()
    steps(learner, 2)
    checkpointer.save(learner, CONFIG)
    found = checkpointer.newest()
    assert found.updated == 2
    older = type(found)(found.path, {k: v for k, v in found.facts.items() if k != "updated"})
    assert older.updated == 2, "of a release that did not store it"
