"""The interface of every loss: its arguments, its result and the checks of both.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stream_ssl.losses.group import Group


class Diagnostics(Mapping[str, float]):
    """A mapping from names to numbers for the metrics.

    The numbers stay on their device until the first read, because a read waits for the device. A
    caller that fetches other numbers anyway can fetch `on_device` together with them.

    Args:
        numbers: 0-dimensional tensors, all on one device.
    """

    def __init__(self, numbers: Mapping[str, Tensor]) -> None:
        self._names = tuple(numbers)
        self.on_device = torch.stack([value.detach() for value in numbers.values()])
        self._read: dict[str, float] | None = None

    def read(self, numbers: list[float] | None = None) -> dict[str, float]:
        """Return the numbers as floats.

        Args:
            numbers: the values of `on_device`, if the caller has already fetched them.
        """
        if self._read is None:
            numbers = self.on_device.tolist() if numbers is None else numbers
            self._read = dict(zip(self._names, numbers, strict=True))
        return self._read

    def __getitem__(self, name: str) -> float:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of a loss.

    Attributes:
        loss: the mean of `per_anchor`, 0-dimensional.
        per_anchor: the loss of each anchor [B].
        diagnostics: numbers for the metrics, by name.
    """

    loss: Tensor
    per_anchor: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


class Mix(NamedTuple):
    """The mixture of images that momentum mixup gives each anchor.

    Anchor b shows a share `theta_B[b]` of sample b. The rest is the positive view of sample
    `permutation_B[b]` (int64).
    """

    permutation_B: Tensor
    theta_B: Tensor


class LossInputs(NamedTuple):
    """The arguments of one call of a loss, see `Loss.forward`."""

    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor
    mask_BN: Tensor | None = None
    same_BN: Tensor | None = None
    prior_B: Tensor | None = None
    mix: Mix | None = None
    group: Group | None = None


class Loss(nn.Module, ABC):
    """A contrastive loss on rows of unit norm.

    A loss owns no memory: the caller passes the negatives. `negative` is either [N, D], shared by
    all anchors, or [B, N, D], one set per anchor. `mask_BN` is True for entries to leave out of the
    sums and of the count N. Gradients reach the anchors. Gradients also reach positives and
    negatives that require them. The loss computes in float64 if the anchors are float64, otherwise
    in float32, also under autocast.

    Attributes:
        needs_labels: the loss reads `same_BN`. It is then an oracle, for experiments.
        needs_prior: the loss reads `prior_B`.
        uses_negatives: False if the loss reads only positives.
        takes_mix: the loss can label mixed anchors (`mix`).
        batch_sized: True if N must be about the size of a batch.
        across_ranks: the loss accepts negatives that are distributed over several ranks (`group`).
    """

    needs_labels: bool = False
    needs_prior: bool = False
    uses_negatives: bool = True
    takes_mix: bool = False
    batch_sized: bool = False
    across_ranks: bool = False

    def begin(self, step: int) -> None:
        """Set the step of the next update.

        The learner calls this before each update. Schedules depend only on the step, so a resumed
        run gives the same numbers.
        """

    def forward(
        self,
        z_BD: Tensor,
        positive_BMD: Tensor,
        negative: Tensor,
        mask_BN: Tensor | None = None,
        *,
        same_BN: Tensor | None = None,
        prior_B: Tensor | None = None,
        mix: Mix | None = None,
        group: Group | None = None,
    ) -> LossOutput:
        """Return the losses of the anchors.

        Args:
            z_BD: anchors.
            positive_BMD: M other views of each anchor's sample.
            negative: [N, D] or [B, N, D].
            mask_BN: bool, True for a negative to leave out.
            same_BN: bool, True if the labels say that the negative shares the anchor's class.
            prior_B: tau+ of each anchor, in [0, 1): the probability that a negative shares its
                class. Values outside this range give losses that are not finite.
            mix: the mixture of the anchors' images; None for images that are not mixed.
            group: the ranks, if each rank holds a part of the negatives and the same number of
                anchors. `mask_BN` and `same_BN` then have one row for each anchor of all ranks, in
                order of rank. The mean over ranks of loss and gradients equals the result of one
                process with all anchors and all negatives.

        Raises:
            TypeError: anchors, positives or negatives are no tensor of floating-point numbers.
            ValueError: a shape does not fit, or an argument that the loss needs is missing.
        """
        inputs = LossInputs(z_BD, positive_BMD, negative, mask_BN, same_BN, prior_B, mix, group)
        self.check_inputs(inputs)
        with torch.autocast(z_BD.device.type, enabled=False):
            return self.compute(inputs)

    @abstractmethod
    def compute(self, inputs: LossInputs) -> LossOutput:
        """Return the losses of the anchors. The arguments are checked and autocast is off."""

    def check_inputs(self, inputs: LossInputs) -> None:
        """Raise TypeError or ValueError as `forward` says."""
        check_shapes(inputs)
        name = type(self).__name__
        if self.needs_labels and inputs.same_BN is None:
            raise ValueError(
                f"{name} as configured is an oracle and needs labels, and same_BN was not given: "
                "train on a labelled stream, or choose a loss without an oracle"
            )
        if self.needs_prior and inputs.prior_B is None:
            raise ValueError(
                f'{name} has prior "memory", and prior_B was not given: pass each anchor\'s '
                "measured tau+ (WorkingMemory.prior), or set the prior to a number"
            )
        if inputs.mix is not None and not self.takes_mix:
            raise ValueError(f"{name} cannot label mixed anchors: choose SelfLabeling, or no mix")
        if inputs.group is not None:
            self.check_across_ranks()

    def check_across_ranks(self) -> None:
        """Raise ValueError unless the negatives may be distributed over several ranks."""
        if not self.across_ranks:
            raise ValueError(
                f"{type(self).__name__} compares with the negatives of one process: for several "
                "ranks choose InfoNCE, Decoupled or a debiased loss"
            )


