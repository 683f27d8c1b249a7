"""Seeded streams of unit vectors, as input of a memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIM, BATCH = 128, 256


class UnitVectors:
    """A stream of seeded unit vectors.

    They form 20 clusters with sizes proportional to 1/rank, or are uniform on the sphere.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._kind = kind
        self._centre_CD = self._rng.standard_normal((20, DIM), dtype=np.float32)
        self._centre_CD /= np.linalg.norm(self._centre_CD, axis=1, keepdims=True)

    def draw(self, count: int) -> NDArray[np.float32]:
        """Return the next `count` unit vectors, float32 [count, DIM]."""
        z_ND = self._rng.standard_normal((count, DIM), dtype=np.float32)
        if self._kind == "clustered":
            share = 1 / np.arange(1, 21)
            cluster = self._rng.choice(20, size=count, p=share / share.sum())
            z_ND = self._centre_CD[cluster] + np.float32(0.6 / DIM**0.5) * z_ND
        z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
        return z_ND
