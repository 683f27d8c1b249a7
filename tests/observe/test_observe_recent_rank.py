"""The recent effective rank falls when the keys collapse, and its maximum outlives a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from condition_world import World
from observe_records import step
from torch.nn.functional import normalize

from stream_ssl.observe.recent_rank import FILE, RecentRank

DRAW = torch.Generator().manual_seed(3)


Samples = Callable[[bool], torch.Tensor]


def images(varied: bool) -> torch.Tensor:
    noise_BCHW = torch.randint(0, 256, (32, 3, 8, 8), generator=DRAW)
    return (noise_BCHW if varied else noise_BCHW // 64 + 100).to(torch.uint8)


def vectors(dim: int, dtype: torch.dtype) -> Samples:
    """Make the bytes of vectors, as batches carry them. Without variation, a sensor is stuck."""
    stuck_D = torch.randn(dim, generator=DRAW)

    def made(varied: bool) -> torch.Tensor:
        noise_BD = torch.randn(32, dim, generator=DRAW)
        value_BD = noise_BD if varied else stuck_D + 0.01 * noise_BD
        return value_BD.to(dtype).view(torch.uint8)[:, :, None, None]

    return made


def feed(
    recent: RecentRank,
    varied_keys: bool = True,
    varied_images: bool = True,
    samples: Samples = images,
) -> None:
    """Feed 1,280 samples: forty batches of 32."""
    for _ in range(40):
        keys_BD = torch.randn(32, 16, generator=DRAW) * (1.0 if varied_keys else 0.01)
        keys_BD[:, 0] += 1.0
        recent.consume(step(keys_BD=normalize(keys_BD, dim=1), images_BCHW=samples(varied_images)))


def present(recent: RecentRank) -> set[str]:
    """Return the conditions after a minute of these figures."""
    world = World("learner")
    world.learner.started()
    world.pass_(60, lambda: world.learner.observe_effective_ranks(recent))
    return {name for name, _ in world.present}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_collapse_is_found_also_after_a_restart(restarted: bool, tmp_path: Path) -> None:
    recent = RecentRank(tmp_path)
    feed(recent)
    assert present(recent) == set()
    if restarted:
        recent = RecentRank(tmp_path)
    feed(recent, varied_keys=False)
    ranks = recent.measure()
    assert ranks["keys"] < 1.3 < 10 < recent.peaks["keys"]
    assert present(recent) == {"collapse"}
    feed(recent)
    assert present(recent) == set()


@pytest.mark.parametrize(
    ("samples", "number_bytes"),
    [
        (images, None),
        (vectors(24, torch.float32), 4),
        (vectors(1024, torch.float32), 4),
        (vectors(1024, torch.half), 2),
    ],
)
def test_a_covered_camera_is_distinguished_from_a_collapse(
    samples: Samples, number_bytes: int | None
) -> None:
    recent = RecentRank(number_bytes=number_bytes)
    feed(recent, samples=samples)
    recent.measure()
    feed(recent, varied_keys=False, varied_images=False, samples=samples)
    assert present(recent) == set()
    feed(recent, varied_keys=False, samples=samples)
    assert present(recent) == {"collapse"}


@pytest.mark.parametrize(("dtype", "number_bytes"), [(torch.float32, 4), (torch.half, 2)])
@pytest.mark.parametrize("dim", [3, 64, 100, 1000])
def test_the_rank_of_a_stuck_sensor_is_low_for_any_length(
    dim: int, dtype: torch.dtype, number_bytes: int
) -> None:
    """The low bytes of numbers are almost random, and would count as many directions."""
    recent, sensor = RecentRank(number_bytes=number_bytes), vectors(dim, dtype)
    feed(recent, varied_images=False, samples=sensor)
    assert recent.measure()["images"] < 2


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[" * 5000, b'{"keys": "nan", "images": 1e999}', b"7"),
        *(b'{"keys": "9", "images": 0.5}', b'{"keys": true, "images": null}'),
    ],
)
def test_a_damaged_file_of_ranks_is_ignored_with_a_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert RecentRank(tmp_path).peaks == {}
    assert FILE in caplog.text


def test_the_maximum_of_vectors_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    """Under "images", older versions kept the maximum of the bytes of vectors, which is higher."""
    (tmp_path / FILE).write_text('{"keys": 9.0, "images": 16.5}')
    assert RecentRank(tmp_path).peaks == {"keys": 9.0, "images": 16.5}
    recent = RecentRank(tmp_path, number_bytes=4)
    assert recent.peaks == {"keys": 9.0}
    feed(recent, samples=vectors(24, torch.float32))
    recent.measure()
    assert RecentRank(tmp_path, number_bytes=4).peaks["images"] == recent.peaks["images"] > 10


@pytest.mark.parametrize("peak", ["1e300", "17"])
def test_a_maximum_above_the_dimension_is_ignored(
    peak: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(f'{{"keys": {peak}, "images": 1.0}}')
    recent = RecentRank(tmp_path)
    feed(recent)
    assert present(recent) == set()
    assert recent.peaks["keys"] == recent.measure()["keys"]
    assert "is above its dimension 16" in caplog.text


def test_a_wrong_maximum_decays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_text('{"keys": 16.0, "images": 1.0}')
    recent = RecentRank(tmp_path)
    feed(recent, varied_keys=False)
    assert present(recent) == {"collapse"}
    before = recent.peaks["keys"]
    monkeypatch.setattr("stream_ssl.observe.recent_rank.COLLAPSED_HALF_LIFE", 1280.0)
    feed(recent, varied_keys=False)
    recent.measure()
    assert recent.peaks["keys"] - 1 == pytest.approx((before - 1) / 2)


def test_keys_that_are_not_finite_are_left_out() -> None:
    recent = RecentRank()
    feed(recent)
    before = recent.measure()["keys"]
    recent.consume(step(keys_BD=torch.full((32, 16), torch.nan)))
    assert recent.measure()["keys"] == before
