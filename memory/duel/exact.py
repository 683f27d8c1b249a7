"""Exact duplicate counts of every slot for any score, and the slots with the largest counts.

A plain version of Algorithm 2 needs two matrix-vector products per newcomer: one for the newcomer
and one for the row that leaves (`plain_loop` in benchmarks/eviction.py). This module proposes and
verifies instead, so that many newcomers become matrix products:

1. The slots with the largest counts are candidates, and the rule is simulated among them.
2. The rows that came and left update every other count through the proposal.
3. The steps before the first step at which another slot has a larger count are accepted. They are
   the steps of Algorithm 2.

This was faster at every size tried: 2.6 times at 32 to 128 slots, 1.8 at 2,048, 13 at 65,536 (D =
128, VonMisesFisher(0.1), batches of 256).

Shapes: B newcomers, T of them in a proposal, A descriptor, K slots of a shard, k occupied slots, R
slots, c candidates of all shards, W = c + T columns, b slots at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stream_ssl.memory.columns import REFUSED, Columns
from stream_ssl.memory.compute import (
    LARGE_ELEMENTS,
    all_to_host,
    columns_at_a_time,
    sum_in_float64,
    to_device,
    to_host,
)
from stream_ssl.memory.duel.simulate import AcceptedSteps, Draws, kept_steps, simulate
from stream_ssl.memory.scores import BLOCK_ELEMENTS, Score
from stream_ssl.memory.shares import Barred, Gate, Groups, Turns


@dataclass(frozen=True, slots=True)
class ProposalSizes:
    """The size of a proposal, by device. It decides the speed, and no eviction.

    Attributes:
        candidates: the number of slots of all shards among which steps are simulated.
        steps: the largest number of newcomers in a proposal.
        lookahead: the number of newcomers whose similarities determine the candidates.
        elements: the similarities of newcomers to all slots that are held.
    """

    candidates: int
    steps: int
    lookahead: int
    elements: int


ON_CPU = ProposalSizes(candidates=256, steps=128, lookahead=24, elements=BLOCK_ELEMENTS)
"""Small matrices, because the work counts. A newcomer that is proposed twice costs twice."""

ON_GPU = ProposalSizes(candidates=1024, steps=512, lookahead=128, elements=LARGE_ELEMENTS)
"""Large matrices, because each proposal launches some 80 kernels and waits twice."""

CALM_SHARE = 4
"""The number of candidates is divided by this number while no count is large."""

FEWEST_STEPS = 4
"""A proposal has at least this many steps more than the previous one had accepted."""

NEWCOMERS = 2
"""The similarities of newcomers for this many proposals are computed at a time."""

RECOUNT_SHARE = 16
"""One slot is counted again for this many newcomers, in turn, which bounds the drift of counts."""


class DrawnSlots(NamedTuple):
    """The slots that newcomers take while no count is large."""

    at_least: float  # least count that is large
    slot_T: Tensor  # int64 on the CPU, over all ranks
    tries_TR: list[list[int]] | None  # under shares, see Draws

    def draws(self, turns: int, slot_c: Tensor, level: float, dtype: torch.dtype) -> Draws:
        """Return the draws of the first newcomers, for counts from which `level` is subtracted."""
        at_least = float(torch.tensor(self.at_least - level, dtype=dtype))
        return Draws(at_least, self.slot_T[:turns].tolist(), slot_c.tolist(), self.tries_TR)


class ExactCounts:
    """The counts N(j) of DUEL, eq. 5, over the slots of all shards.

    All ranks must make the same calls, and they get the same results.

    Args:
        columns: the columns of this shard, from which descriptors are read.
        score: h.
        compete: use Algorithm 1: a newcomer is counted with the others and may be refused.

    Attributes:
        sizes: the size of a proposal on the columns' device.
    """

    def __init__(self, columns: Columns, score: Score, compete: bool = False) -> None:
        self._columns, self._score, self._compete = columns, score, compete
        self._group = columns.group
        self.count_K = torch.zeros(columns.capacity, dtype=torch.float64, device=columns.device)
        self._next = 0  # next slot to count again
        self._owed = 0  # newcomers since slots were last counted again
        self.sizes = ON_CPU if columns.device.type == "cpu" else ON_GPU
        self._steps = self.sizes.steps
        self._calm = False  # all steps of the last proposal took drawn slots, and were accepted
        self._waiting_BA = self._waiting_BK = self.count_K[:0]  # newcomers, and similarities
        self.recount()

    def choose(
        self,
        x_BA: Tensor,
        shared: Turns | None = None,
        drawn: DrawnSlots | None = None,
    ) -> Tensor:
        """Return the slots of at least the first newcomer, numbered over all ranks; -1 refuses.

        Args:
            x_BA: the newcomers.
            shared: the slots that shares allow for each newcomer. None allows all slots.
            drawn: the slots to take while no open slot has a large count. None always evicts by
                count.
        """
        row_KA = self._columns.descriptors
        if not len(self._waiting_BA) or self._waiting_BA.data_ptr() != x_BA.data_ptr():
            self._recount_some()
            if len(x_BA) == 1 and drawn is None and self._group.size == 1:
                return self._replace_one(x_BA, shared)
            self._await(x_BA[: self._most_waiting])
        near_TK = self._waiting_BK[: self._steps]
        turns = proposed = len(near_TK)
        x_TA = x_BA[:turns]
        total_T = self._group.all_reduce_sum(sum_in_float64(near_TK, dim=1))

        groups = None
        if shared is not None:
            groups = Groups(shared[:turns], row_KA.device)
        slot_m = self._candidates(near_TK, groups, drawn)
        count_c, row_cA, slot_c = self._group.all_gather(
            self.count_K[slot_m], row_KA[slot_m], self._group.of_all(slot_m)
        )
        row_WA = torch.cat([row_cA, x_TA])
        h_WW = self._score.between(row_WA, row_WA).fill_diagonal_(0)
        counts, known_c, known_WW = all_to_host(torch.cat([count_c, total_T]), slot_c, h_WW)
        level = float(counts[: len(slot_c)].max())  # subtracted to save float32 precision
        counts = (counts - level).to(known_WW)
        gate = None if shared is None else Gate(shared[:turns], known_c)
        draws = None if drawn is None else drawn.draws(turns, known_c, level, counts.dtype)
        leaving_T, most_T = simulate(
            counts[: len(slot_c)], counts[len(slot_c) :], known_WW, self._compete, gate, draws
        )
        limit_T = largest_allowed(most_T, level, self._score, draws)
        column_T, limit_T = (to_device(of_T, row_KA.device) for of_T in (leaving_T, limit_T))
        barred = None
        if gate is not None and groups is not None:
            turns, used = len(column_T), len(slot_c) + len(column_T)
            barred = gate.barred(turns, groups)
            near_TK, total_T, h_WW = near_TK[:turns], total_T[:turns], h_WW[:used, :used]

        other_K = (self.count_K - level).to(h_WW)
        other_K.index_fill_(0, slot_m, -torch.inf)
        other_T, left_TK = largest_others(
            other_K, near_TK, row_WA[column_T], row_KA, self._score, self._compete, barred
        )
        overruled_T = self._group.all_reduce_max(other_T) > limit_T
        overruled_T[:1].fill_(False)  # the largest of all slots is a candidate
        kept = kept_steps(leaving_T, overruled_T, known_c)
        self._place(x_BA, kept, column_T, near_TK, left_TK, total_T, h_WW)
        by_count = draws is None or bool((most_T >= draws.at_least).any())
        self._calm = not by_count and kept.held == proposed
        self._propose_next(proposed, kept.held)
        return kept.plan

    def offered(self, x_BA: Tensor) -> Tensor:
        """Return `total` of newcomers that fit one product, and keep it for `choose`."""
        fits = self._group.size == 1 and 1 < len(x_BA) <= self._most_waiting
        if not fits or self._columns.occupied < self._columns.capacity:
            return self.total(x_BA)
        self._recount_some()
        self._await(x_BA)
        return sum_in_float64(self._waiting_BK, dim=1)

    @property
    def _most_waiting(self) -> int:
        """The most newcomers whose similarities are computed at a time."""
        most = max(1, self.sizes.elements // self._columns.capacity)
        return min(NEWCOMERS * self.sizes.steps, most)

    def _await(self, x_WA: Tensor) -> None:
        self._waiting_BA = x_WA
        self._waiting_BK = self._score.between(x_WA, self._columns.descriptors)

    def _replace_one(self, x_1A: Tensor, shared: Turns | None) -> Tensor:
        """Return the slot of a single newcomer, and update the counts: Algorithm 2 as it stands."""
        row_KA, count_K = self._columns.descriptors, self.count_K
        joins_K = self._score.between(x_1A, row_KA)[0]
        total_1 = sum_in_float64(joins_K[None], dim=1)
        seen_W = torch.cat([count_K + joins_K, total_1]) if self._compete else count_K
        if shared is not None:
            shut_W = to_device(shared.shut()[: len(seen_W)], seen_W.device)
            seen_W = seen_W.masked_fill(shut_W, -torch.inf)
        slot_1 = to_host((seen_W - seen_W.max()).to(joins_K).argmax()[None])  # equal rows may tie
        slot = int(slot_1)
        self._calm, self._owed = False, self._owed + 1
        if slot == len(row_KA):
            return torch.full_like(slot_1, REFUSED)
        leaves_1K = self._score.between(row_KA[slot : slot + 1], row_KA)
        count_K += joins_K
        count_K -= leaves_1K[0]
        count_K[slot] = total_1[0] - joins_K[slot]
        return slot_1

    @property
    def proposed(self) -> int:
        """The largest number of newcomers that the next `choose` considers."""
        return self._steps

    def _candidates(
        self, near_TK: Tensor, groups: Groups | None, drawn: DrawnSlots | None
    ) -> Tensor:
        """Return the slots of this shard among which steps are simulated, int64 [m].

        They are the slots that may reach the largest count, and the slots that newcomers draw.
        """
        size = max(1, self.sizes.candidates // (CALM_SHARE if self._calm else 1))
        size = min(-(-size // self._group.size), self._columns.capacity)
        drawn_m = torch.empty(0, dtype=torch.int64)
        if drawn is not None:
            slot_T = drawn.slot_T[: len(near_TK)]
            drawn_m = torch.unique(self._group.own(slot_T[self._group.mine(slot_T)]))
        drawn_m = to_device(drawn_m, near_TK.device)
        if drawn is None:  # half, because evictions reduce the largest counts by the other half
            reach_K = self.count_K + 0.5 * near_TK[: self.sizes.lookahead].sum(dim=0)
        else:
            reach_K = self.count_K + near_TK.sum(dim=0)
        first_K = self.count_K + near_TK[0] if self._compete else self.count_K
        if groups is not None:
            first_K = first_K.masked_fill(~groups.first_n, -torch.inf)
            reach_K.index_fill_(0, first_K.argmax()[None], torch.inf)
            open_m: Tensor = torch.unique(torch.cat([groups.largest(reach_K, size), drawn_m]))
            return open_m
        reach_K.index_fill_(0, first_K.argmax()[None], torch.inf)
        reach_K.index_fill_(0, drawn_m, torch.inf)
        size = min(size + len(drawn_m), self._columns.capacity)
        slot_m: Tensor = reach_K.topk(size, sorted=False).indices.sort().values
        return slot_m

    def _place(
        self,
        x_BA: Tensor,
        kept: AcceptedSteps,
        column_T: Tensor,
        near_TK: Tensor,
        left_TK: Tensor,
        total_T: Tensor,
        h_WW: Tensor,
    ) -> None:
        """Update the counts after the accepted steps."""
        first, held = len(h_WW) - len(column_T), kept.held
        self.count_K += near_TK[:held].sum(dim=0)
        self.count_K -= left_TK[:held].sum(dim=0)
        h_TW = h_WW[first:]
        total_T = total_T + h_TW[:, first : first + held].sum(dim=1)
        total_T -= h_TW[:, column_T[:held]].sum(dim=1)
        turn_R = kept.stands_2R[1]
        slot_R = kept.plan[turn_R]
        mine_R = self._group.mine(slot_R)
        slot_2R = torch.stack([self._group.own(slot_R[mine_R]), turn_R[mine_R]])
        slot_R, turn_R = to_device(slot_2R, self.count_K.device)
        self.count_K[slot_R] = total_T[turn_R]
        self._owed += held
        # Update the similarities of the pending newcomers to the slots that were just overwritten.
        self._waiting_BK = waiting_BK = self._waiting_BK[held:]
        self._waiting_BA = x_WA = x_BA[held : held + len(waiting_BK)]
        waiting_BK[:, slot_R] = self._score.between(x_WA, x_BA[turn_R])

    def _propose_next(self, proposed: int, held: int) -> None:
        """Set the length of the next proposal, from the accepted steps of the last one."""
        whole = held == proposed  # the batch may have been short
        steps = max(self._steps, 2 * held) if whole else held + held // 4 + FEWEST_STEPS
        self._steps = min(steps, self.sizes.steps)

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Update the counts after newcomers filled the last of this shard's occupied slots."""
        row_kA = self._columns.descriptor_kA
        old = len(row_kA) - len(descriptor_BA)
        (row_NA,) = self._group.all_gather(descriptor_BA)
        self.count_K[:old] += self._score.total(row_kA[:old], row_NA)
        self._count(torch.arange(old, len(row_kA), device=row_kA.device))

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """Update the counts after these slots changed from the rows `before_RA`."""
        self._waiting_BA, row_kA = self.count_K[:0], self._columns.descriptor_kA
        row_RA = row_kA[slots]
        after_NA, before_NA, rank_N = self._group.all_gather(
            row_RA, before_RA, torch.full_like(slots, self._group.rank)
        )
        if 2 * len(after_NA) >= self._columns.occupied_of_all:
            self.recount()
            return
        change_k, total_N = self._score.moved(row_kA, after_NA, before_NA, self._columns.moving)
        self.count_K[: len(row_kA)] += change_k
        total_N = self._group.all_reduce_sum(total_N)
        if self._group.size > 1:
            total_N = total_N[rank_N == self._group.rank]
        self.count_K[slots] = total_N - self._score.own(row_RA)

    def recount(self) -> None:
        """Count every slot again, a block at a time."""
        row_kA = self._columns.descriptor_kA
        self.count_K.zero_()
        step = max(1, BLOCK_ELEMENTS // row_kA.shape[1])
        for start in range(0, self._columns.capacity, step):
            (row_NA,) = self._group.all_gather(row_kA[start : start + step])
            self.count_K[: len(row_kA)] += self._score.total(row_kA, row_NA)
        self.count_K[: len(row_kA)] -= self._score.own(row_kA)

    def _recount_some(self) -> None:
        """Count the next slots again, as many as the newcomers since the last call allow."""
        number = min(self._owed // RECOUNT_SHARE, self._columns.capacity)
        if number < min(RECOUNT_SHARE, self._columns.capacity):
            return  # few slots at a time cost as much as many
        self._owed = 0
        places = torch.arange(self._next, self._next + number, device=self._columns.device)
        self._count(places % self._columns.capacity)
        self._next = (self._next + number) % self._columns.capacity

    def _count(self, slots: Tensor) -> None:
        row_RA = self._columns.descriptor_kA[slots]
        row_NA, rank_N = self._group.all_gather(row_RA, torch.full_like(slots, self._group.rank))
        total_N = self.total(row_NA)
        if self._group.size > 1:
            total_N = total_N[rank_N == self._group.rank]
        self.count_K[slots] = total_N - self._score.own(row_RA)

    def counts(self) -> Tensor:
        """Return N(j) of the occupied slots, float64 [k]."""
        return self.count_K[: self._columns.occupied].clone()

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """Return sum_k h(d_b . d_k), float64 [B]."""
        row_kA = self._columns.descriptor_kA
        return self._group.all_reduce_sum(self._score.total(descriptor_BA, row_kA))

    def state(self) -> dict[str, Tensor]:
        """Return the state from which `load` continues bit-equal."""
        return {
            "counts": self.count_K[: self._columns.occupied].cpu().clone(),
            "next": torch.tensor([self._next, self._owed, self._steps, self._calm]),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`."""
        self.count_K.zero_()
        self.count_K[: len(state["counts"])] = state["counts"].to(self.count_K.device)
        self._next, self._owed, self._steps, *calm = state["next"].tolist()
        self._calm = any(calm)  # an old state has none

    def check(self) -> tuple[bool, str]:
        """Count again. Return (True, ""), or (False, the slot with the largest error)."""
        occupied, kept_K = self._columns.occupied, self.count_K.clone()
        self.recount()
        again_k, self.count_K = self.count_K[:occupied].clone(), kept_K
        # With a sharp score, the rounding of cosines alone may exceed `least`.
        least, rounding = 1e-4, 1e-6
        if self._columns.descriptors.dtype == torch.float64:
            least, rounding = 1e-9, 2e-15
        unit = max(least, rounding * (1 + self._score.slope))
        off_k = (kept_K[:occupied] - again_k).abs() / again_k.clamp(min=1)
        if len(off_k) and not float(off_k.max()) <= unit:  # a count may be NaN
            slot = int(off_k.argmax())
            count = float(kept_K[slot])
            return False, f"slot {slot}: its count is {count:.9g}, recounted {again_k[slot]:.9g}"
        return True, ""


def largest_allowed(most_T: Tensor, level: float, score: Score, draws: Draws | None) -> Tensor:
    """Return the largest count at which another slot may stay at each step, [T].

    Counts of equal rows may differ by rounding, and either row may leave.
    """
    unit = 4 * torch.finfo(most_T.dtype).eps * (1 + score.slope)
    limit_T = most_T + unit * (most_T + level + 0.25)
    if draws is not None:  # a newcomer may take a drawn slot only if no count is large
        least = most_T.new_tensor(draws.at_least)
        limit_T[most_T < least] = least.nextafter(torch.full_like(least, -torch.inf))
    return limit_T


def largest_others(
    other_K: Tensor,
    near_TK: Tensor,
    left_TA: Tensor,
    row_KA: Tensor,
    score: Score,
    compete: bool,
    barred: Barred | None,
) -> tuple[Tensor, Tensor]:
    """Follow the counts of the other slots through the steps of a proposal.

    Args:
        other_K: the current counts, -inf for candidates. They may be overwritten.
        near_TK: the similarities of the newcomers.
        left_TA: the rows that leave.
        row_KA: the rows of the slots.
        score: h.
        compete: whether a newcomer is counted before a slot is chosen.
        barred: the slots that do not count at each step, or None.

    Returns:
        The largest of these counts at each step, [T], and h of the rows that leave, [T, K].
    """
    follow = _follow_on_host if row_KA.device.type == "cpu" else _follow
    most_T, left_TK = torch.full_like(near_TK[:, 0], -torch.inf), torch.empty_like(near_TK)
    for start in range(0, len(row_KA), step := columns_at_a_time(len(near_TK), row_KA.device)):
        part = slice(start, start + step)
        score.between(left_TA, row_KA[part], out=left_TK[:, part])
        here_T = follow(other_K[part], near_TK[:, part], left_TK[:, part], compete, barred, part)
        most_T = torch.maximum(most_T, here_T)
    return most_T, left_TK


def _follow(
    other_b: Tensor,
    joins_Tb: Tensor,
    leaves_Tb: Tensor,
    compete: bool,
    barred: Barred | None,
    part: slice,
) -> Tensor:
    """Return the largest of these counts at each step, [T], with few kernels."""
    count_Tb = torch.empty_like(joins_Tb)
    count_Tb[0] = other_b
    torch.sub(joins_Tb[:-1], leaves_Tb[:-1], out=count_Tb[1:])
    count_Tb.cumsum_(dim=0)
    if compete:
        count_Tb += joins_Tb
    if barred is not None:
        count_Tb.masked_fill_(barred.steps(part).T, -torch.inf)
    most_T: Tensor = count_Tb.amax(dim=1)
    return most_T


def _follow_on_host(
    other_b: Tensor,
    joins_Tb: Tensor,
    leaves_Tb: Tensor,
    compete: bool,
    barred: Barred | None,
    part: slice,
) -> Tensor:
    """Return the same, step by step in the processor's cache. `other_b` is overwritten."""
    count_b, joins, leaves = other_b.numpy(), joins_Tb.numpy(), leaves_Tb.numpy()
    most_T = torch.empty_like(joins_Tb[:, 0])
    here_T = most_T.numpy()
    if barred is not None:
        penalty_Ub = barred.penalties(part, most_T.dtype).numpy()
    for turn in range(len(here_T)):
        if compete:
            count_b += joins[turn]
        seen_b = count_b
        if barred is not None:
            seen_b = count_b + penalty_Ub[barred.pattern_T[turn]]
        here_T[turn] = seen_b.max()
        if not compete:
            count_b += joins[turn]
        count_b -= leaves[turn]
    return most_T
