"""Images in a file: what it holds, whom it serves, and what a crash or a kill leaves.

Shapes: D embedding, k occupied slots, N samples, C H W image.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from image_file_worker import CAPACITY, built, embedding_of, feed, image_of
from memory_stream import SHAPE, offer, stream

from memory import WorkingMemory
from memory.columns import ImageFile
from memory.eviction import MostDuplicated, Oldest
from memory.scores import VonMisesFisher


def in_file(path: Path, **options: Any) -> WorkingMemory:
    return WorkingMemory(25, 6, Oldest(), SHAPE, seed=3, image_file=path, **options)


def test_an_image_file_holds_what_memory_would(tmp_path: Path) -> None:
    held, filed = WorkingMemory(25, 6, Oldest(), SHAPE, seed=3), in_file(tmp_path / "images")
    for start in range(0, 90, 15):
        offer(held, start, start + 15)
        offer(filed, start, start + 15)
        assert torch.equal(held.images, filed.images)
        assert filed.check_valid() == (True, "")
    one, two = held.sample(7), filed.sample(7)
    assert torch.equal(one.images, two.images)
    assert "columns.images" not in filed.state_dict()
    assert stat.S_IMODE((tmp_path / "images").stat().st_mode) == 0o600


def test_room_for_all_images_is_taken_when_the_file_is_made(tmp_path: Path) -> None:
    """Else the first write that a full disk has no room for would end the process."""
    WorkingMemory(1 << 10, 2, None, (3, 64, 64), image_file=tmp_path / "images")
    found = (tmp_path / "images").stat()
    assert found.st_size == (1 << 10) * 3 * 64 * 64
    assert found.st_blocks * 512 >= found.st_size


def test_a_disk_without_room_for_all_images_is_refused(tmp_path: Path) -> None:
    path, side = tmp_path / "images", 1 << 15
    with pytest.raises(
        OSError, match=r"images takes 10,995,116,277,760 bytes .* make room"
    ) as told:
        ImageFile(path, 10 << 10, (1, side, side), torch.device("cpu"))
    assert told.value.errno == errno.ENOSPC
    assert path.stat().st_size == 0


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


def crash(memory: WorkingMemory, path: Path, meanwhile: Callable[[], object]) -> WorkingMemory:
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
    memory = in_file(path := tmp_path / "images")
    offer(memory, 0, 40)  # the head of the queue stands at slot 15
    again = crash(memory, path, lambda: offer(memory, 40, 48))
    _, _, image_NCHW = stream(60)
    assert again.stats().images_lost == 8
    lost = list(range(15, 23))
    there = [slot for slot in range(25) if slot not in lost]
    assert torch.equal(again.images[there], image_NCHW[again.ids[there]])
    assert int(again.images[lost].max()) == 0
    for how in ("uniform", "inverse-count"):
        for n in (10, 17, 60):
            draw = again.sample(n, how=how)  # type: ignore[arg-type]
            assert set(draw.slots.tolist()) <= set(there)
            assert torch.equal(draw.images, image_NCHW[draw.ids])
    assert sorted(again.stalest(99).tolist()) == there
    assert len(again.reencode(lambda image: stream(len(image))[1])) == 17
    with pytest.raises(ValueError, match="the image of slot 16 is lost"):
        again.images_of([3, 16])
    again = crash(again, path, lambda: None)  # what is lost stays so until it is overwritten
    assert again.stats().images_lost == 8
    offer(again, 40, 45)
    assert again.stats().images_lost == 3


def test_a_replay_of_the_stream_brings_all_images_back(tmp_path: Path) -> None:
    memory, (ids, z_ND, image_NCHW) = in_file(path := tmp_path / "images"), stream(60)
    memory.add(ids[:40], z_ND[:40], image_NCHW[:40])
    again = crash(memory, path, lambda: memory.add(ids[40:], z_ND[40:], image_NCHW[40:]))
    assert again.stats().images_lost == 20
    again.add(ids[40:], z_ND[40:], image_NCHW[40:])
    whole = WorkingMemory(25, 6, Oldest(), SHAPE, seed=3)
    whole.add(ids, z_ND, image_NCHW)
    assert again.stats() == whole.stats()
    assert torch.equal(again.images, whole.images)


def test_damage_to_the_file_is_found(tmp_path: Path) -> None:
    memory = in_file(path := tmp_path / "images")
    offer(memory, 0, 30)

    def damage() -> None:
        with path.open("r+b") as file:
            file.seek(9 * 6 + 2)
            before = file.read(1)[0]
            file.seek(9 * 6 + 2)
            file.write(bytes([before ^ 1]))
        assert memory.check_valid() == (False, "slot 9: its image is not the one written")

    again = crash(memory, path, damage)
    assert sorted(again.stalest(25).tolist()) == [slot for slot in range(25) if slot != 9]


def test_a_memory_without_any_image_left_says_so(tmp_path: Path) -> None:
    memory = in_file(path := tmp_path / "images")
    offer(memory, 0, 30)
    again = crash(memory, path, lambda: os.truncate(path, 0) or os.truncate(path, 150))
    assert again.stats().images_lost == 25
    with pytest.raises(ValueError, match="lost its images"):
        again.sample(3)
    assert len(again.negatives(9)) == 9


def test_nobody_is_written_and_held(tmp_path: Path) -> None:
    policy = MostDuplicated(VonMisesFisher(0.1), compete=True)
    memory = WorkingMemory(2, 2, policy, (1, 1, 1), image_file=tmp_path / "images")
    memory.load_state_dict(memory.state_dict())
    assert memory.check_valid() == (True, "")
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    for number, row_1D in enumerate(rows.split(1)):
        image = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        admission = memory.add(torch.tensor([number]), row_1D, image)
    assert admission.refused.tolist() == [2]
    assert memory.check_valid() == (True, "")


# A process that is killed while it writes.


def run_and_kill(folder: Path, linger: float) -> int:
    """Let the worker save twice and add some more; what it last told to be saved when SIGKILL came.

    Args:
        folder: of its files.
        linger: seconds after the second batch that follows the second save.
    """
    pipe = folder / f"told-{linger}"
    os.mkfifo(pipe)
    worker = Forked(feed, folder, output=pipe)
    with pipe.open() as telling:
        try:
            told: list[str] = []
            while told.count("saved") < 2 or told[-4::2] != ["added", "added"]:
                line = telling.readline().split()
                assert line, "the worker ended by itself"
                told += line
            time.sleep(linger)
        finally:
            worker.kill()
            told += telling.read().split()
            worker.wait(timeout=60)
    assert worker.returncode == -signal.SIGKILL
    return max(int(at) for what, at in itertools.pairwise(told) if what == "saved")


def check_true(memory: WorkingMemory) -> int:
    """Whether all that the memory says is so; how many images it has lost."""
    assert memory.check_valid() == (True, "")
    true_kCHW = image_of(memory.ids)
    kept = memory.stalest(len(memory))
    lost = torch.ones(len(memory), dtype=torch.bool)
    lost[kept] = False
    assert torch.equal(memory.images[kept], true_kCHW[kept])
    assert int(memory.images[lost].sum()) == 0
    assert torch.allclose(memory.embeddings, embedding_of(true_kCHW), atol=1e-6)
    assert int(lost.sum()) == memory.stats().images_lost
    return int(lost.sum())


def test_what_comes_back_after_a_kill_is_true(tmp_path: Path) -> None:
    lost = 0
    for linger in (0.0, 0.003):
        told = run_and_kill(tmp_path, linger)
        memory = built(tmp_path)
        assert len(memory) == CAPACITY
        # A save that was done but could not be told any more is as good.
        assert memory.stats().added >= told
        lost += check_true(memory)
        at = memory.stats().added
        del memory  # lets go of the file
    assert lost > 0, "no kill came between a save and the next: the test shows nothing"
    memory = built(tmp_path)
    while memory.stats().images_lost:
        ids_B = torch.arange(at, at + 16)
        memory.add(ids_B, embedding_of(image_of(ids_B)), image_of(ids_B))
        at += 16
        assert at < 20_000, "lost images are never replaced"
    assert check_true(memory) == 0
