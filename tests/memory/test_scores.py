"""Tests of scores at their extremes: very sharp scores, and scores wider than any cosine.

Shapes: N cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from table import table

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, Threshold, VonMisesFisher
from tests.naive import unit_rows

WIDTHS = (1e-9, 1e-6, 1e-3, 0.1, 1.0, 1.999, 2.0, 4.0, 1e2, 1e5, 1e9)


class Squared(Score):
    """A score from another package, which has its slope and `apply_` alone."""

    slope = 1.0

    def apply_(self, cosine: torch.Tensor) -> torch.Tensor:
        return cosine.add(1.0).mul(0.5).square()  # not in place, as it ought to be

    def __repr__(self) -> str:
        return "Squared()"


def exact(score: Score, x: float) -> float:
    """Return h by its definition, to 60 digits."""
    with localcontext() as context:
        context.prec = 60
        away = 1 - Decimal(x)
        if isinstance(score, VonMisesFisher):
            far, end = -away / Decimal(score.kappa), -2 / Decimal(score.kappa)
        else:
            assert isinstance(score, Gaussian)
            far, end = -(away**2) / Decimal(score.tau), -4 / Decimal(score.tau)
        return float((far.exp() - end.exp()) / (1 - end.exp()))


@table(
    "score",
    [*map(VonMisesFisher, WIDTHS), *map(Gaussian, (1e-18, *WIDTHS))],
    ids=repr,
)
def test_scores_of_every_width_equal_their_definition(score: Score) -> None:
    x_N = torch.cat(
        [torch.linspace(-1, 1, 41, dtype=torch.float64), 1 - torch.logspace(-18, -1, 35).double()]
    ).sort()[0]
    for dtype, eps in ((torch.float64, 2.3e-16), (torch.float32, 1.2e-7)):
        given_N = x_N.to(dtype)
        h_N, wanted = score(given_N), [exact(score, x) for x in given_N.double().tolist()]
        unit = 4 * eps * (1 + score.slope)  # rounding of a cosine near 1, and of h
        assert bool(h_N.isfinite().all())
        assert bool((h_N.diff() >= 0).all())
        assert abs(float(h_N[0])) <= 4 * eps
        assert abs(float(h_N[-1]) - 1) <= 4 * eps
        found = h_N.double().tolist()
        assert max(abs(h - w) for h, w in zip(found, wanted, strict=True)) <= min(unit, 1e-5)


@table(
    ("score", "width"),
    [(VonMisesFisher(w), w) for w in WIDTHS] + [(Gaussian(w**2), w) for w in (1e-8, 0.1, 3e4)],
    ids=str,
)
def test_the_slope_is_the_largest_derivative(score: Score, width: float) -> None:
    x_N = torch.linspace(1 - min(2.0, 20 * width), 1, 4001, dtype=torch.float64)
    steepest = float((score(x_N).diff() / x_N.diff()).max())
    assert score.slope >= steepest * (1 - 1e-3)
    assert score.slope <= steepest * 1.05


def test_every_score_rises_from_0_to_1() -> None:
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    for score in (Linear(), Quadratic(), Gaussian(0.5), Threshold(), VonMisesFisher(0.01)):
        h = score(x)
        assert abs(float(h[0])) < 1e-12
        assert abs(float(h[-1]) - 1) < 1e-12
        assert bool((h.diff() >= 0).all())
        assert torch.equal(score.apply_(x.clone()), h)
        assert x[0] == -1  # the input is unchanged


def test_the_widest_score_evicts_as_the_linear_score() -> None:
    z_ND = unit_rows(np.random.default_rng(0), "clustered", 300, 5)
    gone = [
        WorkingMemory(40, 5, MostDuplicated(score)).add(torch.arange(300), z_ND).evicted.tolist()
        for score in (Linear(), VonMisesFisher(1e9))
    ]
    assert gone[0] == gone[1]


@table(
    ("build", "message"),
    [
        (lambda: VonMisesFisher(1e20), r"kappa is 1e\+20: must lie in \[1e-09, 1e\+09\]"),
        (lambda: VonMisesFisher(1e-300), "kappa is 1e-300: .*memory.Duplicates finds equal rows"),
        (lambda: VonMisesFisher(math.nan), "kappa is nan"),
        (lambda: VonMisesFisher("0.1"), "kappa is '0.1': must be a finite number above 0"),  # type: ignore[arg-type]
        (lambda: Gaussian(1e20), r"tau is 1e\+20: .* a wider one is no other than the widest"),
        (lambda: Gaussian(0), "tau is 0"),
        (lambda: Threshold(0.9, 1e-12), "width is 1e-12"),
        (lambda: Threshold(None), "cosine is None: must be a finite number"),  # type: ignore[arg-type]
        (lambda: Threshold(0.9, 2.0), "the ramp from cosine - width"),
        (lambda: VonMisesFisher(-1), "kappa is -1: must be a finite number above 0"),
        (lambda: VonMisesFisher(10**400), "must be a finite number"),
    ],
    ids=range(11),
)
def test_scores_reject_widths_out_of_range(build: Callable[[], Score], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@table(
    "score",
    [Linear(), Quadratic(), Gaussian(0.5), Threshold(0.3, 0.2), Squared()]
    + [VonMisesFisher(kappa) for kappa in (0.01, 0.03, 0.1, 1.9, 5.0)],
    ids=repr,
)
@table("moving", [slice(None), slice(0), slice(3), slice(2, 5), slice(4, None)], ids=str)
def test_sums_over_rows_equal_sums_of_the_scores_of_cosines(score: Score, moving: slice) -> None:
    random = np.random.default_rng(1)
    row_ND = unit_rows(random, "clustered", 50, 8)
    before_RD = row_ND[[4, 30, 7]].clone()
    after_RD = before_RD.clone()
    after_RD[:, moving] = torch.from_numpy(random.normal(size=(3, 8)))[:, moving] / 3
    row_ND[[4, 30, 7]] = after_RD

    def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return torch.allclose(found, wanted, rtol=1e-9, atol=1e-11)

    h_RN, was_RN = score(after_RD @ row_ND.T), score(before_RD @ row_ND.T)
    change_N, total_R = score.moved(row_ND, after_RD, before_RD, moving)
    assert near(score.between(after_RD, row_ND), h_RN)
    out = torch.zeros(3, 60, dtype=torch.float64)
    assert score.between(after_RD, row_ND, out=out[:, 5:55]).data_ptr() == out[:, 5:].data_ptr()
    assert near(out[:, 5:55], h_RN)
    assert float(out[:, :5].abs().sum() + out[:, 55:].abs().sum()) == 0
    assert near(score.total(after_RD, row_ND), h_RN.sum(dim=1))
    assert near(total_R, h_RN.sum(dim=1))
    assert near(change_N, (h_RN - was_RN).sum(dim=0))


@pytest.mark.parametrize("score", [VonMisesFisher(0.01), Gaussian(0.01)])
def test_a_sharp_score_returns_no_subnormal_numbers(score: Score) -> None:
    cosine = torch.linspace(-1, 1, 10_001)
    found, exact = score(cosine), score(cosine.double())
    tiny = torch.finfo(torch.float32).tiny
    assert ((found == 0) | (found >= tiny)).all()
    assert 0 < float((found == 0).float().mean()) < 1
    assert found.double().numpy() == pytest.approx(exact.numpy(), rel=1e-4, abs=2 * tiny)
