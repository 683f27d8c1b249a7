"""Augmented views of a batch, drawn for each sample and computed on the device of the batch.

Shapes: B samples, C channels, H height, W width, S side of a view, K taps of the blur, T tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from stream_ssl.memory.compute import to_device

Range = tuple[float, float]

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the grey value of a pixel (ITU-R BT.601)."""

LOG_RATIO = math.log(4 / 3)  # largest logarithm of a crop's width / height
TRIES = 10  # drawn pairs of area and ratio, of which the first that fits is used
SIGMA = (0.1, 2.0)  # of the blur, pixels


@dataclass(frozen=True)
class Colour:
    """Strengths of the random changes of colour.

    Args:
        brightness: half-width of the range of its factor around 1, in [0, 1].
        contrast: half-width of the range of its factor around 1, in [0, 1].
        saturation: half-width of the range of its factor around 1, in [0, 1].
        hue: largest rotation in either direction, as a share of a full turn, in [0, 0.5].

    Raises:
        ValueError: a strength is outside its range.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = 0.5 if name == "hue" else 1.0
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}: this strength lies in [0, {most:g}]")


SIMCLR = Colour()


@dataclass(frozen=True)
class Chances:
    """Probabilities of the random changes of a view.

    Args:
        flip: probability of a horizontal flip, in [0, 1].
        jitter: probability, in [0, 1], that brightness, contrast, saturation and hue of a sample
            change at all.
        grey: probability of removing the colour, in [0, 1].
        blur: probability of a Gaussian blur, sigma 0.1 to 2 pixels, in [0, 1].

    Raises:
        ValueError: a probability is outside its range.
    """

    flip: float = 0.5
    jitter: float = 0.8
    grey: float = 0.2
    blur: float = 0.0

    def __post_init__(self) -> None:
        for name, chance in asdict(self).items():
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is {chance}: a probability lies in [0, 1]")


@dataclass(frozen=True)
class DrawnViews:
    """The random numbers of one view of each sample, on the CPU.

    Attributes:
        left_B, top_B: corner of the crop, as a share of the image's side.
        width_B, height_B: sides of the crop, as a share of the image's side.
        flipped_B: whether the crop is mirrored.
        brightness_B, contrast_B, saturation_B: factors; 1 changes nothing, saturation 0 is grey.
        hue_B: rotation of the colours, radians.
        sigma_B: standard deviation of the blur, pixels; 0 does not blur.
    """

    left_B: Tensor
    top_B: Tensor
    width_B: Tensor
    height_B: Tensor
    flipped_B: Tensor
    brightness_B: Tensor
    contrast_B: Tensor
    saturation_B: Tensor
    hue_B: Tensor
    sigma_B: Tensor


class Views(nn.Module):
    """A module from uint8 [B, C, H, W] to one augmented, normalised float32 view of each sample.

    The steps of a view, in this order:

    1. Crop. The area is uniform in the range `crop`. The logarithm of width / height is uniform
       between those of 3/4 and 4/3. The first of ten drawn pairs that fits is used, or else the
       whole image. The position is uniform. Bilinear interpolation resizes the crop to `size`.
    2. Flip. A sample is mirrored with probability `flip`.
    3. Colour, with probability `jitter`. Brightness multiplies a sample by b. Contrast scales its
       distance from its mean grey by c. Saturation scales each pixel's distance from its grey by s.
       Hue rotates each pixel around the grey axis. b, c and s are uniform around 1, and the angle
       is uniform around 0, within the strengths of `colour`.
    4. Greyscale, with probability `grey`: s is 0.
    5. Clamping to [0, 1].
    6. Blur, with probability `blur`: a Gaussian over a tenth of the side, sigma 0.1 to 2 pixels.

    torchvision's ColorJitter differs in three points. It draws the order of the four changes. It
    clamps after each change, so that it loses what a later change would bring back. It rotates hue
    in HSV, which keeps the largest and the smallest channel of a pixel; the rotation keeps the
    mean of the channels.

    The views are float32 under autocast too. All random numbers come from torch's global CPU
    generator, so a seed gives the same views on every device. The defaults are close to SimCLR's
    for small images. `crop=None` is the DUEL paper's choice, which does not crop.

    Args:
        size: side of the views, pixels.
        channels: 1 or 3.
        crop: smallest and largest share of the area kept before resizing back; null does not crop.
        colour: strengths of the changes of colour. Grey images have no saturation and hue.
        mean: number that is subtracted at the end, one per channel or one for all.
        std: number by which the result is then divided, one per channel or one for all, positive.
        transform: class path of a module that replaces all augmentation except mean and std. It
            takes and returns float32 images [B, C, H, W] in [0, 1].
        chances: the arguments of `Chances`: `flip`, `jitter`, `grey` and `blur`.

    Raises:
        ValueError: an argument is outside its range.
    """

    mean: Tensor
    std: Tensor
    luma_C: Tensor
    place_SS2: Tensor

    def __init__(
        self,
        size: int,
        channels: int = 3,
        crop: Range | None = (0.2, 1.0),
        colour: Colour = SIMCLR,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
        transform: nn.Module | None = None,
        **chances: float,
    ) -> None:
        super().__init__()
        self.chances = Chances(**chances)
        _check(size, channels, crop)
        if transform is not None:
            _check_transform(transform, (channels, size, size))
        self.transform, self.crop = transform, crop
        self._strength_41 = torch.tensor(astuple(colour)).unsqueeze(1)
        self._part_4P = _colour_parts(channels)
        buffers = {
            "mean": _per_channel(mean, channels, "mean"),
            "std": _per_channel(std, channels, "std"),
            "luma_C": torch.tensor(LUMA if channels == 3 else (1.0,)),
            "place_SS2": _places(size),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device together with the containing module, but stay float32."""
        super()._apply(lambda value: value.to(fn(value).device), recurse)  # type: ignore[no-untyped-call]
        return self

    @torch.no_grad()
    def forward(self, image_BCHW: Tensor) -> Tensor:
        _check_images(image_BCHW, len(self.luma_C))
        # Under autocast the crop's corners would be bfloat16, which is wrong by whole pixels.
        with torch.autocast(image_BCHW.device.type, enabled=False):
            if self.transform is not None:
                view_BCHW = self.transform(image_BCHW.float() / 255.0).float()
            else:
                view_BCHW = self.augment(image_BCHW, self.draw(len(image_BCHW)))
            return self._normalise(view_BCHW)

    @torch.no_grad()
    def plain(self, image_BCHW: Tensor) -> Tensor:
        """Return the images normalised but not augmented, as evaluation needs them."""
        _check_images(image_BCHW, len(self.luma_C))
        return self._normalise(image_BCHW.float() / 255.0)

    def draw(self, count: int) -> DrawnViews:
        """Draw the random numbers of one view of each of `count` samples."""
        area_TB, ratio_TB = torch.rand(2, TRIES, count)
        width_B, height_B = _sides(area_TB, ratio_TB, self.crop or (1.0, 1.0))
        x_B, y_B, flip_B, jitter_B, grey_B, blur_B, sigma_B = torch.rand(7, count)
        change_4B = (
            self._strength_41 * (2 * torch.rand(4, count) - 1) * (jitter_B < self.chances.jitter)
        )
        b_B, c_B, s_B, h_B = change_4B
        return DrawnViews(
            left_B=x_B * (1 - width_B),
            top_B=y_B * (1 - height_B),
            width_B=width_B,
            height_B=height_B,
            flipped_B=flip_B < self.chances.flip,
            brightness_B=1 + b_B,
            contrast_B=1 + c_B,
            saturation_B=(1 + s_B) * (grey_B >= self.chances.grey),
            hue_B=2 * math.pi * h_B,
            sigma_B=(SIGMA[0] + (SIGMA[1] - SIGMA[0]) * sigma_B) * (blur_B < self.chances.blur),
        )

    def augment(self, image_BCHW: Tensor, drawn: DrawnViews) -> Tensor:
        """Return the views of these random numbers, in [0, 1], before mean and std."""
        _check_images(image_BCHW, len(self.luma_C))
        numbers = _affine(drawn), self._colours(drawn), _taps(drawn, len(self.place_SS2))
        # All numbers are uploaded at once.
        packed_BP = to_device(torch.cat(numbers, 1), self.mean.device)
        ends = list(accumulate(part.shape[1] for part in numbers))
        affine_B4, colour_BP, tap_BK = packed_BP.tensor_split(ends[:-1], 1)
        view_BCHW = image_BCHW.float()
        if self.crop is not None or self.chances.flip:
            view_BCHW = self._resampled(view_BCHW, affine_B4)
        view_BCHW = self._coloured(view_BCHW, colour_BP)
        return _blurred(view_BCHW, tap_BK) if self.chances.blur else view_BCHW

    def _colours(self, drawn: DrawnViews) -> Tensor:
        """Return [B, 1 + C C]: the share of the mean grey that is added, and the colour matrix.

        Both take levels, 0 to 255, to [0, 1].
        """
        s_B = drawn.saturation_B
        weight_4B = torch.stack([1 - s_B, s_B, s_B * drawn.hue_B.cos(), s_B * drawn.hue_B.sin()])
        level_B, factor_B = drawn.brightness_B / 255, drawn.contrast_B
        matrix_BP = (weight_4B * level_B * factor_B).T @ self._part_4P
        return torch.cat([(level_B * (1 - factor_B)).unsqueeze(1), matrix_BP], 1)

    def _resampled(self, image_BCHW: Tensor, affine_B4: Tensor) -> Tensor:
        scale_B112, shift_B112 = affine_B4.view(-1, 2, 1, 1, 2).unbind(1)
        place_BSS2 = torch.addcmul(shift_B112, scale_B112, self.place_SS2)
        return functional.grid_sample(
            image_BCHW, place_BSS2, padding_mode="border", align_corners=False
        )

    def _coloured(self, image_BCHW: Tensor, colour_BP: Tensor) -> Tensor:
        channels = len(self.luma_C)
        matrix_BCC = colour_BP[:, 1:].view(-1, channels, channels)
        shift_B = colour_BP[:, 0] * (image_BCHW.mean((2, 3)) @ self.luma_C)
        view_BCP = torch.baddbmm(shift_B.view(-1, 1, 1), matrix_BCC, image_BCHW.flatten(2))
        return view_BCP.clamp_(0, 1).view_as(image_BCHW)

    def _normalise(self, view_BCHW: Tensor) -> Tensor:
        return (view_BCHW - self.mean).div_(self.std)


