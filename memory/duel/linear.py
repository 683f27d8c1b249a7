"""Exact duplicate counts under linear h, computed from the sum of all rows.

N(j) = (K - 1 + z_j . s - z_j . z_j) / 2, where s is the sum of the rows. The largest count is
therefore a maximum-inner-product search with the query s, which moves a little with each newcomer.

A pool holds the best rows of the column, and the rule is simulated among the best rows of the pool.
The proposal is then verified. The pool is multiplied by s at every 32nd step, which bounds its rows
in between. Rows that come close to the bound are multiplied by s at all steps. An upper bound
covers all rows outside the pool. If it no longer proves the next step, another pool is drawn. The
column is thus read less than once per batch.

If the sum is nearly zero, as for evenly spread directions, no bound holds for long. The whole
column is then the pool for a while. It is multiplied by the sums of all steps, in bfloat16 if the
processor supports it.

Shapes: B newcomers, T of them in a proposal, A descriptor, K slots, P rows of the pool, R rows
compared at every step, c candidates, W = c + T columns, G segments of steps, R slots updated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from stream_ssl.memory.columns import REFUSED, Columns
from stream_ssl.memory.compute import fast_in_bfloat16, to_device, to_host
from stream_ssl.memory.duel.simulate import kept_steps, simulate
from stream_ssl.memory.index import products, top
from stream_ssl.memory.scores import sum_rows
from stream_ssl.memory.shares import Barred, Gate, Groups, Turns

POOL_ROWS = 8192
"""The number of rows in a pool. A pool is read for each proposal, and the column for each pool."""

CANDIDATES = 64
"""The number of rows among which steps are simulated, besides two for each newcomer.

The result is verified.
"""

STEPS = 256
"""The largest number of newcomers in a proposal."""

FEWEST_STEPS = 32
"""The least number of newcomers in a proposal, if there are as many."""

SEGMENT = 32
"""The number of steps between two products of the whole pool with the sum."""

CLOSE_ROWS = 128
"""The number of pool rows multiplied by the sum of every step. It grows if it is too small."""

POOL_WORTH = 16
"""The number of newcomers that a pool must serve.

Otherwise the whole column becomes the pool for a while.
"""

LONGEST_SCAN = 4096
"""The largest number of newcomers for which the column is the pool before a pool is tried again."""

LARGEST_PART = 1 << 18
"""The number of values in a part of many rows, which fits a processor's cache."""

COARSE_PART = 1 << 20
"""The same in bfloat16.

It is larger, because one product costs more than the wait for its threads.
"""

LARGEST = 1e300
"""A value that no gain approaches."""

COARSE = float(torch.finfo(torch.bfloat16).eps)

LEAST_NORM = 1e-30
"""A shorter sum of rows has no direction, because products with it underflow in float32."""

RECOUNT_AFTER = 1 << 20
"""The newcomers and updated rows, besides four per slot, after which the sum is computed again."""


