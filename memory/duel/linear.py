"""Most duplicated under linear h, where the sum of all rows stands for all counts.

N(j) = (K - 1 + z_j . s - z_j . z_j) / 2 with s the sum of the rows, so the largest count is a
maximum-inner-product search with the query s, which moves a little with each newcomer. The rule is
simulated among a few candidates, the best of a shortlist, which is the best of a pool, which is the
best of the column. Each level is drawn with an upper bound of what lies outside it, and drawn again
only when the bound no longer proves the next step; so the column is read less than once a batch.

Where the sum is nearly zero, as among even directions, no bound holds for long. Then the column
itself is multiplied with the sums of many steps at once (`_scan`).

Shapes: B newcomers, T of them in a proposal, A descriptor, K slots, P rows of the pool, S rows of
the shortlist, c candidates, W = c + T columns, N sums, R slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memory.columns import Columns
from memory.compute import to_device, to_host
from memory.duel.simulate import simulate, slots_taken
from memory.index import top
from memory.scores import BLOCK_ELEMENTS, sum_rows

POOL_ROWS = 8192
"""Of a pool. Its rows are read for each shortlist, the column for each pool."""

SHORTLIST_ROWS = 1024
"""Of the smallest shortlist. A smaller one saves little at a step, and lasts for fewer of them."""

CANDIDATES = 64
"""Among which steps are simulated, besides as many as there are newcomers. Whether another would
have left is verified."""

STEPS = 128
"""Most newcomers of a proposal."""

FEWEST_STEPS = 8
"""More newcomers of a proposal than it is thought to hold for."""

WORTH = 64
"""Newcomers that a shortlist must serve, or another is tried: a larger one, or another pool."""

POOL_WORTH = 16
"""Newcomers that a pool must serve, or the column is scanned for a while."""

LONGEST_SCAN = 1024
"""Most newcomers placed by scanning before a pool is tried again."""

LARGEST_SCAN = 1 << 24
"""Gains held at a time, of all slots at some steps."""

LARGEST = 1e300
"""No gain comes near to it."""

LEAST_NORM = 1e-30
"""A sum of rows shorter than this has no direction: products with it underflow in float32."""

RECOUNT_AFTER = 1 << 20
"""Newcomers and updated rows, besides four a slot, after which the sum is taken again."""


class LinearCounts:
    """Duplicate counts by (1 + x) / 2, and who has the largest.

    Args:
        columns: of the memory; descriptors are read from them.
        compete: Algorithm 1's form: a newcomer is counted with the others and may be refused.
    """

    def __init__(self, columns: Columns, compete: bool = False) -> None:
        self._columns, self._compete = columns, compete
        self._size, self._steps = SHORTLIST_ROWS, STEPS
        self._scans = 0  # newcomers to be placed by scanning
        self._wait = 0  # how many that was when a pool failed last
        self.recount()

    def recount(self) -> None:
        """Sum again, and so forget the rounding of all additions and subtractions since."""
        row_kA = self._columns.descriptor_kA
        self._sum_A, self._since = sum_rows(row_kA), 0
        # The shortest and the longest row since, widened by rounding.
        self._norms = torch.ones(2, dtype=torch.float64, device=row_kA.device)
        self._forget(row_kA)

    def _forget(self, row_RA: Tensor) -> None:
        """Give up all that was drawn from the column, which has these rows now."""
        self._widen(row_RA)
        self._pool: Level | None = None
        self._shortlist: Level | None = None
        self._served = self._pool_served = 0  # newcomers, by this shortlist and by this pool
        self._ahead = STEPS  # that this shortlist may serve still
        self._gain_K: Tensor | None = None  # z . s - z . z of all slots now, in a scan

    def _widen(self, row_RA: Tensor) -> None:
        if len(row_RA):
            norm_R = squares(row_RA).sqrt().to(torch.float64)
            least, most = norm_R.min() * (1 - 1e-6), norm_R.max() * (1 + 1e-6)
            shortest, longest = self._norms
            found = torch.minimum(shortest, least), torch.maximum(longest, most)
            self._norms = torch.stack(found)

    def choose(self, x_BA: Tensor) -> Tensor:
        """Slots of the first newcomers, at least one; -1 refuses."""
        if self._since > 4 * self._columns.capacity + RECOUNT_AFTER:
            self.recount()
        plan = torch.empty(0, dtype=torch.int64)
        if self._scans <= 0:
            plan = self._propose(x_BA[: min(STEPS, self._ahead)].to(torch.float64))
        if not len(plan):
            plan = self._scan(x_BA[: self._steps].to(torch.float64))
        self._widen(x_BA[: len(plan)])
        self._since += len(plan)
        return plan

    def _propose(self, x_TA: Tensor) -> Tensor:
        """The plan of the first newcomers; of none where pools serve too few, and scans are due."""
        while True:
            shortlist = self._shortlist = self._shortlist or self._draw_shortlist()
            plan, exhausted = self._among(shortlist, x_TA)
            self._served += len(plan)
            self._pool_served += len(plan)
            if exhausted:
                self._give_up(shortlist)
            if len(plan) or self._scans > 0:
                return plan

    def _give_up(self, shortlist: Level) -> None:
        """Leave a shortlist that proves no more, and what made it last too short."""
        if self._served >= WORTH:
            self._size = max(SHORTLIST_ROWS, int(0.8 * self._size))
        elif not shortlist.limited_by_pool:
            self._size *= 2
        else:
            self._wait = 0 if self._pool_served >= POOL_WORTH else 2 * self._wait + STEPS
            self._scans = self._wait = min(LONGEST_SCAN, self._wait)
            self._pool, self._pool_served = None, 0
        self._shortlist, self._served, self._ahead = None, 0, STEPS // 2

    def _draw_shortlist(self) -> Level:
        pool = self._pool = self._pool or self._draw_pool()
        shortlist = self._draw(pool.row_SA, self._size, wide=True)
        if pool.bound is not None:
            limit, here = pool.bound(self._sum_A[None])[0], shortlist.bound
            shortlist.limited_by_pool = here is None or bool(to_host(limit >= here.limit))
            limit = limit if here is None else torch.maximum(limit, here.limit)
            shortlist.bound = UpperBound(self._sum_A, limit, self._norms[1])
        return shortlist

    def _draw_pool(self) -> Level:
        return self._draw(self._columns.descriptors, POOL_ROWS)

    def _draw(self, row_XA: Tensor, size: int, wide: bool = False) -> Level:
        """The `size` rows of the largest z . s, with a bound of the others; all where no more."""
        if (2 * size if wide else size) >= len(row_XA):
            every = torch.arange(len(row_XA), device=row_XA.device)
            return Level(row_XA.clone(), every, None, wide=wide)
        gain_s, index = top(self._sum_A.to(row_XA.dtype), row_XA, size + 1)
        last, at = gain_s.argmin(), torch.arange(size, device=index.device)
        slack = rounding(row_XA) * self._norms[1] * self._sum_A.norm()
        bound = UpperBound(self._sum_A, gain_s[last].to(torch.float64) + slack, self._norms[1])
        index = index[at + (at >= last)]
        return Level(row_XA[index], index, bound, wide=wide)

    def _among(self, shortlist: Level, x_TA: Tensor) -> tuple[Tensor, bool]:
        """Place the first newcomers, while the bound proves their steps; whether it fails now."""
        row_SA, pool = shortlist.row_SA, self._pool
        assert pool is not None
        first_A = self._first(x_TA)
        gain_S = shortlist.wide_SA @ first_A - shortlist.square_S
        few = largest(gain_S, CANDIDATES + len(x_TA))
        proposal = self._simulate(row_SA[few], x_TA)
        moved_TA = proposal.query_TA - first_A
        level = gain_S.max()  # gains are followed less this, so that float32 tells them apart
        other_S1 = (gain_S - level).to(row_SA.dtype)[:, None]
        other_ST = torch.addmm(other_S1, row_SA, moved_TA.T.to(row_SA.dtype))
        other_ST[few] = -torch.inf
        most_T = other_ST.amax(dim=0).to(torch.float64) + level
        # Equal rows differ by rounding, and either may leave.
        most_T -= 4 * torch.finfo(row_SA.dtype).eps * (1 + moved_TA.norm(dim=1))
        most_T[0] = -torch.inf  # the largest gain of all is a candidate's
        outside_T = torch.full_like(most_T, -LARGEST)
        if shortlist.bound is not None:
            outside_T = shortlist.bound(proposal.query_TA) - self._norms[0].square()
        index = shortlist.slots
        plan, took, turns, exhausted = self._keep(
            proposal, most_T, outside_T, pool.slots[index[few]]
        )
        shortlist.replace(few[took], x_TA[turns])
        pool.replace(index[few[took]], x_TA[turns])
        return plan, exhausted

    def _scan(self, x_TA: Tensor) -> Tensor:
        """Place the first newcomers, at least one, by the gains of all slots at every step."""
        row_KA = self._columns.descriptors
        x_TA = x_TA[: max(1, LARGEST_SCAN // len(row_KA))]
        if self._gain_K is None:
            self._square_K = squares(row_KA)
            self._gain_K = row_KA @ self._sum_A.to(row_KA.dtype) - self._square_K
        x_near = x_TA.to(row_KA.dtype)
        first_K = self._gain_K + row_KA @ x_near[0] if self._compete else self._gain_K
        few = largest(first_K, CANDIDATES + len(x_TA))
        proposal = self._simulate(row_KA[few], x_TA)
        gain_NK = proposal.sum_NA.to(row_KA.dtype) @ row_KA.T
        gain_NK -= self._square_K
        other_TK = gain_NK[:-1] + x_near @ row_KA.T if self._compete else gain_NK[:-1].clone()
        most_T = other_TK.index_fill_(1, few, -torch.inf).amax(dim=1).to(torch.float64)
        most_T -= rounding(row_KA) * proposal.query_TA.norm(dim=1)  # what it may tell apart ties
        most_T[0] = -torch.inf  # the largest of all slots is a candidate
        nothing_T = torch.full_like(most_T, -LARGEST)
        plan, took, turns, _ = self._keep(proposal, most_T, nothing_T, few)
        held, slots, row_RA = len(plan), few[took], x_TA[turns]
        self._gain_K = gain_NK[held].clone()
        self._square_K[slots] = squares(row_RA.to(row_KA.dtype))
        self._gain_K[slots] = (row_RA @ self._sum_A - squares(row_RA)).to(row_KA.dtype)
        self._steps = min(STEPS, 2 * held if held == len(x_TA) else held + held // 4 + 4)
        self._scans -= held
        if self._scans <= 0:
            self._gain_K = None
        return plan

    def _first(self, x_TA: Tensor) -> Tensor:
        """The sum that the first step sees."""
        return self._sum_A + x_TA[0] if self._compete else self._sum_A

    def _simulate(self, row_cA: Tensor, x_TA: Tensor) -> Proposal:
        """Steps among these rows and the newcomers, in the rows' own dtype; sums are in float64."""
        row_WA, first = torch.cat([row_cA, x_TA.to(row_cA.dtype)]), len(row_cA)
        wide_WA = row_WA.to(torch.float64)
        gain_W = wide_WA @ self._sum_A
        gain_W[:first] -= squares(wide_WA[:first])
        gain_W = (gain_W - gain_W[:first].max()).to(row_WA.dtype)
        alike_WW = (row_WA @ row_WA.T).fill_diagonal_(0)
        column_T, _ = simulate(gain_W[:first], gain_W[first:], alike_WW, self._compete)
        gone_TA = wide_WA[column_T]
        sum_NA = torch.cat([self._sum_A[None], x_TA - gone_TA]).cumsum(dim=0)
        query_TA = sum_NA[:-1] + x_TA if self._compete else sum_NA[:-1]
        gain_T = (gone_TA * (query_TA - gone_TA)).sum(dim=1)
        return Proposal(column_T, gain_T, query_TA, sum_NA)

    def _keep(self, proposal: Proposal, most_T: Tensor, outside_T: Tensor, slot_c: Tensor) -> Kept:
        """Take the first steps, up to the one at which another slot may have more.

        Args:
            most_T: the largest gain of the other rows that are known, at each step.
            outside_T: the bound of all others.
            slot_c: of the candidates.
        """
        # Equal rows differ by rounding, and either may leave.
        slack_T = rounding(proposal.query_TA) * (1 + proposal.query_TA.norm(dim=1))
        bound_T = outside_T > proposal.gain_T + slack_T
        overruled_T = bound_T | (most_T > proposal.gain_T + slack_T)
        turns = len(overruled_T)
        held = torch.where(overruled_T.any(), overruled_T.long().argmax(), turns)
        bound = bound_T.long().index_select(0, held.clamp(max=turns - 1)[None])
        # For how many more steps the bound will hold if its lead goes on to fall as it did.
        lead_T = proposal.gain_T - outside_T
        fall = (lead_T[0] - lead_T[-1]).clamp(min=1e-9) / turns
        ahead = (lead_T[-1] / fall).clamp(0, STEPS).long()[None]
        known = to_host(torch.cat([held[None], bound, ahead, proposal.column_T, slot_c])).tolist()
        self._ahead = known[2] + known[2] // 4 + FEWEST_STEPS
        column, slots = known[3 : 3 + known[0]], known[3 + turns :]
        taken, stands = slots_taken(column, list(range(len(slots))))
        plan = [slots[candidate] if candidate >= 0 else candidate for candidate in taken]
        self._sum_A = proposal.sum_NA[known[0]].clone()
        pairs = torch.tensor(list(stands.items()), dtype=torch.int64).view(-1, 2)
        took, turn_R = to_device(pairs, slot_c.device).T
        exhausted = known[0] < turns and bool(known[1])
        return Kept(torch.tensor(plan, dtype=torch.int64), took, turn_R, exhausted)

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Newcomers fill the last of the occupied slots."""
        self._sum_A = self._sum_A + sum_rows(descriptor_BA)
        self._forget(descriptor_BA)

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """These slots hold other rows than `before_RA` now."""
        after_RA = self._columns.descriptors[slots]
        self._since += len(slots)
        self._sum_A = self._sum_A + sum_rows(after_RA) - sum_rows(before_RA)
        self._forget(after_RA)

    def counts(self) -> Tensor:
        """N(j) of the occupied slots, float64 [k]."""
        row_kA = self._columns.descriptor_kA
        step = max(1, BLOCK_ELEMENTS // row_kA.shape[1])
        wide = [part_bA.to(torch.float64) for part_bA in torch.split(row_kA, step)]
        gain_k = torch.cat([(wide_bA * (self._sum_A - wide_bA)).sum(dim=1) for wide_bA in wide])
        return gain_k.add_(len(row_kA) - 1).mul_(0.5)

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """sum_k h(d_b . d_k), float64 [B], without reading the column."""
        return 0.5 * (self._columns.occupied + descriptor_BA.to(torch.float64) @ self._sum_A)

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on bit-equal: equal rows tie, and which of them leaves depends on
        what has been drawn."""
        numbers = [self._size, self._steps, self._scans, self._wait]
        numbers += [self._served, self._pool_served, self._ahead]
        pool, shortlist = self._pool or NOWHERE, self._shortlist or NOWHERE
        return {
            "sum": self._sum_A.clone(),
            "since": torch.tensor([self._since]),
            "search.numbers": torch.tensor([*numbers, int(shortlist.limited_by_pool)]),
            "search.norms": self._norms.clone(),
            "search.gains": torch.zeros(0) if self._gain_K is None else self._gain_K.clone(),
            "search.pool": pool.slots.clone(),
            "search.shortlist": shortlist.slots.clone(),
            "search.bounds": torch.cat(
                [torch.zeros(0, dtype=torch.float64, device=self._sum_A.device)]
                + [level.bound.packed() for level in (pool, shortlist) if level.bound is not None]
            ),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, or an earlier version, which told of the sum alone."""
        device, row_KA = self._columns.device, self._columns.descriptors
        self.recount()
        self._sum_A = state["sum"].to(device, torch.float64)
        self._since = int(state["since"])
        if "search.numbers" not in state:
            return
        *numbers, limited = state["search.numbers"].tolist()
        self._size, self._steps, self._scans, self._wait = numbers[:4]
        self._served, self._pool_served, self._ahead = numbers[4:]
        self._norms = state["search.norms"].to(device)
        if len(state["search.gains"]):
            self._gain_K, self._square_K = state["search.gains"].to(device), squares(row_KA)
        packed = torch.split(state["search.bounds"].to(device), len(self._sum_A) + 2)
        bounds = [UpperBound(part[:-2], part[-2], part[-1]) for part in packed if len(part)]
        slots, index = (state[f"search.{name}"].to(device) for name in ("pool", "shortlist"))
        if len(slots):
            pool_bound = bounds[0] if len(slots) < len(row_KA) else None
            self._pool = Level(row_KA[slots], slots, pool_bound)
            if len(index):
                bound = bounds[-1] if bounds else None
                row_SA = self._pool.row_SA[index]
                self._shortlist = Level(row_SA, index, bound, bool(limited), wide=True)

    def check(self) -> tuple[bool, str]:
        """Sum again: (True, "") or (False, by how much the sum is off)."""
        off = float((self._sum_A - sum_rows(self._columns.descriptor_kA)).abs().max())
        if off > 1e-9 * max(1, self._columns.occupied):
            return False, f"the sum of the rows is off by {off:.3g}"
        return True, ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Steps that are right if no other slot has more."""

    column_T: Tensor  # who leaves, of candidates and newcomers
    gain_T: Tensor  # z . s - z . z of who leaves, at that moment
    query_TA: Tensor  # the sum that each step sees
    sum_NA: Tensor  # the sum before each step and after the last, N = T + 1


class Kept(NamedTuple):
    """What is kept of a proposal."""

    plan: Tensor
    took: Tensor  # candidates whose slots changed hands
    turns: Tensor  # of the newcomers who have them in the end
    exhausted: bool  # whether it is the bound that does not prove the next step


class Level:
    """The best rows of a column, or of a pool, kept in step with the memory.

    Args:
        row_SA: copies of the rows.
        slots: where they stand in what they were drawn from, int64 [S].
        bound: of all rows that are not here; None where these are all.
        limited_by_pool: whether that is the pool's.
        wide: whether sums are taken of them in float64.
    """

    def __init__(
        self,
        row_SA: Tensor,
        slots: Tensor,
        bound: UpperBound | None,
        limited_by_pool: bool = False,
        wide: bool = False,
    ) -> None:
        self.row_SA, self.slots, self.bound = row_SA, slots, bound
        self.limited_by_pool, self._wide = limited_by_pool, wide
        if wide:
            self.wide_SA = row_SA.to(torch.float64)
            self.square_S = squares(self.wide_SA)

    def replace(self, place: Tensor, row_RA: Tensor) -> None:
        """These places have other rows now."""
        self.row_SA[place] = row_RA.to(self.row_SA.dtype)
        if self._wide:
            self.wide_SA[place], self.square_S[place] = row_RA, squares(row_RA)


NOWHERE = Level(torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64), None)


