"""The working memory: a fixed number of embeddings, kept by an eviction policy.

Shapes: B newcomers or anchors, D embedding, K capacity, k occupied slots, N negatives, R slots
refreshed, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.admission import Admission, carry_out
from memory.checks import (
    Array,
    as_tensor,
    check_embeddings,
    check_images,
    check_integers,
    check_slots,
)
from memory.columns import Columns, Image, Rows
from memory.draws import Draw, Negatives, uniform
from memory.eviction import MostDuplicated, Policy
from memory.stats import MemoryStats, effective_classes, percentiles
from memory.validity import check

VERSION = 1
"""Of the state; raised when an older reader could not read it."""


class WorkingMemory:
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
    ) -> None:
        if capacity < 1 or dim < 1:
            raise ValueError(f"capacity {capacity} and dim {dim}: both must be at least 1")
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype {dtype}: must be torch.float32, torch.float64 or None")
        self.capacity, self.dim = capacity, dim
        self._fixed_dtype = dtype is not None
        self._columns = Columns(
            capacity, dim, image_shape, torch.device(device), dtype or torch.float32
        )
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._added = self._evicted = self._refused = 0
        self.eviction: Policy = MostDuplicated() if eviction is None else eviction
        if hasattr(self.eviction, "columns"):
            raise ValueError(f"{self.eviction!r} serves another memory: give each memory its own")
        self.eviction.bind(self._columns, seed + 1)

    def __len__(self) -> int:
        return self._columns.occupied

    @property
    def device(self) -> torch.device:
        return self._columns.device

    @property
    def dtype(self) -> torch.dtype:
        return self._columns.embeddings.dtype

    @property
    def ids(self) -> Tensor:
        """Of the occupied slots, int64 [k], in slot order. A view, as all columns are."""
        return self._columns.ids[: len(self)]

    @property
    def embeddings(self) -> Tensor:
        """Unit rows of the occupied slots [k, D]."""
        return self._columns.z_kD

    @property
    def images(self) -> Tensor | None:
        """uint8 [k, C, H, W], or None in a memory that keeps none."""
        return None if self._columns.images is None else self._columns.images[: len(self)]

    @property
    def labels(self) -> Tensor:
        """int64 [k]; -1 for none. For reports only."""
        return self._columns.labels[: len(self)]

    @property
    def hashes(self) -> Tensor:
        """Content hashes, int64 [k]; 0 for none."""
        return self._columns.hashes[: len(self)]

    @property
    def born(self) -> Tensor:
        """int64 [k]: how many samples had been offered before this one."""
        return self._columns.born[: len(self)]

    @property
    def encoded(self) -> Tensor:
        """int64 [k]: how many samples had been offered when the embedding was last computed."""
        return self._columns.encoded[: len(self)]

    def add(
        self,
        ids: Array,
        z: Array,
        images: Array | None = None,
        labels: Array | None = None,
        hashes: Array | None = None,
    ) -> Admission:
        """Offer a batch, in order. As if each sample were offered alone.

        Args:
            ids: int64 [B].
            z: unit rows [B, D], float32 or float64 (narrower ones are widened to float32).
            images: uint8 [B, C, H, W], where the memory keeps images.
            labels: int64 [B], -1 for none.
            hashes: content hashes, int64 [B], 0 for none.

        Raises:
            ValueError: an input breaks its rule; nothing was added.
        """
        rows = self._check_rows(ids, z, images, labels, hashes)
        offered = len(rows)
        free = min(offered, self.capacity - len(self))
        plan = torch.arange(len(self), len(self) + free)
        admission = Admission.of_nobody()
        if free:
            admission = carry_out(plan, rows[:free], self._columns)
            self._columns.occupied += free
            self.eviction.joined(rows[:free])
        rows = rows[free:]
        while len(rows):
            plan = self.eviction.choose(rows)
            admission = admission.then(carry_out(plan, rows[: len(plan)], self._columns))
            rows = rows[len(plan) :]
        self._added += offered
        self._evicted += len(admission.evicted)
        self._refused += len(admission.refused)
        return admission

    def _check_rows(
        self,
        ids: Array,
        z: Array,
        images: Array | None,
        labels: Array | None,
        hashes: Array | None,
    ) -> Rows:
        device, columns = self.device, self._columns
        z_BD = check_embeddings(z, self.dim, device)
        count = len(z_BD)
        rows = Rows(
            ids=check_integers("ids", ids, count, 0, device),
            embeddings=z_BD,
            labels=check_integers("labels", labels, count, -1, device),
            hashes=check_integers("hashes", hashes, count, 0, device),
            born=torch.arange(self._added, self._added + count, device=device),
            images=check_images(images, columns.image_shape, count, device),
        )
        return self._match_dtype(rows)

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

    def counts(self) -> Tensor:
        """Duplicate counts N(j) of the occupied slots (DUEL, eq. 5), float64 [k]."""
        return self.eviction.counts()

    def collisions(self, z: Array) -> Tensor:
        """Expected collision probability of each anchor with the memory, float64 [B].

        mean_k h(z_b . m_k) (DUEL, Definition 2), with the policy's score; 0 in an empty memory.
        """
        z_BD = as_tensor(z, self.device).to(self.dtype)
        return self.eviction.total(z_BD) / max(1, len(self))

    def negatives(
        self, n: int | None = None, generator: torch.Generator | None = None
    ) -> Negatives:
        """All occupied slots in slot order, or n of them uniformly without replacement.

        Fewer than n where fewer are occupied. All are views; drawn ones are copies.

        Args:
            n: how many, or None for all.
            generator: a CPU generator; the memory's own where not given.
        """
        columns, k = self._columns, len(self)
        if n is None:
            return Negatives(columns.z_kD, self.ids, self.hashes)
        slots = uniform(min(n, k), k, generator or self._generator, self.device)
        return Negatives(columns.embeddings[slots], columns.ids[slots], columns.hashes[slots])

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
        device, count = self.device, len(ids_B)
        ids = check_integers("ids", ids_B, count, 0, device)
        hashes = None if hashes_B is None else check_integers("hashes", hashes_B, count, 0, device)
        return (self.negatives() if negatives is None else negatives).mask(ids, hashes)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Draw:
        """A uniform batch of n slots: distinct while n <= k, else with replacement.

        Raises:
            ValueError: the memory is empty.
        """
        k = len(self)
        if k == 0:
            raise ValueError("cannot sample from an empty memory: add samples first")
        chosen = generator or self._generator
        if n <= k:
            slots = uniform(n, k, chosen, self.device)
        else:
            slots = torch.randint(k, (n,), generator=chosen).to(self.device)
        images = None if self._columns.images is None else self._columns.images[slots]
        return Draw(slots, self._columns.ids[slots], images)

    def stalest(self, n: int) -> Tensor:
        """The n slots whose embeddings are oldest, int64; ties go to the lowest slot."""
        return torch.argsort(self.encoded, stable=True)[: max(0, n)]

    def refresh(self, slots: Array, z: Array) -> Tensor:
        """Replace embeddings by newly computed ones of the same samples.

        Args:
            slots: int64 [R], distinct and occupied.
            z: unit rows [R, D].

        Returns:
            The drift: cosine of the old and the new embedding, float64 [R].
        """
        chosen = check_slots(slots, len(self), self.device)
        new_RD = check_embeddings(z, self.dim, self.device).to(self.dtype)
        if len(new_RD) != len(chosen):
            raise ValueError(f"{len(chosen)} slots but {len(new_RD)} embeddings: must be as many")
        before_RD = self._columns.embeddings[chosen]
        self._columns.embeddings[chosen] = new_RD
        self._columns.encoded[chosen] = self._added
        self.eviction.refreshed(chosen, before_RD)
        return (before_RD * new_RD).sum(dim=1, dtype=torch.float64).clamp_(-1, 1)

    def stats(self) -> MemoryStats:
        """Numbers of this moment. The counts cost O(K D) with linear h, else O(K^2 D)."""
        k = len(self)
        pairs = max(1, k * (k - 1))
        p50, p90, most = percentiles(self._added - self.born, (0.5, 0.9, 1.0))
        return MemoryStats(
            occupancy=k,
            capacity=self.capacity,
            added=self._added,
            inserted=self._added - self._refused,
            evicted=self._evicted,
            refused=self._refused,
            expected_collisions=float(self.counts().sum()) / pairs,
            effective_classes=effective_classes(self.embeddings),
            age_p50=p50,
            age_p90=p90,
            age_max=most,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit-equal, as a flat dict of copies that safetensors takes."""
        counters = [VERSION, self.capacity, self._added, self._evicted, self._refused]
        state = {f"columns.{name}": value for name, value in self._columns.state().items()}
        state |= {f"eviction.{name}": value for name, value in self.eviction.state().items()}
        state["counters"] = torch.tensor(counters, dtype=torch.int64)
        state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state of a memory built with the same arguments.

        Raises:
            ValueError: the state is of another version, capacity, dimension, image shape or policy.
        """
        columns = {name[8:]: value for name, value in state.items() if name.startswith("columns.")}
        eviction = {
            name[9:]: value for name, value in state.items() if name.startswith("eviction.")
        }
        self._check_state(state, columns, eviction)
        _, _, self._added, self._evicted, self._refused = state["counters"].tolist()
        self._generator.set_state(state["generator"].cpu())
        if columns["embeddings"].dtype != self.dtype and not self._fixed_dtype:
            self._columns.promote(columns["embeddings"].dtype)
        self._columns.occupied = 0
        self.eviction.bind(self._columns, self._seed + 1)
        self._columns.load(columns)
        self.eviction.load(eviction)

    def _check_state(
        self,
        state: dict[str, Tensor],
        columns: dict[str, Tensor],
        eviction: dict[str, Tensor],
    ) -> None:
        if "counters" not in state or int(state["counters"][0]) != VERSION:
            raise ValueError(f"this is no memory state of version {VERSION}")
        if int(state["counters"][1]) != self.capacity:
            raise ValueError(
                f"the state is of capacity {int(state['counters'][1])}, this memory of "
                f"{self.capacity}: build the memory with the state's capacity"
            )
        if set(columns) != set(self._columns.names()):
            raise ValueError(
                f"the state has columns {sorted(columns)}, this memory "
                f"{sorted(self._columns.names())}: image_shape must be as when it was saved"
            )
        for name in self._columns.names():
            here, there = getattr(self._columns, name).shape[1:], columns[name].shape[1:]
            if here != there:
                raise ValueError(
                    f"{name} of the state have shape {tuple(there)} a slot, of this memory "
                    f"{tuple(here)}: dim and image_shape must be as when it was saved"
                )
        if set(eviction) != set(self.eviction.state()):
            raise ValueError(
                f"the state was saved under another eviction policy than {self.eviction.name}"
            )

    def check_valid(self) -> tuple[bool, str]:
        """Recount everything. (True, "") or (False, what is wrong)."""
        joined = self._added - self._refused - self._evicted
        if joined != len(self):
            return False, f"{joined} samples should be held by the counters, {len(self)} slots are"
        return check(self._columns, self._added, self.eviction)
