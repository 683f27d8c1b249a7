"""Re-encoding from the images that the memory keeps.

Shapes: D embedding, K slots, R slots refreshed, b images encoded at a time, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import POLICIES, MostDuplicated, Oldest, Policy
from memory.images import Images
from memory.scores import VonMisesFisher
from tests.naive import unit_rows

SHAPE = (2, 3, 3)
MAKERS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "most-duplicated, sharp": lambda: MostDuplicated(VonMisesFisher(0.1)),
}


class Encoder(torch.nn.Module):
    """A linear map of the pixels, and how many images it was given at a time."""

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__()
        weight = np.random.default_rng(seed).normal(size=(18, dim))
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.batches: list[int] = []

    def forward(self, image_bCHW: Tensor) -> Tensor:
        assert image_bCHW.dtype == torch.uint8
        self.batches.append(len(image_bCHW))
        pixel_bP = image_bCHW.flatten(1).to(torch.float64) - 127
        # A row at a time, so that how many come together does not change the rounding.
        z_bD = torch.stack([(pixel_P[:, None] * self.weight).sum(dim=0) for pixel_P in pixel_bP])
        return torch.nn.functional.normalize(z_bD, dim=1)


def filled(capacity: int = 20, count: int = 50, **options: Any) -> WorkingMemory:
    memory = WorkingMemory(capacity, 5, image_shape=SHAPE, dtype=torch.float64, **options)
    rng = np.random.default_rng(count)
    images = torch.from_numpy(rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8))
    memory.add(
        torch.arange(count),
        unit_rows(rng, "clustered", count, 5),
        images,
        labels=torch.arange(count) % 3,
    )
    return memory


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_all_slots_are_encoded_anew_and_the_policy_hears_of_it_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MAKERS[name]()
    memory = filled(eviction=policy)
    heard: list[int] = []
    refreshed = policy.refreshed

    def spy(slots: Tensor, before_RD: Tensor) -> None:
        heard.append(len(slots))
        refreshed(slots, before_RD)

    monkeypatch.setattr(policy, "refreshed", spy)
    encoder = Encoder(5, 0)
    before_KD = memory.embeddings.clone()
    drift_K = memory.reencode(encoder, batch=6)
    assert encoder.batches == [6, 6, 6, 2]
    assert heard == [20]
    assert memory.images is not None
    expected_KD = encoder(memory.images).detach()
    assert torch.equal(memory.embeddings, expected_KD)
    assert not memory.embeddings.requires_grad
    assert torch.allclose(drift_K, (before_KD * expected_KD).sum(dim=1))
    assert memory.encoded.tolist() == [50] * 20
    assert memory.check_valid() == (True, "")
    stats = memory.stats()
    assert stats.drift_mean == pytest.approx(float(drift_K.mean()))
    assert stats.drift_min == pytest.approx(float(drift_K.min()))
    assert (stats.stale_p50, stats.stale_max) == (0, 0)


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_the_size_of_the_batches_changes_nothing(batch: int) -> None:
    by_hand, memory = filled(), filled()
    slots = memory.stalest(7)
    encoder = Encoder(5, 1)
    drift_R = memory.reencode(encoder, slots, batch)
    assert sum(encoder.batches) == 7
    assert max(encoder.batches) == min(batch, 7)
    assert torch.equal(drift_R, by_hand.refresh(slots, encoder(by_hand.images_of(slots))))
    one, two = by_hand.state_dict(), memory.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_memory_of_images_follows_the_encoder() -> None:
    """D-SimCLR: every step has an encoder of its own, and all negatives are made by it."""
    memory = filled(12, 12)
    rng = np.random.default_rng(7)
    for step in range(5):
        encoder = Encoder(5, step)
        memory.reencode(encoder)
        assert memory.images is not None
        assert torch.equal(memory.negatives().z_ND, encoder(memory.images).detach())
        images = torch.from_numpy(rng.integers(0, 256, (4, *SHAPE), dtype=np.uint8))
        memory.add(torch.arange(4) + 100 * step, encoder(images), images)
        assert memory.check_valid() == (True, "")


def wrong_shape(images: Tensor) -> Tensor:
    return torch.eye(5)[:1]


def wrong_dim(images: Tensor) -> Tensor:
    return torch.eye(6)[: len(images)]


def wrong_norm(images: Tensor) -> Tensor:
    return torch.ones(len(images), 5)


class Dying:
    """Good for one batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return torch.eye(5)[torch.arange(len(images)) % 5] * (self.calls < 2)


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (wrong_shape, "encode gave 1 rows for 4 images"),
        (wrong_dim, r"must be \[B, 5\]"),
        (wrong_norm, "row 0 has norm 2.236"),
        (Dying(), "row 0 has norm 0"),
    ],
)
def test_an_encoder_that_fails_changes_nothing(encode: Any, message: str) -> None:
    memory = filled()
    before = memory.state_dict()
    with pytest.raises(ValueError, match=message):
        memory.reencode(encode, batch=4)
    after = memory.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_reencode_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="batch is 0"):
        filled().reencode(Encoder(5, 0), batch=0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 20\)"):
        filled().reencode(Encoder(5, 0), [3, 20])
    plain = WorkingMemory(4, 5)
    plain.add([1], torch.eye(5)[:1])
    with pytest.raises(ValueError, match="keeps no images: give it image_shape"):
        plain.reencode(Encoder(5, 0))


