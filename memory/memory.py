"""The working memory: a fixed number of samples, kept by an eviction policy.

Shapes: B newcomers or anchors, D embedding, A descriptor, K capacity, k occupied slots, N
negatives, R slots refreshed, n slots drawn, b images encoded at a time, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from stream_ssl.memory import draws
from stream_ssl.memory.admission import Admission, Entry, Totals
from stream_ssl.memory.checks import (
    Array,
    check_count,
    check_device,
    check_embeddings,
    check_image_shape,
    check_images,
    check_integers,
    check_seed,
    check_slots,
    check_way,
)
from stream_ssl.memory.columns import Columns, Image, Rows, image_column
from stream_ssl.memory.compute import in_full_precision, to_device, to_host
from stream_ssl.memory.descriptors import Descriptor, Embedding, check_descriptor, descriptors_of
from stream_ssl.memory.draws import Draw, DrawOrder, Negatives, Strata
from stream_ssl.memory.duplicates import Duplicates, Found
from stream_ssl.memory.eviction import Feedback, MostDuplicated, Policy
from stream_ssl.memory.eviction.base import check_free
from stream_ssl.memory.fixed import Fixed
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.scores import Score, check_score
from stream_ssl.memory.shards import RANK_SEEDS, Meeting, check_shareable
from stream_ssl.memory.shares import Holdings, ProducerNames, Shares, check_kept
from stream_ssl.memory.slots import Slots
from stream_ssl.memory.state import (
    State,
    check_fits,
    counters,
    describe,
    encode,
    encode_names,
    is_resharded,
    named,
    part,
    producer_names,
    totals_of,
    upgraded,
)
from stream_ssl.memory.stats import MemoryStats, effective_cells, measure


class WorkingMemory(Slots):
    """K slots of embedding, descriptor, id and optional image, label and content hash.

    Ids are not rows: an id may occur twice, and a slot is known by its number alone. Empty slots
    fill in order of arrival; from then on the policy names the slot that each newcomer takes over.

    A module like any other, without parameters: as a part of another it is saved, loaded, copied
    and moved with it. Its rows keep their dtype, whatever the module around it is cast to.

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
        measured_by: the score of `collisions` and `prior`; None for the policy's, which is linear
            where a policy has none, such as a queue. No part of a state.
        descriptor: what duplicates are counted on (memory/descriptors.py); None for Embedding(),
            the embeddings themselves, as the paper does. One that reads images, such as
            Thumbnail(), needs image_shape.
        group: the ranks that hold it together, `ProcessGroup()` under torch.distributed: this one
            holds every W-th of the K slots. Each offers its own newcomers, and all evict what one
            process would that holds all slots and is offered the batches joined, the first rank's
            first. What is read is of this shard, and so are slots; `add`, `prior`, `check_valid`
            and, where the descriptor is of embeddings, `refresh` must be called by all in turn.
        shares: the slots that each producer keeps whatever the policy prefers (memory/shares.py).
            A number below 1: this part of an equal share. Weights by name: half of the slots are
            divided by weight, and a producer that is not named weighs 1. None: no shares. No part
            of a state.

    Raises:
        ValueError: an argument outside its range, or of another kind, or one that several ranks
            cannot hold together.

    >>> memory = WorkingMemory(capacity=3, dim=2)
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> admission = memory.add(torch.arange(4), z)
    >>> admission.evicted.tolist(), memory.ids.tolist()
    ([0], [3, 1, 2])
    """

    capacity = Fixed[int]()
    capacity_of_all = Fixed[int]()
    dim = Fixed[int]()
    image_shape = Fixed[Image | None]()

    @torch.inference_mode(False)
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
        measured_by: Score | None = None,
        descriptor: Descriptor | None = None,
        group: RankGroup = SINGLE_PROCESS,
        shares: float | dict[str, float] | None = None,
    ) -> None:
        super().__init__()
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
        self.descriptor: Descriptor = Embedding() if descriptor is None else descriptor
        check_descriptor(self.descriptor)
        self.group, self.capacity_of_all = group, capacity
        self.capacity, self.dim, self.duplicates = capacity // group.size, dim, duplicates
        self.image_shape = image_shape
        if group.size > 1:
            check_shareable(capacity, group, self.eviction, duplicates)
        self.shares = Shares.of(shares)
        if self.shares is not None:
            check_kept(self.eviction)
        self._holdings: Holdings | None = None  # made from the columns when they are needed
        self._names = ProducerNames()
        self._fixed_dtype = dtype is not None
        where, self._seed = check_device(device), check_seed(seed)
        self.descriptor.to(where)
        apart = None
        if not isinstance(self.descriptor, Embedding):
            apart = self.descriptor.dim(dim, image_shape)
        images = image_column(self.capacity, image_shape, where, images_on)
        self._columns = Columns(
            self.capacity, dim, apart, where, dtype or torch.float32, images, group
        )
        self._generator = torch.Generator().manual_seed(self._seed + RANK_SEEDS * group.rank)
        self._totals, self._strata = Totals(), Strata(self._seed + 2)
        self._drift = torch.ones(2, dtype=torch.float64)  # mean and least of the last refreshed
        self.eviction.bind(self._columns, self._seed + 1)
        self._description = describe(self.eviction, image_shape, duplicates, self.descriptor)
        self._closely: NearDuplicates | None = None
        if duplicates is not None and duplicates.threshold == "auto":
            self._closely = NearDuplicates(self)

    # What goes in.

    @in_full_precision
    def add(
        self,
        ids: Array,
        z: Array,
        images: Array | None = None,
        labels: Array | None = None,
        hashes: Array | None = None,
        producers: Sequence[str | None] | None = None,
    ) -> Admission:
        """Offer a batch, in order. As if each sample were offered alone, but for what
        `Duplicates` says of near-duplicates and what a policy learns between batches.

        On several ranks all call, one without newcomers with empty batches; images travel only to
        the rank that keeps them.

        Args:
            ids: int64 [B].
            z: unit rows [B, D], float32 or float64 (narrower ones are widened to float32).
            images: uint8 [B, C, H, W], where the memory keeps images.
            labels: int64 [B], -1 for none.
            hashes: content hashes, int64 [B], 0 for none.
            producers: the name of who sent each sample; None for nobody, who has no share.

        Raises:
            ValueError: an input breaks its rule; nothing was added. Or a policy from outside chose
                no slot there is; then the rest of the batch counts as refused.
        """
        rows = self._rows(ids, z, images, labels, hashes, producers)
        meeting = None
        if self.group.size > 1:
            meeting = Meeting(rows, self._totals.added, self._columns)
            rows = meeting.rows
        if self.shares is not None and (self._holdings is None or self._holdings.crowded):
            self._holdings = Holdings(self._columns, self.shares)
        found = self._find_duplicates(rows)
        entry = Entry(rows, self._columns, self.eviction, found, self._holdings)
        try:
            entry.run()
        finally:
            admission = entry.admission()
            self._totals.count(admission)
            self._strata.changed(admission.inserted)
        self.eviction.update(
            Feedback(
                inserted=admission.inserted,
                evicted=len(admission.evicted),
                refused=len(admission.refused),
                added=self._totals.added,
            )
        )
        if meeting is not None:
            meeting.send_images(admission.slots)
            admission = entry.admission(meeting.batch)
        return admission

    def _find_duplicates(self, rows: Rows) -> Found | None:
        if self.duplicates is None:
            return None
        if self._closely is None:
            return self.duplicates.find(rows.descriptors, self._columns.descriptor_kA, self.group)
        assert rows.images is not None  # as NearDuplicates saw to
        return self._closely.find(rows.images, rows.images[:0], self.duplicates.action, rows.ids)

    def _rows(
        self,
        ids: Array,
        z: Array,
        images: Array | None,
        labels: Array | None,
        hashes: Array | None,
        producers: Sequence[str | None] | None,
    ) -> Rows:
        """A batch of newcomers, checked."""
        z_BD = check_embeddings(z, self.dim, self.device)
        count, device, columns = len(z_BD), self.device, self._columns
        labels = torch.full((count,), -1, device=device) if labels is None else labels
        hashes = torch.zeros(count, dtype=torch.int64, device=device) if hashes is None else hashes
        where = device if columns.images is None else columns.images.data_KCHW.device
        found = check_images(images, self.image_shape, count, where)
        integers = [
            check_integers(name, value, device, count)
            for name, value in (("ids", ids), ("labels", labels), ("hashes", hashes))
        ]
        key_B = None if producers is None else self._names.keys(producers, count, columns.producers)
        z_BD = self._match_dtype(z_BD)
        return Rows(
            ids=integers[0],
            embeddings=z_BD,
            descriptors=descriptors_of(self.descriptor, z_BD, found, self.descriptors.shape[1]),
            labels=integers[1],
            hashes=integers[2],
            born=torch.arange(self._totals.added, self._totals.added + count, device=device),
            images=found,
            producers=None if key_B is None else to_device(key_B, device),
        )

    def _match_dtype(self, z_BD: Tensor) -> Tensor:
        if z_BD.dtype == torch.float64 and self.dtype != torch.float64 and not self._fixed_dtype:
            state = self.eviction.state()
            self._columns.promote(torch.float64)
            self.eviction.bind(self._columns, self._seed + 1)
            self.eviction.load(state)
            self._count_again()
        return z_BD.to(self.dtype)

    def _count_again(self) -> None:
        """Let the policy forget what it counted in another dtype than the rows have now."""
        every = torch.arange(len(self), device=self.device)
        self.eviction.on_update(every, self.descriptors.clone())

    # What keeps embeddings those of the present encoder.

    def stalest(self, n: int) -> Tensor:
        """The n slots whose embeddings are oldest, int64; ties go to the lowest slot."""
        return torch.argsort(self.encoded, stable=True)[: check_count("n", n, least=0)]

    def on_overwrite(self, watch: Callable[[Tensor], None] | None) -> None:
        """Call `watch` with the slots that a batch is about to overwrite, int64 on the memory's
        device, while they still hold what leaves; those from `len(self)` on hold nothing."""
        self._columns.on_overwrite = watch

    def images_of(self, slots: Array) -> Tensor:
        """Copies of the images of these slots, uint8 [R, C, H, W], on the memory's device;
        ValueError where the memory keeps no images."""
        chosen = check_slots(slots, len(self), self.device)
        if self._columns.images is None:
            raise ValueError("this memory keeps no images: give it image_shape")
        return self._columns.images.read(chosen)

    @in_full_precision
    def refresh(self, slots: Array, z: Array) -> Tensor:
        """Replace the embeddings of these slots, int64 [R], distinct and occupied, by newly made
        ones [R, D] of the same samples. The drift: cosine of old and new, float64 [R]."""
        chosen = check_slots(slots, len(self), self.device)
        new_RD = check_embeddings(z, self.dim, self.device).to(self.dtype)
        if len(new_RD) != len(chosen):
            raise ValueError(f"{len(chosen)} slots but {len(new_RD)} embeddings: must be as many")
        before_RD = self._columns.embeddings[chosen]
        before_RA = self._columns.descriptors[chosen]
        new_RA = self.descriptor.refreshed(before_RA, new_RD)
        self._columns.refresh(chosen, new_RD, new_RA, self._totals.added)
        if self.descriptor.moves:
            self.eviction.on_update(chosen, before_RA)
        self._strata.changed(len(chosen))
        drift_R = (before_RD * new_RD).sum(dim=1, dtype=torch.float64).clamp_(-1, 1)
        if len(drift_R):
            self._drift = torch.stack([drift_R.mean(), drift_R.min()])
        return drift_R

    @torch.no_grad()
    def reencode(
        self, encode: Callable[[Tensor], Tensor], slots: Array | None = None, batch: int = 256
    ) -> Tensor:
        """Compute embeddings anew from the images: of all slots as D-SimCLR does before each step
        (DUEL, section 4), or of the stalest few. Returns what `refresh` does.

        Args:
            encode: uint8 images [b, C, H, W] on the memory's device to unit rows [b, D]. Called
                without gradient.
            slots: distinct and occupied; all that have their image where not given.
            batch: most images encoded at a time, b.

        Raises:
            ValueError: the memory keeps no images, or `encode` gives anything but unit rows; then
                nothing has changed.
        """
        check_count("batch", batch, least=1)
        all_slots = self.stalest(len(self)).sort().values if slots is None else slots
        chosen = check_slots(all_slots, len(self), self.device)
        new_RD = self.embeddings.new_empty(len(chosen), self.dim)
        for start in range(0, len(chosen), batch):
            image_bCHW = self.images_of(chosen[start : start + batch])
            z_bD = check_embeddings(encode(image_bCHW), self.dim, self.device)
            if len(z_bD) != len(image_bCHW):
                raise ValueError(
                    f"encode gave {len(z_bD)} rows for {len(image_bCHW)} images: must be one each"
                )
            new_RD[start : start + batch] = z_bD
        return self.refresh(chosen, new_RD)

    # What is drawn: negatives, and training batches.

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
        """All occupied slots in slot order, as views; or copies of n of them, fewer where fewer are
        occupied, each at most once. `mask` leaves an anchor's own copies out.

        Args:
            n: how many, or None for all.
            generator: a CPU generator; the memory's own where not given.
            how: "uniform": every choice equally likely. "hardest": the largest cosine to any
                anchor, the hardest first; no randomness. "stratified": from each k-means cell of
                the descriptors as many as from any other, as far as it has them, and uniformly
                within; the cells are fitted again when as many rows have changed as there were.
            anchors: unit rows [B, D], for "hardest".
            ids_B, hashes_B: of the anchors, for "hardest": a slot of the same id or content hash is
                left out before choosing.
            each: for "hardest", choose n for each anchor, rather than n for all together; every
                field then has B in front. An anchor that has fewer than n left gets some of those
                left out as well, which `mask` marks.
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
            z_BD = check_embeddings(anchors, self.dim, self.device, "anchor").to(self.dtype)
            if ids_B is None and hashes_B is not None:
                raise ValueError("hashes_B without ids_B: pass the anchors' ids as well")
            barred = [
                None if given is None else check_integers(name, given, self.device, len(z_BD))
                for name, given in (("ids_B", ids_B), ("hashes_B", hashes_B))
            ]
            slots = draws.hardest(n, z_BD, self.negatives(), barred[0], barred[1], each)
        elif how == "stratified" and n:
            cell_k, found = self._strata.cells(columns.descriptor_kA, cells)
            slots = to_device(draws.stratified(n, to_host(cell_k), found, chosen), self.device)
        else:
            slots = draws.uniform(n, k, chosen, self.device)
        return Negatives(columns.embeddings[slots], columns.ids[slots], columns.hashes[slots])

    @in_full_precision
    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        how: DrawOrder = "uniform",
    ) -> Draw:
        """A training batch of n slots: distinct while n <= k, else with replacement. What is drawn
        is counted in `draws`.

        Args:
            n: how many.
            generator: a CPU generator; the memory's own where not given.
            how: "uniform", or "inverse-count": in proportion to 1 / (1 + N(j)), one slot after the
                other, for what `counts` costs; or "epochs": those never drawn first, then each
                slot once before any comes again, in a new order each time.

        Raises:
            ValueError: the memory is empty.
        """
        check_way(how, draws.ORDERS)
        n = check_count("n", n, least=0)
        columns, chosen = self._columns, generator or self._generator
        k = len(self)
        if k == 0:
            raise ValueError("cannot sample from an empty memory: add samples first")
        if how == "inverse-count":
            weight_k = to_host(1 / (1 + self.eviction.counts().clamp(min=0)))
            slots = to_device(draws.weighted(n, weight_k, chosen), self.device)
        elif n > k:
            slots = to_device(torch.randint(k, (n,), generator=chosen), self.device)
        elif how == "epochs":
            slots = draws.by_epochs(n, columns.drawn_epoch[:k], chosen)
        else:
            slots = draws.uniform(n, k, chosen, self.device)
        columns.count_draws(slots)
        images = None if columns.images is None else columns.images.read(slots)
        return Draw(slots, columns.ids[slots], images)

    # What is measured.

    @in_full_precision
    def counts(self) -> Tensor:
        """Duplicate counts N(j) of the occupied slots (DUEL, eq. 5), on descriptors, float64 [k].

        They cost nothing where the policy keeps them, O(K A) with linear h, else O(K^2 A). On
        several ranks over all slots where the policy keeps them, else over this shard alone.
        """
        return self.eviction.counts()

    @in_full_precision
    def collisions(self, z: Array, images: Array | None = None) -> Tensor:
        """Expected collision probability of each anchor with the memory, float64 [B].

        mean_k h(d_b . d_k) over descriptors (DUEL, Definition 2), with the score `measured_by`, or
        the policy's; 0 in an empty memory. O(B K A), O(B A) where a policy of linear h keeps a sum.
        On several ranks over this shard alone, every W-th of the slots.

        Args:
            z: unit rows [B, D].
            images: uint8 [B, C, H, W], where the descriptor reads images.

        Raises:
            ValueError: not unit rows of this dimension, or images missing or of another shape.
        """
        z_BD = check_embeddings(z, self.dim, self.device, "anchor").to(self.dtype)
        found = None
        if self.descriptor.needs_images:
            found = check_images(images, self.image_shape, len(z_BD), self.device)
        row_BA = descriptors_of(self.descriptor, z_BD, found, self.descriptors.shape[1])
        if self.measured_by is None and self.group.size == 1:
            return self.eviction.total(row_BA) / max(1, len(self))
        score = self.measured_by or self.eviction.score
        return score.total(row_BA, self.descriptors) / max(1, len(self))

    @in_full_precision
    def prior(self, z: Array) -> Tensor:
        """tau+ of debiased losses, float64 [B]: the probability that a negative drawn from the
        memory shares an anchor's class, mean_k h(z_b . z_k), in the space in which a loss compares,
        whatever the descriptor is. On several ranks over all slots.

        Args:
            z: unit rows [B, D]; on several ranks the same rows.

        Raises:
            ValueError: not unit rows of this dimension.
        """
        z_BD = check_embeddings(z, self.dim, self.device, "anchor").to(self.dtype)
        if self._columns.shared and self.measured_by is None and self.group.size == 1:
            return self.eviction.total(z_BD) / max(1, len(self))
        score = self.eviction.score if self.measured_by is None else self.measured_by
        total_B = self.group.all_reduce_sum(score.total(z_BD, self.embeddings))
        return total_B / max(1, self.occupied_of_all)

    @in_full_precision
    def stats(self) -> MemoryStats:
        """Numbers of this moment, in O(K D^2) besides the counts, which are sampled where they are
        dear (see MemoryStats.counted). Cheap enough for every few seconds."""
        return measure(self._columns, self.eviction, self._totals, self._drift)

    @in_full_precision
    def effective_cells(self, cells: int = 64) -> float:
        """Exponential of the entropy of the sizes of k-means cells of the embeddings, from 1 to
        `cells`; 0 of an empty memory. Clusters at each call: not for every step."""
        return effective_cells(self.embeddings, cells, self._strata.seed)

    @in_full_precision
    def check_valid(self) -> tuple[bool, str]:
        """Recount everything. (True, "") or (False, what is wrong)."""
        joined = self.group.share(self._totals.inserted - self._totals.evicted)
        if joined != len(self):
            return False, f"{joined} samples should be held by the counters, {len(self)} slots are"
        ok, reason = self._columns.check(self._totals.added)
        return self.eviction.check() if ok else (ok, reason)

    # What a module is: saved, loaded and moved. All of the memory is one flat dict of tensors.

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Everything needed to go on bit-equal: copies, which safetensors takes; with `keep_vars`
        rows and images are the memory's own, which go on changing."""
        state = named("columns", self._columns.state(live=keep_vars))
        state |= named("eviction", self.eviction.state()) | named("strata", self._strata.state())
        state["counters"] = counters(self.capacity_of_all, self._totals)
        if self.group.size > 1:
            state["shard"] = torch.tensor([self.group.rank, self.group.size])
        state["description"] = encode(self._description)
        state["drift"] = self._drift.clone()
        state["generator"] = self._generator.get_state()
        keys = torch.unique(self._columns.producers[: len(self)])
        state["producer_names"] = encode_names(self._names.held(to_host(keys).tolist()))
        for name, value in state.items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As a part of a module that is loaded."""
        del local_metadata, unexpected_keys
        state = {
            name[len(prefix) :]: v for name, v in state_dict.items() if name.startswith(prefix)
        }
        if not state:
            if strict:
                missing_keys.append(f"{prefix}counters")
            return
        try:
            self.load_state_dict(state)
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.') or 'memory'}: {error}")

    @in_full_precision
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over a state of a memory built with the same arguments.

        Args:
            state_dict: of `state_dict`.
            strict, assign: as of every module; a memory's state is whole and copied all the same.

        Returns:
            No missing and no unexpected keys, as a module has it.

        Raises:
            ValueError: the state is of a later version, or of another capacity, dimension, image
                shape, descriptor, eviction policy, score, or of other options of these; then
                nothing has changed. `duplicates` may be another.
        """
        del strict, assign
        state = upgraded(state_dict)
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
        self._holdings, self._names = None, ProducerNames(producer_names(state))
        self._columns.occupied_of_all = self._totals.inserted - self._totals.evicted
        if is_resharded(state):
            self.eviction.bind(self._columns, self._seed + 1)
        if not is_resharded(state) or part(state, "eviction"):
            self.eviction.load(part(state, "eviction"))
        if columns["embeddings"].dtype != self.dtype:
            self._count_again()
        return _IncompatibleKeys([], [])  # as of every module: nothing is missing or left over

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WorkingMemory:
        """Follow the module around it to another device; rows keep their dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device=self.device)).device
        if device != self.device:
            self._move(device)
        return self

    def _move(self, device: torch.device) -> None:
        policy: State = self.eviction.state()
        strata, self._drift = self._strata.state(), self._drift.to(device)
        self._columns.to(device)
        self.descriptor.to(device)
        self.eviction.bind(self._columns, self._seed + 1)
        if set(policy) == set(self.eviction.state()):  # index="auto" may choose otherwise there
            self.eviction.load(policy)
        self._strata.load(strata, device)

    def extra_repr(self) -> str:
        return (
            f"capacity={self.capacity}, dim={self.dim}, occupied={len(self)}, "
            f"eviction={self.eviction.name}, descriptor={self.descriptor!r}"
        )
