"""The working memory: a fixed number of embeddings, kept by an eviction policy.

Shapes: B newcomers or anchors, D embedding, K capacity, k occupied slots, C H W image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from memory.admission import Admission, Totals
from memory.arguments import check_count
from memory.checks import Array, check_embeddings, check_image_shape, check_rows
from memory.columns import Columns, Rows
from memory.duplicates import Duplicates
from memory.eviction import Feedback, MostDuplicated, Policy
from memory.eviction.base import check_free
from memory.images import Image, image_column
from memory.offer import offer
from memory.precision import in_full_precision
from memory.refreshing import Refreshing
from memory.scores import Score, check_score
from memory.state import (
    State,
    check_fits,
    counters,
    describe,
    encode,
    named,
    part,
    totals_of,
    upgraded,
)
from memory.stats import MemoryStats, effective_cells, measure
from memory.strata import Strata
from memory.validity import check


class WorkingMemory(Refreshing):
    """K slots of embedding, id and optional image, label and content hash.

    Ids are not rows: an id may occur twice, and a slot is known by its number alone. Empty slots
    fill in order of arrival; from then on the policy names the slot that each newcomer takes over.

    Args:
        capacity: K >= 1.
        dim: D >= 1.
        eviction: who makes room; MostDuplicated() where not given. A policy serves one memory.
        image_shape: (C, H, W) of uint8 images to keep beside the embeddings, or None for none.
        device: where the columns lie.
        dtype: float32 or float64 of the embeddings. None: float32, and float64 from the first
            float64 batch on.
        seed: of every draw, the policy's included.
        duplicates: a test for near-duplicates at admission; None for none.
        images_on: where the images lie, with the embeddings on the "device", or on the "host",
            pinned where the device is a GPU.
        image_file: a file to keep the images in instead, memory-mapped; it is no part of a state,
            see memory/images.py for what holds after a crash.
        measured_by: the score of `collisions`; None for the policy's, which is linear where a
            policy has none, such as a queue. No part of a state.

    >>> memory = WorkingMemory(capacity=3, dim=2)
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> admission = memory.add(torch.arange(4), z)
    >>> admission.evicted.tolist(), memory.ids.tolist()
    ([0], [3, 1, 2])
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        eviction: Policy | None = None,
        image_shape: Image | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
        duplicates: Duplicates | None = None,
        images_on: Literal["device", "host"] = "device",
        image_file: Path | None = None,
        measured_by: Score | None = None,
    ) -> None:
        capacity, dim = check_count("capacity", capacity), check_count("dim", dim)
        if capacity < 1 or dim < 1:
            raise ValueError(f"capacity {capacity} and dim {dim}: both must be at least 1")
        image_shape = check_image_shape(image_shape)
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype {dtype}: must be torch.float32, torch.float64 or None")
        if not isinstance(duplicates, Duplicates | None):
            raise ValueError(
                f"duplicates is {duplicates!r}: must be an instance of memory.Duplicates, such as "
                "Duplicates(threshold=0.98)"
            )
        if measured_by is not None:
            check_score(measured_by)
        self.measured_by = measured_by
        self.eviction: Policy = MostDuplicated() if eviction is None else eviction
        check_free("eviction", self.eviction)
        self.capacity, self.dim, self.duplicates = capacity, dim, duplicates
        self._fixed_dtype = dtype is not None
        where = torch.device(device)
        images = image_column(capacity, image_shape, where, images_on, image_file)
        self._columns = Columns(capacity, dim, image_shape, where, dtype or torch.float32, images)
        self._seed = seed = check_count("seed", seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._totals, self._strata = Totals(), Strata(seed + 2)
        self._drift = torch.ones(2, dtype=torch.float64)
        self.eviction.bind(self._columns, seed + 1)
        self._description = describe(self.eviction, image_shape, duplicates)

    @in_full_precision
    def add(
        self,
        ids: Array,
        z: Array,
        images: Array | None = None,
        labels: Array | None = None,
        hashes: Array | None = None,
    ) -> Admission:
        """Offer a batch, in order. As if each sample were offered alone, but for what
        `Duplicates` says of near-duplicates and what a policy learns between batches.

        Args:
            ids: int64 [B].
            z: unit rows [B, D], float32 or float64 (narrower ones are widened to float32).
            images: uint8 [B, C, H, W], where the memory keeps images.
            labels: int64 [B], -1 for none.
            hashes: content hashes, int64 [B], 0 for none.

        Raises:
            ValueError: an input breaks its rule; nothing was added.
        """
        rows = check_rows(self._columns, self._totals.added, ids, z, images, labels, hashes)
        admission = offer(self._match_dtype(rows), self._columns, self.eviction, self.duplicates)
        self._totals.count(len(rows), admission)
        self._strata.changed(admission.inserted)
        self.eviction.update(
            Feedback(
                inserted=admission.inserted,
                evicted=len(admission.evicted),
                refused=len(admission.refused),
                added=self._totals.added,
            )
        )
        return admission

    def _match_dtype(self, rows: Rows) -> Rows:
        if rows.embeddings.dtype == self.dtype:
            return rows
        if not self._fixed_dtype and rows.embeddings.dtype == torch.float64:
            self._promote()
            return rows
        return rows.with_embeddings(rows.embeddings.to(self.dtype))

    def _promote(self) -> None:
        state = self.eviction.state()
        self._columns.promote(torch.float64)
        self.eviction.bind(self._columns, self._seed + 1)
        self.eviction.load(state)
        self._count_anew()

    def _count_anew(self) -> None:
        """Let the policy forget what it counted in another dtype than the rows have now."""
        every = torch.arange(len(self), device=self.device)
        self.eviction.refreshed(every, self.embeddings.clone())

    @in_full_precision
    def counts(self) -> Tensor:
        """Duplicate counts N(j) of the occupied slots (DUEL, eq. 5), float64 [k]."""
        return self.eviction.counts()

    @in_full_precision
    def collisions(self, z: Array) -> Tensor:
        """Expected collision probability of each anchor with the memory, float64 [B].

        mean_k h(z_b . m_k) (DUEL, Definition 2), with the score `measured_by`, or the policy's; 0
        in an empty memory. With the policy's linear h it costs O(B D) where the policy keeps the
        sum of the rows, else O(K D); with any other O(B K D).

        Args:
            z: unit rows [B, D].

        Raises:
            ValueError: not unit rows of this dimension.
        """
        z_BD = check_embeddings(z, self.dim, self.device, "anchor").to(self.dtype)
        if self.measured_by is None:
            return self.eviction.total(z_BD) / max(1, len(self))
        return self.measured_by.total(z_BD, self.embeddings) / max(1, len(self))

    @in_full_precision
    def stats(self) -> MemoryStats:
        """Numbers of this moment, in O(K D^2) besides the counts, which are sampled where they are
        dear (see MemoryStats.counted). Cheap enough for every few seconds.
        """
        return measure(self._columns, self.eviction, self._totals, self._drift)

    @in_full_precision
    def effective_cells(self, cells: int = 64) -> float:
        """Exponential of the entropy of the sizes of k-means cells, from 1 to `cells`; 0 of an
        empty memory. Clusters anew at each call: not for every step.
        """
        return effective_cells(self.embeddings, cells, self._strata.seed)

    def state_dict(self) -> State:
        """Everything needed to go on bit-equal, as a flat dict of copies that safetensors takes."""
        state = named("columns", self._columns.state())
        state |= named("eviction", self.eviction.state()) | named("strata", self._strata.state())
        state["counters"] = counters(self.capacity, self._totals)
        state["description"] = encode(self._description)
        state["drift"] = self._drift.clone()
        state["generator"] = self._generator.get_state()
        return state

    @in_full_precision
    def load_state_dict(self, state: State) -> None:
        """Take over a state of a memory built with the same arguments.

        Raises:
            ValueError: the state is of a later version, or of another capacity, dimension, image
                shape, eviction policy, score, or of other options of these or of `duplicates`; then
                nothing has changed.
        """
        state = upgraded(state)
        check_fits(state, self._columns, self.eviction, self._description)
        columns = part(state, "columns")
        self._totals = totals_of(state)
        self._generator.set_state(state["generator"].cpu())
        self._drift = state["drift"].clone().to(self.device)
        self._strata.load(part(state, "strata"), self.device)
        if columns["embeddings"].dtype != self.dtype and not self._fixed_dtype:
            self._columns.promote(columns["embeddings"].dtype)
        self._columns.occupied = 0
        self.eviction.bind(self._columns, self._seed + 1)
        self._columns.load(columns)
        self.eviction.load(part(state, "eviction"))
        if columns["embeddings"].dtype != self.dtype:
            self._count_anew()

    @in_full_precision
    def check_valid(self) -> tuple[bool, str]:
        """Recount everything. (True, "") or (False, what is wrong)."""
        joined = self._totals.inserted - self._totals.evicted
        if joined != len(self):
            return False, f"{joined} samples should be held by the counters, {len(self)} slots are"
        return check(self._columns, self._totals.added, self.eviction)