@dataclass(frozen=True, slots=True)
class UpperBound:
    """Bounds z . s over all rows z of which only this is known: |z| <= radius, z . s_0 <= limit.

    With p = z . s_0 / |s_0| and s = s_0 + d, where d has the component `along` on s_0 and the rest
    `across`: z . s <= (|s_0| + along) p + across sqrt(radius^2 - p^2). That is concave in p and has
    its peak at the direction of s, so the bound is its value at the largest p allowed, or at the
    peak. |d| alone would bound nothing: evictions move s against itself, where such rows lose too.
    """

    sum_A: Tensor  # s_0, float64
    limit: Tensor  # float64, of no dimension, as is the radius
    radius: Tensor

    def __call__(self, sum_NA: Tensor) -> Tensor:
        """The bound at each of these sums, float64 [N]."""
        norm, radius = self.sum_A.norm(), self.radius
        directed = norm > LEAST_NORM
        unit_A = torch.where(directed, self.sum_A / norm, 0.0)
        cosine = torch.where(directed, self.limit / norm, radius).clamp(min=-radius)
        moved_NA = sum_NA - self.sum_A
        square_N, along_N = squares(moved_NA), moved_NA @ unit_A
        # Where a move is all but along s_0 the difference of squares is nothing but rounding.
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
        """All of it in one row [A + 2]."""
        return torch.cat([self.sum_A, self.limit[None], self.radius[None]])


def squares(row_RA: Tensor) -> Tensor:
    """z . z of each row."""
    norm_R: Tensor = torch.linalg.vector_norm(row_RA, dim=1)
    return norm_R.square()


def largest(gain_S: Tensor, count: int) -> Tensor:
    """Where the `count` largest stand, in order of place."""
    place_c: Tensor = gain_S.topk(min(count, len(gain_S)), sorted=False).indices.sort().values
    return place_c


def rounding(row_RA: Tensor) -> float:
    """Largest error of a product of such rows, relative to the norms of its factors.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: in any order of summation
    at most A roundings of eps / 2 each; three more for what is rounded before and after.
    """
    return (row_RA.shape[1] + 3) * 0.5 * float(torch.finfo(row_RA.dtype).eps)
