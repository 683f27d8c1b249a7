"""Views: per sample, normalised, and fixed by torch's seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stream_ssl.learning.views import Views


def images(channels: int, batch: int = 6, size: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, channels, size, size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [None, (0.2, 1.0)])
def test_a_seed_fixes_the_views(channels: int, crop: tuple[float, float] | None) -> None:
    views = Views(12, channels, crop=crop, blur=0.5)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(views(images(channels)))
    assert seen[0].shape == (6, channels, 12, 12)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_autocast_changes_no_view(channels: int) -> None:
    views, seen = Views(12, channels, blur=0.5), []
    for narrow in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            seen.append(views(images(channels)))
    assert torch.equal(*seen)


def test_each_sample_gets_its_own() -> None:
    torch.manual_seed(0)
    same_BCHW = images(1, batch=1).expand(16, -1, -1, -1)
    view_BCHW = Views(12, 1)(same_BCHW)
    assert len({tuple(view.flatten().tolist()) for view in view_BCHW}) == 16


def test_with_everything_off_a_view_is_the_plain_image() -> None:
    off = Views(12, 3, crop=None, flip=0, jitter=0, grey=0, mean=(0.5, 0.4, 0.3), std=(0.25,))
    image_BCHW = images(3)
    mean = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)
    expected = (image_BCHW.float() / 255 - mean) / 0.25
    torch.testing.assert_close(off(image_BCHW), expected)
    torch.testing.assert_close(Views(12, 3).plain(image_BCHW), (image_BCHW / 255 - 0.5) / 0.25)


def test_a_flip_of_probability_1_mirrors() -> None:
    flipped = Views(12, 1, crop=None, flip=1.0, jitter=0)(images(1))
    expected = Views(12, 1).plain(images(1)).flip(3)
    torch.testing.assert_close(flipped, expected)


def test_grey_of_probability_1_drops_the_colour() -> None:
    view_BCHW = Views(12, 3, crop=None, flip=0, jitter=0, grey=1.0)(images(3))
    torch.testing.assert_close(view_BCHW[:, 0], view_BCHW[:, 2])


def test_images_of_another_size_are_cropped_to_size() -> None:
    assert Views(8, 1)(images(1, size=12)).shape == (6, 1, 8, 8)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="channels is 2"):
        Views(12, 2)
    with pytest.raises(ValueError, match="crop is"):
        Views(12, 1, crop=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"flip is 1\.5"):
        Views(12, 1, flip=1.5)
    with pytest.raises(ValueError, match="mean has 2 numbers"):
        Views(12, 3, mean=(0.1, 0.2))
    with pytest.raises(ValueError, match="std is"):
        Views(12, 1, std=(0.0,))
    with pytest.raises(ValueError, match=r"images are torch\.float32"):
        Views(12, 1)(images(1).float())
