"""Most duplicated under any h, exactly, a block of newcomers at a time.

A block's similarities to the column are one matrix product. The slots with the largest counts are
candidates; among them the sequential rule proposes who leaves (race.py). The similarities of those
to the column are a second product, with which every other slot's count is followed through the
proposal (audit.py): steps that no slot outside overrules are carried out; then the slots outside
that have most become candidates as well. So an eviction costs two rows of a matrix product, and
K^2 appears only where all is counted anew. In a small memory all slots are candidates, and nothing
is left to follow.

Shapes: B newcomers, T of them in a block, D embedding, K slots of a shard, l newcomers to come.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns
from memory.eviction.block import Block, column_sums
from memory.eviction.bounds import Indices, Vector
from memory.eviction.candidates import Candidates, Rooms
from memory.eviction.group import ALONE, Group
from memory.eviction.race import slack
from memory.eviction.tally import Counts
from memory.scores import Score

CANDIDATES = 2048
"""Of all shards, at the beginning of a block, unless all slots are."""

MORE = 512
"""Slots of a shard that become candidates where one outside has overruled a proposal."""

FORESEEN = 24
"""Newcomers by which candidates are found: what more would bring is taken away again as well."""

JUDGED = 48
"""Steps proposed and judged together on the host: those behind one that fails were for nothing."""


class ScoredTally(Counts):
    """Duplicate counts by any score, and who has the largest.

    Args:
        columns: of this shard of the memory; rows are read from them.
        score: h.
        compete: a newcomer is counted with the others, and may be the one that leaves.
        group: who holds the other shards, as many slots each. All ranks must be asked alike; all
            find the same, and the same as one process that holds all slots.
    """

    def __init__(
        self, columns: Columns, score: Score, compete: bool = False, group: Group = ALONE
    ) -> None:
        super().__init__(columns, score, group)
        self._compete = compete
        wide = columns.embeddings.dtype == torch.float64
        # What rounding may make of a count, relative to it: counts that near tie.
        self._unit = (1e-13 if wide else 4e-7) * (1 + score.slope)
        self._rooms: Rooms | None = None

    def choose(self, z_BD: Tensor) -> Tensor:
        """Slots of the first newcomers, -1 for those refused: of a block, or of part of it.

        Slots are those of all shards: slot j of rank r is r K + j.
        """
        z_KD, group = self._columns.embeddings, self._group
        rooms = self._rooms = self._rooms or Rooms(z_KD, group)
        block = Block(z_BD, z_KD, self.score, group, rooms.near_TK)
        self.recount_due()
        candidates = Candidates(
            block, z_KD, self.count_K, self.score, self._unit, self._compete, group, rooms
        )
        self._widen(candidates, block)
        race, sure = candidates.race, True
        at_once = len(block) if candidates.are_all or z_KD.device.type != "cpu" else JUDGED
        plan: list[int] = []
        while race.turn < len(block):
            proposal = race.run(at_once)
            held = candidates.carry_out(proposal, sure) if len(proposal) else -1
            plan += proposal.slot_L[: max(0, held)].tolist()
            sure = held < len(proposal)
            if held < 0 or (sure and candidates.room == 0):
                break  # the rest is another block's
            if sure:
                self._widen(candidates, block)
        candidates.add_to(self.count_K)
        self.placed(len(plan))
        return torch.tensor(plan, dtype=torch.int64)

    def _widen(self, candidates: Candidates, block: Block) -> None:
        """Let slots outside that have most become candidates, the next step's among them."""
        if candidates.take_all:
            candidates.widen(torch.arange(len(self.count_K), device=self.count_K.device))
            return
        turn, apart_K = candidates.race.turn, candidates.outside.apart_K
        near_lK = block.near_TK[turn : turn + FORESEEN]
        first = self._first(candidates, near_lK[0])
        # Half of what joins: evictions take about as much away where counts are largest.
        reach_K = apart_K + column_sums(near_lK, 0.5)
        reach_K[first] = -torch.inf
        size = min(max(1, CANDIDATES // self._group.size) if turn == 0 else MORE, candidates.room)
        margin = slack(candidates.race.level, self._unit)
        more = _largest(reach_K, size - len(first), margin)
        candidates.widen(torch.cat([first, more]).sort().values)

    def _first(self, candidates: Candidates, near_K: Tensor) -> Tensor:
        """The slot outside that may leave at the next step before any candidate; [1], or [0] if
        there is none. With it among the candidates that step is proven."""
        race, apart_K = candidates.race, candidates.outside.apart_K
        seen_K = apart_K + near_K if self._compete else apart_K
        (most_of_ranks,) = self._group.together(seen_K.max()[None])
        most = max(float(most_of_ranks.max()), race.most())
        tied_K = seen_K >= most - slack(most + race.level, self._unit)
        return torch.nonzero(tied_K).flatten()[:1]

    def counts(self) -> Tensor:
        """N(j) of the occupied slots, float64 [k]."""
        return self.count_K[: self._columns.occupied].clone()

    def total(self, z_BD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k), float64 [B]."""
        return self._group.total(self.score.total(z_BD, self._columns.z_kD))


def _largest(value_K: Tensor, size: int, margin: float) -> Tensor:
    """Slots of the `size` largest values above -inf. Of those that tie, the lowest."""
    if value_K.device.type == "cpu":  # ten times as fast in numpy
        return torch.from_numpy(_largest_on_host(value_K.numpy(), size, margin))
    size = min(size, int((value_K > -torch.inf).sum()))
    if size <= 0:
        return torch.empty(0, dtype=torch.int64, device=value_K.device)
    cut = torch.topk(value_K, size, sorted=False).values.min()
    above = torch.nonzero(value_K > cut + margin).flatten()
    tied = torch.nonzero((value_K - cut).abs() <= margin).flatten()[: size - len(above)]
    return torch.cat([above, tied])


def _largest_on_host(value_K: Vector, size: int, margin: float) -> Indices:
    size = min(size, int(np.count_nonzero(value_K > -np.inf)))
    if size <= 0:
        return np.empty(0, np.int64)
    cut = np.partition(value_K, len(value_K) - size)[len(value_K) - size]
    above = np.flatnonzero(value_K > cut + margin)
    tied = np.flatnonzero(np.abs(value_K - cut) <= margin)[: size - len(above)]
    return np.concatenate([above, tied])