def _sides(area_TB: Tensor, ratio_TB: Tensor, crop: Range) -> tuple[Tensor, Tensor]:
    """Return width and height of the crops [B], as shares of the image's side."""
    area_TB = crop[0] + (crop[1] - crop[0]) * area_TB
    ratio_TB = ((2 * ratio_TB - 1) * LOG_RATIO).exp()
    side_2TB = torch.stack([area_TB * ratio_TB, area_TB / ratio_TB]).sqrt()
    fits_TB = (side_2TB <= 1).all(0)
    first_1B = fits_TB.to(torch.uint8).argmax(0, keepdim=True)
    side_2B = side_2TB.gather(1, first_1B.expand(2, 1, -1)).squeeze(1)
    width_B, height_B = side_2B.where(fits_TB.any(0), 1.0)
    return width_B, height_B


def _affine(drawn: DrawnViews) -> Tensor:
    """Return scales and shifts [B, 4], x before y, from a place in the view to one in the image."""
    mirror_B = 1 - 2 * drawn.flipped_B.float()
    return torch.stack(
        [
            drawn.width_B * mirror_B,
            drawn.height_B,
            2 * drawn.left_B + drawn.width_B - 1,
            2 * drawn.top_B + drawn.height_B - 1,
        ],
        1,
    )


