"""A small encoder for one core, and the larger encoders of the papers.

Shapes: B samples, C channels, H height, W width, F features.
"""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.experiments.papers.presets import Network
from stream_ssl.encoder.network import ResNet, in_layout, layout_for

# (channels, kernel, stride) per layer, which reduce 32 x 32 images to widths 16, 8, 4, 2 and 2. A
# kernel of 4 with a stride of 2 is the cheapest first layer that reads every pixel twice.
LAYERS = ((24, 4, 2), (48, 3, 2), (128, 3, 2), (192, 3, 2), (192, 3, 1))
LAYOUT = layout_for(LAYERS[0][0])


class ConvNet(nn.Module):
    """Five strided convolutions with 0.62 M parameters.

    They map images [B, 3, 32, 32] to features [B, F], where F = `dim` = 192.
    """

    dim = LAYERS[-1][0]

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels, kernel, stride in LAYERS:
            layers += [
                nn.Conv2d(before, channels, kernel, stride, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
            before = channels
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.to(memory_format=LAYOUT)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BF: Tensor = self.layers(in_layout(image_BCHW, LAYOUT))
        return feature_BF


def encoder(name: Network) -> tuple[nn.Module, int]:
    """Return a network with new weights, and its F."""
    if name == "conv":
        return ConvNet(), ConvNet.dim
    net = ResNet() if name == "resnet18" else ResNet(depths=(3, 4, 6, 3), block="bottleneck")
    return net, net.dim
