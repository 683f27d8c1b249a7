"""The sequential rule of DUEL among a few candidates, on the host.

Shapes: L newcomers to place, D embedding, c candidates, R of them whose rows are known, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from memory.eviction.bounds import Indices, Matrix, Vector
from memory.scores import Score

Count = TypeVar("Count", float, Vector)

REFUSED = -1
"""In place of a candidate: the newcomer itself has the largest count and does not join."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Steps that are right if no slot outside the candidates has a larger count."""

    place_L: Indices  # the candidate evicted, or REFUSED
    leaver_L: Indices  # the newcomer who left; -1: the candidate itself
    most_L: Vector  # the count of who left
    count_Lc: Matrix  # counts before each step; one row more, for after the last

    def __len__(self) -> int:
        return len(self.place_L)


class Race:
    """The candidates, and how like each other they and the newcomers are.

    Args:
        z_cD: rows of the candidates, in order of their slots, on the host.
        count_c: their duplicate counts N, float64.
        near_Lc: h of the newcomers and the candidates; written over.
        among_LL: h of the newcomers among themselves.
        total_L: sum of h of each newcomer with all K slots; written over.
        score: h.
        likely_R: candidates that may well leave: their rows are one matrix product. Those of
            others cost one each.
    """

    def __init__(
        self,
        z_cD: Tensor,
        count_c: Vector,
        near_Lc: Matrix,
        among_LL: Matrix,
        total_L: Vector,
        score: Score,
        likely_R: Tensor,
    ) -> None:
        self._z_cD, self._score = z_cD, score
        self._count_c, self._near_Lc = count_c, near_Lc
        self._among_LL, self._total_L = among_LL, total_L
        self._pair_Rc: Matrix = score.apply_(z_cD[likely_R] @ z_cD.T).numpy()
        self._row = {place: row for row, place in enumerate(likely_R.tolist())}
        self._holder: dict[int, int] = {}
        self._taken_L, self._taker_L = np.empty((2, len(near_Lc)), np.int64)
        self._taken = 0

    def run(self, unit: float, compete: bool) -> Proposal:
        """Let newcomers in, one by one, each evicting the largest count of its moment.

        DUEL, Algorithm 2; with `compete` Algorithm 1's form, where the newcomer is counted with
        the others and may be the one that leaves.

        Args:
            unit: relative difference of counts within which they tie.
            compete: see above.
        """
        count_c, near_Lc = self._count_c, self._near_Lc
        place_L, leaver_L = np.empty((2, len(near_Lc)), np.int64)
        most_L = np.empty(len(near_Lc))
        count_Lc = np.empty((len(near_Lc) + 1, len(count_c)))
        for now, near_c in enumerate(near_Lc):
            count_Lc[now] = count_c
            seen_c = count_c + near_c if compete else count_c
            most = float(seen_c.max())
            if compete and self._total_L[now] > most + slack(most, unit):
                place_L[now], leaver_L[now], most_L[now] = REFUSED, now, self._total_L[now]
                continue
            place = int((seen_c >= most - slack(most, unit)).argmax())
            place_L[now], leaver_L[now], most_L[now] = place, self._holder.get(place, -1), most
            self._take(place, now)
        count_Lc[-1] = count_c
        return Proposal(place_L, leaver_L, most_L, count_Lc)

    def _take(self, place: int, now: int) -> None:
        near_c, count_c = self._near_Lc[now], self._count_c
        count_c -= self._leaving(place)
        # Only who is yet to come needs to know; who left is asked once, and told then.
        among_l, total_l = self._among_LL[now, now:], self._total_L[now:]
        total_l += among_l
        total_l -= self._near_Lc[now:, place]
        self._near_Lc[now + 1 :, place] = among_l[1:]
        count_c += near_c
        count_c[place] = total_l[0] - among_l[0]
        self._taken_L[self._taken], self._taker_L[self._taken] = place, now
        self._taken += 1
        self._holder[place] = now

    def _leaving(self, place: int) -> Matrix:
        """h of who stands at a place with all candidates of this moment."""
        taken_l, taker_l = self._taken_L[: self._taken], self._taker_L[: self._taken]
        newcomer = self._holder.get(place)
        if newcomer is not None:
            h_c: Matrix = self._near_Lc[newcomer]
            h_c[taken_l] = self._among_LL[newcomer, taker_l]
            return h_c
        row = self._row.get(place)
        if row is None:
            h_c = self._score.apply_(self._z_cD @ self._z_cD[place]).numpy()
        else:
            h_c = self._pair_Rc[row]
        h_c[taken_l] = self._near_Lc[taker_l, place]
        return h_c


def slack(most: Count, unit: float) -> Count:
    """How far below the largest a count may lie and still tie with it."""
    return unit * (most + 0.25)  # what left a count of almost none has left its rounding there