def _colour_parts(channels: int) -> Tensor:
    """Return four matrices [4, C C] of which each change of colour is a weighted sum.

    They are the grey of a pixel, the mean of its channels, the distance from this mean, and this
    distance after a quarter turn around the grey axis.
    """
    eye_CC, mean_CC = torch.eye(channels), torch.full((channels, channels), 1 / channels)
    grey_CC, turn_CC = mean_CC, torch.zeros(channels, channels)
    if channels == 3:
        grey_CC = torch.tensor(LUMA).expand(3, 3)
        turn_CC = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / 3**0.5
    return torch.stack([grey_CC, mean_CC, eye_CC - mean_CC, turn_CC]).flatten(1)


def _taps(drawn: DrawnViews, size: int) -> Tensor:
    """Return the blur's weights [B, K] over SimCLR's odd number of pixels, a tenth of the side."""
    half = min(size - 1, max(1, size // 10 // 2))  # a reflection is within the view
    offset_K = torch.arange(-half, half + 1)
    # Without blur all weight is in the middle.
    weight_BK = (-(offset_K**2) / (2 * drawn.sigma_B.clamp(min=1e-3) ** 2).unsqueeze(1)).exp()
    return weight_BK / weight_BK.sum(1, keepdim=True)


def _blurred(view_BCHW: Tensor, tap_BK: Tensor) -> Tensor:
    """Return the views blurred along both axes, with a kernel for each sample."""
    batch, channels, height, width = view_BCHW.shape
    taps, groups = tap_BK.shape[1], batch * channels
    weight_GK = tap_BK.repeat_interleave(channels, 0)
    view_1GHW = view_BCHW.reshape(1, groups, height, width)
    view_1GHW = functional.pad(view_1GHW, [taps // 2] * 4, mode="reflect")
    for shape in ((groups, 1, 1, taps), (groups, 1, taps, 1)):
        view_1GHW = functional.conv2d(view_1GHW, weight_GK.view(shape), groups=groups)
    return view_1GHW.view_as(view_BCHW)


def _places(size: int) -> Tensor:
    """Return the centres of a view's pixels [S, S, 2], x before y, in [-1, 1]."""
    place_S = (torch.arange(size) + 0.5) * (2 / size) - 1
    return torch.stack(torch.meshgrid(place_S, place_S, indexing="xy"), 2)


def _check_images(given: Any, channels: int) -> None:
    """Raise ValueError unless `given` has `channels` channels, with levels from 0 to 255."""
    rule = f"views start from uint8 tensors [B, {channels}, H, W], 0 to 255"
    if not isinstance(given, Tensor):
        raise ValueError(f"images are of type {type(given).__name__}: {rule}; see torch.from_numpy")
    if given.dtype != torch.uint8:
        raise ValueError(f"images are {given.dtype}: {rule}")
    shape = tuple(given.shape)
    if len(shape) == 4 and shape[1] == channels:
        return
    remedy = f"convert them to {channels} channels"
    if len(shape) == 4 and shape[1] in (1, 3):
        remedy += f", or build Views with channels={shape[1]}"
    elif len(shape) == 3:
        remedy = "pass one image as a batch of one (image.unsqueeze(0))"
    elif shape[-1:] == (channels,):
        remedy = "put the channels first (images.permute(0, 3, 1, 2))"
    raise ValueError(f"images have shape {shape}: {rule}; {remedy}")


def _per_channel(values: Sequence[float], channels: int, name: str) -> Tensor:
    if len(values) not in (1, channels):
        raise ValueError(
            f"{name} has {len(values)} numbers: give 1, or {channels}, one for each channel"
        )
    if name == "std" and min(values) <= 0:
        raise ValueError(f"std is {tuple(values)}: views are divided by it, so it must be positive")
    return torch.tensor(list(values), dtype=torch.float32).view(1, -1, 1, 1)


def _check_transform(transform: nn.Module, shape: tuple[int, int, int]) -> None:
    image_BCHW = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    name = type(transform).__name__
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            view_BCHW = transform(image_BCHW)
    except Exception as error:  # a user's module may raise any exception
        raise ValueError(
            f"views.transform {name} takes no images [B, {shape[0]}, {shape[1]}, {shape[2]}]: "
            f"{error}"
        ) from error
    if not isinstance(view_BCHW, Tensor) or view_BCHW.shape != image_BCHW.shape:
        found = getattr(view_BCHW, "shape", type(view_BCHW).__name__)
        raise ValueError(
            f"views.transform {name} makes {found} of {tuple(image_BCHW.shape)}: a view has the "
            "shape of its image"
        )
    if not view_BCHW.is_floating_point():
        raise ValueError(f"views.transform {name} gives {view_BCHW.dtype}: views are floats")


def _check(size: int, channels: int, crop: Range | None) -> None:
    if size < 1:
        raise ValueError(f"size is {size}: the side of a view has at least 1 pixel")
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}: views are made of grey (1) or colour (3) images")
    if crop is not None and not 0 < crop[0] <= crop[1] <= 1:
        raise ValueError(f"crop is {crop}: give the least and largest area kept, 0 < least <= 1")
