"""Scores h: from the cosine of two rows to the probability that they share a class.

DUEL, Definition 2: h is continuous and increasing, with h(-1) = 0 and h(1) = 1.

Shapes: B query rows, D embedding, K memory slots, R moved rows, M = 2 R, b rows at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import threshold

from stream_ssl.memory.checks import check_instance, check_number
from stream_ssl.memory.compute import LARGE_ELEMENTS, sum_in_float64

FINEST, COARSEST = 1e-9, 1e9
"""The narrowest and widest score, in cosine.

Float64 cosines that differ by less than the first differ only by rounding. A score wider than the
second equals its limit in float64.
"""

EVEN, STEEP = 0.5, 40.0
"""The values of 1 / kappa for which float32 holds e^(x / kappa), and the difference of two, well.

Below, the exponentials are nearly equal. Above, they are too large, or their products subnormal.
"""

BLOCK_ELEMENTS = 1 << 22
"""The largest block of similarities held at a time on a CPU, in elements (16 MiB of float32)."""


class Score(ABC):
    """A score h. Subclasses are frozen dataclasses, because a score has no state.

    A subclass defines `slope` and `apply_`. For speed, it may also write h(x) as a g(f x) + b, with
    `apply_raw_` for g, and f, a and b as `factor`, `scale` and `shift`. Then a matrix product
    applies f for free, and a sum of many h applies a and b once.
    """

    factor: float = 1.0
    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, cosine: Tensor) -> Tensor:
        """Return h of every element, in a new tensor.

        Args:
            cosine: any shape, floating point, in [-1, 1]. Values may lie outside by rounding, and
                then h may do so too, unless it is not monotonic there.

        >>> Linear()(torch.tensor([-1.0, 0.0, 1.0])).tolist()
        [0.0, 0.5, 1.0]
        """
        return self.apply_(cosine.clone())

    @property
    @abstractmethod
    def slope(self) -> float:
        """The largest derivative of h. It bounds how much h magnifies rounding errors."""

    @abstractmethod
    def apply_(self, cosine: Tensor) -> Tensor:
        """Overwrite `cosine` with h of every element, and return it."""

    def apply_raw_(self, cosine: Tensor) -> Tensor:
        """Overwrite `factor` times each cosine with (h - shift) / scale, and return it."""
        return self.apply_(cosine)

    def between(self, z_BD: Tensor, memory_KD: Tensor, out: Tensor | None = None) -> Tensor:
        """Return h(z_b . m_k) for all pairs of rows, [B, K], in `out` if it is given."""
        raw_BK = self._raw(z_BD, memory_KD, out)
        is_h = self.scale == 1 and self.shift == 0
        h_BK = raw_BK if is_h else affine_(raw_BK, self.scale, self.shift)
        return h_BK if out is None or h_BK is out else out.copy_(h_BK)

    def _raw(self, z_BD: Tensor, memory_KD: Tensor, out: Tensor | None = None) -> Tensor:
        return self.apply_raw_(add_product(None, z_BD, memory_KD, self.factor, out))

    def total(self, z_BD: Tensor, memory_KD: Tensor) -> Tensor:
        """Return sum_k h(z_b . m_k) for every row b, float64 [B], computed in blocks."""
        total_B = torch.zeros(len(z_BD), dtype=torch.float64, device=z_BD.device)
        step = _rows_at_a_time(len(memory_KD), z_BD.device)
        for start in range(0, len(z_BD), step):
            raw_bK = self._raw(z_BD[start : start + step], memory_KD)
            total_B[start : start + step] = sum_in_float64(raw_bK, dim=1)
        return total_B.mul_(self.scale).add_(self.shift * len(memory_KD))

    def moved(
        self,
        memory_KD: Tensor,
        after_RD: Tensor,
        before_RD: Tensor,
        moving: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Return what changes in the totals of all rows when some rows of the memory move.

        Args:
            memory_KD: the memory, with the moved rows as they are now.
            after_RD: these rows as they are now.
            before_RD: the same rows as they were.
            moving: the columns in which these rows may differ. The product of the others is made
                once.

        Returns:
            The change of each row's total, float64 [K], and the totals of the moved rows, float64
            [R].
        """
        change_K = torch.zeros(len(memory_KD), dtype=torch.float64, device=memory_KD.device)
        total_R = change_K.new_zeros(len(after_RD))
        first, last, _ = moving.indices(memory_KD.shape[1])
        step = _rows_at_a_time(2 * len(after_RD), memory_KD.device)
        for start in range(0, len(memory_KD), step):
            row_bD, same_bR = memory_KD[start : start + step], None
            for part in (slice(first), slice(last, None)):
                if row_bD[:, part].shape[1]:
                    one_bd, other_Rd = row_bD[:, part], after_RD[:, part]
                    same_bR = add_product(same_bR, one_bd, other_Rd, self.factor)
            row_bd = row_bD[:, first:last]
            now_bR, was_bR = (
                self.apply_raw_(add_product(same_bR, row_bd, of_RD[:, first:last], self.factor))
                for of_RD in (after_RD, before_RD)
            )
            total_R += sum_in_float64(now_bR, dim=0)
            gone_b = sum_in_float64(was_bR, dim=1)
            change_K[start : start + step] = sum_in_float64(now_bR, dim=1) - gone_b
        change_K *= self.scale
        return change_K, total_R.mul_(self.scale).add_(self.shift * len(memory_KD))

    def counts(self, memory_KD: Tensor) -> Tensor:
        """Return the duplicate counts N(j), float64 [K] (DUEL, eq. 5).

        N(j) is the sum of h(m_i . m_j) over all i except j.
        """
        return self.total(memory_KD, memory_KD) - self.own(memory_KD)

    def own(self, z_BD: Tensor) -> Tensor:
        """Return h of each row with itself, which the counts exclude, float64 [B]."""
        return self.apply_((z_BD * z_BD).sum(dim=1)).to(torch.float64)


