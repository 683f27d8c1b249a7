"""Scores h: from the cosine of two embeddings to the probability that they share a class.

DUEL, Definition 2: h is continuous and increasing with h(-1) = 0 and h(1) = 1.

Shapes: B rows asked about, D embedding, K memory slots.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Largest similarity block held at a time, in elements (16 MiB of float32)."""


class Score(ABC):
    """A score h. Subclasses are frozen: a score has no state."""

    def __call__(self, cosine: Tensor) -> Tensor:
        """h of every element, in a new tensor.

        Args:
            cosine: any shape, floating point, in [-1, 1]; what lies outside by rounding is clamped
                where h would turn round there.

        >>> Linear()(torch.tensor([-1.0, 0.0, 1.0])).tolist()
        [0.0, 0.5, 1.0]
        """
        return self.apply_(cosine.clone())

    @property
    @abstractmethod
    def slope(self) -> float:
        """The largest derivative of h: how much it makes of a cosine's rounding."""

    @abstractmethod
    def apply_(self, cosine: Tensor) -> Tensor:
        """h of every element, written over `cosine`, which is returned."""

    def total(self, z_BD: Tensor, memory_KD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k) for every row b, float64 [B]; K x B is never held beyond a block."""
        total_B = torch.zeros(len(z_BD), dtype=torch.float64, device=z_BD.device)
        step = max(1, BLOCK_ELEMENTS // max(1, len(memory_KD)))
        for start in range(0, len(z_BD), step):
            cosine_bK = z_BD[start : start + step] @ memory_KD.T
            total_B[start : start + step] = self.apply_(cosine_bK).sum(dim=1, dtype=torch.float64)
        return total_B

    def counts(self, memory_KD: Tensor) -> Tensor:
        """The duplicate counts N(j) = sum_{i != j} h(m_i . m_j) (DUEL, eq. 5), float64 [K]."""
        own_K = self.apply_((memory_KD * memory_KD).sum(dim=1)).to(torch.float64)
        return self.total(memory_KD, memory_KD) - own_K


@dataclass(frozen=True)
class Linear(Score):
    """h(x) = (1 + x) / 2, DUEL's default. A sum over slots needs only the sum of their rows."""

    slope = 0.5

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.add_(1.0).mul_(0.5)

    def total(self, z_BD: Tensor, memory_KD: Tensor) -> Tensor:
        sum_D = sum_rows(memory_KD)
        return 0.5 * (len(memory_KD) + z_BD.to(torch.float64) @ sum_D)


@dataclass(frozen=True)
class Quadratic(Score):
    """h(x) = ((1 + x) / 2)^2 (DUEL, section 4)."""

    slope = 1.0

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.add_(1.0).mul_(0.5).clamp_(min=0.0).square_()


@dataclass(frozen=True)
class Gaussian(Score):
    """h(x) = exp(-(x - 1)^2 / tau), shifted and scaled to h(-1) = 0 (DUEL, section 4).

    Args:
        tau: squared width in cosine, > 0. The paper's value is 1.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)

    @property
    def slope(self) -> float:
        steepest = max(-math.sqrt(self.tau / 2), -2.0)  # of x - 1
        return -2 * steepest / self.tau * math.exp(-(steepest**2) / self.tau) / self._range

    @property
    def _range(self) -> float:
        return 1.0 - math.exp(-4.0 / self.tau)

    def apply_(self, cosine: Tensor) -> Tensor:
        least = math.exp(-4.0 / self.tau)
        cosine.clamp_(-1.0, 1.0).sub_(1.0).square_().mul_(-1.0 / self.tau).exp_()
        return cosine.sub_(least).div_(1.0 - least)


@dataclass(frozen=True)
class VonMisesFisher(Score):
    """h(x) = exp((x - 1) / kappa), shifted and scaled to h(-1) = 0: a score as sharp as wanted.

    Args:
        kappa: cosine over which h falls by a factor e, > 0. At 0.1 only near neighbours count.
    """

    kappa: float = 0.1

    def __post_init__(self) -> None:
        check_positive("kappa", self.kappa)

    @property
    def slope(self) -> float:
        return 1 / (self.kappa * (1.0 - math.exp(-2.0 / self.kappa)))

    def apply_(self, cosine: Tensor) -> Tensor:
        least = math.exp(-2.0 / self.kappa)
        cosine.clamp_(-1.0, 1.0).sub_(1.0).mul_(1.0 / self.kappa).exp_()
        return cosine.sub_(least).div_(1.0 - least)


@dataclass(frozen=True)
class Threshold(Score):
    """h(x) = 1 from a cosine on, 0 below, and straight between: neighbours are counted as such.

    The ramp is h's continuity (Definition 2), and what keeps the last bit of a cosine from turning
    a neighbour into none.

    Args:
        cosine: from here on two samples are duplicates; above -1, at most 1.
        width: of the ramp below it, > 0; its foot lies at -1 or above.
    """

    cosine: float = 0.9
    width: float = 0.05

    def __post_init__(self) -> None:
        check_positive("width", self.width)
        if not -1 <= self.cosine - self.width < self.cosine <= 1:
            raise ValueError(
                f"cosine {self.cosine} with width {self.width}: the ramp from cosine - width to "
                "cosine must lie within [-1, 1]"
            )

    @property
    def slope(self) -> float:
        return 1 / self.width

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.sub_(self.cosine - self.width).mul_(1 / self.width).clamp_(0.0, 1.0)


def sum_rows(z_KD: Tensor) -> Tensor:
    """Sum of the rows in float64 [D], a block at a time: the column is never held twice."""
    sum_D = torch.zeros(z_KD.shape[1], dtype=torch.float64, device=z_KD.device)
    step = max(1, BLOCK_ELEMENTS // z_KD.shape[1])
    for start in range(0, len(z_KD), step):
        sum_D += z_KD[start : start + step].sum(dim=0, dtype=torch.float64)
    return sum_D


def check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}: must be a finite number above 0")
