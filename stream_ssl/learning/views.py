"""Augmented views of a batch, drawn for each sample on the device of the batch.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import kornia.augmentation as K
import torch
from torch import Tensor, nn

Range = tuple[float, float]


class Views(nn.Module):
    """A module from uint8 [B, C, H, W] to one augmented, normalised float32 view of each sample.

    The views are float32 under autocast too. All random numbers come from torch's global CPU
    generator, so a seed gives the same views on every device. The defaults are close to SimCLR's
    for small images. `crop=None` is the DUEL paper's choice, which does not crop.

    Args:
        size: side of the images, pixels.
        channels: 1 or 3.
        crop: smallest and largest share of the area kept before resizing back; null does not crop.
        flip: probability of a horizontal flip, in [0, 1].
        brightness: half-width of the random change of brightness.
        contrast: half-width of the random change of contrast.
        saturation: half-width of the random change of saturation; colour images only.
        hue: half-width of the random change of hue; colour images only.
        jitter: probability, in [0, 1], that brightness, contrast, saturation and hue of a sample
            change at all.
        grey: probability of removing the colour, in [0, 1].
        blur: probability of a Gaussian blur, sigma 0.1 to 2 pixels, in [0, 1].
        mean: number that is subtracted at the end, one per channel or one for all.
        std: number by which the result is then divided, one per channel or one for all, positive.
        transform: class path of a module that replaces all augmentation except mean and std. It
            takes and returns float32 images [B, C, H, W] in [0, 1].

    Raises:
        ValueError: an argument is outside its range.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: int,
        channels: int = 3,
        crop: Range | None = (0.2, 1.0),
        flip: float = 0.5,
        brightness: float = 0.4,
        contrast: float = 0.4,
        saturation: float = 0.4,
        hue: float = 0.1,
        jitter: float = 0.8,
        grey: float = 0.2,
        blur: float = 0.0,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
        transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check(channels, crop, {"flip": flip, "jitter": jitter, "grey": grey, "blur": blur})
        steps: list[nn.Module] = []
        if crop is not None:
            steps.append(K.RandomResizedCrop((size, size), scale=crop, cropping_mode="resample"))
        if flip:
            steps.append(K.RandomHorizontalFlip(p=flip))
        if channels == 3:
            if jitter and any((brightness, contrast, saturation, hue)):
                steps.append(K.ColorJitter(brightness, contrast, saturation, hue, p=jitter))
            if grey:
                steps.append(K.RandomGrayscale(p=grey))
        elif jitter:
            if brightness:
                steps.append(K.RandomBrightness((1 - brightness, 1 + brightness), p=jitter))
            if contrast:
                steps.append(K.RandomContrast((1 - contrast, 1 + contrast), p=jitter))
        if blur:
            steps.append(K.RandomGaussianBlur((_odd(size), _odd(size)), (0.1, 2.0), p=blur))
        if transform is not None:
            steps = [transform]
            _check_transform(transform, (channels, size, size))
        self.steps = nn.ModuleList(steps)
        self.register_buffer("mean", _per_channel(mean, channels, "mean"), persistent=False)
        self.register_buffer("std", _per_channel(std, channels, "std"), persistent=False)

    @torch.no_grad()
    def forward(self, image_BCHW: Tensor) -> Tensor:
        # Under autocast the crop's corners would be bfloat16, which is wrong by whole pixels.
        with torch.autocast(image_BCHW.device.type, enabled=False):
            view_BCHW = _to_float(image_BCHW)
            for step in self.steps:
                view_BCHW = step(view_BCHW)
            return self._normalise(view_BCHW)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Numbers drawn on the CPU are uploaded without a wait. Numbers drawn on a GPU would be read
        # back about six times per view.
        step: Any
        for step in self.steps:
            if hasattr(step, "set_rng_device_and_dtype"):  # only kornia's modules have it
                step.set_rng_device_and_dtype(torch.device("cpu"), torch.float32)
        return self

    @torch.no_grad()
    def plain(self, image_BCHW: Tensor) -> Tensor:
        """Return the images normalised but not augmented, as evaluation needs them."""
        return self._normalise(_to_float(image_BCHW))

    def _normalise(self, view_BCHW: Tensor) -> Tensor:
        return (view_BCHW - self.mean) / self.std


def _to_float(image_BCHW: Tensor) -> Tensor:
    if image_BCHW.dtype != torch.uint8:
        raise ValueError(
            f"images are {image_BCHW.dtype}: views start from uint8 [B, C, H, W], 0 to 255"
        )
    return image_BCHW.float() / 255.0


def _odd(size: int) -> int:
    """Return the size of SimCLR's blur kernel: a tenth of the side, odd, at least 3."""
    return max(3, size // 10 // 2 * 2 + 1)


def _per_channel(values: Sequence[float], channels: int, name: str) -> Tensor:
    if len(values) not in (1, channels):
        raise ValueError(f"{name} has {len(values)} numbers: give 1, or {channels}, one a channel")
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


def _check(channels: int, crop: Range | None, chances: dict[str, float]) -> None:
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}: views are made of grey (1) or colour (3) images")
    if crop is not None and not 0 < crop[0] <= crop[1] <= 1:
        raise ValueError(f"crop is {crop}: give the least and largest area kept, 0 < least <= 1")
    for name, chance in chances.items():
        if not 0 <= chance <= 1:
            raise ValueError(f"{name} is {chance}: a probability lies in [0, 1]")
