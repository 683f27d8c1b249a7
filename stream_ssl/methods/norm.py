"""BatchNorm where it meets a single value, and whose statistics it uses.

Shapes: B samples, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Statistics = Literal["average", "batch"]


class _SingleValue:
    """One value per channel has no variance, and torch refuses it. Here such an input is normalised
    by the running averages and does not change them; without averages the value is its own mean,
    and the output is the bias."""

    def forward(self: _BatchNorm, value: Tensor) -> Tensor:  # type: ignore[misc]
        if value.numel() != value.shape[1] or not (self.training or self.running_mean is None):
            normalised: Tensor = super().forward(value)  # type: ignore[misc]
            return normalised
        shape = [1, -1] + [1] * (value.ndim - 2)
        mean, variance = value.flatten(), torch.ones_like(value).flatten()
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None, "averages are kept together"
            mean, variance = self.running_mean, self.running_var
        out = (value - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out


class BatchNorm1d(_SingleValue, nn.BatchNorm1d):
    """torch's, but accepts a batch of one sample."""


class BatchNorm2d(_SingleValue, nn.BatchNorm2d):
    """torch's, but accepts a single value per channel."""


def forget_statistics(module: nn.Module) -> None:
    """Let every BatchNorm use the statistics of its batch, in evaluation mode too."""
    for layer in batchnorms(module):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


@contextmanager
def normalising_by(statistics: Statistics, *modules: nn.Module) -> Iterator[None]:
    """Every BatchNorm uses its batch's statistics, or its running averages, and changes neither."""
    found = [layer for module in modules for layer in batchnorms(module)]
    before = [(layer.training, layer.track_running_stats) for layer in found]
    try:
        for layer in found:
            layer.training = statistics == "batch"
            layer.track_running_stats &= statistics == "average"
        yield
    finally:
        for layer, (training, tracks) in zip(found, before, strict=True):
            layer.training, layer.track_running_stats = training, tracks


def batchnorms(module: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm of a network that is not frozen."""
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
    return [layer for layer in layers if not getattr(layer, "frozen", False)]


def freeze(stage: nn.Module) -> None:
    """No gradient from here on, and evaluation mode, which `Method.train` leaves: BatchNorm uses
    its averages and does not change them."""
    stage.requires_grad_(False).eval()
    for module in stage.modules():
        module.frozen = True  # type: ignore[assignment]


def keep_frozen(module: nn.Module) -> None:
    """Evaluation mode for what is frozen, after `train()` has reached it."""
    for part in module.modules():
        if getattr(part, "frozen", False):
            part.training = False
