"""Tests of views: drawn per sample, normalised, and determined by torch's seed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from naive_views import view_of
from table import table
from torch import Tensor

from stream_ssl.learning.views import Colour, DrawnViews, Views


def images(channels: int, batch: int = 6, size: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, channels, size, size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@table(
    ("given", "message"),
    [
        (images(1), r"have shape \(6, 1, 12, 12\): .*\[B, 3, H, W\].*Views with channels=1"),
        (images(3)[0], r"have shape \(3, 12, 12\): .*batch of one \(image\.unsqueeze\(0\)\)"),
        (images(3).permute(0, 2, 3, 1), r"\(6, 12, 12, 3\): .*channels first"),
        (images(3).numpy(), r"images are of type ndarray: .*uint8 tensor.*torch\.from_numpy"),
        (images(3).float(), r"images are torch\.float32: views start from uint8 tensors"),
    ],
    ids=range(5),
)
def test_images_that_are_no_batch_are_refused(given: Any, message: str) -> None:
    views = Views(12, 3)
    as_they_are = Views(12, 3, transform=torch.nn.Identity())
    drawn = views.draw(6)
    for call in (views, as_they_are, views.plain, lambda given: views.augment(given, drawn)):
        with pytest.raises(ValueError, match=message):
            call(given)


class Double(torch.nn.Module):
    """A transform that computes in float64."""

    def forward(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        return image_BCHW.double()


def test_views_are_float32_after_a_transform_that_returns_float64() -> None:
    view_BCHW = Views(12, 3, transform=Double())(images(3))
    assert view_BCHW.dtype == torch.float32
    assert torch.equal(view_BCHW, Views(12, 3).plain(images(3)))


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


def test_each_sample_gets_a_view_of_its_own() -> None:
    torch.manual_seed(0)
    same_BCHW = images(1, batch=1).expand(16, -1, -1, -1)
    view_BCHW = Views(12, 1)(same_BCHW)
    assert len({tuple(view.flatten().tolist()) for view in view_BCHW}) == 16


def test_a_view_without_augmentation_is_the_plain_image() -> None:
    off = Views(12, 3, crop=None, flip=0, jitter=0, grey=0, mean=(0.5, 0.4, 0.3), std=(0.25,))
    image_BCHW = images(3)
    mean = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)
    expected = (image_BCHW.float() / 255 - mean) / 0.25
    torch.testing.assert_close(off(image_BCHW), expected)
    torch.testing.assert_close(Views(12, 3).plain(image_BCHW), (image_BCHW / 255 - 0.5) / 0.25)


def test_a_flip_of_probability_1_mirrors_every_image() -> None:
    flipped = Views(12, 1, crop=None, flip=1.0, jitter=0)(images(1))
    expected = Views(12, 1).plain(images(1)).flip(3)
    torch.testing.assert_close(flipped, expected)


def test_grey_of_probability_1_drops_the_colour() -> None:
    view_BCHW = Views(12, 3, crop=None, flip=0, jitter=0, grey=1.0)(images(3))
    torch.testing.assert_close(view_BCHW[:, 0], view_BCHW[:, 2])


def test_images_of_another_size_are_cropped_to_size() -> None:
    assert Views(8, 1)(images(1, size=12)).shape == (6, 1, 8, 8)


def test_views_reject_wrong_settings() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        Views(0)
    with pytest.raises(ValueError, match="channels is 2"):
        Views(12, 2)
    with pytest.raises(ValueError, match="crop is"):
        Views(12, 1, crop=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"flip is 1\.5"):
        Views(12, 1, flip=1.5)
    with pytest.raises(ValueError, match=r"hue is 0\.6: this strength lies in \[0, 0\.5\]"):
        Colour(hue=0.6)
    with pytest.raises(ValueError, match="contrast is -1"):
        Colour(contrast=-1)
    with pytest.raises(ValueError, match="mean has 2 numbers"):
        Views(12, 3, mean=(0.1, 0.2))
    with pytest.raises(ValueError, match="std is"):
        Views(12, 1, std=(0.0,))
    with pytest.raises(ValueError, match=r"images are torch\.float32"):
        Views(12, 1)(images(1).float())


STILL = {"crop": None, "flip": 0.0, "grey": 0.0, "mean": (0.0,), "std": (1.0,)}
NONE = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}


def still(channels: int, **changed: Any) -> Views:
    """Return views in [0, 1], with every augmentation off except the given ones."""
    colour = Colour(**{name: changed.pop(name, value) for name, value in NONE.items()})
    return Views(12, channels, colour=colour, **{**STILL, **changed})


def seen(image_CHW: Tensor, samples: int = 400, **changed: Any) -> Tensor:
    """Return views of one image, in [0, 1], with every augmentation off except the given ones."""
    torch.manual_seed(0)
    return still(image_CHW.shape[0], **changed)(image_CHW.expand(samples, -1, -1, -1))


@pytest.mark.parametrize("size", [12, 40])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_equal_those_of_the_naive_twin(channels: int, size: int) -> None:
    views = Views(size, channels, colour=Colour(0.4, 0.4, 0.4, 0.5), jitter=1.0, blur=0.5)
    image_BCHW = images(channels, batch=12, size=16)
    torch.manual_seed(0)
    drawn = views.draw(12)
    for column_B in vars(drawn).values():
        assert len(column_B.unique()) > 1
    for number, view_CSS in enumerate(views.augment(image_BCHW, drawn)):
        twin_CSS = view_of(image_BCHW[number].numpy(), drawn, number, size)
        assert np.abs(view_CSS.numpy() - twin_CSS).max() < 1e-4


@table("changed", [{}, {"crop": (1.0, 1.0)}, {"crop": (0.3, 0.8)}, {"flip": 0.5}, {"blur": 1.0}])
def test_constant_images_stay_constant(changed: dict[str, Any]) -> None:
    level_B111 = torch.tensor([0, 1, 100, 254, 255], dtype=torch.uint8).view(-1, 1, 1, 1)
    image_BCHW = level_B111.expand(-1, 3, 12, 12)
    view_BCHW = still(3, contrast=0.4, saturation=0.4, hue=0.5, **changed)(image_BCHW)
    torch.testing.assert_close(view_BCHW, image_BCHW / 255, atol=1e-6, rtol=0)


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    view_BCHW = still(3, crop=(1.0, 1.0))(images(3))
    torch.testing.assert_close(view_BCHW, images(3) / 255, atol=1e-5, rtol=0)


MANY = 20_000


def drawn(**changed: Any) -> DrawnViews:
    torch.manual_seed(0)
    return Views(32, **changed).draw(MANY)


def quantiles(value_N: Tensor) -> list[float]:
    """Return the 5 %, 50 % and 95 % quantiles, which a uniform distribution spreads evenly."""
    return value_N.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()


def near(*wanted: float, within: float = 0.01) -> Any:
    return pytest.approx(list(wanted), abs=within)


def test_crops_have_the_area_and_ratio_of_their_law() -> None:
    # Every ratio fits an area below 3/4, so that nothing is drawn again.
    small = drawn(crop=(0.2, 0.7))
    assert quantiles(small.width_B * small.height_B) == near(0.225, 0.45, 0.675)
    log_ratio_B = (small.width_B / small.height_B).log() / math.log(4 / 3)
    assert quantiles(log_ratio_B) == near(-0.9, 0, 0.9, within=0.03)
    large = drawn(crop=(0.2, 1.0))
    area_B = large.width_B * large.height_B
    assert torch.stack([large.width_B, large.height_B]).amax() <= 1
    # An area of a fits a share -log(a) / log(4/3) of the ratios, at most all.
    area_K = torch.linspace(0.2, 1, 1001)
    fits_K = (-area_K.log() / math.log(4 / 3)).clamp(max=1)
    expected = float(fits_K[area_K > 0.75].sum() / fits_K.sum())
    assert (area_B > 0.75).float().mean() == pytest.approx(expected, abs=0.01)
    whole = drawn(crop=(1.0, 1.0))
    assert torch.equal(whole.width_B * whole.height_B, torch.ones(MANY))


def test_positions_and_flips_are_uniform_and_independent_of_the_crop() -> None:
    found = drawn(flip=0.3)
    assert found.flipped_B.float().mean() == pytest.approx(0.3, abs=0.01)
    for start_B, side_B in ((found.left_B, found.width_B), (found.top_B, found.height_B)):
        inside_B = side_B < 1
        place_N = start_B[inside_B] / (1 - side_B[inside_B])
        assert quantiles(place_N) == near(0.05, 0.5, 0.95)
        together = torch.stack([place_N, side_B[inside_B], found.flipped_B[inside_B].float()])
        assert (together.corrcoef() - torch.eye(3)).abs().max() < 0.03


def test_changes_of_colour_are_uniform_within_their_strengths() -> None:
    found = drawn(colour=Colour(0.1, 0.2, 0.3, 0.4), jitter=1.0, grey=0.0)
    names = ("brightness_B", "contrast_B", "saturation_B", "hue_B")
    for name, strength in zip(names, (0.1, 0.2, 0.3, 0.8 * math.pi), strict=True):
        middle = 0 if name == "hue_B" else 1
        share_B = (getattr(found, name) - middle) / strength
        assert quantiles(share_B) == near(-0.9, 0, 0.9, within=0.03)
        assert share_B.abs().max() <= 1 + 1e-5
    together = torch.stack([getattr(found, name) for name in names])
    assert (together.corrcoef() - torch.eye(4)).abs().max() < 0.03


def test_jitter_grey_and_blur_have_their_probabilities() -> None:
    found = drawn(jitter=0.7, grey=0.2, blur=0.4)
    still_B = (found.brightness_B == 1) & (found.contrast_B == 1) & (found.hue_B == 0)
    assert still_B.float().mean() == pytest.approx(0.3, abs=0.015)
    assert (found.saturation_B == 0).float().mean() == pytest.approx(0.2, abs=0.015)
    blurred_B = found.sigma_B > 0
    assert blurred_B.float().mean() == pytest.approx(0.4, abs=0.015)
    assert quantiles(found.sigma_B[blurred_B]) == near(0.195, 1.05, 1.905, within=0.03)


def test_a_hue_change_of_a_third_of_a_turn_exchanges_the_channels() -> None:
    image_BCHW = images(3)
    views = still(3)
    whole = views.draw(6)
    turned_BCHW = views.augment(image_BCHW, replace(whole, hue_B=torch.full((6,), 2 * math.pi / 3)))
    torch.testing.assert_close(turned_BCHW, (image_BCHW / 255).roll(1, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_the_share_of_samples_that_are_changed(channels: int) -> None:
    image_CHW = images(channels, batch=1)[0]
    view_BCHW = seen(image_CHW, brightness=0.4, jitter=0.3)
    changed = (view_BCHW - image_CHW / 255).abs().amax((1, 2, 3)) > 1e-3
    assert 0.22 < changed.float().mean() < 0.38  # 3.5 standard errors


def test_saturation_and_hue_change_a_red_image_differently() -> None:
    red_CHW = torch.zeros(3, 12, 12, dtype=torch.uint8)
    red_CHW[0] = 200
    red_CHW[1:] = 80
    for saturation, hue in ((0.6, 0.0), (0.0, 0.3)):
        red, green, blue = seen(red_CHW, jitter=1.0, saturation=saturation, hue=hue).unbind(1)
        assert (red - 200 / 255).abs().max() > 0.05 or (green - 80 / 255).abs().max() > 0.05
        # A change of saturation leaves red red; a change of hue does not.
        assert ((green - blue).abs().max() > 0.1) == (hue > 0)


def test_the_contrast_of_a_grey_image_rises_and_falls() -> None:
    ramp_CHW = torch.arange(144).view(1, 12, 12).add(50).to(torch.uint8)
    spread_B = seen(ramp_CHW, contrast=0.5, jitter=1.0).std((1, 2, 3))
    share_B = spread_B / (ramp_CHW / 255).std()
    assert 0.4 < share_B.min() < 0.6
    assert share_B.max() > 1.2


def test_the_blur_has_a_sigma_of_at_most_two_pixels() -> None:
    point_CHW = torch.zeros(1, 12, 12, dtype=torch.uint8)
    point_CHW[0, 6, 6] = 255
    peak_B = seen(point_CHW, blur=1.0)[:, 0, 6, 6]
    # A Gaussian over 3 pixels with sigma 2 has 0.362 in the middle, squared 0.131; a wide one has
    # 1/9.
    assert 0.1305 < peak_B.min() < 0.15
    assert peak_B.max() > 0.9


@pytest.mark.parametrize("size", [1, 2])
def test_views_of_one_and_two_pixels_are_blurred(size: int) -> None:
    views = Views(size, 1, crop=None, jitter=0, blur=1.0, mean=(0.0,), std=(1.0,))
    image_BCHW = torch.full((4, 1, size, size), 51, dtype=torch.uint8)
    assert torch.allclose(views(image_BCHW), torch.tensor(0.2))