def check_temperature(temperature: float) -> float:
    """Return the temperature as a float.

    Raises:
        ValueError: it is not a positive, finite number.
    """
    given: Any = temperature  # may be a number of NumPy
    number = isinstance(given, Real) and not isinstance(given, bool)
    if not (number and math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature is {temperature!r}: cosines are divided by it, so it must be a positive "
            "and finite number. Choose 0.05 to 1"
        )
    return float(temperature)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        *first, last = [f'"{choice}"' for choice in choices]
        raise ValueError(f"{name} is {value!r}: choose {', '.join(first)} or {last}")


def check_shapes(inputs: LossInputs) -> None:
    """Raise ValueError or TypeError unless the tensors fit together as `Loss` describes."""
    z_BD, positive_BMD, negative, mask_BN, same_BN, prior_B, mix, group = inputs
    named = {"anchors": z_BD, "positives": positive_BMD, "negatives": negative}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} are of type {type(value).__name__}: pass a torch tensor")
        if not value.is_floating_point():
            raise TypeError(f"{name} are {value.dtype}: pass floating-point numbers")
    if z_BD.ndim != 2 or z_BD.shape[0] == 0:
        raise ValueError(f"anchors have shape {tuple(z_BD.shape)}: expected [B, D] with B >= 1")
    batch, dim = z_BD.shape
    if positive_BMD.ndim != 3 or positive_BMD.shape[::2] != (batch, dim):
        raise ValueError(
            f"positives have shape {tuple(positive_BMD.shape)}: expected [{batch}, M, {dim}]. "
            "For one positive per anchor add a dimension: positive.unsqueeze(1)"
        )
    if positive_BMD.shape[1] == 0:
        raise ValueError("positives have M = 0: every anchor needs at least one positive")
    before, last = negative.shape[:-2], negative.shape[-1:]
    if negative.ndim < 2 or before not in ((), (batch,)) or last != (dim,):
        raise ValueError(
            f"negatives have shape {tuple(negative.shape)}: expected [N, {dim}] for all anchors "
            f"or [{batch}, N, {dim}] for each"
        )
    for name, flag_BN in (("mask", mask_BN), ("same_BN", same_BN)):
        if flag_BN is None:
            continue
        anchors = batch * (1 if group is None else group.size)
        if flag_BN.shape != (anchors, negative.shape[-2]) or flag_BN.dtype != torch.bool:
            raise ValueError(
                f"{name} has shape {tuple(flag_BN.shape)} of {flag_BN.dtype}: expected bool "
                f"[{anchors}, {negative.shape[-2]}], one row for each anchor and one column for "
                "each negative"
            )
    if prior_B is not None and prior_B.shape != (batch,):
        raise ValueError(f"prior_B has shape {tuple(prior_B.shape)}: expected [{batch}]")
    if mix is not None and not (mix.permutation_B.shape == mix.theta_B.shape == (batch,)):
        raise ValueError(
            f"mix has shapes {tuple(mix.permutation_B.shape)} and {tuple(mix.theta_B.shape)}: "
            f"expected [{batch}] both"
        )
