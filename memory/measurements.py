"""Questions to a memory: what is near a row, how many duplicates, how balanced the content is.

Shapes: B queries or anchors, D embedding, A descriptor, K capacity, k occupied slots, C H W image.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.checks import (
    Array,
    check_embeddings,
    check_images,
    check_integers,
    check_slots,
    check_way,
)
from stream_ssl.memory.compute import in_full_precision, to_host
from stream_ssl.memory.descriptors import descriptors_of
from stream_ssl.memory.draws import Strata
from stream_ssl.memory.index import nearest
from stream_ssl.memory.scores import Score
from stream_ssl.memory.slots import Slots
from stream_ssl.memory.stats import MemoryStats, effective_cells, measure


class Measurements(Slots):
    """Measurements of the occupied slots. None of them changes the memory."""

    measured_by: Score | None
    _strata: Strata
    _drift: Tensor

    @in_full_precision
    def nearest(
        self, rows: Array, k: int, by: Literal["embeddings", "descriptors"] = "embeddings"
    ) -> tuple[Tensor, Tensor]:
        """Return the k slots that are most similar to each query, exactly, the most similar first.

        On several ranks, the search covers this rank's shard only.

        Args:
            rows: the queries, unit rows [B, D] or [B, A].
            k: the number of slots, at least 1. At most `len(self)` are returned.
            by: the rows of the slots with which the queries are compared.

        Returns:
            The cosines [B, k] and the slots, int64 [B, k].

        Raises:
            ValueError: the memory is empty, the queries are not unit rows of the right size, or an
                argument is out of range.
        """
        check_way(by, ("embeddings", "descriptors"), "by")
        row_kX = self.embeddings if by == "embeddings" else self.descriptors
        query_BX = check_embeddings(rows, row_kX.shape[1], self.device, "row").to(self.dtype)
        if not len(self):
            raise ValueError("cannot search an empty memory: add samples first")
        return nearest(query_BX, row_kX, k)

    @in_full_precision
    def counts(self) -> Tensor:
        """Return the duplicate counts N(j) of the occupied slots, float64 [k] (DUEL, eq. 5).

        Duplicates are counted on descriptors. The counts are free if the policy keeps them.
        Otherwise they cost O(K A) with linear h and O(K^2 A) with other scores. On several ranks,
        counts that the policy keeps cover all slots, and other counts cover this shard only.
        """
        return self.eviction.counts()

    @in_full_precision
    def collisions(
        self,
        z: Array,
        images: Array | None = None,
        features: Array | None = None,
        slots: Array | None = None,
    ) -> Tensor:
        """Return the expected collision probability of each anchor with the memory, float64 [B].

        The value is mean_k h(d_b . d_k) over descriptors (DUEL, Definition 2). The score is
        `measured_by`, or the policy's score. The value is 0 if the memory is empty. The cost is O(B
        K A), or O(B A) if a policy with linear h keeps a sum. On several ranks, the mean covers
        this rank's shard only.

        Args:
            z: unit rows [B, D].
            images: uint8 [B, C, H, W], required if the descriptor reads images.
            features: floating point [B, F], required if the descriptor reads features.
            slots: distinct occupied slots [B] that hold the anchors, whose descriptors then serve
                in place of features.

        Raises:
            ValueError: the rows are not unit rows [B, D], or images or features are missing or have
                another shape.
        """
        z_BD = check_embeddings(z, self.embeddings.shape[1], self.device, "anchor").to(self.dtype)
        found = None
        if self.descriptor.needs_images:
            found = check_images(images, self.image_shape, len(z_BD), self.device)
        if self.descriptor.needs_features and slots is not None:
            row_BA = self.descriptors[check_slots(slots, len(self), self.device)]
        else:
            width = self.descriptors.shape[1]
            row_BA = descriptors_of(self.descriptor, z_BD, found, width, features)
        return self._collisions(row_BA)

    def _collisions(self, row_BA: Tensor, are_next: bool = False) -> Tensor:
        """Return `collisions` of descriptors.

        Args:
            row_BA: the descriptors.
            are_next: whether the policy is asked for slots of these rows next.
        """
        if self.measured_by is None and self.group.size == 1:
            total = self.eviction.offered if are_next else self.eviction.total
            return total(row_BA) / max(1, len(self))
        score = self.measured_by or self.eviction.score
        return score.total(row_BA, self.descriptors) / max(1, len(self))

    @in_full_precision
    def prior(self, z: Array, ids: Array | None = None) -> Tensor:
        """Return tau+ of the debiased losses for each anchor, float64 [B].

        tau+ is the probability that a negative drawn from the memory has the anchor's class: mean_k
        h(z_b . z_k). It is computed on embeddings, because the loss compares embeddings, whatever
        the descriptor is. On several ranks, the mean covers all slots.

        Args:
            z: unit rows [B, D]. All ranks must pass the same rows.
            ids: sample ids [B] of the anchors. The mean then leaves out the slots that hold the
                anchor's own sample, which are no negatives of it. None: all slots count.

        Raises:
            ValueError: the rows are not unit rows [B, D], or the ids are not B integers.
        """
        z_BD = check_embeddings(z, self.embeddings.shape[1], self.device, "anchor").to(self.dtype)
        score = self.eviction.score if self.measured_by is None else self.measured_by
        if self._columns.shared and self.measured_by is None and self.group.size == 1:
            total_B = self.eviction.total(z_BD)
        else:
            total_B = score.total(z_BD, self.embeddings)
        count_B = torch.full_like(total_B, len(self))
        if ids is not None and len(self):
            id_B = check_integers("anchor ids", ids, self.device, len(z_BD)).contiguous()
            order = torch.sort(self.ids)
            first_B = torch.searchsorted(order.values, id_B)
            times_B = torch.searchsorted(order.values, id_B, right=True) - first_B
            for nth in range(max(to_host(times_B).tolist(), default=0)):
                own_BD = self.embeddings[order.indices[(first_B + nth).clamp(max=len(self) - 1)]]
                own_B = score((z_BD * own_BD).sum(1)).to(torch.float64)
                total_B = total_B - torch.where(nth < times_B, own_B, 0.0)
            count_B = count_B - times_B
        both_2B: Tensor = self.group.all_reduce_sum(torch.stack([total_B, count_B]))
        return both_2B[0].clamp(min=0) / both_2B[1].clamp(min=1)

    @in_full_precision
    def stats(self) -> MemoryStats:
        """Return statistics of the memory's current contents.

        The cost is O(K D^2) plus the cost of the counts. If counts are expensive, only some slots
        are counted (see MemoryStats.counted). Call it every few seconds rather than at every step.
        """
        return measure(self._columns, self.eviction, self._totals, self._drift)

    @in_full_precision
    def effective_cells(self, cells: int = 64) -> float:
        """Return the exponential of the entropy of the k-means cell sizes of the embeddings.

        The value lies between 1 and `cells`, and is 0 for an empty memory. Each call clusters the
        embeddings again, so do not call it at every step.
        """
        return effective_cells(self.embeddings, cells, self._strata.seed)

    @in_full_precision
    def check_valid(self) -> tuple[bool, str]:
        """Recompute the memory's bookkeeping. Return (True, ""), or (False, the first error)."""
        joined = self.group.share(self._totals.inserted - self._totals.evicted)
        if joined != len(self):
            return False, f"{joined} samples should be held by the counters, {len(self)} slots are"
        ok, reason = self._columns.check(self._totals.added)
        return self.eviction.check() if ok else (ok, reason)
