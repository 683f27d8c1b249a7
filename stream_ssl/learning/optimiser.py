"""The settings of the optimiser, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

MOMENTUM = 0.9  # for SGD, as in MoCo
BETAS = (0.9, 0.999)  # for Adam and AdamW, as in their papers


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """The optimiser of the weights and its settings.

    Args:
        name: "adam", "adamw" or "sgd".
        learning_rate: learning rate before the schedule's factor, positive.
        weight_decay: decay of all weights, 0 or more.
        clip: largest norm of the gradient, positive; null does not clip.

    Raises:
        ValueError: an argument is outside its range.
    """

    name: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("adam", "adamw", "sgd"):
            raise ValueError(f'optimiser is {self.name!r}: choose "adam", "adamw" or "sgd"')
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate is {self.learning_rate}: it must be positive, finite")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay is {self.weight_decay}: it must be 0 or more, finite")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip is {self.clip}: a norm is positive; None does not clip")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimiser for these parameters."""
        parameters = list(parameters)
        rate, decay = self.learning_rate, self.weight_decay
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, momentum=MOMENTUM)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        fused = all(one.is_cuda for one in parameters)  # one kernel for all weights
        return kind(parameters, lr=rate, weight_decay=decay, betas=BETAS, fused=fused or None)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as a flat mapping.

    The name "7.exp_avg" belongs to parameter 7, in the optimiser's order.
    """
    flat: dict[str, Tensor] = {}
    for index, parameter in enumerate(_parameters(optimiser)):
        for name, value in optimiser.state.get(parameter, {}).items():
            if value is not None:
                flat[f"{index}.{name}"] = torch.as_tensor(value)
    return flat


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load a state that `optimiser_tensors` returned.

    Raises:
        ValueError: a shape does not fit its parameter.
    """
    parameters = _parameters(optimiser)
    optimiser.state.clear()
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        parameter = parameters[int(index)]
        if value.ndim and value.shape != parameter.shape:
            raise ValueError(
                f"optimiser state {key} has shape {tuple(value.shape)}, its parameter "
                f"{tuple(parameter.shape)}: the checkpoint is of another model"
            )
        if value.ndim:
            # Keep the parameter's memory layout: with other strides torch runs other vector code,
            # which may change the last bit of a sum.
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        else:
            fused = any(group.get("fused") for group in optimiser.param_groups)
            at = parameter.device if fused else value.device
            value = value.to(at, copy=True)
        optimiser.state[parameter][name] = value


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