@dataclass(frozen=True)
class Linear(Score):
    """h(x) = (1 + x) / 2, DUEL's default. A sum over slots needs only the sum of their rows."""

    slope = 0.5

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.add_(1.0).mul_(0.5)

    def moved(
        self,
        memory_KD: Tensor,
        after_RD: Tensor,
        before_RD: Tensor,
        moving: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        del moving  # sums of rows are cheap
        change_K = self.total(memory_KD, after_RD) - self.total(memory_KD, before_RD)
        return change_K, self.total(after_RD, memory_KD)

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
        tau: the squared width in cosine, in [1e-18, 1e9]. The paper uses 1. For large tau, h
            approaches (1 + x) (3 - x) / 4.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", check_width("tau", self.tau, FINEST**2, COARSEST))

    @property
    def slope(self) -> float:
        steepest = max(-math.sqrt(self.tau / 2), -2.0)  # of x - 1
        falling = -2 * steepest / self.tau * math.exp(-(steepest**2) / self.tau)
        return falling / -math.expm1(-4.0 / self.tau)

    def apply_(self, cosine: Tensor) -> Tensor:
        most = 4.0 / self.tau
        cosine.clamp_(-1.0, 1.0).sub_(1.0).square_()
        return between_(cosine.mul_(-1.0 / self.tau), most)


@dataclass(frozen=True)
class VonMisesFisher(Score):
    """h(x) = exp((x - 1) / kappa), shifted and scaled to h(-1) = 0, with adjustable sharpness.

    Args:
        kappa: the change of cosine over which h falls by a factor e, in [1e-9, 1e9]. At 0.1 only
            near neighbours count. For large kappa, h approaches Linear().
    """

    kappa: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", check_width("kappa", self.kappa, FINEST, COARSEST))
        steep = 1.0 / self.kappa
        if EVEN <= steep <= STEEP:  # h is e^-s (e^(s x) - e^-s) / (1 - e^-2s), with fewer passes
            whole = -math.expm1(-2.0 * steep)
            object.__setattr__(self, "factor", steep)
            object.__setattr__(self, "scale", math.exp(-steep) / whole)
            object.__setattr__(self, "shift", -math.exp(-2.0 * steep) / whole)

    @property
    def slope(self) -> float:
        return 1 / (self.kappa * -math.expm1(-2.0 / self.kappa))

    def apply_raw_(self, cosine: Tensor) -> Tensor:
        return self.apply_(cosine) if self.scale == 1 else cosine.exp_()

    def apply_(self, cosine: Tensor) -> Tensor:
        if self.scale != 1:
            return affine_(cosine.mul_(self.factor).exp_(), self.scale, self.shift)
        steep = 1.0 / self.kappa
        cosine.clamp_(-1.0, 1.0).sub_(1.0)
        return between_(cosine.mul_(steep), 2.0 * steep)


@dataclass(frozen=True)
class Threshold(Score):
    """A score that counts neighbours: 1 from a cosine on, 0 well below it, and a ramp between.

    The ramp makes h continuous (DUEL, Definition 2), so that rounding a cosine does not add or
    remove a whole neighbour.

    Args:
        cosine: samples at or above this cosine are duplicates; above -1, at most 1.
        width: the width of the ramp below `cosine`, at least 1e-9. The ramp starts at -1 or above.
    """

    cosine: float = 0.9
    width: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "cosine", check_number("cosine", self.cosine))
        object.__setattr__(self, "width", check_width("width", self.width, FINEST, 2.0))
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


