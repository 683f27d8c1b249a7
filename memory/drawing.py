"""What is drawn from a memory: negatives, and training batches.

Shapes: B anchors, D embedding, N negatives, k occupied slots, n slots drawn.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memory import draws
from memory.arguments import check_count
from memory.checks import Array, check_embeddings, check_integers, check_way
from memory.draws import Draw, Negatives
from memory.eviction import Policy
from memory.precision import in_full_precision
from memory.strata import Strata
from memory.views import ColumnViews


class Drawing(ColumnViews):
    """Draws from the columns, by the memory's own generator where none is given."""

    dim: int
    eviction: Policy
    _generator: torch.Generator
    _strata: Strata

    @in_full_precision
    def negatives(
        self,
        n: int | None = None,
        generator: torch.Generator | None = None,
        how: Literal["uniform", "hardest", "stratified"] = "uniform",
        anchors: Array | None = None,
        ids_B: Array | None = None,
        hashes_B: Array | None = None,
        each: bool = False,
        cells: int = 64,
    ) -> Negatives:
        """All occupied slots in slot order, or n of them, each at most once.

        Fewer than n where fewer are occupied. All are views; drawn ones are copies. Whatever was
        drawn, `mask` leaves an anchor's own copies out.

        Args:
            n: how many, or None for all.
            generator: a CPU generator; the memory's own where not given.
            how: "uniform": every choice equally likely. "hardest": the largest cosine to any
                anchor, the hardest first, ties to the lowest slot; no randomness. "stratified":
                from each k-means cell as many as from any other, as far as it has them, and
                uniformly within. The cells are found anew when as many rows have changed as there
                were when they were found.
            anchors: unit rows [B, D], for "hardest".
            ids_B, hashes_B: of the anchors, for "hardest": a slot of the same id or content hash is
                left out before choosing.
            each: for "hardest", choose n for each anchor, rather than n for all together; every
                field of the negatives then has B in front. An anchor that has fewer than n left
                gets some of those left out as well, which `mask` marks.
            cells: for "stratified".

        Raises:
            ValueError: "hardest" without anchors, a choice where all are taken, or an argument
                outside its range.
        """
        check_way(how, ("uniform", "hardest", "stratified"))
        if how == "hardest" and anchors is None:
            raise ValueError('how="hardest" compares with anchors: pass anchors=')
        if each and how != "hardest":
            raise ValueError(f'each=True with how={how!r}: only how="hardest" chooses for each')
        check_count("cells", cells, least=1)
        columns, k = self._columns, len(self)
        if n is None:
            if how != "uniform":
                raise ValueError(f"how={how!r} chooses among the slots: say how many with n=")
            return Negatives(columns.z_kD, self.ids, self.hashes)
        n, chosen = min(check_count("n", n, least=0), k), generator or self._generator
        if anchors is not None and how == "hardest":
            slots = self._hardest(n, anchors, ids_B, hashes_B, each)
        elif how == "stratified" and n:
            cell_k, found = self._strata.cells(columns.z_kD, cells)
            slots = draws.stratified(n, cell_k.cpu(), found, chosen).to(self.device)
        else:
            slots = draws.uniform(n, k, chosen, self.device)
        return Negatives(columns.embeddings[slots], columns.ids[slots], columns.hashes[slots])

    def _hardest(
        self, n: int, anchors: Array, ids_B: Array | None, hashes_B: Array | None, each: bool
    ) -> Tensor:
        z_BD = check_embeddings(anchors, self.dim, self.device, "anchor").to(self.dtype)
        if ids_B is None and hashes_B is not None:
            raise ValueError("hashes_B without ids_B: pass the anchors' ids as well")
        count, device = len(z_BD), self.device
        contrast = draws.Contrast(
            z_BD,
            self._columns.z_kD,
            self.ids,
            self.hashes,
            None if ids_B is None else check_integers("ids_B", ids_B, device, count),
            None if hashes_B is None else check_integers("hashes_B", hashes_B, device, count),
        )
        return draws.hardest_each(n, contrast) if each else draws.hardest(n, contrast)

    def mask(
        self,
        ids_B: Array,
        hashes_B: Array | None = None,
        negatives: Negatives | None = None,
    ) -> Tensor:
        """bool [B, N]: True where a negative must be left out for an anchor, being the same sample
        (id) or the same content (hash, where both carry one).

        Args:
            ids_B: of the anchors, int64.
            hashes_B: content hashes of the anchors, 0 for none.
            negatives: those drawn; all occupied slots where not given.
        """
        return (self.negatives() if negatives is None else negatives).mask(ids_B, hashes_B)

    @in_full_precision
    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        how: Literal["uniform", "inverse-count"] = "uniform",
    ) -> Draw:
        """A training batch of n slots: distinct while n <= k, else with replacement.

        Slots whose image is lost (memory/images.py) are left out.

        Args:
            n: how many.
            generator: a CPU generator; the memory's own where not given.
            how: "uniform", or "inverse-count": in proportion to 1 / (1 + N(j)), one slot after the
                other. The counts cost what `counts` does: nothing where the policy keeps them,
                O(K D) with linear h, else O(K^2 D).

        Raises:
            ValueError: the memory is empty, or all images are lost.
        """
        check_way(how, ("uniform", "inverse-count"))
        n = check_count("n", n, least=0)
        columns, chosen = self._columns, generator or self._generator
        there = columns.with_images()
        k = len(self) if there is None else len(there)
        if k == 0:
            what = "an empty memory" if there is None else "a memory that lost its images"
            raise ValueError(f"cannot sample from {what}: add samples first")
        if how == "inverse-count":
            count_k = self.eviction.counts() if there is None else self.eviction.counts()[there]
            slots = draws.weighted(n, 1 / (1 + count_k.clamp(min=0).cpu()), chosen).to(self.device)
        elif n <= k:
            slots = draws.uniform(n, k, chosen, self.device)
        else:
            slots = torch.randint(k, (n,), generator=chosen).to(self.device)
        slots = slots if there is None else there[slots]
        images = None if columns.images is None else columns.images.read(slots)
        return Draw(slots, columns.ids[slots], images)
