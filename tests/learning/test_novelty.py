"""Tests that near-duplicates are dropped before they are encoded, and waiting samples are kept.

Shapes: B samples.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning_world import BATCH, DIM, SIZE, SLOTS, Repeatable, build, differing, steps
from torch import Tensor

from stream_ssl.batch import START, Batch, Origin
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.novelty import Novelty
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.records import Idle
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Embedding, Thumbnail, Weighted
from stream_ssl.memory.eviction import Oldest
from stream_ssl.memory.sketch_distance import ALIKE

SHAPE = (1, SIZE, SIZE)
THRESHOLD = 0.9


class Parked(Repeatable):
    """A stream in which most frames are noised copies of two scenes, and each fourth sample is
    new.
    """

    def next(self, timeout: float) -> Batch | None:
        batch = super().next(timeout)
        if batch is None:
            return None
        draw = np.random.default_rng(1)
        scene_SCHW = draw.integers(0, 256, (2, *SHAPE))
        noise = np.random.default_rng(self.record).integers(-9, 10, (BATCH, *SHAPE))
        image_BCHW = np.clip(scene_SCHW[np.arange(BATCH) % 2] + noise, 0, 255).astype(np.uint8)
        image_BCHW[::4] = batch.images_BCHW[::4]
        batch.images_BCHW[:] = image_BCHW
        origins = [Origin("camera", "lens", str(number), 0.0) for number in batch.ids_B.tolist()]
        return replace(batch, origins_B=origins)


def tensors(batch: Batch[Any]) -> Batch[Tensor]:
    return Batch(**{name: torch.from_numpy(column) for name, column in batch.columns().items()})


def one_by_one(batches: list[Batch[Tensor]]) -> list[int]:
    """Return the admitted ids of a loop over a memory that holds all admitted samples."""
    kept: list[Tensor] = []
    ids = []
    for batch in batches:
        for number, image_CHW in zip(batch.ids_B.tolist(), batch.images_BCHW, strict=True):
            row_A = Thumbnail(4)(torch.empty(1, 0, dtype=torch.float64), image_CHW[None])[0]
            if all(float(row_A @ other_A) < THRESHOLD for other_A in kept):
                kept.append(row_A)
                ids.append(number)
    return ids


MIXED = Weighted([Embedding(), Thumbnail(4)], weights=[9, 1])


@pytest.mark.parametrize("descriptor", [Thumbnail(4), MIXED], ids=repr)
def test_novelty_admits_the_same_samples_as_a_loop(descriptor: Any) -> None:
    memory = WorkingMemory(500, DIM, Oldest(), SHAPE, descriptor=descriptor)
    novelty, stream, seen = Novelty(memory, THRESHOLD), Parked(), []
    let_through, dropped_origins, new_origins = [], 0, 0
    for _ in range(40):
        batch = tensors(stream.next(0.0))
        seen.append(batch)
        new = novelty(batch)
        dropped_origins += len(novelty.dropped_origins)
        new_origins += len(novelty.new_origins)
        if new is not None:
            assert len(new) == BATCH
            let_through += new.ids_B.tolist()
            z_BD = torch.nn.functional.normalize(torch.randn(BATCH, DIM), dim=1)
            memory.add(new.ids_B, z_BD, new.images_BCHW, new.labels_B, new.hashes_B)
    expected = one_by_one(seen)
    assert let_through + novelty.state()["ids_B"].tolist() == expected
    assert BATCH < len(expected) < 0.4 * 40 * BATCH
    assert dropped_origins == 40 * BATCH - len(expected)
    assert new_origins == len(expected)  # at once, also of samples that wait


def test_a_restored_novelty_test_admits_the_same_pictures() -> None:
    """A learner that is stopped midway admits the same samples as one that is not."""
    passed = []
    for stops in (False, True):
        torch.manual_seed(0)
        memory = WorkingMemory(500, DIM, Oldest(), SHAPE, descriptor=Embedding())
        novelty, stream, ids = Novelty(memory, "auto"), Parked(), []
        for turn in range(30):
            if stops and turn % 7 == 3:
                waiting = novelty.state()
                novelty = Novelty(memory, "auto")
                novelty.load(waiting, torch.device("cpu"))
            batch = tensors(stream.next(0.0))
            new = novelty(batch)
            if new is not None:
                ids += new.ids_B.tolist()
                z_BD = torch.nn.functional.normalize(torch.randn(BATCH, DIM), dim=1)
                memory.add(new.ids_B, z_BD, new.images_BCHW, new.labels_B, new.hashes_B)
        passed.append(ids + novelty.state()["ids_B"].tolist())
    assert passed[0] == passed[1]
    # Two scenes, and each fourth sample, which is new.
    assert 2 * 30 <= len(passed[0]) <= 2 * 30 + 6
    assert [number for number in passed[0] if number % BATCH % 4 == 0] == [
        number for number in range(BATCH, 31 * BATCH) if number % 4 == 0
    ]


def test_each_dropped_sample_names_its_original() -> None:
    """The original may be in a slot, among the waiting samples, or earlier in the batch."""
    memory = WorkingMemory(500, DIM, Oldest(), SHAPE, descriptor=Embedding())
    draw = np.random.default_rng(3)
    picture_NCHW = torch.from_numpy(draw.integers(0, 256, (12, *SHAPE), dtype=np.uint8))
    z_BD = torch.nn.functional.normalize(torch.randn(3, DIM), dim=1)
    memory.add(torch.arange(3), z_BD, picture_NCHW[:3], torch.tensor([5, 6, 7]))
    novelty = Novelty(memory, "auto")
    origins = [Origin("camera", "lens", str(number), 0.0) for number in range(4)]

    def batch(numbers: list[int], labels: list[int]) -> Batch[Tensor]:
        return Batch(
            ids_B=torch.arange(4),
            hashes_B=torch.arange(4),
            labels_B=torch.tensor(labels),
            images_BCHW=picture_NCHW[numbers],
            received_B=torch.zeros(4, dtype=torch.float64),
            origins_B=origins,
        )

    assert novelty(batch([3, 1, 4, 1], [0, 6, 0, 2])) is None  # 3 and 4 wait
    assert [(one.origin, one.distance, one.label, one.twin_label) for one in novelty.dropped] == [
        (origins[1], 0.0, 6, 6),
        (origins[3], 0.0, 2, 6),
    ]
    assert [origin for origin, _ in novelty.distances] == origins
    assert [distance < ALIKE for _, distance in novelty.distances] == [False, True, False, True]
    assert novelty(batch([4, 5, 5, 2], [1, 1, 9, -1])) is None  # 5 waits too
    assert [(one.label, one.twin_label) for one in novelty.dropped] == [(1, 0), (9, 1), (-1, 7)]
    for one, number in zip(novelty.dropped, (4, 5, 2), strict=True):
        assert torch.equal(one.picture_CHW, picture_NCHW[number])
        assert torch.equal(one.twin_CHW, picture_NCHW[number])
    assert novelty.dropped_origins == [origins[0], origins[2], origins[3]]
    assert novelty.new_origins == [origins[1]]
    assert len(novelty(batch([6, 7, 8, 9], [-1] * 4))) == 4
    assert novelty.dropped == []


def test_waiting_samples_are_restored_and_pass_if_novelty_is_off() -> None:
    memory = WorkingMemory(50, DIM, Oldest(), SHAPE, descriptor=Thumbnail(4))
    novelty, stream = Novelty(memory, THRESHOLD), Parked()
    batches = [tensors(stream.next(0.0)) for _ in range(3)]
    assert novelty(batches[0]) is None
    waiting = novelty.state()
    assert 0 < len(novelty) == len(waiting["ids_B"]) < BATCH
    other = Novelty(memory, None)
    other.load(waiting, torch.device("cpu"))
    first, second = other(batches[1]), other(batches[2])
    ids = torch.cat([waiting["ids_B"], batches[1].ids_B, batches[2].ids_B])
    assert torch.equal(torch.cat([first.ids_B, second.ids_B]), ids[: 2 * BATCH])
    assert len(other) == len(novelty)
    assert Novelty(memory, None)(batches[0]) is batches[0]


def test_near_duplicates_are_not_encoded_and_updates_follow_the_pace() -> None:
    encoded = []

    class Counted:
        def __init__(self, method: Any) -> None:
            self.plain = method.encode_keys

        def __call__(self, view_BCHW: Tensor) -> Tensor:
            encoded.append(len(view_BCHW))
            return self.plain(view_BCHW)

    for counts in ("received", "new"):
        learner = build(
            stream=Parked(),
            anchors="memory",
            descriptor=Thumbnail(4),
            novelty=THRESHOLD,
            pace=Pace(counts=counts),
        )
        learner.method.encode_keys = Counted(learner.method)
        encoded.clear()
        found = steps(learner, 90)
        new = sum(r.batch for r in found if not r.replay)
        away = sum(r.near_duplicates for r in found)
        told = [origin.id for r in found for origin in r.dropped_origins if origin is not None]
        trained = [str(number) for r in found if not r.replay for number in r.ids_B.tolist()]
        assert len(told) == away
        assert len({*told, *trained}) == away + new  # each is reported once
        assert new + away <= found[-1].samples < new + away + BATCH
        assert away > 0.6 * found[-1].samples
        updates = sum(r.skipped is None for r in found)
        assert sum(encoded) == new + BATCH * updates  # an update encodes the keys of its samples
        due = (found[-1].samples if counts == "received" else new) // BATCH
        assert due - updates in (0, 1)  # the last update may not be made yet
        without = [r for r in found if r.skipped == "novelty"]
        assert without
        assert all(r.batch == 0 and r.admission is None for r in without)
        assert learner.pace.updates <= learner.step


def test_a_checkpoint_holds_the_waiting_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_ssl.learning.learner.IDLE", 0.0)

    def make(start: Any = None) -> Any:
        return build(
            stream=Parked(*([] if start is None else [start])),
            anchors="memory",
            descriptor=Thumbnail(4),
            novelty=THRESHOLD,
        )

    whole, first = make(), make()
    steps(whole, 25)
    steps(first, 10)
    captured = first.capture()
    assert 0 < len(captured.tensors["waiting"]["ids_B"]) < BATCH
    again = make(first.offset)
    again.restore(captured)
    steps(again, 15)
    assert differing(whole, again) == []
    quiet = make(first.offset)
    quiet.restore(captured)
    quiet.batches.next = lambda _: None
    records = quiet.run(threading.Event())
    idle = next(record for record in records if isinstance(record, Idle))
    assert idle.waiting == len(captured.tensors["waiting"]["ids_B"])


def test_a_checkpoint_holds_the_cells_of_the_test_although_no_sample_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 16)
    whole, first = (build(novelty="auto", slots=96) for _ in range(2))
    steps(whole, 20)
    steps(first, 9)
    assert len(first.novelty) == 0
    again = build(novelty="auto", slots=96, start=first.offset)
    again.restore(first.capture())
    steps(again, 11)
    ours, theirs = whole.novelty.state(), again.novelty.state()
    assert ours.keys() == theirs.keys() == {"test.centres", "test.changes_left"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert differing(whole, again) == []


def test_waiting_samples_go_to_the_first_of_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 16)
    learner, checkpointer = build(stream=Parked(), novelty="auto"), Checkpointer(tmp_path)
    steps(learner, 20)
    assert "test.centres" in learner.capture().tensors["waiting"]
    checkpointer.save(learner, {})
    saved = checkpointer.newest()
    assert saved is not None
    first, second = (saved.capture(rank, 2, START).tensors for rank in range(2))
    ids_W = learner.capture().tensors["waiting"]["ids_B"]
    assert first["waiting"]["ids_B"].tolist() == ids_W.tolist()
    assert "waiting" not in second
    assert not any(name.startswith("test.") for name in first["waiting"])


@pytest.mark.parametrize("descriptor", [Embedding(), Weighted([Embedding()])])
def test_a_descriptor_of_embeddings_alone_is_refused(descriptor: Any) -> None:
    memory = WorkingMemory(SLOTS, DIM, image_shape=SHAPE, descriptor=descriptor)
    with pytest.raises(ValueError, match=r"novelty is 0\.9 .* Choose memory.descriptor: Thumbnail"):
        Novelty(memory, 0.9)
    with pytest.raises(ValueError, match=r"novelty: threshold is 1\.5"):
        Novelty(WorkingMemory(4, 2, image_shape=SHAPE, descriptor=Thumbnail(2)), 1.5)
