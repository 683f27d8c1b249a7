"""One update of the weights, or none where numbers are not finite.

Shapes: B samples, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memory import WorkingMemory
from memory.compute import to_host
from stream_ssl.batch import Batch
from stream_ssl.learning.optimiser import OptimiserSettings, load_optimiser, optimiser_tensors
from stream_ssl.learning.phases import Phases
from stream_ssl.learning.schedule import Schedule
from stream_ssl.learning.views import Views
from stream_ssl.losses import Diagnostics
from stream_ssl.methods import Method

Keys = Literal["before", "after"]


class Outcome(NamedTuple):
    """What a batch gave. `usable`: whether the memory may take the keys. `unread`: diagnostics that
    still lie on a device, 0-dimensional."""

    keys_BD: Tensor
    usable: bool
    skipped: str | None
    loss: float = math.nan
    norm: float = math.nan
    rate: float = 0.0
    diagnostics: Mapping[str, float] = {}
    unread: Mapping[str, Tensor] = {}


class Updates:
    """Views, loss, gradient and optimiser step of one batch after another.

    What an update depends on is read from the device once, behind the backward pass: whether loss,
    keys and gradient are sound.

    Args:
        method: what is trained.
        memory: read for negatives; a method may encode it anew before it looks.
        views: the augmentation.
        settings: of the optimiser.
        schedule: factor of the learning rate by step.
        device: where all of it lies.
        precision: what the method computes in.
        plain_keys: `encode` takes the images as they are, rather than a view of each.
        keys: which keys `update` returns: those of the key encoder "before" the update, which the
            forward pass made, or of the one "after" it.
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
        keys: Keys,
    ) -> None:
        self._method, self._memory, self._views = method, memory, views
        self._settings, self._schedule = settings, schedule
        self._device, self._precision = device, precision
        self._plain_keys, self.keys = plain_keys, keys
        self._see = views.plain if plain_keys else views
        self._parameters = list(method.trained)
        self._buffers = Backup(list(method.buffers()))
        self._optimiser = settings.build(self._parameters)

    def update(self, batch: Batch[Tensor], step: int, phases: Phases) -> Outcome:
        """Learn from a batch."""
        self._method.begin(step)
        with phases("data"):
            views = [self._views(images_of(batch)) for _ in range(self._method.views)]
        # A forward pass on numbers that are not finite leaves them in BatchNorm's averages.
        self._buffers.save()
        rate = self._settings.learning_rate * self._schedule(step)
        with phases("memory"), self._autocast():
            self._method.prepare(self._memory, self._see)
        with phases("forward"), self._autocast():
            output = self._method(views, self._known(batch), self._memory)
        with phases("backward"):
            self._optimiser.zero_grad(set_to_none=True)
            output.loss.loss.backward()
            norm = self._gradient_norm()
            loss, usable, size, found = _read(
                output.loss.loss, is_usable(output.keys_BD), norm, output.loss.diagnostics
            )
            skipped = _unsound(loss, usable, size)
            if skipped is None:
                self._descend(norm, rate)
            else:
                self._optimiser.zero_grad(set_to_none=True)
                self._buffers.restore()
        keys_BD = output.keys_BD
        if self.keys == "after" and skipped is None:
            view_BCHW = self._see(images_of(batch)) if self._plain_keys else views[1]
            keys_BD, usable = self._keys_of(view_BCHW, phases)
        size = size if skipped in (None, "gradient") else math.nan
        return Outcome(keys_BD, usable, skipped, loss, size, rate, found)

    def encode(self, image_BCHW: Tensor, phases: Phases) -> Outcome:
        """Keys alone, for the memory; "pace" is the reason for no update."""
        with phases("data"):
            view_BCHW = self._see(image_BCHW)
        keys_BD, usable = self._keys_of(view_BCHW, phases)
        return Outcome(keys_BD, usable, "pace")

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's state, flat."""
        return optimiser_tensors(self._optimiser)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave. ValueError if a shape does not fit."""
        load_optimiser(self._optimiser, tensors)

    def _keys_of(self, view_BCHW: Tensor, phases: Phases) -> tuple[Tensor, bool]:
        """Keys of a view, and whether the memory may take them."""
        with phases("forward"), self._autocast():
            keys_BD = self._method.encode_keys(view_BCHW)
            return keys_BD, bool(to_host(is_usable(keys_BD)))

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self._device)

    def _descend(self, norm: Tensor, rate: float) -> None:
        """One optimiser step along a gradient of this norm."""
        if self._settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.clip, norm)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._method.after_update()

    def _known(self, batch: Batch[Tensor]) -> Batch[Tensor]:
        """Labels are for oracles alone."""
        return batch if self._method.needs_labels else replace(batch, labels_B=None)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"
        )


class Backup:
    """A second copy of tensors, to undo what befell them; made and put back by one kernel a dtype.

    Args:
        live: the tensors, which stay the same objects.
    """

    def __init__(self, live: Iterable[Tensor]) -> None:
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in live:
            by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._pairs = [(same, [torch.empty_like(one) for one in same]) for same in by_type.values()]

    @torch.no_grad()
    def save(self) -> None:
        """Keep the values of this moment."""
        for live, kept in self._pairs:
            torch._foreach_copy_(kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the tensors the values kept."""
        for live, kept in self._pairs:
            torch._foreach_copy_(live, kept)


def images_of(batch: Batch[Tensor]) -> Tensor:
    """The images of a batch that is to be encoded."""
    assert batch.images_BCHW is not None, "only what has images can be encoded"
    return batch.images_BCHW


def check_keys(keys: str) -> None:
    """ValueError unless it is one of the two."""
    if keys not in ("before", "after"):
        raise ValueError(f'keys is {keys!r}: choose "before" or "after" the update')


def is_usable(keys_BD: Tensor) -> Tensor:
    """bool, 0-dimensional: finite and of unit norm, which the memory asks. An encoder that died
    gives zeros."""
    norm_B = torch.linalg.vector_norm(keys_BD, dim=1)
    usable: Tensor = ((norm_B - 1).abs() < 1e-3).all()
    return usable


def _read(
    loss: Tensor, usable: Tensor, norm: Tensor, diagnostics: Mapping[str, float]
) -> tuple[float, bool, float, Mapping[str, float]]:
    """All of it on the host, waiting for the device once."""
    parts = [torch.stack([loss.detach().double(), usable.double(), norm.double()])]
    if isinstance(diagnostics, Diagnostics):
        parts.append(diagnostics.on_device.double())
    value, good, size, *rest = to_host(torch.cat(parts)).tolist()
    if isinstance(diagnostics, Diagnostics):
        diagnostics = diagnostics.read(rest)
    return value, bool(good), size, diagnostics


def _unsound(loss: float, usable: bool, norm: float) -> str | None:
    """Why there may be no update, if so."""
    if not math.isfinite(loss):
        return "loss"
    if not usable:
        return "keys"
    return None if math.isfinite(norm) else "gradient"
