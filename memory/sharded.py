"""A memory that several processes hold together, each a shard of its slots.

The decisions are those that one process would make that holds all slots: every rank runs the same
small simulation among the candidates of all shards, and follows the slots of its own.

Shapes: B newcomers, D embedding, K slots of a shard, k occupied ones of it, W ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.admission import Admission, Totals, apply
from memory.checks import Array, check_count, check_device, check_embeddings, check_integers
from memory.columns import REFUSED, Columns, Rows
from memory.compute import in_full_precision, to_host
from memory.duel.exact import ExactCounts
from memory.duel.process_group import ProcessGroup, SingleProcess
from memory.scores import Linear, Score, check_score


class ShardedMemory:
    """This rank's K of W K slots, under DUEL's policy.

    Slot j of rank r is slot r K + j of all; empty slots fill in order of arrival, the first rank's
    first. Every rank must offer the same batches in the same order, as after an all-gather of
    what each has encoded. It holds neither images nor labels.

    Args:
        capacity: K, the same on every rank.
        dim: D.
        score: h; Linear() where not given.
        compete: DUEL's Algorithm 1: a newcomer with the largest count is refused.
        device: where the shard lies.
        dtype: of the embeddings.
        group: the ranks; those of torch.distributed's default group where not given.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        score: Score | None = None,
        compete: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        group: SingleProcess | None = None,
    ) -> None:
        capacity, dim = check_count("capacity", capacity, 1), check_count("dim", dim, 1)
        score = Linear() if score is None else score
        check_score(score)
        self._group = ProcessGroup() if group is None else group
        self._columns = Columns(capacity, dim, None, check_device(device), dtype)
        self._totals = Totals()
        self._counts = ExactCounts(self._columns, score, compete, self._group)

    @property
    def device(self) -> torch.device:
        return self._columns.device

    @property
    def ids(self) -> Tensor:
        """Of the occupied slots of this shard, int64 [k], in slot order."""
        return self._columns.ids[: self._columns.occupied]

    @property
    def embeddings(self) -> Tensor:
        """Unit rows of the occupied slots of this shard [k, D]."""
        return self._columns.z_kD

    @in_full_precision
    def counts(self) -> Tensor:
        """Duplicate counts of this shard's occupied slots over all shards, float64 [k]."""
        return self._counts.counts()

    @in_full_precision
    def add(self, ids: Array, z: Array) -> Admission:
        """Offer a batch, in order. The admission is the same on every rank; slots are those of all.

        Args:
            ids: int64 [B].
            z: unit rows [B, D].
        """
        rows = self._rows(ids, z)
        held = self._totals.inserted - self._totals.evicted
        free = max(0, min(len(rows), self._columns.capacity * self._group.size - held))
        admission = Admission.of_nobody()
        if free:
            admission = self._fill(torch.arange(held, held + free), rows[:free])
        rows = rows[free:]
        while len(rows):
            plan = self._counts.choose(rows.descriptors)
            admission = admission.then(self._apply(plan, rows[: len(plan)]))
            rows = rows[len(plan) :]
        self._totals.count(admission)
        return admission

    def _rows(self, ids: Array, z: Array) -> Rows:
        columns, added = self._columns, self._totals.added
        z_BD = check_embeddings(z, columns.dim, self.device).to(columns.embeddings.dtype)
        ids_B = check_integers("ids", ids, self.device, len(z_BD))
        nothing = torch.zeros_like(ids_B)
        born_B = torch.arange(added, added + len(z_BD), device=self.device)
        return Rows(ids_B, z_BD, z_BD, nothing - 1, nothing, born_B)

    def _fill(self, plan: Tensor, rows: Rows) -> Admission:
        mine = rows[self._mine(plan) != REFUSED]
        admission = self._apply(plan, rows)
        self._columns.occupied += len(mine)
        self._counts.on_insert(mine.descriptors)
        return admission

    def _mine(self, plan: Tensor) -> Tensor:
        """The plan in slots of this shard; REFUSED for what goes elsewhere."""
        slots, capacity = plan - self._group.rank * self._columns.capacity, self._columns.capacity
        return torch.where((slots >= 0) & (slots < capacity), slots, REFUSED)

    def _apply(self, plan: Tensor, rows: Rows) -> Admission:
        """Write this shard's part, and put the parts of all shards together."""
        mine = self._mine(plan)
        own = apply(mine, rows, self._columns)
        evicted_B, born_B = torch.zeros(2, len(plan), dtype=torch.int64)
        evicts = torch.zeros(len(plan), dtype=torch.int64)
        if len(own.evicted):
            where = (mine != REFUSED).nonzero().flatten()
            evicted_B[where], born_B[where], evicts[where] = own.evicted, own.ages, 1
        slots = torch.where(own.slots >= 0, own.slots + self._offset + 1, 0)
        # On the device, where NCCL wants it.
        parts = torch.stack([evicted_B, born_B, evicts, slots]).to(self.device)
        found = to_host(self._group.all_reduce_sum(parts))
        left = found[2] > 0
        return Admission(
            slots=found[3] - 1,
            evicted=found[0][left],
            ages=found[1][left],
            refused=to_host(rows.ids)[plan == REFUSED],
            inserted=int((plan != REFUSED).sum()),
        )

    @property
    def _offset(self) -> int:
        return self._group.rank * self._columns.capacity

    @in_full_precision
    def check_valid(self) -> tuple[bool, str]:
        """Recount this shard's slots over all. Every rank must call."""
        return self._counts.check()
