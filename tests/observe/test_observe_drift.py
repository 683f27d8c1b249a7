"""Drift is found in the signal that changes, and nowhere in a steady stream."""

from __future__ import annotations

import math

import pytest
import torch
from observe_records import step
from table import table

from stream_ssl.learning.records import StepRecord
from stream_ssl.observe.catalogue import SIGNALS
from stream_ssl.observe.drift import Drift


def around(direction: int, generator: torch.Generator, spread: float = 0.3) -> torch.Tensor:
    rows = spread * torch.randn(8, 6, generator=generator)
    rows[:, direction] += 1
    return torch.nn.functional.normalize(rows, dim=1)


def noisy(generator: torch.Generator, direction: int = 0, **level: float) -> StepRecord:
    """A step whose loss and collisions scatter around a level."""
    loss, collision = level.get("loss", 3.0), level.get("collision", 0.3)
    scatter = torch.randn(2, generator=generator).tolist()
    return step(
        loss=loss + 0.2 * scatter[0],
        collision_expected=collision + 0.02 * scatter[1],
        keys_BD=around(direction, generator),
    )


def test_a_steady_stream_shows_no_drift() -> None:
    generator = torch.Generator().manual_seed(0)
    drift = Drift(short=100, long=1000)
    for _ in range(2000):
        drift.consume(noisy(generator))
    assert drift.take_new() == dict.fromkeys(SIGNALS, 0)
    assert drift.shift("embedding") < 0.01


@table(
    ("signal", "change"),
    [
        ("loss", {"loss": 4.0}),
        ("collision", {"collision": 0.5}),
        ("embedding", {"direction": 3}),
    ],
)
def test_a_change_is_found_only_in_its_own_signal(signal: str, change: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    drift = Drift(short=100, long=10_000)
    for _ in range(500):
        drift.consume(noisy(generator))
    assert sum(drift.take_new().values()) == 0
    for _ in range(300):
        drift.consume(noisy(generator, **change))
    found = drift.take_new()
    assert found[signal] >= 1
    assert sum(found.values()) == found[signal]
    assert sum(drift.take_new().values()) == 0  # reported once


def test_a_tenfold_rise_of_a_small_score_is_found() -> None:
    """Under the default policy, the score of a batch and the memory is about 0.001."""
    generator, drift = torch.Generator().manual_seed(1), Drift()
    for level, count in ((0.0004, 1000), (0.004, 300)):
        for _ in range(count):
            noise = 1 + 0.2 * torch.randn((), generator=generator).clamp(-3, 3).item()
            drift.consume(step(collision_expected=level * noise))
        found = drift.take_new()["collision"]
        assert bool(found) == (level > 0.001)


def test_the_shift_equals_its_closed_form() -> None:
    """The keys lie along one axis for long, and along another for one short half-life."""
    drift = Drift(short=40, long=1_000_000)
    first, second = torch.eye(2)[[0]].repeat(20, 1), torch.eye(2)[[1]].repeat(20, 1)
    assert drift.shift("embedding") == 0
    for _ in range(200):
        drift.consume(step(keys_BD=first))
    assert drift.shift("embedding") == pytest.approx(0, abs=1e-6)
    for _ in range(2):
        drift.consume(step(keys_BD=second))
    early, late = 0.5 / (1 - 0.5**0.5), 1 + 0.5**0.5
    usual = (200.0, 2.0)  # the long mean forgets next to nothing
    dot = early * usual[0] + late * usual[1]
    expected = 1 - dot / math.hypot(early, late) / math.hypot(*usual)
    assert drift.shift("embedding") == pytest.approx(expected, abs=1e-3)


def test_replayed_samples_do_not_count_as_drift() -> None:
    """Replayed samples have another loss than the stream."""
    generator, drift = torch.Generator().manual_seed(1), Drift()
    for _ in range(500):
        drift.consume(noisy(generator))
    for _ in range(300):
        drift.consume(step(loss=4.0, collision_expected=0.5, replay=True, admission=None))
    assert drift.take_new() == dict.fromkeys(SIGNALS, 0)


def test_values_that_are_not_finite_do_not_hide_a_later_change() -> None:
    generator, drift = torch.Generator().manual_seed(1), Drift()
    keys_BD = around(0, generator)
    drift.consume(step(loss=math.nan, collision_expected=math.inf, keys_BD=keys_BD))
    for loss, count in ((3.0, 500), (4.0, 300)):
        for _ in range(count):
            drift.consume(noisy(generator, loss=loss, collision=loss / 10))
    found = drift.take_new()
    assert found["loss"] >= 1
    assert found["collision"] >= 1


@pytest.mark.parametrize(("dtype", "number_bytes"), [(torch.float32, 4), (torch.float16, 2)])
def test_a_change_of_vectors_is_found_although_their_high_bytes_are_equal(
    dtype: torch.dtype, number_bytes: int
) -> None:
    """All numbers lie in [1, 2), as the readings of some sensors do."""
    generator, drift = torch.Generator().manual_seed(0), Drift(number_bytes=number_bytes)
    shape_8D = 0.05 * torch.randn(8, 100, generator=generator)
    for change, count in ((0.0, 150), (0.15, 100)):
        for _ in range(count):
            value_BD = 1.5 + torch.randn(8, 8, generator=generator) @ shape_8D
            value_BD = (value_BD + change * torch.linspace(-1, 1, 100)).clamp(1, 1.99).to(dtype)
            images = value_BD.view(torch.uint8)[:, :, None, None]
            drift.consume(step(keys_BD=around(0, generator), images_BCHW=images))
        assert bool(drift.take_new()["image"]) == bool(change)


def test_keys_that_the_memory_was_not_offered_do_not_move_the_means() -> None:
    drift = Drift(short=4, long=1_000_000)
    drift.consume(step(keys_BD=torch.eye(3)[[0] * 4]))
    drift.consume(step(keys_BD=torch.eye(3)[[1] * 4], admission=None))
    assert drift.shift("embedding") == pytest.approx(0, abs=1e-6)
    drift.consume(step(keys_BD=torch.eye(3)[[1] * 4]))
    assert drift.shift("embedding") == pytest.approx(1 - 3 / 10**0.5, abs=1e-3)


def test_the_images_show_a_covered_camera_and_no_motion_of_the_encoder() -> None:
    generator, drift, found = torch.Generator().manual_seed(0), Drift(), 0
    for number in range(240):
        base = torch.rand(32, 1, 4, 4, generator=generator) + torch.linspace(0, 2, 4)
        dark = 0.02 * torch.rand(32, 1, 4, 4, generator=generator)
        pixels = base / 3 if number < 160 else dark
        images = (pixels * 255).to(torch.uint8).repeat_interleave(4, 2).repeat_interleave(4, 3)
        angle = torch.tensor(number / 40)  # the encoder turns
        keys_BD = torch.stack([angle.cos(), angle.sin()]).repeat(32, 1)
        drift.consume(step(keys_BD=keys_BD, images_BCHW=images))
        new = drift.take_new()["image"]
        assert not (new and number < 160)
        found += new
    assert found
