"""BatchNorm for single values, frozen stages and several ranks, and the choice of its statistics.

Shapes: B samples, C channels, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from stream_ssl.losses.group import Group

Statistics = Literal["average", "batch"]


class _SingleValue:
    """A BatchNorm that accepts one value per channel.

    One value has no variance, so torch raises an error for it. This class normalises such an input
    by the running averages and does not change them. Without averages the value is its own mean, so
    the output is the bias.
    """

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
    """torch's BatchNorm1d, but it accepts a batch of one sample."""


class BatchNorm2d(_SingleValue, nn.BatchNorm2d):
    """torch's BatchNorm2d, but it accepts a single value per channel."""


def accept_single_values(network: nn.Module) -> None:
    """Make every BatchNorm of a network accept one value per channel, as the classes above do.

    Layers with a forward pass of their own keep it. timm's layers apply an activation there.
    """
    for layer in network.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = BatchNorm2d
        elif type(layer) is nn.BatchNorm1d:
            layer.__class__ = BatchNorm1d
        elif isinstance(layer, _BatchNorm) and type(layer) not in (BatchNorm1d, BatchNorm2d):
            layer.register_forward_pre_hook(_use_averages)
            layer.register_forward_hook(_use_own_mode, always_call=True)


_MODE = ("training", "running_mean", "running_var")
"""The attributes that decide whether a BatchNorm uses its averages or the batch's statistics."""


def _use_averages(layer: _BatchNorm, given: tuple[Tensor, ...]) -> None:
    """Let a layer normalise a single value by its averages, or by the value itself if it has none.

    Under `synchronised` the layer normalises by the values of all ranks.
    """
    value = given[0]
    if value.numel() != value.shape[1] or "forward" in vars(layer):
        return
    if not (layer.training or layer.running_mean is None):
        return
    vars(layer)["_mode"] = [getattr(layer, name) for name in _MODE]
    if not layer.track_running_stats or layer.running_mean is None:
        layer.running_mean = value.detach().flatten()
        layer.running_var = torch.ones_like(layer.running_mean)
    layer.training = False


def _use_own_mode(layer: _BatchNorm, *_: Any) -> None:
    if (mode := vars(layer).pop("_mode", None)) is not None:
        for name, value in zip(_MODE, mode, strict=True):
            setattr(layer, name, value)


def forget_statistics(module: nn.Module) -> None:
    """Make every BatchNorm use the statistics of its batch, also in evaluation mode."""
    for layer in batchnorms(module):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


@contextmanager
def normalising_by(statistics: Statistics, *modules: nn.Module) -> Iterator[None]:
    """Make every BatchNorm use its batch's statistics or its averages, and change neither."""
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


@contextmanager
def synchronised(group: Group, module: nn.Module) -> Iterator[None]:
    """Make every BatchNorm normalise by the statistics of all ranks' batches together.

    This applies to layers that use their batch's statistics. The batches may differ in size. All
    ranks must make the same forward and backward passes. Each layer needs one exchange in the
    forward pass and one in the backward pass. torch's SyncBatchNorm computes the same, but only on
    GPUs.
    """
    found = batchnorms(module)
    for layer in found:
        layer.forward = partial(_forward_of_all, layer, group)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in found:
            del layer.forward


def _forward_of_all(layer: _BatchNorm, group: Group, value: Tensor) -> Tensor:
    forward = type(layer).forward  # timm's layers apply an activation, too
    if forward in (_SingleValue.forward, nn.SyncBatchNorm.forward):
        forward = _BatchNorm.forward  # each rank takes part, also with a single value
    with _OfAll(group):
        return forward(layer, value)


class _OfAll(TorchFunctionMode):
    """Make torch's batch_norm normalise by the statistics of all ranks' batches together."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        with_group = partial(_batch_norm, self._group)
        return (with_group if function is F.batch_norm else function)(*args, **(kwargs or {}))


def _batch_norm(
    group: Group,
    value: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what torch's batch_norm would return for the batches of all ranks together."""
    if not training:
        return F.batch_norm(value, running_mean, running_var, weight, bias, False, momentum, eps)
    axes, shape = [0, *range(2, value.ndim)], [1, -1] + [1] * (value.ndim - 2)
    wide = value.float()
    variance_C, mean_C = torch.var_mean(wide, axes, correction=0)
    count = mean_C.new_full((1,), value.numel() // value.shape[1])
    of_each: Tensor = _Gathered.apply(torch.cat([mean_C, variance_C, count]).unsqueeze(0), group)
    mean_WC, variance_WC, count_W1 = torch.split(of_each, [len(mean_C), len(mean_C), 1], 1)
    total = count_W1.sum()
    mean_C = (count_W1 * mean_WC).sum(0) / total
    apart_WC = variance_WC + (mean_WC - mean_C).square()  # Chan et al. 1979, eq. 2.1
    variance_C = (count_W1 * apart_WC).sum(0) / total
    with torch.no_grad():  # the running averages move as torch moves them
        if running_mean is not None:
            running_mean.lerp_(mean_C, momentum)
        if running_var is not None:
            running_var.lerp_(variance_C * total / (total - 1), momentum)
    out: Tensor = (wide - mean_C.view(shape)) * torch.rsqrt(variance_C.view(shape) + eps)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(value.dtype)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. The gradient of a row is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, row_1C: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather_equal(row_1C)

    @staticmethod
    def backward(ctx: Any, grad_WC: Tensor) -> tuple[Tensor, None]:
        rank = ctx.group.rank
        return ctx.group.all_reduce_sum(grad_WC)[rank : rank + 1], None


def batchnorms(module: nn.Module) -> list[_BatchNorm]:
    """Return every BatchNorm of a network that is not frozen."""
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
    return [layer for layer in layers if not getattr(layer, "frozen", False)]


def freeze(stage: nn.Module) -> None:
    """Stop the gradient of a stage and set it to evaluation mode for good.

    `Method.train` does not change the mode. BatchNorm uses its averages and does not change them.
    """
    stage.requires_grad_(False).eval()
    for module in stage.modules():
        module.frozen = True  # type: ignore[assignment]


def keep_frozen(module: nn.Module) -> None:
    """Set frozen modules back to evaluation mode after a call of `train()`."""
    for part in module.modules():
        if getattr(part, "frozen", False):
            part.training = False
