"""The update of the weights: views, loss, gradient, and the decision whether to take the step.

An update is skipped if the loss or the gradient is not finite, or if the keys are not of unit
norm. Weights, optimiser and BatchNorm's averages then stay unchanged, and `Update.skipped` gives
the reason. Several ranks make each update together, and their mean loss decides for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.learning.backup import Backup
from stream_ssl.learning.keys import BatchKeys, KeyEncoder, images_of
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.phase_timer import PhaseTimer
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.schedule import Schedule, factor_at
from stream_ssl.learning.vectors import VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.losses import Diagnostics
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.compute import to_host
from stream_ssl.methods import Method
from stream_ssl.methods.base import is_unit
from stream_ssl.methods.norm import synchronised


class Update(NamedTuple):
    """The result of an update.

    Attributes:
        skipped: the reason for a skipped update, as in `StepRecord`; None if the weights were
            updated.
        loss: the mean loss over ranks.
        grad_norm: norm of the gradient before clipping; NaN if the loss or the keys were not
            usable.
        learning_rate: the learning rate of this update.
        diagnostics: the loss's diagnostics.
        change: norm of the change of the weights over their norm, 0-dimensional, on the device;
            None if they were not updated.
    """

    skipped: str | None
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    diagnostics: Mapping[str, float] = {}
    change: Tensor | None = None


class Weights:
    """The weights of a method, and their updates.

    The numbers that decide on an update are read from the device once, after the backward pass:
    whether loss, keys and gradient are finite.

    Args:
        method: the method whose weights are updated.
        memory: the working memory, whose embeddings are the negatives of the loss.
        views: the augmentation.
        optimiser: the optimiser's settings.
        schedule: factor of the learning rate for each update.
        keys: the key encoder of the run.
        ranks: the ranks that make each update together.
        sync_batchnorm: whether the ranks share BatchNorm's statistics in an update.
        timer: takes the seconds of the phases "data", "memory", "forward" and "backward".
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        views: Views | VectorViews,
        optimiser: OptimiserSettings,
        schedule: Schedule,
        keys: KeyEncoder,
        ranks: Ranks,
        sync_batchnorm: bool,
        timer: PhaseTimer,
    ) -> None:
        self._method, self._memory, self._views, self._keys = method, memory, views, keys
        self._optimisation, self._schedule = optimiser, schedule
        self._ranks, self._sync_batchnorm, self._timer = ranks, sync_batchnorm, timer
        self._parameters = list(method.trained)
        self._device = self._parameters[0].device
        self._before = Backup(self._parameters)
        self._buffers = Backup(list(method.buffers()))
        self._averages = [one for one in method.buffers() if one.is_floating_point()]
        self._held = [
            (part._buffers, name, tensor)
            for part in method.modules()
            if isinstance(part._buffers, dict)  # modules of TorchScript have none
            for name, tensor in part._buffers.items()
            if tensor is not None
        ]

    @cached_property
    def optimiser(self) -> torch.optim.Optimizer:
        """The optimiser of the method's weights.

        It is built on first use, because torch then loads its compiler, which takes as long as
        torch itself. A check of the configuration needs no optimiser.
        """
        return self._optimisation.build(self._parameters)

    def update(self, batch: Batch[Tensor], number: int) -> tuple[Update, BatchKeys]:
        """Update the weights once on a batch.

        Args:
            batch: samples on the device.
            number: number of updates made before.

        Returns:
            The update, and the keys of the batch by the encoder before the update.
        """
        self._method.begin(number)
        rate = self._optimisation.learning_rate * factor_at(self._schedule, number)
        images_BCHW = images_of(batch)
        with self._timer("data"):
            views = [self._views(images_BCHW) for _ in range(self._method.views)]
        # A forward pass on numbers that are not finite spoils BatchNorm's averages.
        self._buffers.save()
        with self._timer("memory"), self._keys.autocast():
            self._method.prepare(self._memory, self._keys.view)
        with self._timer("forward"), self._keys.autocast(), self._synchronised():
            # Only a loss that is an oracle may read the labels.
            known = batch if self._method.needs_labels else replace(batch, labels_B=None)
            output = self._method(views, known, self._memory)
        with self._timer("backward"):
            self.optimiser.zero_grad(set_to_none=True)
            output.loss.loss.backward()
            self._hold_buffers()  # not before, because the backward pass reads the tensors
            self._fill_gradients()
            mean_loss, keys_usable = self._ranks.average(
                [*self._gradients(), *self._averages], output.loss.loss, is_unit(output.keys_BD)
            )
            norm = self._gradient_norm()
            loss, usable, grad_norm, diagnostics = _read(
                mean_loss, keys_usable, norm, output.loss.diagnostics
            )
            skipped, change = _reason_to_skip(loss, usable, grad_norm), None
            if skipped is None:
                change = self._take_step(norm, rate)
            else:
                self.optimiser.zero_grad(set_to_none=True)
                self._buffers.restore()
        keys = BatchKeys(output.keys_BD, usable)
        grad_norm = grad_norm if skipped in (None, "gradient") else math.nan
        return Update(skipped, loss, grad_norm, rate, diagnostics, change), keys

    def _synchronised(self) -> AbstractContextManager[None]:
        # Only updates can synchronise, because all ranks make them with the same passes.
        together = self._sync_batchnorm and not self._ranks.alone
        return synchronised(self._memory.group, self._method) if together else nullcontext()

    @torch.no_grad()
    def _hold_buffers(self) -> None:
        """Move the value of each buffer to the tensor that was the buffer at first.

        A network may assign a new tensor to its buffer. But a skipped update restores the first
        tensor, and the ranks average it.
        """
        moved = []
        for buffers, name, tensor in self._held:
            new = buffers.get(name)
            if new is not tensor and new is not None and new.shape == tensor.shape:
                moved.append((buffers, name, tensor, new.clone()))  # two may be exchanged
        for buffers, name, tensor, new in moved:
            buffers[name] = tensor.copy_(new)

    def _fill_gradients(self) -> None:
        """Give each weight without a gradient a zero gradient if there are several ranks.

        All ranks average the gradients of all weights. But a network may leave out layers at
        random, and then the ranks have gradients of different weights.
        """
        for weight in () if self._ranks.alone else self._parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _gradient_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(self._gradients()).to(self._device)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _take_step(self, norm: Tensor, rate: float) -> Tensor:
        """Make one optimiser step along a gradient of this norm.

        Returns:
            The norm of the weights' change over their norm, 0-dimensional.
        """
        if (clip := self._optimisation.clip) is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, clip, norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self._before.save()
        self.optimiser.step()
        change = self._before.change().to(self._device)
        self._method.after_update()
        return change


def _read(
    loss: Tensor, usable: Tensor, norm: Tensor, diagnostics: Mapping[str, float]
) -> tuple[float, bool, float, Mapping[str, float]]:
    """Read all numbers on the host, with one wait for the device."""
    parts = [torch.stack([loss.detach().double(), usable.double(), norm.double()])]
    if isinstance(diagnostics, Diagnostics):
        parts.append(diagnostics.on_device.double())
    value, good, size, *rest = to_host(torch.cat(parts)).tolist()
    if isinstance(diagnostics, Diagnostics):
        diagnostics = diagnostics.read(rest)
    return value, bool(good), size, diagnostics


def _reason_to_skip(loss: float, usable: bool, norm: float) -> str | None:
    """Return the reason to skip the update, or None."""
    if not math.isfinite(loss):
        return "loss"
    if not usable:
        return "keys"
    return None if math.isfinite(norm) else "gradient"
