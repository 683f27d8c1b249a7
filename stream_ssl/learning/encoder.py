"""The encoder: torchvision's ResNet, narrower, shallower and for small images where asked.

Shapes: B samples, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torchvision.models.resnet as torchvision_resnet
from torch import Tensor, nn

from stream_ssl.methods.norm import BatchNorm2d

BLOCKS = {
    "basic": torchvision_resnet.BasicBlock,
    "bottleneck": torchvision_resnet.Bottleneck,
}


class ResNet(torchvision_resnet.ResNet):  # type: ignore[misc]  # torchvision is untyped
    """Images [B, C, H, W] to features [B, F], F = `dim`.

    Args:
        width: channels of the first stage, doubled at each of the next (64 in ResNet's paper).
        depths: blocks of each of the four stages; (2, 2, 2, 2) is ResNet-18, 0 leaves one out.
        channels: of the images, 1 or 3.
        stem: "cifar" is SimCLR's for small images, one 3x3 convolution of stride 1 and no pooling;
            "imagenet" is 7x7 of stride 2 and pooling.
        block: "basic" (ResNet-18, -34) or "bottleneck" (ResNet-50 and deeper).

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        width: int = 64,
        depths: Sequence[int] = (2, 2, 2, 2),
        channels: int = 3,
        stem: Literal["cifar", "imagenet"] = "cifar",
        block: Literal["basic", "bottleneck"] = "basic",
    ) -> None:
        depths = tuple(depths)
        _check(width, depths, channels, stem, block)
        # The parent builds the stages while it initialises, and assigns its own `inplanes`
        # before: _make_layer needs the width, and modules cannot be set that early.
        object.__setattr__(self, "width", width)
        super().__init__(BLOCKS[block], list(depths), num_classes=1, norm_layer=BatchNorm2d)
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(
            channels,
            width,
            kernel_size=3 if small else 7,
            stride=1 if small else 2,
            padding=1 if small else 3,
            bias=False,
        )
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = BatchNorm2d(width)
        if small:
            self.maxpool = nn.Identity()
        self.fc = nn.Identity()
        self.dim: int = self.inplanes
        # Channels last is the faster layout, on a CPU too. Below 8 channels, however, oneDNN's
        # kernels for it write past the end of their buffers and corrupt the heap.
        self.layout = torch.channels_last if width >= 8 else torch.contiguous_format
        self.to(memory_format=self.layout)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BF: Tensor = super().forward(image_BCHW.contiguous(memory_format=self.layout))
        return feature_BF

    def _make_layer(
        self,
        block: type[nn.Module],
        planes: int,
        blocks: int,
        stride: int = 1,
        dilate: bool = False,
    ) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self.width
        if blocks == 0:
            return nn.Sequential()
        stage: nn.Sequential = super()._make_layer(
            block, planes * self.width // 64, blocks, stride, dilate
        )
        return stage


def _check(width: int, depths: tuple[int, ...], channels: int, stem: str, block: str) -> None:
    if width < 1:
        raise ValueError(f"width is {width}: the first stage needs at least 1 channel")
    if len(depths) != 4 or min(depths) < 0 or depths[0] < 1:
        raise ValueError(
            f"depths is {depths}: give four numbers of blocks, the first at least 1, "
            "0 leaving out a later stage"
        )
    if channels < 1:
        raise ValueError(f"channels is {channels}: images have 1 (grey) or 3 (colour)")
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f'stem is {stem!r}: choose "cifar" for small images or "imagenet"')
    if block not in BLOCKS:
        raise ValueError(f"block is {block!r}: choose one of {sorted(BLOCKS)}")