SCORES: dict[str, type[Score]] = {
    "linear": Linear,
    "quadratic": Quadratic,
    "gaussian": Gaussian,
    "von-mises-fisher": VonMisesFisher,
    "threshold": Threshold,
}
"""The scores by the names used in config files. A new score is one line here."""


def _rows_at_a_time(columns: int, device: torch.device) -> int:
    """Return the number of rows, at least 1, of a block of similarities with `columns` columns."""
    elements = BLOCK_ELEMENTS if device.type == "cpu" else LARGE_ELEMENTS
    return max(1, elements // max(1, columns))


def add_product(
    start_NM: Tensor | None,
    one_ND: Tensor,
    other_MD: Tensor,
    factor: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return start + factor one @ other^T in `out` or a new tensor, in one operation."""
    if start_NM is None:
        start = one_ND.new_empty(1)
        return torch.addmm(start, one_ND, other_MD.T, beta=0, alpha=factor, out=out)
    return torch.addmm(start_NM, one_ND, other_MD.T, alpha=factor)


def sum_rows(z_KD: Tensor) -> Tensor:
    """Return the sum of the rows, float64 [D], computed in blocks to save memory."""
    sum_D = torch.zeros(z_KD.shape[1], dtype=torch.float64, device=z_KD.device)
    step = max(1, BLOCK_ELEMENTS // z_KD.shape[1])
    for start in range(0, len(z_KD), step):
        sum_D += z_KD[start : start + step].sum(dim=0, dtype=torch.float64)
    return sum_D


def between_(exponent: Tensor, most: float) -> Tensor:
    """Overwrite each exponent x in [-m, 0] with (e^x - e^-m) / (1 - e^-m), from 0 to 1."""
    floor = math.log(torch.finfo(exponent.dtype).tiny)
    if most > -floor:
        # Smaller values are 0. Processors compute with subnormal numbers many times as slowly.
        exponent.clamp_(min=floor + 0.1).exp_()
        return threshold(exponent, math.exp(floor + 0.2), 0.0, inplace=True)
    if most > 1:
        least = math.exp(-most)
        return affine_(exponent.exp_(), 1.0 / (1.0 - least), -least / (1.0 - least))
    # For nearly constant exponentials, expm1 keeps the digits of their differences.
    return exponent.add_(most).expm1_().div_(math.expm1(most))


def affine_(value: Tensor, scale: float, shift: float) -> Tensor:
    """Overwrite each number x with scale x + shift, in one pass over memory."""
    return torch.add(torch.tensor(shift, dtype=value.dtype), value, alpha=scale, out=value)


def check_width(name: str, value: float, least: float, most: float) -> float:
    """Check that a score is not sharper than rounding and not wider than its limit."""
    rule = "a finite number above 0"
    if check_number(name, value, rule) <= 0:
        raise ValueError(f"{name} is {value}: must be {rule}")
    if not least <= value <= most:
        raise ValueError(
            f"{name} is {value}: must lie in [{least:g}, {most:g}]; a sharper score would count "
            "roundings (memory.Duplicates finds equal rows), a wider one is no other than the "
            "widest"
        )
    return float(value)


def check_score(given: Any) -> None:
    """Raise ValueError unless `given` is a score."""
    check_instance("score", given, Score, "stream_ssl.memory.scores.Score", "such as Linear()")
