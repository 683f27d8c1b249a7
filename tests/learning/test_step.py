"""Tests of the step with each kind of anchors: order, freshness, pace, and skipped updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from learning_world import BATCH, SLOTS, Repeatable, build, steps
from table import table
from torch import Tensor

from stream_ssl.batch import START
from stream_ssl.learning import step
from stream_ssl.learning.backup import Backup
from stream_ssl.learning.collisions import count_pairs, true_collisions
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.step import draw_batch
from stream_ssl.losses import LossOutput
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Embedding, Features, Weighted
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.methods import MethodOutput


def spied(learner: Learner) -> list[SimpleNamespace]:
    """Record the method's later calls in order: kind, keys, ids, and the key encoder's weights."""
    method, seen = learner.method, []
    encode, forward = method.encode_keys, method.forward

    def weights() -> Tensor:
        return torch.cat([p.detach().flatten() for p in method.key_encoder.parameters()])

    def encode_keys(image_BCHW: Tensor) -> Tensor:
        keys_BD = encode(image_BCHW)
        seen.append(SimpleNamespace(kind="encode", keys=keys_BD, weights=weights()))
        return keys_BD

    def learn(views, samples, memory):
        method.encode_keys = encode  # the keys of its own positives are not recorded
        out = forward(views, samples, memory)
        method.encode_keys = encode_keys
        held = memory.ids.clone()
        seen.append(
            SimpleNamespace(
                kind="learn", keys=out.keys_BD, ids=samples.ids_B, held=held, weights=weights()
            )
        )
        return out

    method.encode_keys, method.forward = encode_keys, learn
    return seen


def one_by_one(learner: Learner, count: int) -> Iterator[StepRecord]:
    """Yield each record before the next step is made."""
    for _ in range(count):
        yield from steps(learner, 1)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("anchors", ["memory", "stream"])
def test_slots_are_described_again_when_the_memory_is_full_and_then_periodically(
    anchors: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first description is when the memory is full. Others follow at equal distances."""
    monkeypatch.setattr(step, "LEAST_PERIOD", 5)
    monkeypatch.setattr(step, "DESCRIBED_SHARE", 1)
    descriptor = Weighted([Embedding(), Features(7)]) if beside else Features(7)
    learner = build(anchors=anchors, descriptor=descriptor, plain_keys=True)
    memory, due = learner.memory, []
    for record in one_by_one(learner, 11):
        assert memory.check_valid() == (True, "")
        described = Features(7)
        described.fit(0)
        view_kCHW = learner.views.plain(memory.images[: len(memory)])
        feature_kF = learner.method.encode_newcomers(view_kCHW)[1]
        now_kA = described.redescribed(feature_kF[:, :0], feature_kF)
        held_kA = memory.descriptors[: len(memory)]
        if beside:
            held_kA = held_kA[:, memory.dim :] * 2**0.5
        if torch.allclose(now_kA, held_kA, atol=1e-5):
            due.append(record.step)
    assert due == [SLOTS // BATCH, 5, 10]


def from_memory(**settings) -> Learner:
    return build(anchors="memory", **settings)


def test_a_batch_enters_the_memory_before_the_training_draw() -> None:
    learner = from_memory()
    seen = spied(learner)
    for record in one_by_one(learner, 5):
        arrived, learnt = seen[-2:]
        assert (arrived.kind, learnt.kind) == ("encode", "learn")
        stayed = record.ids_B[record.admission.slots >= 0]
        assert len(stayed)
        assert set(stayed.tolist()) <= set(learnt.held.tolist())
        assert set(learnt.ids.tolist()) <= set(learnt.held.tolist())
        assert len(set(learnt.ids.tolist())) == BATCH
    older = [set(s.ids.tolist()) - set(s.held[-BATCH:].tolist()) for s in seen[3::2]]
    assert any(older)


def test_keys_in_the_memory_come_from_the_key_encoder_before_the_update() -> None:
    learner = from_memory(write_back=False, optimiser=OptimiserSettings("sgd", learning_rate=5.0))
    seen = spied(learner)
    for record in one_by_one(learner, 3):
        arrived, learnt = seen[-2:]
        assert torch.equal(record.keys_BD, arrived.keys)
        assert torch.equal(arrived.weights, learnt.weights)
        slots = record.admission.slots
        kept = slots >= 0
        assert torch.equal(learner.memory.embeddings[slots[kept]], arrived.keys[kept])
    after = torch.cat([p.detach().flatten() for p in learner.method.key_encoder.parameters()])
    assert not torch.equal(after, seen[-1].weights)


def test_fresh_keys_go_back_to_the_slots_that_were_drawn() -> None:
    learner = from_memory()
    seen = spied(learner)
    for record in one_by_one(learner, 6):
        learnt = seen[-1]
        held = learner.memory.ids.tolist()
        for sample, key_D in zip(learnt.ids.tolist(), learnt.keys, strict=True):
            slot = held.index(sample)
            assert torch.equal(learner.memory.embeddings[slot], key_D)
            assert learner.memory.encoded[slot] == record.samples
        assert -1 <= record.diagnostics["written_back_cosine"] <= 1
        assert learner.memory.check_valid() == (True, "")


def test_embeddings_do_not_change_without_write_back() -> None:
    learner = from_memory(write_back=False)
    seen = spied(learner)
    records = steps(learner, 6)
    arrived = {tuple(row) for s in seen if s.kind == "encode" for row in s.keys.tolist()}
    assert {tuple(row) for row in learner.memory.embeddings.tolist()} <= arrived
    assert torch.equal(learner.memory.born // BATCH, learner.memory.encoded // BATCH)
    assert not any("written_back_cosine" in record.diagnostics for record in records)


def test_plain_keys_encode_the_images_without_augmentation() -> None:
    learner = from_memory(plain_keys=True, write_back=False, reencode=3)
    expected, plain = [], learner.method.encode_keys

    def encode_keys(image_BCHW: Tensor) -> Tensor:
        expected.append(image_BCHW)
        return plain(image_BCHW)

    learner.method.encode_keys = encode_keys
    (first,) = steps(learner, 1)
    slots = learner.memory.stalest(3)
    stale_RCHW = learner.views.plain(learner.memory.images[slots])
    (second,) = steps(learner, 1)
    came_BCHW, positive_BCHW, both_NCHW, _ = expected  # an empty memory has no stalest slots
    as_they_are_BCHW = learner.views.plain(learner.memory.images[first.admission.slots])
    assert torch.equal(came_BCHW, as_they_are_BCHW)
    assert not torch.equal(positive_BCHW, as_they_are_BCHW)
    new_BCHW = learner.views.plain(learner.memory.images[second.admission.slots])
    assert torch.equal(both_NCHW, torch.cat([new_BCHW, stale_RCHW])), "one pass for both"
    assert torch.equal(learner.memory.encoded[slots], torch.full_like(slots, BATCH))


def test_a_replay_without_write_back_does_not_change_embeddings() -> None:
    kept = build(pace=Pace(2 / BATCH), write_back=False)
    steps(kept, 1)
    before = kept.memory.embeddings.clone()
    assert steps(kept, 1)[0].replay
    assert torch.equal(before, kept.memory.embeddings)


def test_an_anchor_is_no_negative_of_itself() -> None:
    counts = [record.diagnostics["negatives"] for record in steps(from_memory(), 5)]
    held = [BATCH, 2 * BATCH, SLOTS, SLOTS, SLOTS]
    # Negatives: the batch's other keys, and all slots except the anchor's own, after evictions too.
    assert counts == [BATCH - 1 + slots - 1 for slots in held]


def test_the_record_describes_the_batch_of_the_stream() -> None:
    learner = from_memory()
    for number, record in enumerate(steps(learner, 4), start=1):
        batch = Repeatable(START)
        batch.record = number
        fresh = batch.next(0)
        assert record.ids_B.tolist() == fresh.ids_B.tolist()
        assert record.labels_B.tolist() == fresh.labels_B.tolist()
        assert (record.batch, record.samples, record.replay) == (BATCH, number * BATCH, False)
        assert record.admission is not None
        assert record.skipped is None
        assert record.grad_norm > 0
    assert record.collision_expected > 0


def test_the_record_has_the_relative_change_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_ssl.learning.optimiser.MOMENTUM", 0.0)
    learner = build(optimiser=OptimiserSettings("sgd", 0.1, weight_decay=0.0))
    trained = list(learner.method.trained)
    for record in one_by_one(learner, 2):
        norm = torch.nn.utils.get_total_norm(trained)
        if record.step == 1:
            before = norm.item()
    assert record.relative_change == pytest.approx(0.1 * record.grad_norm / before, rel=1e-4)
    assert record.relative_change > 0


def test_the_record_of_a_skipped_update_has_no_change_of_the_weights() -> None:
    records = steps(build(pace=Pace(0.5 / BATCH)), 4)
    known = [not math.isnan(record.relative_change) for record in records]
    assert known == [False, True, False, True]


def test_collisions_are_measured_before_the_batch_enters_the_memory() -> None:
    assert steps(from_memory(), 1)[0].collision_expected == 0


def test_a_pace_of_two_replays_after_each_batch() -> None:
    learner = from_memory(pace=Pace(2 / BATCH))
    records = steps(learner, 6)
    assert [record.replay for record in records] == [False, True] * 3
    assert all(record.skipped is None for record in records)
    assert learner.pace.updates == 6


@table("anchors", ["stream", "memory"])
def test_a_pace_of_a_half_adds_every_batch_to_the_memory(anchors: str) -> None:
    learner = build(anchors=anchors, pace=Pace(0.5 / BATCH))
    seen = spied(learner)
    records = steps(learner, 4)
    assert [record.skipped for record in records] == ["pace", None, "pace", None]
    update = ["learn"] if anchors == "stream" else ["encode", "learn"]
    assert [one.kind for one in seen] == ["encode", *update] * 2
    assert all(record.admission is not None for record in records)
    assert learner.samples == 4 * BATCH
    assert learner.pace.updates == 2


def test_a_loss_that_is_not_finite_keeps_the_batch_and_the_weights() -> None:
    learner = from_memory()
    steps(learner, 2)
    plain = learner.method.forward

    def spoilt(*inputs):
        out = plain(*inputs)
        loss = LossOutput(out.loss.loss * torch.inf, out.loss.per_anchor)
        return MethodOutput(loss, out.keys_BD)

    learner.method.forward = spoilt
    before = [p.detach().clone() for p in learner.method.parameters()]
    record = steps(learner, 1)[0]
    assert record.skipped == "loss"
    assert record.admission is not None
    pairs = zip(before, learner.method.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)
    learner.method.forward = plain
    assert steps(learner, 1)[0].skipped is None
    assert learner.pace.updates == 4


def test_keys_of_zeros_do_not_enter_the_memory() -> None:
    learner = from_memory()
    plain = learner.method.encode_keys
    learner.method.encode_keys = lambda image_BCHW: torch.zeros(len(image_BCHW), 6)
    first = steps(learner, 1)[0]
    assert (first.skipped, first.admission, len(learner.memory)) == ("keys", None, 0)
    assert learner.pace.updates == 1
    learner.method.encode_keys = plain
    second = steps(learner, 1)[0]
    assert (second.skipped, second.replay, len(learner.memory)) == (None, False, BATCH)


def test_training_batches_may_favour_samples_with_few_duplicates() -> None:
    policy = MostDuplicated(VonMisesFisher(0.1))
    memory = WorkingMemory(20, 4, eviction=policy, image_shape=(1, 2, 2), seed=0)
    z_KD = torch.eye(4)[[0] * 17 + [1, 2, 3]]
    memory.add(torch.arange(20), z_KD, images=torch.zeros(20, 1, 2, 2, dtype=torch.uint8))

    def rare(how) -> float:
        drawn = [draw_batch(memory, 2, torch.device("cpu"), how) for _ in range(400)]
        return sum((d.slots_B >= 17).sum().item() for d in drawn) / 800

    assert rare("uniform") == pytest.approx(3 / 20, abs=0.04)
    # The crowd has N = 16, the three have N = 0. The first draw is one of the three with
    # probability 3 / (3 + 17 / 17), the second with 2 / 3 or 3 / (3 + 16 / 17), depending on the
    # first.
    expected = (0.75 + 0.75 * 2 / 3 + 0.25 * 3 / (3 + 16 / 17)) / 2
    assert rare("inverse-count") == pytest.approx(expected, abs=0.05)


def test_drawn_samples_have_their_ids_labels_hashes_and_images() -> None:
    memory = WorkingMemory(40, 4, image_shape=(1, 2, 2), seed=0)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:40]
    z_KD = torch.nn.functional.normalize(torch.randn(40, 4, generator=torch.Generator()), dim=1)
    images = (ids % 251).to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    memory.add(ids, z_KD, images=images, labels=ids % 7 - 1, hashes=ids * 3)
    seen = set()
    for _ in range(20):
        drawn = draw_batch(memory, 5, torch.device("cpu"))
        assert torch.equal(drawn.labels_B, drawn.ids_B % 7 - 1)
        assert torch.equal(drawn.hashes_B, drawn.ids_B * 3)
        assert torch.equal(drawn.images_BCHW[:, 0, 0, 0], drawn.ids_B % 251)
        assert torch.equal(memory.ids[drawn.slots_B], drawn.ids_B)
        seen |= set(drawn.ids_B.tolist())
    assert len(seen) > 20


def test_the_learner_draws_by_its_option_draw() -> None:
    learner = from_memory(draw="inverse-count")
    asked, plain = [], learner.memory.sample

    def sample(n, how):
        asked.append((n, how))
        return plain(n, how=how)

    learner.memory.sample = sample
    steps(learner, 2)
    assert asked == [(BATCH, "inverse-count")] * 2


@table("seed", range(5))
def test_true_collisions_are_the_share_of_equal_pairs(seed: int) -> None:
    """Compare with a loop over all pairs, for any numbers that stand for the classes."""
    classes = torch.tensor([0, 1, 7, 10**12, 2**62, 2**63 - 1, -1, -5, -(2**63)])
    generator = torch.Generator().manual_seed(seed)
    batch = classes[torch.randint(0, 9, (40,), generator=generator)]
    held = classes[torch.randint(0, 9, (60,), generator=generator)]
    known_B = [label for label in batch.tolist() if label >= 0]
    known_K = [label for label in held.tolist() if label >= 0]
    equal = sum(one == other for one in known_B for other in known_K)
    assert true_collisions(count_pairs(batch, held).tolist()) == equal / (
        len(known_B) * len(known_K)
    )


def test_true_collisions_need_labels_on_both_sides() -> None:
    labelled, none = torch.tensor([3, -1]), torch.tensor([-1, -7])
    assert true_collisions(count_pairs(labelled, labelled).tolist()) == 1
    for one, other in ((none, labelled), (labelled, none), (none, none), (labelled, labelled[:0])):
        assert true_collisions(count_pairs(one, other).tolist()) is None


def test_a_backup_restores_the_saved_tensors() -> None:
    live = [torch.ones(3), torch.tensor(4), torch.zeros(2, 2), torch.tensor(7)]
    backup = Backup(live)
    backup.save()
    for tensor in live:
        tensor.add_(5)
    live[0].fill_(math.nan)
    backup.restore()
    assert [tensor.tolist() for tensor in live] == [[1, 1, 1], 4, [[0, 0], [0, 0]], 7]


def test_the_step_rejects_wrong_settings() -> None:
    with pytest.raises(ValueError, match="anchors is 'both'"):
        build(anchors="both")
    with pytest.raises(ValueError, match="7 slots are fewer than the 8 samples"):
        steps(build(anchors="memory", slots=7), 1)
    with pytest.raises(ValueError, match="draw is 'best'"):
        build(draw="best")
    with pytest.raises(ValueError, match='anchors="memory" trains on images'):
        build(anchors="memory", images=False)
