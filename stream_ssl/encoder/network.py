"""The networks of a run: an encoder, which is a ResNet or the user's own network, and a projector.

The module also loads initial weights and freezes stages.

Shapes: B samples, C channels, H height, W width, F features, D embedding.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from stream_ssl.bounded_files import open_binary
from stream_ssl.methods.norm import (
    BatchNorm1d,
    BatchNorm2d,
    accept_single_values,
    freeze,
)
from stream_ssl.tensor_file import as_state, load_file

log = logging.getLogger("stream_ssl.learner")

PREFIX = "backbone."
"""Prefix of the encoder's weights in files that `stream-ssl export` writes."""

CHANNELS_LAST_FROM = 16
"""Smallest number of channels for the layout channels last.

With fewer channels, oneDNN's kernels for this layout write past their buffers on some CPUs.
"""


def layout_for(width: int) -> torch.memory_format:
    """Return the fastest safe layout of a network whose narrowest layer has `width` channels."""
    return torch.channels_last if width >= CHANNELS_LAST_FROM else torch.contiguous_format


def in_layout(image_BCHW: Tensor, layout: torch.memory_format) -> Tensor:
    """Return the images in this layout.

    Grey images are contiguous in both layouts. So `contiguous` would keep strides of the layout
    channels last, and each convolution would then use this layout.
    """
    if layout == torch.channels_last:
        return image_BCHW.contiguous(memory_format=layout)
    return image_BCHW.clone(memory_format=layout)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, as in ResNet-18 and -34.

    The names of the weights are those of torchvision, whose files can be loaded.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        y_BCHW += x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        result_BCHW: Tensor = self.relu(y_BCHW)
        return result_BCHW


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, as in ResNet-50 and deeper (version 1.5).

    The second convolution has the stride, and the third four times the channels.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        y_BCHW += x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        result_BCHW: Tensor = self.relu(y_BCHW)
        return result_BCHW


BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {
    "basic": BasicBlock,
    "bottleneck": Bottleneck,
}


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps height and width, up to the stride."""
    conv = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    if not conv.weight.is_meta:  # torch takes seconds to prepare a draw without values
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return a projection to the block's output; None if the input has its shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), BatchNorm2d(outputs))


class ResNet(nn.Module):
    """A ResNet from images [B, C, H, W] to features [B, F], F = `dim`.

    Args:
        width: channels of the first stage, doubled at each later stage (64 in ResNet's paper).
        depths: number of blocks in each of the four stages; (2, 2, 2, 2) is ResNet-18. 0 leaves out
            a stage, but not the first.
        channels: channels of the images, 1 or 3.
        stem: first layers. "cifar" is SimCLR's stem for small images: one 3x3 convolution of stride
            1 without pooling. "imagenet" is a 7x7 convolution of stride 2 with pooling.
        block: "basic" (ResNet-18, -34) or "bottleneck" (ResNet-50 and deeper).

    Raises:
        ValueError: an argument is outside its range.
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
        _check_resnet(width, depths, channels, stem, block)
        super().__init__()
        small = stem == "cifar"
        self.conv1 = _conv(channels, width, 3 if small else 7, 1 if small else 2)
        self.bn1 = BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.dim, made = width, BLOCKS[block]
        stages = []
        for stage, blocks in enumerate(depths):
            layers: list[nn.Module] = []
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                layers.append(made(self.dim, width << stage, stride))
                self.dim = (width << stage) * made.expansion
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._width = width  # torch.save refuses a module that holds a memory format
        self.to(memory_format=layout_for(width))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        x_BCHW = self.conv1(in_layout(image_BCHW, layout_for(self._width)))
        x_BCHW = self.maxpool(self.relu(self.bn1(x_BCHW)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
        feature_BF: Tensor = self.avgpool(x_BCHW).flatten(1)
        return feature_BF


class Model(nn.Module):
    """Any network from images [B, C, H, W] to features [B, F], F = `dim`.

    Args:
        module: the network. Its BatchNorm layers are changed so that they accept a single value
            per channel.
        shape: (C, H, W) of the images.
        head: name of the layer to remove, such as "fc" of torchvision's ResNets; None removes none.

    Raises:
        ValueError: there is no such layer, or the network does not turn such images into features.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, int, int], head: str | None = None
    ) -> None:
        super().__init__()
        if head is not None:
            _stage(module, head, "encoder.head")
            module.set_submodule(head, nn.Identity())
        accept_single_values(module)
        self.module = module
        widths = [m.out_channels for m in module.modules() if isinstance(m, nn.Conv2d)]
        self._narrow = min(widths, default=CHANNELS_LAST_FROM) < CHANNELS_LAST_FROM
        feature_BF = self._tried(module.eval(), shape, "")
        self._tried(_copy(module).train(), shape, " in training")
        self.train()
        self.dim: int = feature_BF.shape[1]

    @staticmethod
    def _tried(module: nn.Module, shape: tuple[int, int, int], when: str) -> Tensor:
        """Return the features of two black images."""
        name = type(module).__name__
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                feature_BF = module(torch.zeros(2, *shape))
        except Exception as error:  # a user's network may raise any exception
            raise ValueError(
                f"encoder.model {name} takes no images of {shape} (channels, height, width){when}: "
                f"{error}; see decoder.size and decoder.channels"
            ) from error
        found = getattr(feature_BF, "shape", type(feature_BF).__name__)
        if not isinstance(feature_BF, Tensor) or feature_BF.ndim != 2 or len(feature_BF) != 2:
            raise ValueError(
                f"encoder.model {name} gives {found} of 2 images{when}: features are one row an "
                "image, [2, F]; pool what is left of height and width, and leave out auxiliary "
                "outputs"
            )
        if not feature_BF.is_floating_point():
            raise ValueError(
                f"encoder.model {name} gives {feature_BF.dtype}{when}: features are floating point"
            )
        return feature_BF

    def forward(self, image_BCHW: Tensor) -> Tensor:
        if self._narrow:
            image_BCHW = in_layout(image_BCHW, torch.contiguous_format)
        feature_BF: Tensor = self.module(image_BCHW)
        if feature_BF.dtype != torch.float32 and not torch.is_autocast_enabled(
            feature_BF.device.type
        ):
            feature_BF = feature_BF.float()  # the projector computes in float32
        return feature_BF


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy of a user's network.

    Raises:
        ValueError: the network cannot be copied, or a checkpoint cannot hold its state.
    """
    name = type(module).__name__
    for key, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"encoder.model {name}: its state {key} is a {type(value).__name__}, and a "
                "checkpoint holds only tensors; let get_extra_state() return a tensor"
            )
    try:
        return copy.deepcopy(module)
    except Exception as error:  # a user's network may raise any exception
        raise ValueError(
            f"encoder.model {name} cannot be copied: {error}; a network must hold no open files or "
            "locks"
        ) from error


class Projector(nn.Module):
    """A projection of features [B, F] to embeddings [B, D]; the method scales them to unit norm.

    Contrastive methods use no BatchNorm here, because its statistics reveal an anchor's batch.
    Methods without negatives need it.

    Args:
        features: F.
        dim: D, the embedding size, at least 2.
        hidden: size of one hidden layer with a ReLU, as in SimCLR and MoCo v2; 0 for one linear
            layer, as in the DUEL paper.
        batchnorm: "none"; or "hidden", after the hidden layer, as in BYOL; or "all", after every
            layer, as in SimSiam, where the last BatchNorm has no scale and shift.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        features: int,
        dim: int = 128,
        hidden: int = 0,
        batchnorm: Literal["none", "hidden", "all"] = "none",
    ) -> None:
        super().__init__()
        if features < 1 or dim < 2 or hidden < 0:
            raise ValueError(
                f"features={features}, dim={dim}, hidden={hidden}: features must be positive, dim "
                "at least 2, and hidden 0 (linear) or the size of the hidden layer. With dim=1, "
                "an embedding is 1 or -1 and has no gradient"
            )
        _check_projector(batchnorm, hidden)
        self.dim = dim
        self.layers: nn.Module = nn.Linear(features, dim)
        if hidden or batchnorm != "none":
            parts: list[nn.Module] = []
            if hidden:
                parts.append(nn.Linear(features, hidden))
                if batchnorm != "none":
                    parts.append(BatchNorm1d(hidden))
                parts.append(nn.ReLU(inplace=True))
            parts.append(nn.Linear(hidden or features, dim))
            if batchnorm == "all":
                parts.append(BatchNorm1d(dim, affine=False))
            self.layers = nn.Sequential(*parts)

    def forward(self, feature_BF: Tensor) -> Tensor:
        z_BD: Tensor = self.layers(feature_BF)
        return z_BD


def called(spec: Mapping[str, Any], *arguments: Any, **more: Any) -> Any:
    """Import the class that a class path names and call it.

    Args:
        spec: a mapping with `class_path` and, optionally, `init_args`.
        arguments: positional arguments of the call.
        more: named arguments of the call, in addition to `init_args`.
    """
    module, _, name = spec["class_path"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found(*arguments, **more, **(spec.get("init_args") or {}))


def load_weights(encoder: nn.Module, file: Path, head: str | None = None) -> None:
    """Load a safetensors file's weights into an encoder.

    The file may come from a model library or from an export of this project.

    Args:
        encoder: the encoder. For a `Model`, the names are those of its module.
        file: the file. Weights that the encoder does not use are logged, except those of `head`.
        head: name of the layer that was removed.

    Raises:
        ValueError: the file cannot be read, lacks a weight, has several networks, or has a weight
            of another shape, or one that is quantised, NaN or infinite.
    """
    found = _read(file)
    if any(name.startswith(PREFIX) for name in found):
        found = {n.removeprefix(PREFIX): t for n, t in found.items() if n.startswith(PREFIX)}
    if isinstance(encoder, Model):
        found = {n.removeprefix("module."): tensor for n, tensor in found.items()}
        encoder = encoder.module
    own = encoder.state_dict()
    found = _without_prefix(found, own, file)
    # Many files lack BatchNorm's counters, which nothing reads.
    wanted = {n: t for n, t in own.items() if n in found or not n.endswith("num_batches_tracked")}
    _check_weights(found, wanted, file)
    more = sorted(set(found) - set(own))
    unused = [name for name in more if head is None or not name.startswith(f"{head}.")]
    if unused:
        log.warning("encoder.weights %s: not used: %s", file, ", ".join(unused))
    fitting = {name: found[name] for name in own if name in found}
    encoder.load_state_dict(as_state(fitting, encoder), strict=False)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with open_binary(file, links=True) as opened:  # rejects a pipe, which would block
            begin = opened.read(2)
        if begin in PICKLES:
            raise ValueError(
                "it is a file of torch.save, which could run code; convert it once: "
                "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
            )
        return load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"encoder.weights {file} cannot be read as safetensors: {error}") from None


def _check_weights(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError unless the weights that were found are finite and of the shapes wanted."""
    for name, tensor in wanted.items():
        there = tuple(found[name].shape) if name in found else "absent"
        if there != tuple(tensor.shape):
            raise ValueError(
                f"encoder.weights {file} does not fit: {name} is {there} there and "
                f"{tuple(tensor.shape)} in the encoder; give the section encoder (model, width, "
                "depths, stem, block) and decoder.channels that it was made with"
            )
        if tensor.is_floating_point() and not _is_plain(found[name]):
            raise ValueError(
                f"encoder.weights {file}: {name} is {found[name].dtype}, which is quantised: give "
                "weights in float32, float16 or bfloat16"
            )
        if not found[name].isfinite().all():
            raise ValueError(
                f"encoder.weights {file}: the weights {name} are not finite, because their "
                "training has diverged: give another file"
            )


def _without_prefix(
    found: dict[str, Tensor], own: Mapping[str, Tensor], file: Path
) -> dict[str, Tensor]:
    """Return the weights of a file whose names may have a prefix without it, such as "module.".

    DistributedDataParallel, torch.compile and models that contain the encoder prepend one.

    Args:
        found: the file's weights by name.
        own: the encoder's weights.
        file: the file.

    Raises:
        ValueError: several prefixes fit.
    """
    needed = [name for name in own if not name.endswith("num_batches_tracked")]
    if not needed or all(name in found for name in needed):
        return found
    begins = [name.removesuffix(needed[0]) for name in found if name.endswith(f".{needed[0]}")]
    fitting = [begin for begin in begins if all(begin + name in found for name in needed)]
    if not fitting:
        return found
    if len(fitting) > 1:
        raise ValueError(
            f"encoder.weights {file} holds several encoders, whose names begin with "
            f"{', '.join(fitting)}: give a file with the weights of one of them"
        )
    log.info("encoder.weights %s: read the weights whose names begin with %s", file, fitting[0])
    return {n.removeprefix(fitting[0]): t for n, t in found.items() if n.startswith(fitting[0])}


def _is_plain(weight: Tensor) -> bool:
    """Return whether a weight's numbers need no scale, which quantised weights do."""
    return weight.is_floating_point() and weight.element_size() > 1


def freeze_stages(encoder: nn.Module, names: Iterable[str]) -> None:
    """Freeze submodules by name: no gradient, and BatchNorm and dropout in evaluation mode.

    Raises:
        ValueError: there is no submodule with this name.
    """
    module = encoder.module if isinstance(encoder, Model) else encoder
    for name in names:
        freeze(_stage(module, name, "encoder.frozen"))


def _stage(module: nn.Module, name: str, option: str) -> nn.Module:
    try:
        return module.get_submodule(name or "?")
    except AttributeError:
        there = ", ".join(child for child, _ in module.named_children())
        raise ValueError(
            f"{option} {name!r}: {type(module).__name__} has no such part; it has {there}"
        ) from None


PICKLES = (b"PK", b"\x80\x02", b"\x80\x04")
"""How files of `torch.save` begin: a zip archive, or a pickle in older versions."""
MOST_WIDTH, MOST_BLOCKS = 4096, 1000
"""Limits far above any published network, because a file from elsewhere may claim any size."""


def _check_resnet(
    width: int, depths: tuple[int, ...], channels: int, stem: str, block: str
) -> None:
    if width < 1:
        raise ValueError(f"width is {width}: the first stage needs at least 1 channel")
    if len(depths) != 4 or min(depths) < 0 or depths[0] < 1:
        raise ValueError(
            f"depths is {depths}: give four numbers of blocks, the first at least 1, "
            "0 leaving out a later stage"
        )
    if width > MOST_WIDTH or max(depths) > MOST_BLOCKS:
        raise ValueError(
            f"width is {width} and depths {depths}: at most {MOST_WIDTH} channels in the first "
            f"stage and {MOST_BLOCKS} blocks in a stage"
        )
    if channels < 1:
        raise ValueError(f"channels is {channels}: images have 1 (grey) or 3 (colour)")
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f'stem is {stem!r}: choose "cifar" for small images or "imagenet"')
    if block not in BLOCKS:
        raise ValueError(f"block is {block!r}: choose one of {sorted(BLOCKS)}")


def _check_projector(batchnorm: str, hidden: int) -> None:
    if batchnorm not in ("none", "hidden", "all"):
        raise ValueError(f'batchnorm is {batchnorm!r}: choose "none", "hidden" or "all"')
    if batchnorm == "hidden" and not hidden:
        raise ValueError(
            'batchnorm="hidden" normalises a hidden layer, and hidden is 0: give its size'
        )
