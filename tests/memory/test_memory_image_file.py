"""Images in a file: what it holds, whom it serves, and what a crash leaves.

Shapes: D embedding, k occupied slots, N samples, C H W image.
"""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_stream import SHAPE, offer, stream

from memory import WorkingMemory
from memory.eviction import MostDuplicated, Oldest
from memory.scores import VonMisesFisher


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


def test_a_batch_that_nobody_of_joins_is_counted(tmp_path: Path) -> None:
    memory = WorkingMemory(
        2,
        2,
        MostDuplicated(VonMisesFisher(0.1), compete=True),
        image_shape=(1, 1, 1),
        image_file=tmp_path / "images",
    )
    image = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    for number, row in enumerate([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]):
        admission = memory.add(torch.tensor([number]), torch.tensor([row]), images=image)
    assert admission.refused.tolist() == [2]
    assert memory.check_valid() == (True, "")


def test_an_empty_memory_is_saved_and_loaded(tmp_path: Path) -> None:
    memory = WorkingMemory(4, 3, image_shape=(1, 2, 2), image_file=tmp_path / "images")
    assert memory.check_valid() == (True, "")
    memory.load_state_dict(memory.state_dict())
    assert len(memory) == 0
