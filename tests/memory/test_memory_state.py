"""States: bit-equal there and back, of older versions, in files, and beside an image file.

Shapes: D embedding, k occupied slots, N samples, C H W image.
"""

from __future__ import annotations

import gc
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import memory as package
from memory import Duplicates, WorkingMemory
from memory.eviction import POLICIES, Feedback, MostDuplicated, Oldest
from memory.scores import Score, VonMisesFisher
from memory.state import VERSION
from tests.naive import unit_rows

SHAPE = (1, 2, 3)


def stream(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, embeddings and images, in which every image is another."""
    z_ND = unit_rows(np.random.default_rng(seed), "clustered", count, 6)
    image_NCHW = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    )
    return torch.arange(count), z_ND, image_NCHW


def offer(memory: WorkingMemory, start: int, end: int) -> None:
    """Samples [start, end) of the stream, and every kind of draw."""
    ids, z_ND, image_NCHW = stream(end)
    part = slice(start, end)
    memory.add(ids[part], z_ND[part], image_NCHW[part], labels=ids[part] % 4)
    memory.refresh(memory.stalest(3), z_ND[:3])
    memory.negatives(5)
    memory.negatives(5, how="stratified", cells=3)
    memory.sample(4)
    memory.sample(4, how="inverse-count")


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("action", [None, "count", "merge"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_memory_goes_on_bit_equal(name: str, action: Any, tmp_path: Path) -> None:
    rule = None if action is None else Duplicates(0.97, action)
    memory = WorkingMemory(25, 6, POLICIES[name](), SHAPE, seed=3, duplicates=rule)
    start = 0
    for end in (10, 60, 130):
        offer(memory, start, end)
        state = memory.state_dict()
        package.save(memory, tmp_path / "held")
        loaded = package.load(tmp_path / "held", POLICIES[name](), seed=8, duplicates=rule)
        assert_equal(loaded.state_dict(), state)
        twice = WorkingMemory(25, 6, POLICIES[name](), SHAPE, duplicates=rule)
        twice.load_state_dict(loaded.state_dict())
        assert_equal(twice.state_dict(), state)
        assert loaded.check_valid() == (True, "")
        assert loaded.stats() == memory.stats()
        for each in (memory, loaded):
            offer(each, end, end + 15)
        assert_equal(loaded.state_dict(), memory.state_dict())
        memory, start = loaded, end + 15


def test_a_state_of_version_1_is_read() -> None:
    memory = WorkingMemory(8, 6, image_shape=SHAPE)
    ids, z_ND, image_NCHW = stream(20)
    memory.add(ids, z_ND, image_NCHW)
    old = {
        name: value
        for name, value in memory.state_dict().items()
        if name in ("counters", "generator")
        or (name.startswith(("columns.", "eviction.")) and name != "columns.multiplicity")
    }
    old["counters"] = torch.tensor([1, 8, 20, 12, 0])
    loaded = WorkingMemory(8, 6, image_shape=SHAPE)
    loaded.load_state_dict(old)
    assert_equal(loaded.state_dict(), memory.state_dict())
    assert loaded.check_valid() == (True, "")


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_other_versions_are_refused(version: int) -> None:
    memory = WorkingMemory(4, 3)
    state = memory.state_dict()
    state["counters"][0] = version
    with pytest.raises(ValueError, match=f"no memory state of version 1 to {VERSION}"):
        memory.load_state_dict(state)


def test_a_state_of_another_score_is_refused_and_changes_nothing() -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6, MostDuplicated(VonMisesFisher(0.2)))
    memory.add(ids, z_ND)
    before = memory.state_dict()
    other = WorkingMemory(8, 6, MostDuplicated(VonMisesFisher(0.1)))
    other.add(ids[:9], z_ND[:9])
    with pytest.raises(ValueError, match=r"score VonMisesFisher\(kappa=0.1\), this memory has"):
        memory.load_state_dict(other.state_dict())
    assert_equal(memory.state_dict(), before)


class Learning(Oldest):
    """A policy that moves its own score, and remembers where it was."""

    name = "learning"

    def __init__(self) -> None:
        self.score: Score = VonMisesFisher(0.1)

    def update(self, feedback: Feedback) -> None:
        self.heard = feedback
        self.score = VonMisesFisher(0.1 + feedback.added / 1000)

    def state(self) -> dict[str, Tensor]:
        kappa = getattr(self.score, "kappa", 0.0)
        return super().state() | {"kappa": torch.tensor([kappa], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.score = VonMisesFisher(float(state["kappa"]))


def test_a_policy_hears_of_every_batch_and_may_move_its_score() -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6, policy := Learning(), duplicates=Duplicates(0.999, "refuse"))
    memory.add(ids[:12], z_ND[:12])
    again = memory.add(ids[10:14], z_ND[[10, 11, 12, 13]])
    assert policy.heard == Feedback(
        inserted=again.inserted,
        evicted=len(again.evicted),
        refused=len(again.refused),
        added=16,
    )
    assert again.refused.tolist() == [10, 11]
    loaded = WorkingMemory(8, 6, Learning())
    loaded.load_state_dict(memory.state_dict())
    assert loaded.eviction.score == VonMisesFisher(0.1 + 16 / 1000)
    assert torch.equal(loaded.counts(), memory.counts())


def test_a_failed_save_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6)
    memory.add(ids[:9], z_ND[:9])
    package.save(memory, tmp_path / "held")
    before = memory.state_dict()
    memory.add(ids[9:], z_ND[9:])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        package.save(memory, tmp_path / "held")
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    assert_equal(package.load(tmp_path / "held").state_dict(), before)


def test_a_file_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a memory")
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "other")
    for name in ("text", "other"):
        with pytest.raises(ValueError, match="holds no memory that was saved here"):
            package.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        package.load(tmp_path / "nothing")


def test_the_error_without_safetensors_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.save(WorkingMemory(2, 2), tmp_path / "held")
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.load(tmp_path / "held")


def in_file(path: Path, **options: Any) -> WorkingMemory:
    return WorkingMemory(25, 6, Oldest(), SHAPE, seed=3, image_file=path, **options)


def test_an_image_file_holds_what_memory_would(tmp_path: Path) -> None:
    held, filed = WorkingMemory(25, 6, Oldest(), SHAPE, seed=3), in_file(tmp_path / "images")
    for start in range(0, 90, 15):
        offer(held, start, start + 15)
        offer(filed, start, start + 15)
        assert held.images is not None
        assert torch.equal(held.images, filed.images)
        assert filed.check_valid() == (True, "")
    one, two = held.sample(7), filed.sample(7)
    assert one.images is not None
    assert torch.equal(one.images, two.images)
    assert "columns.images" not in filed.state_dict()
    assert stat.S_IMODE((tmp_path / "images").stat().st_mode) == 0o600


def test_a_large_image_file_is_sparse(tmp_path: Path) -> None:
    memory = WorkingMemory(1 << 16, 2, None, (3, 64, 64), image_file=tmp_path / "images")
    image_NCHW = torch.full((3, 3, 64, 64), 7, dtype=torch.uint8)
    memory.add(range(3), torch.eye(2)[[0, 1, 0]], image_NCHW)
    found = (tmp_path / "images").stat()
    assert found.st_size == (1 << 16) * 3 * 64 * 64
    assert found.st_blocks * 512 < 1 << 20


def test_a_file_serves_one_memory_of_one_size(tmp_path: Path) -> None:
    memory = in_file(tmp_path / "images")
    with pytest.raises(ValueError, match="in use by another memory"):
        in_file(tmp_path / "images")
    del memory
    gc.collect()
    with pytest.raises(ValueError, match="has 150 bytes, images of shape"):
        WorkingMemory(3, 6, None, SHAPE, image_file=tmp_path / "images")
    in_file(tmp_path / "images")
    with pytest.raises(ValueError, match="give image_shape"):
        WorkingMemory(3, 6, image_file=tmp_path / "images")


def crash(memory: WorkingMemory, path: Path, meanwhile: Callable[[], None]) -> WorkingMemory:
    """The memory as it comes back from its state of now, after what happened meanwhile."""
    state = memory.state_dict()
    meanwhile()
    memory._columns.images = None  # the process ends: the lock goes with it
    gc.collect()
    again = in_file(path)
    again.load_state_dict(state)
    assert again.check_valid() == (True, "")
    return again


def test_a_file_that_went_on_has_lost_what_was_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "images"
    memory = in_file(path)
    offer(memory, 0, 40)  # the head of the queue stands at slot 15
    again = crash(memory, path, lambda: offer(memory, 40, 48))
    _, _, image_NCHW = stream(60)
    assert again.stats().images_lost == 8
    lost = list(range(15, 23))
    there = [slot for slot in range(25) if slot not in lost]
    assert again.images is not None
    assert torch.equal(again.images[there], image_NCHW[again.ids[there]])
    assert int(again.images[lost].max()) == 0
    for how in ("uniform", "inverse-count"):
        for n in (10, 17, 60):
            draw = again.sample(n, how=how)  # type: ignore[arg-type]
            assert set(draw.slots.tolist()) <= set(there)
            assert draw.images is not None
            assert torch.equal(draw.images, image_NCHW[draw.ids])
    assert sorted(again.stalest(99).tolist()) == there
    assert len(again.reencode(lambda image: stream(len(image))[1])) == 17
    with pytest.raises(ValueError, match="the image of slot 16 is lost"):
        again.images_of([3, 16])


def test_a_loss_is_remembered_until_the_slot_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "images"
    memory = in_file(path)
    offer(memory, 0, 40)
    again = crash(memory, path, lambda: offer(memory, 40, 48))
    once_more = crash(again, path, lambda: None)
    assert once_more.stats().images_lost == 8
    offer(once_more, 40, 45)
    assert once_more.stats().images_lost == 3


def test_a_replay_of_the_stream_brings_all_images_back(tmp_path: Path) -> None:
    path, (ids, z_ND, image_NCHW) = tmp_path / "images", stream(60)
    memory = in_file(path)
    memory.add(ids[:40], z_ND[:40], image_NCHW[:40])
    again = crash(memory, path, lambda: discard(memory.add(ids[40:], z_ND[40:], image_NCHW[40:])))
    assert again.stats().images_lost == 20
    again.add(ids[40:], z_ND[40:], image_NCHW[40:])
    whole = WorkingMemory(25, 6, Oldest(), SHAPE, seed=3)
    whole.add(ids, z_ND, image_NCHW)
    assert again.stats() == whole.stats()
    assert whole.images is not None
    assert torch.equal(again.images, whole.images)


def discard(_: object) -> None:
    """A statement where a callable is wanted."""


def test_damage_to_the_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "images"
    memory = in_file(path)
    offer(memory, 0, 30)

    def damage() -> None:
        with path.open("r+b") as file:
            file.seek(9 * 6 + 2)
            before = file.read(1)[0]
            file.seek(9 * 6 + 2)
            file.write(bytes([before ^ 1]))
        assert memory.check_valid() == (False, "slot 9: its image is not the one written")

    assert crash(memory, path, damage)._columns.with_images().tolist() == [  # type: ignore[union-attr]
        slot for slot in range(25) if slot != 9
    ]


def test_a_memory_without_any_image_left_says_so(tmp_path: Path) -> None:
    path = tmp_path / "images"
    memory = in_file(path)
    offer(memory, 0, 30)
    again = crash(memory, path, lambda: os.truncate(path, 0) or os.truncate(path, 150))
    assert again.stats().images_lost == 25
    with pytest.raises(ValueError, match="lost its images"):
        again.sample(3)
    assert len(again.negatives(9)) == 9
