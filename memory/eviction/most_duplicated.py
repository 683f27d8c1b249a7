"""Evict the sample with the largest duplicate count: DUEL's Algorithm 2."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from memory.columns import Columns, Rows
from memory.eviction.approximate import IndexTally, pick
from memory.eviction.base import Policy
from memory.eviction.linear import LinearTally
from memory.eviction.scored import ScoredTally
from memory.scores import Linear, Score


class MostDuplicated(Policy):
    """For each newcomer in turn, evict argmax_j N(j); the newcomer takes that slot.

    DUEL, Definition 3 and Algorithm 2. Exact: at every step the evicted has the largest count of
    that moment, to rounding. Counts that rounding may have told apart tie, and ties go to the
    lowest slot.

    Args:
        score: h of eq. 5; Linear() where not given.
        compete: Algorithm 1's form. The newcomer joins first, and is refused where its own count is
            the largest of the K + 1. The sum of all counts then never rises.
        index: "exact"; "ivf" for counts that are approximate between far cells of an index, for
            memories of any size under scores other than linear (memory.eviction.approximate says
            how far off they are); "auto" for the one that was measured to be worth it at this size.

    >>> import torch
    >>> from memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=MostDuplicated())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 1]]).evicted.tolist()
    []
    >>> memory.add(torch.tensor([3]), torch.eye(2)[[0]]).evicted.tolist()
    [1]
    """

    name = "most-duplicated"

    def __init__(
        self,
        score: Score | None = None,
        compete: bool = False,
        index: Literal["exact", "ivf", "auto"] = "exact",
    ) -> None:
        if index not in ("exact", "ivf", "auto"):
            raise ValueError(f'index is {index!r}: choose "exact", "ivf" or "auto"')
        if not isinstance(score, Score | None):
            raise ValueError(
                f"score is {score!r}: must be an instance of memory.scores.Score, such as Linear()"
            )
        if not isinstance(compete, bool):
            raise ValueError(f"compete is {compete!r}: must be True or False")
        self.score = Linear() if score is None else score
        self.compete, self.index = compete, index

    def settings(self) -> dict[str, Any]:
        index = self.index
        if hasattr(self, "_tally"):  # "auto" has chosen
            index = "ivf" if isinstance(self._tally, IndexTally) else "exact"
        return {"compete": self.compete, "index": index}

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._tally = self._make_tally(columns, seed)

    def _make_tally(self, columns: Columns, seed: int) -> LinearTally | ScoredTally | IndexTally:
        index = self.index
        if index == "auto":
            index = pick(columns.capacity, self.score, columns.device)
        if index == "ivf":
            return IndexTally(columns, self.score, compete=self.compete, seed=seed)
        if isinstance(self.score, Linear):
            return LinearTally(columns, self.compete)
        return ScoredTally(columns, self.score, self.compete)

    def joined(self, rows: Rows) -> None:
        self._tally.joined(rows.embeddings)

    def choose(self, rows: Rows) -> Tensor:
        return self._tally.choose(rows.embeddings)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        self._tally.refreshed(slots, before_RD)

    def counts(self) -> Tensor:
        return self._tally.counts()

    def total(self, z_BD: Tensor) -> Tensor:
        return self._tally.total(z_BD)

    def state(self) -> dict[str, Tensor]:
        return self._tally.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._tally.load(state)

    def check(self) -> tuple[bool, str]:
        return self._tally.check()
