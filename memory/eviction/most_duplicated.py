"""Eviction of the sample with the largest duplicate count: DUEL's Algorithm 2."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.duel.approximate import ApproximateCounts, pick
from stream_ssl.memory.duel.exact import ExactCounts
from stream_ssl.memory.duel.linear import LinearCounts
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.scores import Linear, Score, check_score
from stream_ssl.memory.shares import Turns

Index = Literal["exact", "ivf", "auto"]


class MostDuplicated(Policy):
    """For each newcomer, evict the sample with the largest duplicate count, argmax_j N(j).

    The newcomer takes that slot (DUEL, Definition 3 and Algorithm 2). The choice is exact: at every
    step the evicted sample has the largest count at that moment, within rounding. Counts that
    differ only by rounding tie. Ties are broken the same way at every repetition.

    Args:
        score: the score h of DUEL, eq. 5. None means Linear().
        compete: use Algorithm 1: the newcomer joins first and is refused if its own count is the
            largest of the K + 1. The sum of all counts then never rises.
        index: "exact" for exact counts. "ivf" for counts that are approximate between distant cells
            of an index, for very large memories (see memory.duel.approximate for the error). "auto"
            for the faster of the two at this size, by measurement. Linear counts are always exact.

    >>> import torch
    >>> from stream_ssl.memory import WorkingMemory
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
        index: Index = "exact",
    ) -> None:
        if index not in ("exact", "ivf", "auto"):
            raise ValueError(f'index is {index!r}: choose "exact", "ivf" or "auto"')
        if not isinstance(compete, bool):
            raise ValueError(f"compete is {compete!r}: must be True or False")
        self.score = Linear() if score is None else score
        check_score(self.score)
        self.compete = compete
        self.index = "exact" if isinstance(self.score, Linear) else index
        self.across_ranks = self.index != "ivf"  # cells cover the slots of one process only

    def settings(self) -> dict[str, Any]:
        index = self.index
        if hasattr(self, "_counts"):  # "auto" is resolved
            index = "ivf" if isinstance(self._counts, ApproximateCounts) else "exact"
        return {"compete": self.compete, "index": index}

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._counts = self._engine(columns, seed)

    def _engine(
        self, columns: Columns, seed: int
    ) -> LinearCounts | ExactCounts | ApproximateCounts:
        index = self.index
        if index == "auto":
            alone = columns.group.size == 1
            index = pick(columns.capacity, columns.device) if alone else "exact"
        if index == "ivf":
            return ApproximateCounts(columns, self.score, compete=self.compete, seed=seed)
        if isinstance(self.score, Linear) and columns.group.size == 1:
            return LinearCounts(columns, self.compete)
        return ExactCounts(columns, self.score, self.compete)

    def on_insert(self, rows: Rows) -> None:
        self._counts.on_insert(rows.descriptors)

    def choose(self, rows: Rows) -> Tensor:
        return self._counts.choose(rows.descriptors)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        return self._counts.choose(rows.descriptors, turns)

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        self._counts.on_update(slots, before_RA)

    def counts(self) -> Tensor:
        return self._counts.counts()

    def total(self, descriptor_BA: Tensor) -> Tensor:
        return self._counts.total(descriptor_BA)

    def offered(self, descriptor_BA: Tensor) -> Tensor:
        if isinstance(self._counts, ExactCounts):
            return self._counts.offered(descriptor_BA)
        return self.total(descriptor_BA)

    def state(self) -> dict[str, Tensor]:
        return self._counts.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._counts.load(state)

    def check(self) -> tuple[bool, str]:
        return self._counts.check()
