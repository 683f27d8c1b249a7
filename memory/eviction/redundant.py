"""Eviction by duplicate counts while samples are duplicated, and at random otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stream_ssl.memory.checks import check_number
from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.duel.exact import DrawnSlots, ExactCounts
from stream_ssl.memory.eviction.most_duplicated import MostDuplicated
from stream_ssl.memory.eviction.random import Random, tries, walked
from stream_ssl.memory.scores import Score, VonMisesFisher
from stream_ssl.memory.shares import Turns

_RULE = "a number of expected duplicates above 0"
_OF_CHANCE = "chance."  # prefix of the random generator's entries in a state


class Redundant(MostDuplicated):
    """Evict the most duplicated sample while a count is large enough, else a random sample.

    DUEL's rule (Algorithm 2) always evicts the largest count, even if nothing is duplicated. It
    then evicts the picture that looks most ordinary. Unusual pictures are never evicted, and they
    fill the memory. This policy ignores counts below `at_least`: while no slot has a larger
    count, each newcomer takes a random slot. The choice is exact, as in MostDuplicated.

    Args:
        score: the score h of DUEL, eq. 5. None means VonMisesFisher(0.01), which counts only rows
            with a cosine above about 0.99.
        at_least: the smallest count that matters, in expected duplicates, above 0.

    Raises:
        ValueError: `at_least` is not a positive number, or the score is not a Score.

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(3, 2, Redundant())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 1]]).evicted.tolist()
    []
    >>> memory.add(torch.tensor([3]), torch.tensor([[-1.0, 0.0]])).evicted.tolist()
    [1]
    """

    name = "redundant"

    def __init__(self, score: Score | None = None, at_least: float = 0.5) -> None:
        super().__init__(VonMisesFisher(0.01) if score is None else score)
        self.at_least = check_number("at_least", at_least, _RULE)
        if self.at_least <= 0:
            raise ValueError(f"at_least is {at_least}: must be {_RULE}")

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "at_least": self.at_least}

    def bind(self, columns: Columns, seed: int) -> None:
        self._chance = Random()
        self._chance.bind(columns, seed)
        self._drawn_B = torch.zeros(0, dtype=torch.float64)  # in [0, 1), for later newcomers
        super().bind(columns, seed)

    def _engine(self, columns: Columns, seed: int) -> ExactCounts:
        del seed
        return ExactCounts(columns, self.score)

    def choose(self, rows: Rows) -> Tensor:
        return self._choose(rows, None)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        return self._choose(rows, turns)

    def _choose(self, rows: Rows, turns: Turns | None) -> Tensor:
        # Each newcomer uses one number, so a batch draws the same slots as single samples.
        missing = self._chance.drawn(max(0, len(rows) - len(self._drawn_B)))
        self._drawn_B = torch.cat([self._drawn_B, missing])
        assert isinstance(self._counts, ExactCounts)
        number_T = self._drawn_B[: min(self._counts.proposed, len(rows))]
        slots, tries_TR = self.columns.capacity_of_all, None
        if turns is None:
            slot_T = (number_T * slots).floor().to(torch.int64)
        else:
            tries_TR = tries(number_T, slots)
            slot_T = walked(turns[: len(number_T)], tries_TR)
        drawn = DrawnSlots(self.at_least, slot_T, tries_TR)
        plan = self._counts.choose(rows.descriptors, turns, drawn)
        self._drawn_B = self._drawn_B[len(plan) :]
        return plan

    def state(self) -> dict[str, Tensor]:
        chance = {**self._chance.state(), "drawn": self._drawn_B.clone()}
        of_chance = {_OF_CHANCE + name: value for name, value in chance.items()}
        return {**super().state(), **of_chance}

    def load(self, state: dict[str, Tensor]) -> None:
        names = [name for name in state if name.startswith(_OF_CHANCE)]
        chance = {name.removeprefix(_OF_CHANCE): state[name] for name in names}
        self._drawn_B = to_host(chance.pop("drawn")).clone()
        self._chance.load(chance)
        super().load({name: value for name, value in state.items() if name not in names})
