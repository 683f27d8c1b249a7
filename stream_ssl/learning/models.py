"""Encoders of other libraries and one's own; weights to begin with; stages that stay as they are.

Shapes: B images, C channels, H height, W width, F features.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stream_ssl.methods.norm import BatchNorm1d, BatchNorm2d, freeze

log = logging.getLogger("stream_ssl.learner")

PREFIX = "backbone."
"""Of an encoder's weights in what `stream-ssl export` writes."""


class Model(nn.Module):
    """Any network of images [B, C, H, W] to features [B, F], F = `dim`.

    Args:
        module: the network; its BatchNorm layers become those that take a batch of one value.
        shape: (C, H, W) of the images that will come.
        head: the layer that is taken off, "fc" of torchvision's ResNets; None takes none off.

    Raises:
        ValueError: there is no such layer, or the network does not turn such images into features.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, int, int], head: str | None = None
    ) -> None:
        super().__init__()
        name = type(module).__name__
        if head is not None:
            _stage(module, head, "encoder.head")
            module.set_submodule(head, nn.Identity())
        for layer in module.modules():
            if type(layer) is nn.BatchNorm2d:
                layer.__class__ = BatchNorm2d
            elif type(layer) is nn.BatchNorm1d:
                layer.__class__ = BatchNorm1d
        self.module = module
        self.eval()
        try:
            with torch.no_grad():
                feature_BF = module(torch.zeros(2, *shape))
        except Exception as error:  # whatever a stranger's network raises
            raise ValueError(
                f"encoder.model {name} takes no images of {shape} (channels, height, width): "
                f"{error}; see decoder.size and decoder.channels"
            ) from error
        found = getattr(feature_BF, "shape", type(feature_BF).__name__)
        if not isinstance(feature_BF, Tensor) or feature_BF.ndim != 2 or len(feature_BF) != 2:
            raise ValueError(
                f"encoder.model {name} gives {found} of 2 images: features are one row an image, "
                "[2, F]; pool what is left of height and width"
            )
        self.train()
        self.dim: int = feature_BF.shape[1]

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BF: Tensor = self.module(image_BCHW)
        return feature_BF


def called(spec: Mapping[str, Any], *arguments: Any, **more: Any) -> Any:
    """What a class path names, called with its `init_args`."""
    module, _, name = spec["class_path"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found(*arguments, **more, **(spec.get("init_args") or {}))


def load_weights(encoder: nn.Module, file: Path, head: str | None = None) -> None:
    """Put a safetensors file's weights into an encoder: a library's, or an export's of ours.

    Args:
        encoder: a `Model`'s names are those of its module.
        file: may hold more, which is told; weights of `head` go without a word.
        head: the layer that was taken off.

    Raises:
        ValueError: it cannot be read, lacks a weight, or holds one of another shape.
    """
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"encoder.weights {file} cannot be read as safetensors: {error}") from None
    if any(name.startswith(PREFIX) for name in found):
        found = {n.removeprefix(PREFIX): t for n, t in found.items() if n.startswith(PREFIX)}
    if isinstance(encoder, Model):
        found = {n.removeprefix("module."): tensor for n, tensor in found.items()}
        encoder = encoder.module
    own = encoder.state_dict()
    # Counters of BatchNorm, which nothing reads: many files lack them.
    wanted = {n: t for n, t in own.items() if n in found or not n.endswith("num_batches_tracked")}
    for name, tensor in wanted.items():
        there = tuple(found[name].shape) if name in found else "absent"
        if there != tuple(tensor.shape):
            raise ValueError(
                f"encoder.weights {file} does not fit: {name} is {there} there and "
                f"{tuple(tensor.shape)} in the encoder; give the section encoder (model, width, "
                "depths, stem, block) and decoder.channels that it was made with"
            )
    more = sorted(set(found) - set(own))
    unused = [name for name in more if head is None or not name.startswith(f"{head}.")]
    if unused:
        log.warning("encoder.weights %s: not used: %s", file, ", ".join(unused))
    encoder.load_state_dict({name: found[name] for name in own if name in found}, strict=False)


def freeze_stages(encoder: nn.Module, names: Iterable[str]) -> None:
    """Freeze submodules by name: no gradient, and BatchNorm and dropout as in evaluation.

    Raises:
        ValueError: there is no such one, or nothing is left to train.
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
