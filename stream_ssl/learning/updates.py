"""One update of the weights, or none where numbers are not finite.

Shapes: B samples, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memory import WorkingMemory
from stream_ssl.learning.inputs import Inputs
from stream_ssl.learning.optimiser import OptimiserSettings, load_optimiser, optimiser_tensors
from stream_ssl.learning.phases import Phases
from stream_ssl.learning.schedule import Schedule
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method, Samples


class Outcome(NamedTuple):
    """What a batch gave. `usable`: whether the memory may take the keys."""

    keys_BD: Tensor
    usable: bool
    skipped: str | None
    loss: float = math.nan
    norm: float = math.nan
    rate: float = 0.0
    diagnostics: Mapping[str, float] = {}


class Updates:
    """Views, loss, gradient and optimiser step of one batch after another.

    Args:
        method: what is trained.
        memory: read for negatives; a method may encode it anew before it looks.
        views: the augmentation.
        settings: of the optimiser.
        schedule: factor of the learning rate by step.
        device: where all of it lies.
        precision: what the method computes in.
        plain_keys: `encode` takes the images as they are, rather than a view of each.
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        views: Views,
        settings: OptimiserSettings,
        schedule: Schedule,
        device: torch.device,
        precision: Literal["float32", "bfloat16"],
        plain_keys: bool,
    ) -> None:
        self._method, self._memory, self._views = method, memory, views
        self._settings, self._schedule = settings, schedule
        self._device, self._precision = device, precision
        self._see = views.plain if plain_keys else views
        self._parameters = list(method.trained)
        self._optimiser = settings.build(self._parameters)

    def update(self, inputs: Inputs, step: int, phases: Phases) -> Outcome:
        """Learn from a batch; the keys are those of the key encoder before it follows."""
        self._method.begin(step)
        with phases("data"):
            views = [self._views(inputs.image_BCHW) for _ in range(self._method.views)]
        # A forward pass on numbers that are not finite leaves them in BatchNorm's averages.
        buffers = [(buffer, buffer.clone()) for buffer in self._method.buffers()]
        rate = self._settings.learning_rate * self._schedule(step)
        with phases("memory"), self._autocast():
            self._method.prepare(self._memory, self._see)
        with phases("forward"), self._autocast():
            output = self._method(views, self._known(inputs), self._memory)
            loss = float(output.loss.loss.detach())
            usable = is_usable(output.keys_BD)
        with phases("backward"):
            skipped, norm = self._descend(output.loss.loss, loss, rate, usable)
        if skipped is not None:
            for buffer, before in buffers:
                buffer.copy_(before)
        found = dict(output.loss.diagnostics)
        return Outcome(output.keys_BD, usable, skipped, loss, norm, rate, found)

    def encode(self, image_BCHW: Tensor, phases: Phases) -> Outcome:
        """Keys alone, for the memory; "pace" is the reason for no update."""
        with phases("data"):
            view_BCHW = self._see(image_BCHW)
        with phases("forward"), self._autocast():
            keys_BD = self._method.encode_keys(view_BCHW)
        return Outcome(keys_BD, is_usable(keys_BD), "pace")

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's state, flat."""
        return optimiser_tensors(self._optimiser)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave. ValueError if a shape does not fit."""
        load_optimiser(self._optimiser, tensors)

    def _descend(
        self, loss: Tensor, value: float, rate: float, usable: bool
    ) -> tuple[str | None, float]:
        """One optimiser step; the reason why there was none, and the norm of the gradient."""
        self._optimiser.zero_grad(set_to_none=True)
        if not math.isfinite(value):
            return "loss", math.nan
        if not usable:
            return "keys", math.nan
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not math.isfinite(float(norm)):
            self._optimiser.zero_grad(set_to_none=True)
            return "gradient", float(norm)
        if self._settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.clip, norm)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._method.after_update()
        return None, float(norm)

    def _known(self, inputs: Inputs) -> Samples:
        """Labels are for oracles alone."""
        labels_B = inputs.labels_B if self._method.needs_labels else None
        return Samples(inputs.ids_B, inputs.hashes_B, labels_B)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"
        )


def is_usable(keys_BD: Tensor) -> bool:
    """Finite and of unit norm: what the memory takes. An encoder that died gives zeros."""
    norm_B = torch.linalg.vector_norm(keys_BD, dim=1)
    return bool(((norm_B - 1).abs() < 1e-3).all())
