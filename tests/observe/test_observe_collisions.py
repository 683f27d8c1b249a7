"""The calibration of cosines to probabilities, against the laws that made the pairs."""

from __future__ import annotations

import pytest
import torch
from observe_records import step
from table import table
from torch.nn.functional import normalize

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import Oldest
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.observe.collisions import (
    Calibration,
    ClassCollisions,
    NearDuplicateShare,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_calibration_finds_a_probability_that_rises_with_the_cosine() -> None:
    calibration, generator = Calibration(half_life=1e9), draws()
    for _ in range(20):
        cosine = torch.rand(20_000, generator=generator) * 2 - 1
        law = torch.sigmoid(6 * (cosine - 0.3))
        calibration.take(cosine, torch.rand(20_000, generator=generator) < law)
    at = torch.tensor([-0.9, -0.3, 0.0, 0.3, 0.6, 0.95])
    found = [calibration.mean(one.reshape(1)) for one in at]
    assert found == pytest.approx(torch.sigmoid(6 * (at - 0.3)).tolist(), abs=0.05)
    assert found == sorted(found)  # type: ignore[type-var]


def test_calibration_gives_no_probability_before_pairs_of_both_kinds() -> None:
    calibration = Calibration()
    calibration.take(torch.rand(10_000), torch.zeros(10_000, dtype=torch.bool))
    assert calibration.mean(torch.ones(3)) is None
    calibration.take(torch.rand(200), torch.ones(200, dtype=torch.bool))
    assert calibration.mean(torch.ones(3)) is not None
    assert calibration.mean(torch.ones(0)) is None


def test_calibration_forgets_old_pairs() -> None:
    calibration, cosine = Calibration(half_life=2), torch.full((500,), 0.5)
    for same in [True, False] * 2:  # first half the pairs, ...
        calibration.take(cosine, torch.full((500,), same))
    for _ in range(20):  # ... then one in ten
        calibration.take(cosine, torch.arange(500) % 10 == 0)
    assert calibration.mean(cosine) == pytest.approx(0.1, abs=0.01)


def test_a_few_labels_suffice_to_estimate_the_collisions_of_all_samples() -> None:
    """A class of 60 % and eight of 5 %, in one direction each; one label in five is known."""
    generator, collisions = draws(1), ClassCollisions()
    share = torch.tensor([0.6] + [0.05] * 8)
    centre_CD = torch.eye(9, 16)
    memory = WorkingMemory(1024, 16, eviction=Oldest())
    found = None
    for batch in range(60):
        label_B = torch.multinomial(share, 128, replacement=True, generator=generator)
        noise_BD = 0.3 * torch.randn(128, 16, generator=generator)
        keys_BD = normalize(centre_CD[label_B] + noise_BD, dim=1)
        known_B = torch.where(torch.rand(128, generator=generator) < 0.2, label_B, -1)
        ids_B = torch.arange(128) + 128 * batch
        admission = memory.add(ids_B, keys_BD, labels=known_B)
        record = step(keys_BD=keys_BD, labels_B=known_B, ids_B=ids_B, admission=admission)
        collisions.consume(record)
        found = collisions.measure(memory)
        assert collisions.measure(memory) is None, "no batch since"
    assert found == pytest.approx(float(share @ share), abs=0.04)


def test_samples_without_labels_give_no_probability() -> None:
    collisions, memory = ClassCollisions(), WorkingMemory(8, 3, eviction=Oldest())
    record = step()
    memory.add(record.ids_B, record.keys_BD)
    collisions.consume(record)
    assert collisions.measure(memory) is None


def jittered(image_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the images, moved by up to a pixel and changed by up to 6 plus 4 levels."""
    change = torch.randint(-4, 5, image_BCHW.shape, generator=generator)
    change += torch.randint(-6, 7, (len(image_BCHW), 1, 1, 1), generator=generator)
    moves = torch.randint(-1, 2, (len(image_BCHW), 2), generator=generator).tolist()
    moved_BCHW = image_BCHW.to(torch.int64)
    for number, move in enumerate(moves):
        moved_BCHW[number] = moved_BCHW[number].roll(move, (1, 2))
    return (moved_BCHW + change).clamp(0, 255).to(torch.uint8)


def held(images: torch.Tensor, **settings: object) -> WorkingMemory:
    """Return a memory of these images, with random embeddings."""
    memory = WorkingMemory(len(images), 4, eviction=Oldest(), image_shape=(3, 16, 16), **settings)  # type: ignore[arg-type]
    z_BD = normalize(torch.randn(len(images), 4, generator=draws(5)), dim=1)
    memory.add(torch.arange(len(images)), z_BD, images=images)
    return memory


@table("copied", [0, 64, 200])
def test_the_survey_finds_the_share_of_slots_that_show_the_same_scene(copied: int) -> None:
    """`copied` of 256 slots show one of four scenes, jittered."""
    generator = draws(1)
    different = torch.nn.functional.interpolate(
        torch.rand(260, 3, 4, 4, generator=generator), 16, mode="bicubic"
    )
    images = (different.clamp(0, 1) * 200 + 20).to(torch.uint8)
    scenes = images[256:].repeat(50, 1, 1, 1)[:copied]
    images = torch.cat([images[: 256 - copied], jittered(scenes, generator)])
    memory = held(images)
    assert NearDuplicateShare(NearDuplicates(memory), memory).survey() == pytest.approx(
        copied / 256, abs=0.06
    )


def test_the_share_does_not_jump_between_surveys() -> None:
    """Every fourth of 1,024 slots is a copy, and one survey of 256 slots may miss some."""
    images = torch.randint(0, 256, (1024, 3, 16, 16), dtype=torch.uint8, generator=draws())
    images[::4] = images[0]
    memory = held(images)
    share = NearDuplicateShare(NearDuplicates(memory), memory)
    surveyed = [share.survey() for _ in range(12)]
    assert surveyed[3:] == [0.25] * 9


def test_noise_has_no_near_duplicates() -> None:
    images = torch.randint(0, 256, (256, 3, 16, 16), dtype=torch.uint8, generator=draws())
    memory = held(images)
    assert NearDuplicateShare(NearDuplicates(memory), memory).survey() == 0


def test_a_memory_without_pictures_has_no_share_of_near_duplicates() -> None:
    assert NearDuplicateShare(None, WorkingMemory(8, 4)).survey() is None
    empty = WorkingMemory(8, 4, image_shape=(3, 16, 16))
    assert NearDuplicateShare(NearDuplicates(empty), empty).survey() is None
