"""A small encoder for one core, and the papers' larger ones.

Shapes: B samples, C channels, H height, W width, F features.
"""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.experiments.papers.presets import Network
from stream_ssl.encoder.network import ResNet, in_layout, layout_for

# (channels, kernel, stride): 32 x 32 images are 16, 8, 4, 2 and 2 wide behind them. A kernel of 4
# at a stride of 2 is the cheapest first layer that looks at every pixel twice.
LAYERS = ((24, 4, 2), (48, 3, 2), (128, 3, 2), (192, 3, 2), (192, 3, 1))


class ConvNet(nn.Module):
    """Five strided convolutions, 0.62 M parameters: images [B, 3, 32, 32] to features [B, F],
    F = `dim` = 192."""

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
        self.layout = layout_for(LAYERS[0][0])
        self.to(memory_format=self.layout)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BF: Tensor = self.layers(in_layout(image_BCHW, self.layout))
        return feature_BF


def encoder(name: Network) -> tuple[nn.Module, int]:
    """A network with new weights, and its F."""
    if name == "conv":
        return ConvNet(), ConvNet.dim
    net = ResNet() if name == "resnet18" else ResNet(depths=(3, 4, 6, 3), block="bottleneck")
    return net, net.dim