def test_an_empty_memory_has_nothing_to_encode() -> None:
    memory = WorkingMemory(4, 5, image_shape=SHAPE)
    assert len(memory.reencode(Encoder(5, 0))) == 0
    assert memory.stats().drift_mean == 1


@pytest.mark.parametrize("where", ["host", "file"])
def test_where_images_lie_changes_nothing(where: str, tmp_path: Path) -> None:
    options: dict[str, Any] = (
        {"images_on": "host"} if where == "host" else {"image_file": tmp_path / "images"}
    )
    memories = filled(eviction=Oldest(), seed=2), filled(eviction=Oldest(), seed=2, **options)
    draws = [memory.sample(9) for memory in memories]
    assert torch.equal(draws[0].slots, draws[1].slots)
    assert draws[0].images is not None
    assert draws[1].images is not None
    assert torch.equal(draws[0].images, draws[1].images)
    drifts = [memory.reencode(Encoder(5, 3)) for memory in memories]
    assert torch.equal(drifts[0], drifts[1])
    assert torch.equal(memories[0].embeddings, memories[1].embeddings)
    slots = torch.tensor([4, 0, 9])
    assert torch.equal(memories[0].images_of(slots), memories[1].images_of(slots))


def test_images_are_copies_when_read() -> None:
    images = Images(4, SHAPE, torch.device("cpu"), host=True)
    slots = torch.tensor([2, 0])
    images.write(slots, torch.full((2, *SHAPE), 9, dtype=torch.uint8))
    read_RCHW = images.read(slots)
    images.write(slots, torch.zeros(2, *SHAPE, dtype=torch.uint8))
    assert read_RCHW.unique().tolist() == [9]
    with pytest.raises(ValueError, match="images_on is 'disk': choose \"device\""):
        WorkingMemory(4, 5, image_shape=SHAPE, images_on="disk")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_first_float64_batch_counts_anew(name: str) -> None:
    memory = WorkingMemory(10, 5, MAKERS[name](), SHAPE, seed=4)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (30, *SHAPE), dtype=np.uint8))
    z_ND, ids = unit_rows(rng, "clustered", 30, 5), torch.arange(30)
    memory.add(ids[:15], z_ND[:15].to(torch.float32), images[:15], ids[:15] % 3)
    memory.negatives(4, how="stratified", cells=3)
    state, held = memory.state_dict(), memory.ids.clone()
    memory.add(ids[:0], z_ND[:0], images[:0])
    assert memory.dtype == torch.float64
    assert torch.equal(memory.ids, held)
    # Counts are those of float64 now, to which check_valid holds them.
    assert memory.check_valid() == (True, "")
    wide = WorkingMemory(10, 5, MAKERS[name](), SHAPE, dtype=torch.float64)
    wide.load_state_dict(state)
    assert wide.dtype == torch.float64
    assert wide.check_valid() == (True, "")
    for each in (memory, wide):
        each.add(ids[15:], z_ND[15:], images[15:], ids[15:] % 3)
        each.negatives(4, how="stratified", cells=3)
        assert each.check_valid() == (True, "")
    assert torch.equal(memory.ids, wide.ids)
    loaded = WorkingMemory(10, 5, MAKERS[name](), SHAPE)
    loaded.load_state_dict(memory.state_dict())
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded.counts(), memory.counts())
