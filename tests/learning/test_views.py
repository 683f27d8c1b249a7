"""Tests of views: drawn per sample, normalised, and determined by torch's seed."""

from __future__ import annotations

import pytest
import torch
from table import table
from torch import Tensor

from stream_ssl.learning.views import Views


def images(channels: int, batch: int = 6, size: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, channels, size, size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@table("channels", [1, 3])
@table("crop", [None, (0.2, 1.0)])
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


STILL = {"crop": None, "flip": 0.0, "brightness": 0.0, "contrast": 0.0, "hue": 0.0, "grey": 0.0}


def seen(image_CHW: Tensor, samples: int = 400, **changed: float) -> Tensor:
    """Return views of one image, in [0, 1], with every augmentation off except the given ones."""
    torch.manual_seed(0)
    settings = {**STILL, "saturation": 0.0, "mean": (0.0,), "std": (1.0,), **changed}
    views = Views(12, image_CHW.shape[0], **settings)
    return views(image_CHW.expand(samples, -1, -1, -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_the_share_of_samples_that_are_changed(channels: int) -> None:
    image_CHW = images(channels, batch=1)[0]
    view_BCHW = seen(image_CHW, brightness=0.4, jitter=0.3)
    changed = (view_BCHW - image_CHW / 255).abs().amax((1, 2, 3)) > 1e-3
    assert 0.22 < changed.float().mean() < 0.38  # 3.5 standard errors


def test_saturation_and_hue_are_told_apart() -> None:
    red_CHW = torch.zeros(3, 12, 12, dtype=torch.uint8)
    red_CHW[0] = 200
    red_CHW[1:] = 80
    for saturation, hue in ((0.6, 0.0), (0.0, 0.3)):
        red, green, blue = seen(red_CHW, jitter=1.0, saturation=saturation, hue=hue).unbind(1)
        assert (red - 200 / 255).abs().max() > 0.05 or (green - 80 / 255).abs().max() > 0.05
        # A change of saturation leaves red red; a change of hue does not.
        assert ((green - blue).abs().max() > 0.1) == (hue > 0)


def test_grey_contrast_goes_both_ways() -> None:
    ramp_CHW = torch.arange(144).view(1, 12, 12).add(50).to(torch.uint8)
    spread_B = seen(ramp_CHW, contrast=0.5, jitter=1.0).std((1, 2, 3))
    share_B = spread_B / (ramp_CHW / 255).std()
    assert 0.4 < share_B.min() < 0.6
    assert share_B.max() > 1.2


def test_blur_is_of_two_pixels_at_most() -> None:
    point_CHW = torch.zeros(1, 12, 12, dtype=torch.uint8)
    point_CHW[0, 6, 6] = 255
    peak_B = seen(point_CHW, blur=1.0)[:, 0, 6, 6]
    # A Gaussian over 3 pixels with sigma 2 has 0.362 in the middle, squared 0.131; a wide one has
    # 1/9.
    assert 0.1305 < peak_B.min() < 0.15
    assert peak_B.max() > 0.9
