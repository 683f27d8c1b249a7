"""The working memory: a fixed number of sample slots, managed by an eviction policy.

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
from stream_ssl.memory.measurements import Measurements
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.scores import Score, check_score
from stream_ssl.memory.shards import RANK_SEEDS, Meeting, check_shareable
from stream_ssl.memory.shares import Holdings, ProducerNames, Shares, check_kept
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


class WorkingMemory(Measurements):
    """A memory of K slots, each with an embedding, a descriptor, an id and optional extras.

    The extras are an image, a label, a content hash and the name of a producer. Several slots may
    hold the same id, so only the slot number identifies a slot. Newcomers fill the empty slots in
    order of arrival. Once the memory is full, the eviction policy chooses the slot that each
    newcomer takes.

    The memory is a `torch.nn.Module` without parameters. A module that contains it saves, loads,
    copies and moves it. Casting that module does not change the dtype of the memory's rows.

    Several ranks can hold one memory. Each rank offers its own newcomers, and the evictions are
    those of a single process that holds all slots and receives the joined batches, first rank
    first. Slot numbers and columns are those of this rank's shard. All ranks must call `add`,
    `prior` and `check_valid` together, and `refresh` if the descriptor depends on embeddings.

    Args:
        capacity: number of slots K, at least 1. On several ranks, the slots of all ranks together.
        dim: size D of an embedding, at least 1.
        eviction: the eviction policy, by default MostDuplicated(). A policy serves one memory.
        image_shape: (C, H, W) of the uint8 images to keep beside the embeddings. None keeps no
            images.
        device: the device of the columns.
        dtype: dtype of the embeddings, float32 or float64. None starts with float32 and changes to
            float64 when the first float64 batch arrives.
        seed: the seed of every random draw, including the draws of the policy.
        duplicates: the test for near-duplicates at admission. None runs no test.
        images_on: where the images are kept: on the "device" with the embeddings, or on the "host".
            Host memory is pinned if the device is a GPU.
        measured_by: the score that `collisions` and `prior` use. None uses the policy's score,
            which is linear for policies without one, such as a queue. A state does not contain it.
        descriptor: the rows on which duplicates are counted (memory/descriptors.py). None uses
            Embedding(), the embeddings themselves, as the DUEL paper does. A descriptor that reads
            images, such as Thumbnail(), needs image_shape.
        group: the ranks that hold the memory together: `ProcessGroup()` under torch.distributed.
            Each of W ranks holds every W-th of the K slots. See above.
        shares: the slots that each producer keeps under any policy (memory/shares.py). A number
            from 0 to below 1 guarantees this part of an equal share. A dict of weights by name
            divides half of the slots by weight, and a producer without a weight has weight 1. None
            guarantees nothing. A state does not contain it.

    Raises:
        ValueError: an argument has the wrong type or is out of range, or several ranks cannot share
            a memory with these arguments.

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
        self._holdings: Holdings | None = None  # created from the columns at first use
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
        self._drift = torch.ones(2, dtype=torch.float64)  # mean and minimum of the last refresh
        self.eviction.bind(self._columns, self._seed + 1)
        self._description = describe(self.eviction, image_shape, duplicates, self.descriptor)
        self._closely: NearDuplicates | None = None
        if duplicates is not None and duplicates.threshold == "auto":
            self._closely = NearDuplicates(self)

    # Admission.

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
        """Offer a batch of newcomers, in order, and return what happened to each of them.

        The result is the same as if each sample were offered alone, with two exceptions: the
        near-duplicate rules of `Duplicates`, and policies that learn between batches.

        On several ranks, all ranks must call this method. A rank without newcomers passes empty
        batches. Images travel only to the rank that keeps them.

        Args:
            ids: sample ids, int64 [B].
            z: unit rows [B, D], float32 or float64. Narrower dtypes are widened to float32.
            images: uint8 [B, C, H, W], required if the memory keeps images.
            labels: int64 [B], -1 for no label.
            hashes: content hashes, int64 [B], 0 for no hash.
            producers: the name of the producer of each sample. None means no producer, and such
                samples have no share.

        Raises:
            ValueError: an input is invalid, and the memory is unchanged. Also raised if a custom
                policy chooses an invalid slot: then the rest of the batch counts as refused.
        """
        rows = self._rows(ids, z, images, labels, hashes, producers)
        meeting = None
        if self.group.size > 1:
            meeting = Meeting(rows, self._totals.added, self._columns)
            rows = meeting.rows
        if self.shares is not None and (self._holdings is None or self._holdings.crowded):
            self._holdings = Holdings(self._columns, self.shares)
        found = self._find_duplicates(rows)
        added = self._totals.added
        entry = Entry(rows, self._columns, self.eviction, found, self._holdings, added)
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
        assert rows.images is not None  # NearDuplicates checked this
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
        """Return the checked newcomers of a batch."""
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
            producers=key_B,
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
        """Make the policy recompute what it counted when the rows had another dtype."""
        every = torch.arange(len(self), device=self.device)
        self.eviction.on_update(every, self.descriptors.clone())

    # Re-encoding with the current encoder.

    def stalest(self, n: int) -> Tensor:
        """Return the n slots with the oldest embeddings, int64. Ties go to the lowest slot."""
        return torch.argsort(self.encoded, stable=True)[: check_count("n", n, least=0)]

    def on_overwrite(self, watch: Callable[[Tensor], None] | None) -> None:
        """Call `watch` before each batch overwrites slots.

        `watch` receives the slots, int64 on the memory's device, while they still hold the old
        samples. Slots from `len(self)` on are empty. None removes the callback.
        """
        self._columns.on_overwrite = watch

    def images_of(self, slots: Array) -> Tensor:
        """Return copies of the images of these slots, uint8 [R, C, H, W], on the memory's device.

        Raises:
            ValueError: the memory keeps no images, or the slots are not distinct and occupied.
        """
        chosen = check_slots(slots, len(self), self.device)
        if self._columns.images is None:
            raise ValueError("this memory keeps no images: give it image_shape")
        return self._columns.images.read(chosen)

    @in_full_precision
    def refresh(self, slots: Array, z: Array) -> Tensor:
        """Replace the embeddings of these slots by new embeddings of the same samples.

        Args:
            slots: int64 [R], distinct and occupied.
            z: the new embeddings, unit rows [R, D].

        Returns:
            The drift: the cosine between the old and the new embedding of each slot, float64 [R].

        Raises:
            ValueError: invalid slots or rows, or different numbers of slots and rows.
        """
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
        """Compute new embeddings from the stored images, and return the drift as `refresh` does.

        D-SimCLR encodes all slots again before each step (DUEL, section 4). It is cheaper to encode
        only the `stalest` slots.

        Args:
            encode: a function from uint8 images [b, C, H, W] on the memory's device to unit rows
                [b, D]. It runs without gradient.
            slots: distinct occupied slots. None means all occupied slots.
            batch: the largest number b of images to encode at a time.

        Raises:
            ValueError: the memory keeps no images, or `encode` did not return unit rows. The memory
                is unchanged.
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

    # Draws: negatives and training batches.

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
        """Return negatives: all occupied slots as views, or copies of n distinct slots.

        Fewer than n slots are returned if fewer are occupied. `Negatives.mask` marks the slots that
        hold the anchor itself.

        Args:
            n: the number of negatives. None returns all occupied slots, in slot order.
            generator: a CPU generator. None uses the memory's own.
            how: "uniform" draws every choice with equal probability. "hardest" takes the slots with
                the largest cosine to any anchor, hardest first, without randomness. "stratified"
                draws equally from all k-means cells of the descriptors, as far as a cell has enough
                rows, and uniformly within a cell. The cells are fitted again after as many rows
                have changed as there were at the last fit.
            anchors: unit rows [B, D], for "hardest".
            ids_B: ids of the anchors, for "hardest". Slots with the same id or content hash are
                excluded before the choice.
            hashes_B: content hashes of the anchors, for "hardest".
            each: for "hardest", choose n slots for each anchor instead of n for all together. Every
                field of the result then has a leading dimension B. An anchor with fewer than n
                allowed slots also gets excluded slots, which `mask` marks.
            cells: the number of k-means cells, for "stratified".

        Raises:
            ValueError: "hardest" without anchors, a choice without n, or an argument that is out of
                range.
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
        """Draw a training batch of n slots, and count the draws in `draws`.

        The slots are distinct while n <= k, and drawn with replacement otherwise.

        Args:
            n: the number of slots.
            generator: a CPU generator. None uses the memory's own.
            how: "uniform" draws with equal probability. "inverse-count" draws one slot after the
                other, in proportion to 1 / (1 + N(j)), and costs as much as `counts`. "epochs"
                first draws slots that were never drawn, then each slot once before any slot comes
                again, in a new order each time.

        Raises:
            ValueError: the memory is empty, or an argument is out of range.
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

    # The torch.nn.Module interface: save, load, move. The state is one flat dict of tensors.

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Add the memory's state to `destination`, from which a memory continues bit-equal.

        The tensors are copies, which safetensors accepts. With `keep_vars`, rows and images are the
        memory's own tensors, which later calls change.
        """
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
        """Load the memory's part of the state of the module that contains it."""
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
        """Load the state of a memory that was built with the same arguments.

        Args:
            state_dict: a result of `state_dict`.
            strict: ignored. It exists for compatibility with `torch.nn.Module`: a state is always
                loaded as a whole and copied.
            assign: ignored, as `strict` is.

        Returns:
            No missing and no unexpected keys, in the form of `torch.nn.Module`.

        Raises:
            ValueError: the state comes from a later version or from a memory with another capacity,
                dimension, image shape, descriptor, eviction policy, score or option of these. The
                memory is then unchanged. Another setting of `duplicates` is allowed.
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
        return _IncompatibleKeys([], [])  # torch's result for a complete load

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WorkingMemory:
        """Move to another device together with the containing module. Rows keep their dtype."""
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
        if set(policy) == set(self.eviction.state()):  # index="auto" depends on the device
            self.eviction.load(policy)
        self._strata.load(strata, device)

    def extra_repr(self) -> str:
        return (
            f"capacity={self.capacity}, dim={self.dim}, occupied={len(self)}, "
            f"eviction={self.eviction.name}, descriptor={self.descriptor!r}"
        )
