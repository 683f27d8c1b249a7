"""What the ranks of a sharded memory and one process alone are both given."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memory.scores import Gaussian, Linear, Quadratic, Score, Threshold, VonMisesFisher
from tests.naive import unit_rows

SLOTS, DIM = 48, 6
BATCHES = (20, 0, 40, 1, 60, 7)
SCORES: tuple[Score, ...] = (Linear(), Quadratic(), Gaussian(), VonMisesFisher(0.1), Threshold())


class Case(NamedTuple):
    score: Score
    compete: bool
    stream: str
    seed: int


CASES = tuple(
    Case(score, compete, stream, seed)
    for seed, (score, compete, stream) in enumerate(
        (score, compete, stream)
        for score in SCORES
        for compete in (False, True)
        for stream in ("clustered", "duplicates")
    )
)


def rows_of(case: Case) -> NDArray[Any]:
    """Seeded unit rows, float64 [sum of BATCHES, DIM]."""
    rng = np.random.default_rng(case.seed)
    return np.asarray(unit_rows(rng, case.stream, sum(BATCHES), DIM).numpy())
