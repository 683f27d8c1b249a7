"""The ResNet of an encoder that stream-ssl has trained, for transformers. It needs only torch.

Load it with `transformers.AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention


class StreamSslConfig(PretrainedConfig):
    """The shape of the network.

    Args:
        num_channels: channels of the images, 1 or 3.
        width: channels of the first stage, doubled at each later stage.
        depths: number of blocks in each stage; 0 leaves out a stage.
        stem: "cifar", one 3x3 convolution; or "imagenet", a 7x7 convolution and pooling.
        block: "basic" or "bottleneck".
    """

    model_type = "stream-ssl-resnet"

    def __init__(
        self, num_channels=3, width=64, depths=(2, 2, 2, 2), stem="cifar", block="basic", **more
    ):
        self.num_channels, self.width, self.depths = num_channels, width, list(depths)
        self.stem, self.block = stem, block
        super().__init__(**more)


def conv(inputs, outputs, side, stride=1):
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions, or a 3x3 convolution between two of 1x1, beside a shortcut."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        sides = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        if not bottleneck:
            sides = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.count = len(sides)
        for number, side in enumerate(sides, start=1):
            setattr(self, f"conv{number}", conv(*side))
            setattr(self, f"bn{number}", nn.BatchNorm2d(side[1]))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.count:
                y = y.relu()
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class StreamSslModel(PreTrainedModel):
    """Maps normalised images [B, C, H, W] to features: `model(pixel_values).pooler_output`."""

    config_class = StreamSslConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        small, bottleneck = config.stem == "cifar", config.block == "bottleneck"
        width = config.width
        self.conv1 = conv(config.num_channels, width, 3 if small else 7, 1 if small else 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for stage, depth in enumerate(config.depths):
            blocks = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Block(inputs, width << stage, stride, bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.post_init()

    def forward(self, pixel_values, return_dict=None, **_):
        x = self.maxpool(self.bn1(self.conv1(pixel_values)).relu())
        for stage in range(len(self.config.depths)):
            x = getattr(self, f"layer{stage + 1}")(x)
        pooled = torch.nn.functional.adaptive_avg_pool2d(x, 1)
        if return_dict is False:
            return x, pooled
        return BaseModelOutputWithPoolingAndNoAttention(last_hidden_state=x, pooler_output=pooled)