class LinearCounts:
    """Duplicate counts with h(x) = (1 + x) / 2, and the slots with the largest counts.

    Args:
        columns: the memory's columns, from which descriptors are read.
        compete: use Algorithm 1: a newcomer is counted with the others and may be refused.
    """

    def __init__(self, columns: Columns, compete: bool = False) -> None:
        self._columns, self._compete = columns, compete
        self._steps, self._close = STEPS, CLOSE_ROWS
        self._coarse = fast_in_bfloat16(columns.device)
        self._scans = 0  # remaining newcomers with the column as pool
        self._wait = 0  # value of _scans when a pool last failed
        self.recount()

    def recount(self) -> None:
        """Compute the sum again, which removes the rounding errors of earlier updates."""
        row_kA = self._columns.descriptor_kA
        self._sum_A, self._since = sum_rows(row_kA), 0
        # Norms of the shortest and the longest row since then, widened by rounding.
        self._norms = torch.ones(2, dtype=torch.float64, device=row_kA.device)
        self._widen(row_kA)
        self._drop_pool()

    def _drop_pool(self) -> None:
        self._pool: Pool | None = None
        self._served = 0  # newcomers served by this pool

    def _widen(self, row_RA: Tensor) -> None:
        """Extend the bounds of the norms to these rows of the column."""
        if len(row_RA):
            norm_R = squares(row_RA).sqrt().to(torch.float64)
            least, most = norm_R.min() * (1 - 1e-6), norm_R.max() * (1 + 1e-6)
            shortest, longest = self._norms
            found = torch.minimum(shortest, least), torch.maximum(longest, most)
            self._norms = torch.stack(found)

    def choose(self, x_BA: Tensor, shared: Turns | None = None) -> Tensor:
        """Return the slots of the first newcomers, at least one; -1 refuses.

        Args:
            x_BA: the newcomers.
            shared: the slots that shares allow for each newcomer. None allows all slots.
        """
        if self._since > 4 * self._columns.capacity + RECOUNT_AFTER:
            self.recount()
        if shared is not None and self._columns.capacity > POOL_ROWS:
            # A pool lacks the largest counts of each producer. The next batch may need them, too.
            self._scans = max(self._scans, 2 * len(x_BA), STEPS)
            if self._pool is not None and self._pool.slots is not None:
                self._drop_pool()
        if len(x_BA) == 1:
            return self._replace_one(x_BA, shared)
        plan = torch.empty(0, dtype=torch.int64)
        while not len(plan):
            pool = self._pool = self._pool or self._draw_pool()
            turns = None if shared is None else shared[: self._steps]
            plan = self._place(pool, x_BA[: self._steps].to(torch.float64), turns)
        self._widen(x_BA[: len(plan)])
        self._since += len(plan)
        return plan

    def _replace_one(self, x_1A: Tensor, shared: Turns | None) -> Tensor:
        """Return the slot of a single newcomer, and update the sum: Algorithm 2 as it stands."""
        x_A = x_1A[0].to(torch.float64)
        query_A = self._sum_A + x_A if self._compete else self._sum_A
        shut_W = None if shared is None else shared.shut()
        pool, place_1 = self._leaving(query_A, shut_W)
        self._since += 1
        may_refuse = self._compete and (shut_W is None or not shut_W[-1])
        if may_refuse and x_A @ self._sum_A > pool.gains(query_A, place_1)[0]:
            return torch.full((1,), REFUSED)
        slot_1 = to_host(place_1 if pool.slots is None else pool.slots[place_1])
        self._sum_A = self._sum_A + x_A - self._columns.descriptors[int(slot_1)]
        pool.replace(place_1, x_1A)
        self._widen(x_1A)
        return slot_1

    def _leaving(self, query_A: Tensor, shut_W: Tensor | None) -> tuple[Pool, Tensor]:
        """Return a pool, and the place of its row that has the largest count of all open slots.

        If slots are shut, the pool must be the column.
        """
        shut_K = None if shut_W is None else to_device(shut_W[:-1], query_A.device)
        while True:
            pool = self._pool = self._pool or self._draw_pool()
            place_1 = pool.largest(query_A, self._norms[1], shut_K)
            if self._columns.capacity <= POOL_ROWS or shut_K is not None:
                return pool, place_1
            is_outside = False
            if pool.bound is not None:
                gain_1 = pool.gains(query_A, place_1) + ties(pool.row_PA, query_A[None])
                most_1 = pool.bound(query_A[None]) - self._norms[0].square()
                is_outside = bool(to_host(most_1 > gain_1))
            self._adapt(1, int(not is_outside), 0, outside=is_outside, unsure=False)
            if not is_outside:
                return pool, place_1

    def _draw_pool(self) -> Pool:
        row_KA = self._columns.descriptors
        if self._scans > 0 or len(row_KA) <= POOL_ROWS:
            return Pool(row_KA, coarse=self._coarse and len(row_KA) > POOL_ROWS)
        return best_rows(row_KA, self._sum_A, self._norms[1])

    def _place(self, pool: Pool, x_TA: Tensor, shared: Turns | None = None) -> Tensor:
        """Place the first newcomers, and return their slots: none if no step is proven."""
        first_A = self._sum_A + x_TA[0] if self._compete else self._sum_A
        every = self._close >= len(pool.row_PA)
        gain_P = pool.gains(first_A) if every else pool.roughly(first_A)
        groups, gate, barred = None, None, None
        if shared is not None:  # the pool is the whole column
            groups = Groups(shared, gain_P.device)
        turns = STEPS if self._scans else len(x_TA)  # a scan costs more than its candidates
        few = candidates(pool, gain_P, x_TA, groups, CANDIDATES + 2 * turns)
        if shared is not None:
            gate = Gate(shared, few)
        proposal = propose(pool.row_PA[few], x_TA, self._sum_A, self._compete, gate)
        x_TA = x_TA[: len(proposal.column_T)]
        if gate is not None and groups is not None:
            barred = gate.barred(len(x_TA), groups)
        tie_T = ties(pool.row_PA, proposal.query_TA)
        proposal = proposal._replace(gain_T=proposal.gain_T + tie_T)
        more_T, unsure_T, close = self._others(pool, gain_P, few, proposal, barred)
        if every:
            more_T[:1].fill_(False)  # a candidate has the largest gain of the pool
        outside_T = torch.zeros_like(more_T)
        if pool.bound is not None:
            outside_T = pool.bound(proposal.query_TA) - self._norms[0].square() > proposal.gain_T
        doubt_3T = torch.stack([outside_T, unsure_T, more_T])
        return self._keep(pool, proposal, x_TA, few, doubt_3T, close)

    def _others(
        self, pool: Pool, gain_P: Tensor, few: Tensor, proposal: Proposal, barred: Barred | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the other rows of the pool with the rows that leave.

        Returns:
            The steps at which a compared row has a larger count, bool [T]; the steps at which one
            of the rest may have a larger count, bool [T]; and the number of rows that came close,
            int64 [1].
        """
        row_PA, first_A, level = pool.row_PA, proposal.query_TA[0], proposal.gain_T[0]
        least_T, moved_TA = proposal.gain_T - level, proposal.query_TA - first_A
        gain_P = (gain_P - level).index_fill_(0, few, -torch.inf)  # keeps float32 precision
        chosen_R: Tensor | None = None
        if barred is not None:
            gain_P = gain_P.masked_fill(barred.always(), -torch.inf)
        more_T = torch.zeros_like(least_T, dtype=torch.bool)
        unsure_T = torch.zeros_like(more_T)
        close = torch.zeros(1, dtype=torch.int64, device=row_PA.device)
        if len(row_PA) > CLOSE_ROWS:
            # The rounding errors of the gains and of the level.
            slack = 2 * rounding(row_PA) * self._norms[1] * first_A.norm()
            coarse = pool.coarse_PX
            segments: Segments | EveryStep = Segments(moved_TA, row_PA)
            if coarse is not None:
                segments = EveryStep(moved_TA, coarse)
            over_PG = segments.over(gain_P, least_T - slack, self._norms[1])
            # Rows that may leave only at some steps count only at these steps.
            for rows, shut_T in () if barred is None else barred.sometimes():
                part: Segments | EveryStep = Segments(moved_TA, row_PA[rows])
                if coarse is not None:
                    part = EveryStep(moved_TA, coarse[rows])
                floor_T = torch.where(shut_T, LARGEST, least_T - slack)
                over_PG[rows] = part.over(gain_P[rows], floor_T, self._norms[1])
            over_P = over_PG.amax(dim=1)
            close = (over_P > 0).sum()[None]
            if self._close < len(row_PA):
                chosen_R = over_P.topk(self._close, sorted=False).indices
                rest_G = over_PG.index_fill_(0, chosen_R, -torch.inf).amax(dim=0)
                unsure_T = (rest_G > 0)[segments.of_T]
                row_PA, left_R = row_PA[chosen_R], gain_P[chosen_R].isneginf()
                gain_P = pool.gains(first_A, chosen_R).sub_(level).masked_fill_(left_R, -torch.inf)
        gain_P, moved_AT = gain_P.to(row_PA.dtype), moved_TA.T.to(row_PA.dtype)
        barred_RT = None if barred is None else barred.steps(chosen_R)
        step = max(1, LARGEST_PART // len(least_T))
        for start in range(0, len(gain_P), step):
            part_b = slice(start, start + step)
            gain_bT = torch.addmm(gain_P[part_b, None], row_PA[part_b], moved_AT)
            if barred_RT is not None:
                gain_bT.masked_fill_(barred_RT[part_b], -torch.inf)
            more_T |= gain_bT.amax(dim=0) > least_T
        return more_T, unsure_T, close

    def _keep(
        self,
        pool: Pool,
        proposal: Proposal,
        x_TA: Tensor,
        few: Tensor,
        doubt_3T: Tensor,
        close: Tensor,
    ) -> Tensor:
        """Accept the steps before the first step in doubt, and adapt to the cause of the doubt.

        Args:
            pool: the pool of the proposal.
            proposal: the proposed steps.
            x_TA: the newcomers of the proposal.
            few: the candidates, as rows of the pool.
            doubt_3T: bool, three causes of doubt at each step: a row outside the pool may have
                more, a row of the pool may have more, or a row of the pool has more.
            close: the number of pool rows that came close to having more, int64 [1].
        """
        turns, slot_c = len(x_TA), few if pool.slots is None else pool.slots[few]
        first_3 = torch.where(doubt_3T.any(dim=1), doubt_3T.long().argmax(dim=1), -1)
        kept = kept_steps(proposal.column_T, doubt_3T.any(dim=0), slot_c, close, first_3)
        self._sum_A = proposal.sum_NA[kept.held].clone()
        took_R, turn_R = to_device(kept.stands_2R, few.device)
        pool.replace(few[took_R], x_TA[turn_R])
        number, outside, unsure, _ = kept.also
        self._adapt(turns, kept.held, number, outside == kept.held, unsure == kept.held)
        return kept.plan

    def _adapt(self, turns: int, held: int, close: int, outside: bool, unsure: bool) -> None:
        """Adapt the next proposal to what ended this one."""
        whole = self._columns.capacity
        self._served += held
        self._scans = max(0, self._scans - held)
        self._close = max(CLOSE_ROWS, 2 * close, self._close // 2)
        if held == turns:
            self._steps = min(STEPS, max(self._steps, 2 * held))  # the batch may have been short
        elif outside:
            self._wait = 0 if self._served >= POOL_WORTH else 2 * self._wait + STEPS
            self._scans = self._wait = min(LONGEST_SCAN, self._wait)
            self._close = whole if self._scans and not self._coarse else self._close
            self._steps = STEPS
            self._drop_pool()
        elif not unsure:
            # With all rows compared, the first step is proven.
            self._close = self._close if held else whole
            self._steps = held + held // 4 + FEWEST_STEPS if self._scans else STEPS
        if not self._scans and self._pool and len(self._pool.row_PA) > POOL_ROWS:
            self._drop_pool()
            self._steps = FEWEST_STEPS  # few steps show whether a pool fails again

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Update the sum after newcomers filled the last of the occupied slots."""
        self._sum_A = self._sum_A + sum_rows(descriptor_BA)
        self._widen(descriptor_BA)
        self._drop_pool()

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """Update the sum after these slots changed from the rows `before_RA`."""
        after_RA = self._columns.descriptors[slots]
        self._since += len(slots)
        self._sum_A = self._sum_A + sum_rows(after_RA) - sum_rows(before_RA)
        self._widen(after_RA)
        self._drop_pool()

    def counts(self) -> Tensor:
        """Return N(j) of the occupied slots, float64 [k]."""
        row_kA = self._columns.descriptor_kA
        parts = [(wide_bA * (self._sum_A - wide_bA)).sum(dim=1) for wide_bA in _wide(row_kA)]
        return torch.cat(parts).add_(len(row_kA) - 1).mul_(0.5)

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """Return sum_k h(d_b . d_k), float64 [B], without reading the column."""
        return 0.5 * (self._columns.occupied + descriptor_BA.to(torch.float64) @ self._sum_A)

    def state(self) -> dict[str, Tensor]:
        """Return the state from which `load` continues bit-equal.

        It includes the pool, because equal rows tie, and the pool determines which of them leaves.
        """
        pool = self._pool
        numbers = [self._steps, self._close, self._scans, self._wait, self._served]
        nothing = torch.zeros(0, dtype=torch.int64)
        bound = None if pool is None else pool.bound
        return {
            "sum": self._sum_A.clone(),
            "since": torch.tensor([self._since]),
            "search.numbers": torch.tensor(numbers),
            "search.norms": self._norms.clone(),
            "search.pool": nothing if pool is None or pool.slots is None else pool.slots.clone(),
            "search.bound": nothing.double() if bound is None else bound.packed(),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`. A state of an earlier version may contain the sum only."""
        device, row_KA = self._columns.device, self._columns.descriptors
        self.recount()
        self._sum_A = state["sum"].to(device, torch.float64)
        self._since = int(state["since"])
        if "search.bound" not in state:
            return
        numbers = state["search.numbers"].tolist()
        self._steps, self._close, self._scans, self._wait, self._served = numbers
        self._norms = state["search.norms"].to(device)
        slots, packed = state["search.pool"].to(device), state["search.bound"].to(device)
        if len(slots):
            self._pool = Pool(row_KA[slots], slots, UpperBound(packed[:-2], packed[-2], packed[-1]))

    def check(self) -> tuple[bool, str]:
        """Compute the sum again. Return (True, ""), or (False, the error of the sum)."""
        off = float((self._sum_A - sum_rows(self._columns.descriptor_kA)).abs().max())
        if not off <= 1e-9 * max(1, self._columns.occupied):  # it may be NaN
            return False, f"the sum of the rows is off by {off:.3g}"
        return True, ""


def candidates(
    pool: Pool, gain_P: Tensor, x_TA: Tensor, groups: Groups | None, count: int
) -> Tensor:
    """Return `count` rows of a pool with the largest gains, now or after the batch.

    The gains after the batch assume that the rows with the largest gains leave for the newcomers.
    """
    open_P = gain_P if groups is None else gain_P.masked_fill(~groups.open_n, -torch.inf)
    leave_A = pool.row_PA[largest(open_P, len(x_TA))].sum(dim=0)
    move_A = x_TA.sum(dim=0).to(leave_A.dtype) - leave_A
    later_P = gain_P + products(move_A, pool.row_PA)
    best_P = torch.maximum(gain_P - gain_P.max(), later_P - later_P.max())
    first_P = gain_P if groups is None else gain_P.masked_fill(~groups.first_n, -torch.inf)
    best_P.index_fill_(0, first_P.argmax()[None], torch.inf)  # even if many rows tie
    return largest(best_P, count) if groups is None else groups.largest(best_P, count)


class Proposal(NamedTuple):
    """Proposed steps, which are right if no other slot has a larger count."""

    column_T: Tensor  # column that leaves, a candidate or a newcomer; on the CPU
    gain_T: Tensor  # z . s - z . z of the row that leaves, at that step
    query_TA: Tensor  # the sum at each step
    sum_NA: Tensor  # the sum before each step and after the last, N = T + 1


def propose(
    row_cA: Tensor, x_TA: Tensor, sum_A: Tensor, compete: bool, gate: Gate | None
) -> Proposal:
    """Simulate the steps among these rows and the newcomers, in the rows' dtype.

    Sums are float64.
    """
    row_WA, first = torch.cat([row_cA, x_TA.to(row_cA.dtype)]), len(row_cA)
    wide_WA = row_WA.to(torch.float64)
    gain_W = wide_WA @ sum_A
    gain_W[:first] -= squares(wide_WA[:first])
    gain_W = (gain_W - gain_W[:first].max()).to(row_WA.dtype)
    alike_WW = (row_WA @ row_WA.T).fill_diagonal_(0)
    leaving_T, _ = simulate(gain_W[:first], gain_W[first:], alike_WW, compete, gate)
    column_T = to_device(leaving_T, row_WA.device)
    gone_TA, x_TA = wide_WA[column_T], x_TA[: len(column_T)]
    sum_NA = torch.cat([sum_A[None], x_TA - gone_TA]).cumsum(dim=0)
    query_TA = sum_NA[:-1] + x_TA if compete else sum_NA[:-1]
    gain_T = (gone_TA * (query_TA - gone_TA)).sum(dim=1)
    return Proposal(leaving_T, gain_T, query_TA, sum_NA)


class Segments:
    """Upper bounds of the rows' products with the sum, by segments of 32 steps.

    The sum at a step is a point on the line between the sums at both ends of its segment, plus a
    rest. A row's product with the point is at most the larger of its products with the two ends.
    Its product with the rest is at most the product of their lengths.

    Args:
        moved_TA: the sum at each step minus the first sum.
        row_PA: the rows.
    """

    def __init__(self, moved_TA: Tensor, row_PA: Tensor) -> None:
        self._row_PA = row_PA
        last, device = len(moved_TA) - 1, moved_TA.device
        count = max(1, -(-last // SEGMENT))
        step_T = torch.arange(last + 1, device=device)
        self.of_T = (step_T // SEGMENT).clamp(max=count - 1)
        end_H = (torch.arange(count + 1, device=device) * SEGMENT).clamp(max=last)
        start_T, stop_T = end_H[self.of_T], end_H[self.of_T + 1]
        part_T1 = ((step_T - start_T) / (stop_T - start_T).clamp(min=1))[:, None].to(moved_TA.dtype)
        between_TA = torch.lerp(moved_TA[start_T], moved_TA[stop_T], part_T1)
        self._end_HA = moved_TA[end_H]
        self._rest_T = torch.linalg.vector_norm(moved_TA - between_TA, dim=1)

    def over(self, gain_P: Tensor, least_T: Tensor, radius: Tensor) -> Tensor:
        """Return how far the gains of rows may exceed `least_T` within each segment, [P, G].

        Args:
            gain_P: the gains at the first step.
            least_T: float64 [T], minus the same level as the gains.
            radius: a float64 scalar, the largest length of a row.
        """
        row_PA = self._row_PA
        far = torch.linalg.vector_norm(self._end_HA, dim=1).max()
        slack_T = rounding(row_PA) * (radius * far + least_T.abs())
        floor_T = least_T - radius * self._rest_T - slack_T
        none_G = floor_T.new_full((len(self._end_HA) - 1,), LARGEST)
        floor_G = none_G.scatter_reduce(0, self.of_T, floor_T, "amin").to(row_PA.dtype)
        end_HA = self._end_HA.to(row_PA.dtype)
        gain_PH = torch.addmm(gain_P[:, None].to(row_PA.dtype), row_PA, end_HA.T)
        return torch.maximum(gain_PH[:, :-1], gain_PH[:, 1:]).sub_(floor_G)


class EveryStep:
    """The same bounds as `Segments`, in one segment: all rows times all sums, in bfloat16.

    Args:
        moved_TA: the sum at each step minus the first sum.
        coarse_PX: the rows, see Pool.
    """

    def __init__(self, moved_TA: Tensor, coarse_PX: Tensor) -> None:
        self.of_T = torch.zeros(len(moved_TA), dtype=torch.int64, device=moved_TA.device)
        self._moved_TA, self._coarse_PX = moved_TA, coarse_PX

    def over(self, gain_P: Tensor, least_T: Tensor, radius: Tensor) -> Tensor:
        """Return how far the gains of rows may exceed `least_T` at any step, [P, 1]."""
        # A row, a sum, a gain and `least_T` each have an error of half an eps of their size. If a
        # row just reaches `least_T`, its first gain differs from it by no more than the product.
        # So the loss is at most 1.5 eps of the size; the rest covers the float32 additions.
        size_T = radius * torch.linalg.vector_norm(self._moved_TA, dim=1) + least_T.abs()
        short_T2 = torch.stack([torch.ones_like(size_T), 2 * COARSE * size_T - least_T], dim=1)
        query_XT = torch.cat([self._moved_TA, short_T2], dim=1).to(torch.bfloat16).T
        self._coarse_PX[:, -2] = gain_P
        step = max(1, COARSE_PART // len(query_XT))
        # Compare as integers, ten times as fast; positive values keep their order.
        parts = [
            (row_bX @ query_XT).view(torch.int16).amax(dim=1)
            for row_bX in torch.split(self._coarse_PX, step)
        ]
        return torch.cat(parts).view(torch.bfloat16)[:, None]


class Pool:
    """The best rows of the column, or the whole column, updated with the memory.

    Args:
        row_PA: the rows.
        slots: the slots of the rows, int64 [P]. None means that the pool is the column itself.
        bound: a bound for all rows outside the pool. None if there are none.
        coarse: keep the rows in bfloat16 as well.

    Attributes:
        coarse_PX: the bfloat16 rows, each followed by its gain and a 1, X = A + 2; or None.
    """

    def __init__(
        self,
        row_PA: Tensor,
        slots: Tensor | None = None,
        bound: UpperBound | None = None,
        coarse: bool = False,
    ) -> None:
        self.row_PA, self.slots, self.bound = row_PA, slots, bound
        self.coarse_PX = pad(row_PA.to(torch.bfloat16), (0, 2), value=1.0) if coarse else None
        self._square_P = torch.cat([squares(wide_bA) for wide_bA in _wide(row_PA)])

    def roughly(self, sum_A: Tensor) -> Tensor:
        """Return z . s - z . z of each row, [P], in the rows' dtype."""
        dtype = self.row_PA.dtype
        return products(sum_A.to(dtype), self.row_PA) - self._square_P.to(dtype)

    def gains(self, sum_A: Tensor, index: Tensor | None = None) -> Tensor:
        """Return z . s - z . z of all rows or of these rows, float64."""
        row_RA = self.row_PA if index is None else self.row_PA[index]
        square_R = self._square_P if index is None else self._square_P[index]
        return torch.cat([wide_bA @ sum_A for wide_bA in _wide(row_RA)]) - square_R

    def largest(self, sum_A: Tensor, radius: Tensor, shut_P: Tensor | None = None) -> Tensor:
        """Return the place of the row with the largest gain, int64 [1].

        On a CPU, products in the rows' dtype leave few rows to compute in float64. A GPU computes
        all rows sooner than the host learns which they are.

        Args:
            sum_A: the sum of the rows, float64.
            radius: a float64 scalar, the largest length of a row.
            shut_P: bool, the rows that do not count; None if all count.
        """
        on_host = self.row_PA.device.type == "cpu"
        gain_P = self.roughly(sum_A) if on_host else self.gains(sum_A)
        if shut_P is not None:
            gain_P.masked_fill_(shut_P, -torch.inf)
        if not on_host:
            return gain_P.argmax()[None]
        slack = 2 * rounding(self.row_PA) * float(radius * (sum_A.norm() + radius))
        few = (gain_P >= float(gain_P.max()) - slack).nonzero()[:, 0]
        return few if len(few) == 1 else few[self.gains(sum_A, few).argmax()[None]]

    def replace(self, place: Tensor, row_RA: Tensor) -> None:
        """Replace the rows at these places.

        If the pool is the column, the memory writes the rows itself.
        """
        row_RA = row_RA.to(self.row_PA.dtype)
        if self.slots is not None:
            self.row_PA[place] = row_RA
        if self.coarse_PX is not None:
            self.coarse_PX[place, :-2] = row_RA.to(torch.bfloat16)
        self._square_P[place] = squares(row_RA.to(torch.float64))


def best_rows(row_KA: Tensor, sum_A: Tensor, radius: Tensor) -> Pool:
    """Return a pool of the rows with the largest products with the sum, and a bound of the others.

    Args:
        row_KA: the column.
        sum_A: the sum of the rows, float64.
        radius: a float64 scalar, the largest length of a row.
    """
    gain_P, slots = top(sum_A.to(row_KA.dtype), row_KA, POOL_ROWS + 1)
    last = gain_P.argmin()
    slack = rounding(row_KA) * radius * sum_A.norm()
    bound = UpperBound(sum_A, gain_P[last].to(torch.float64) + slack, radius)
    at = torch.arange(POOL_ROWS, device=slots.device)
    slots = slots[at + (at >= last)]
    return Pool(row_KA[slots], slots, bound)


@dataclass(frozen=True, slots=True)
class UpperBound:
    """An upper bound of z . s over all rows z with |z| <= radius and z . s_0 <= limit.

    Let p = z . s_0 / |s_0| and s = s_0 + d. Let `along` be the component of d on s_0, and `across`
    the length of the rest. Then z . s <= (|s_0| + along) p + across sqrt(radius^2 - p^2). The right
    side is concave in p, with its peak at the direction of s. The bound is its value at the largest
    allowed p, or at the peak. A bound by |d| alone would be useless, because evictions move s
    against itself, which reduces the products of these rows too.
    """

    sum_A: Tensor  # s_0, float64
    limit: Tensor  # a float64 scalar, like the radius
    radius: Tensor

    def __call__(self, sum_NA: Tensor) -> Tensor:
        """Return the bound at each of these sums, float64 [N]."""
        norm, radius = self.sum_A.norm(), self.radius
        directed = norm > LEAST_NORM
        unit_A = torch.where(directed, self.sum_A / norm, 0.0)
        cosine = torch.where(directed, self.limit / norm, radius).clamp(min=-radius)
        moved_NA = sum_NA - self.sum_A
        square_N, along_N = squares(moved_NA), moved_NA @ unit_A
        # If a move is nearly parallel to s_0, the difference of squares is only rounding.
        wide = 8 * rounding(sum_NA)
        across_N = ((square_N - along_N * along_N).clamp(min=0) + wide * square_N).sqrt()
        along_N = along_N + norm
        length_N = torch.hypot(along_N, across_N)
        edge_N = along_N * cosine + across_N * (radius**2 - cosine**2).clamp(min=0).sqrt()
        peaks_N = cosine * length_N >= radius * along_N
        slack_N = radius * wide * (norm + square_N.sqrt())
        most_N: Tensor = torch.where(peaks_N, radius * length_N, edge_N) + slack_N
        return most_N

    def packed(self) -> Tensor:
        """Return all fields in one row, [A + 2]."""
        return torch.cat([self.sum_A, self.limit[None], self.radius[None]])


def _wide(row_RA: Tensor) -> Iterator[Tensor]:
    """Yield the rows in float64, a block at a time."""
    for row_bA in torch.split(row_RA, max(1, LARGEST_PART // row_RA.shape[1])):
        yield row_bA.to(torch.float64)


def squares(row_RA: Tensor) -> Tensor:
    """Return z . z of each row."""
    norm_R: Tensor = torch.linalg.vector_norm(row_RA, dim=1)
    return norm_R.square()


def ties(row_PA: Tensor, query_TA: Tensor) -> Tensor:
    """Return how far the gains of equal rows may differ by rounding, [T]. Either row may leave."""
    moved_T = torch.linalg.vector_norm(query_TA - query_TA[0], dim=1)
    norm_T = torch.linalg.vector_norm(query_TA, dim=1)
    tie_T: Tensor = 4 * torch.finfo(row_PA.dtype).eps * (1 + moved_T)
    tie_T += rounding(query_TA) * (1 + norm_T)
    return tie_T


def largest(gain_S: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest values, in ascending order."""
    place_c: Tensor = gain_S.topk(min(count, len(gain_S)), sorted=False).indices.sort().values
    return place_c


def rounding(row_RA: Tensor) -> float:
    """Return the largest error of a product of two such rows, relative to their norms.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: at most A roundings of eps
    / 2 each, in any order of summation. Three more cover the rounding before and after.
    """
    return (row_RA.shape[1] + 3) * 0.5 * float(torch.finfo(row_RA.dtype).eps)
