"""Most duplicated under any h, exactly, a block of newcomers at a time.

A block's similarities to the column are one matrix product. The slots with the largest counts are
candidates; among them the sequential rule proposes who leaves (race.py). The similarities of those
to the column are a second product, with which every other slot's count is followed through the
proposal (audit.py): steps that no slot outside overrules are carried out, the rest is proposed
anew. So an eviction costs two rows of a matrix product, and K^2 appears nowhere.

Shapes: B newcomers, D embedding, K slots, L steps proposed, l of them judged together, R candidates
likely to leave, c candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns
from memory.eviction.audit import Outside, Steps
from memory.eviction.block import NEWCOMERS, Block, alike, column_sums
from memory.eviction.bounds import Indices
from memory.eviction.group import ALONE, Group
from memory.eviction.race import REFUSED, Proposal, Race, slack
from memory.eviction.tally import Counts
from memory.scores import Score

CANDIDATES = 1536
"""Fewest."""

PER_STEP = 4
"""Candidates for each step of a proposal."""

JUDGED = 24
"""Fewest steps judged together on the host: those behind one that fails were for nothing."""

JUDGED_ELEMENTS = 1 << 19
"""Of a small memory more are judged together, up to so many similarities."""


class Candidates(NamedTuple):
    """Slots that may have the largest count within the next steps, of all shards, ascending."""

    mine: Tensor  # those of this shard, numbered from its first
    are_mine_c: Tensor  # bool
    slot_c: Tensor
    reach_c: Tensor  # the count that each may come to have
    count_c: Tensor
    z_cD: Tensor
    near_Lc: Tensor  # h of the newcomers and the candidates


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
        self._block: Block | None = None
        self._reach = NEWCOMERS // 4  # steps that a proposal may hold

    def joined(self, z_BD: Tensor) -> None:
        super().joined(z_BD)
        self._block = None

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        super().refreshed(slots, before_RD)
        self._block = None

    def choose(self, z_BD: Tensor) -> Tensor:
        """Slots of the first newcomers, -1 for those refused: as many as one proposal proves.

        Slots are those of all shards: slot j of rank r is r K + j.
        """
        block = self._block
        if block is None or not block.goes_on_with(z_BD):
            block = Block(z_BD, self._columns.embeddings, self.score, self._group)
            self.recount_some(len(block))
        near_LK = block.near_TK[block.turn :][: self._reach]
        candidates = self._gather(near_LK)
        proposal = self._propose(block, candidates)
        slot_c = candidates.slot_c.cpu().numpy()
        slot_L = np.where(proposal.place_L < 0, REFUSED, slot_c[proposal.place_L])
        left_LD = self._leavers(block, candidates, proposal)
        held = self._judge(candidates, slot_L, proposal, near_LK, left_LD)
        count_c = torch.from_numpy(proposal.count_Lc[held]).to(self.count_K.device)
        self.count_K[candidates.mine] = count_c[candidates.are_mine_c]
        block.advance(slot_L[:held])
        self._block = block if block.turn < len(block) else None
        if held == len(slot_L):
            self._reach = min(max(self._reach, 2 * held), NEWCOMERS)
        else:
            self._reach = max(8, (2 * self._reach + 3 * held) // 4)
        return torch.from_numpy(slot_L[:held])

    def _gather(self, near_LK: Tensor) -> Candidates:
        """The largest of every shard."""
        z_KD, rank = self._columns.embeddings, self._group.rank
        # Half of what joins: evictions take about as much away where counts are largest.
        reach_K = self.count_K + 0.5 * column_sums(near_LK)
        size = max(CANDIDATES, PER_STEP * len(near_LK))
        mine = self._largest(reach_K, size, self._first(near_LK[0]))
        slot_c, reach_c, count_c, z_cD, near_cL = self._group.together(
            mine + rank * len(z_KD),
            reach_K[mine],
            self.count_K[mine],
            z_KD[mine],
            near_LK.index_select(1, mine).T,
        )
        return Candidates(
            mine=mine,
            are_mine_c=slot_c // len(z_KD) == rank,
            slot_c=slot_c,
            reach_c=reach_c,
            count_c=count_c,
            z_cD=z_cD,
            near_Lc=near_cL.T,
        )

    def _propose(self, block: Block, candidates: Candidates) -> Proposal:
        """What the sequential rule does among the candidates."""
        steps, reach_c = len(candidates.near_Lc), candidates.reach_c
        likely_R = torch.topk(reach_c, min(len(reach_c), 2 * steps + 32)).indices
        race = Race(
            z_cD=candidates.z_cD.cpu(),
            count_c=candidates.count_c.cpu().numpy(),
            near_Lc=candidates.near_Lc.cpu().contiguous().numpy(),
            among_LL=block.among_TT[block.turn :, block.turn :][:steps, :steps],
            total_L=block.total_T[block.turn :][:steps].copy(),
            score=self.score,
            likely_R=likely_R.cpu(),
        )
        return race.run(self._unit, self._compete)

    def _first(self, near_K: Tensor) -> int:
        """The slot of the first step, which candidates must hold for a step to be taken at all."""
        seen_K = self.count_K + near_K if self._compete else self.count_K
        most = float(seen_K.max())
        return int((seen_K >= most - slack(most, self._unit)).to(torch.int8).argmax())

    def _largest(self, reach_K: Tensor, size: int, first: int) -> Tensor:
        """Slots of the `size` largest, and `first`; ascending. Of those that tie, the lowest."""
        if size >= len(reach_K):
            return torch.arange(len(reach_K), device=reach_K.device)
        cut = float(torch.topk(reach_K, size, sorted=False).values.min())
        margin = slack(cut, self._unit)
        above = torch.nonzero(reach_K > cut + margin).flatten()
        tied = torch.nonzero((reach_K - cut).abs() <= margin).flatten()[: size - len(above)]
        chosen = torch.cat([above, tied, torch.tensor([first], device=reach_K.device)])
        ascending: Tensor = torch.unique(chosen)
        return ascending

    def _judge(
        self,
        candidates: Candidates,
        slot_L: Indices,
        proposal: Proposal,
        near_LK: Tensor,
        left_LD: Tensor,
    ) -> int:
        """How many steps of the proposal hold; they are added to the counts of all slots."""
        capacity, level = len(self.count_K), float(proposal.most_L[0])
        apart_K = (self.count_K - level).to(near_LK.dtype)
        apart_K[candidates.mine] = -torch.inf
        outside = Outside(apart_K, self._compete)
        # A refused newcomer stands behind all slots. Slots are named from this shard's first.
        order_L = np.where(slot_L < 0, self._group.size * capacity, slot_L)
        order_L -= self._group.rank * capacity
        together = max(JUDGED, self._reach // 2, JUDGED_ELEMENTS // capacity)
        if apart_K.device.type != "cpu":
            together = len(slot_L)
        for start in range(0, len(slot_L), together):
            part = slice(start, start + together)
            steps = Steps(
                near_LK=near_LK[part],
                left_LK=alike(left_LD[part], self._columns.embeddings, self.score),
                slot_L=order_L[part],
                most_L=proposal.most_L[part] - level,
                margin_L=slack(proposal.most_L[part], self._unit),
            )
            held = self._group.least(outside.follow(steps, sure=1 if start == 0 else 0))
            self.count_K += column_sums(steps.near_LK[:held])
            self.count_K -= column_sums(steps.left_LK[:held])
            if held < len(steps):
                return start + held
        return len(slot_L)

    def _leavers(self, block: Block, candidates: Candidates, proposal: Proposal) -> Tensor:
        """Rows of who left at each step: candidates, or newcomers before them [L, D]."""
        z_cD = candidates.z_cD
        left_LD = z_cD[torch.from_numpy(proposal.place_L).to(z_cD.device)]
        came = np.flatnonzero(proposal.leaver_L >= 0)
        left_LD[came] = block.x_TD[block.turn + proposal.leaver_L[came]]
        return left_LD

    def state(self) -> dict[str, Tensor]:
        self._block = None
        return super().state() | {"reach": torch.tensor([self._reach])}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self._block, self._reach = None, int(state["reach"])

    def counts(self) -> Tensor:
        """N(j) of the occupied slots, float64 [k]."""
        return self.count_K[: self._columns.occupied].clone()

    def total(self, z_BD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k), float64 [B]."""
        return self._group.total(self.score.total(z_BD, self._columns.z_kD))
