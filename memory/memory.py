"""The working memory: a fixed number of sample slots, managed by an eviction policy.

This file admits newcomers. The other parts of a memory are in slots.py (read access),
measurements.py, draws.py (negatives and training batches), reencoding.py and state.py.

Shapes: B newcomers, D embedding, K slots, C H W image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.admission import Admission, Entry, Totals
from stream_ssl.memory.checks import (
    Array,
    Checked,
    check_count,
    check_device,
    check_embeddings,
    check_examples,
    check_image_shape,
    check_images,
    check_integers,
    check_payload,
    check_seed,
    check_slots,
)
from stream_ssl.memory.columns import Columns, Image, Rows, image_column
from stream_ssl.memory.compute import Generator, changes_memory, on_host
from stream_ssl.memory.descriptors import Descriptor, Embedding, check_descriptor, descriptors_of
from stream_ssl.memory.draws import RandomDraws, Strata
from stream_ssl.memory.duplicates import Duplicates, Found
from stream_ssl.memory.eviction import Feedback, MostDuplicated, Policy
from stream_ssl.memory.eviction.base import check_free
from stream_ssl.memory.measurements import Measurements
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.reencoding import Reencoding
from stream_ssl.memory.scores import Score, check_score
from stream_ssl.memory.shards import RANK_SEEDS, Meeting, check_shareable
from stream_ssl.memory.shares import Holdings, ProducerNames, Shares, check_kept
from stream_ssl.memory.state import Stateful, describe


class WorkingMemory(Measurements, RandomDraws, Reencoding, Stateful):
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
        duplicates: the test for near-duplicates at admission, with a `threshold` and an `action`;
            see `Duplicates`. None runs no test.
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
        payload: further columns: an example tensor of one slot's entry by name, such as
            {"action": torch.zeros(4)}. Not on several ranks.

    Raises:
        ValueError: an argument has the wrong type or is out of range, or several ranks cannot share
            a memory with these arguments.

    >>> memory = WorkingMemory(capacity=3, dim=2)
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> admission = memory.add(torch.arange(4), z)
    >>> admission.evicted.tolist(), memory.ids.tolist()
    ([0], [3, 1, 2])
    """

    @torch.inference_mode(False)
    @on_host
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
        payload: Mapping[str, Tensor] | None = None,
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
        check_examples(payload)
        if group.size > 1 and payload:
            raise ValueError("payload needs a memory of one rank")
        self.shares = Shares.of(shares)
        if self.shares is not None:
            check_kept(self.eviction)
        self._holdings: Holdings | None = None  # created from the columns at first use
        self._names = ProducerNames()
        self._fixed_dtype = dtype is not None
        where, self._seed = check_device(device), check_seed(seed)
        self.descriptor.to(where)
        shared = isinstance(self.descriptor, Embedding)
        apart = None if shared else self.descriptor.dim(dim, image_shape)
        images = image_column(self.capacity, image_shape, where, images_on)
        self._columns = Columns(
            self.capacity, dim, apart, where, dtype or torch.float32, images, group, payload
        )
        self._columns.moving = self.descriptor.moving
        self._generator = Generator().manual_seed(self._seed + RANK_SEEDS * group.rank)
        self._totals, self._strata = Totals(), Strata(self._seed + 2)
        self._drift = torch.ones(2, dtype=torch.float64)  # mean and minimum of the last refresh
        self.eviction.bind(self._columns, self._seed + 1)
        self._description = describe(self.eviction, image_shape, duplicates, self.descriptor)
        of_pictures = duplicates is not None and duplicates.threshold == "auto"
        self._near_duplicates = NearDuplicates(self) if of_pictures else None

    # Admission.

    @changes_memory
    def add(
        self,
        ids: Array,
        z: Array,
        images: Array | None = None,
        labels: Array | None = None,
        hashes: Array | None = None,
        producers: Sequence[str | None] | None = None,
        features: Array | None = None,
        payload: Mapping[str, Array] | None = None,
        measure: bool = False,
    ) -> Admission:
        """Offer a batch of newcomers, in order, and return what happened to each of them.

        The result is the same as if each sample were offered alone, with three exceptions: the
        near-duplicate rules of `Duplicates`, policies that learn between batches, and ties, which
        another batch size may break another way.

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
            features: the encoder's features, floating point [B, F], required if the descriptor
                reads features.
            payload: an entry [B, ...] of each further column, by name.
            measure: whether to return the newcomers' collisions too. `collisions` costs more.

        Raises:
            ValueError: an input is invalid, and the memory is unchanged. Also raised if a custom
                policy chooses an invalid slot: then the rest of the batch counts as refused.
        """
        rows = self._rows(ids, z, images, labels, hashes, producers, features, payload)
        own_BA, meeting = rows.descriptors, None
        if self.group.size > 1:
            meeting = Meeting(rows, self._totals.added, self._columns)
            rows = meeting.rows
            assert rows.producers is not None
            self._names.meet(rows.producers, meeting.batch, self.group, self.device)
        if rows.embeddings.dtype != self.dtype and len(rows):  # all inputs are valid now
            self._widen()
        if self.shares is not None and (self._holdings is None or self._holdings.crowded):
            self._holdings = Holdings(self._columns, self.shares)
        found, added = self._find_duplicates(rows), self._totals.added
        collision_B = self._collisions(own_BA, are_next=found is None) if measure else None
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
        return admission if collision_B is None else replace(admission, collisions=collision_B)

    def _find_duplicates(self, rows: Rows) -> Found | None:
        if self.duplicates is None:
            return None
        if (test := self._near_duplicates) is None:
            return self.duplicates.find(rows.descriptors, self._columns.descriptor_kA, self.group)
        assert rows.images is not None  # NearDuplicates checked this
        return test.find(rows.images, rows.images[:0], self.duplicates.action, rows.ids)

    def _rows(
        self,
        ids: Array,
        z: Array,
        images: Array | None,
        labels: Array | None,
        hashes: Array | None,
        producers: Sequence[str | None] | None,
        features: Array | None,
        payload: Mapping[str, Array] | None,
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
        entries = check_payload(payload, columns.payload, count)
        key_B = None if producers is None else self._names.keys(producers, count, columns.producers)
        is_wider = z_BD.dtype == torch.float64 and count > 0 and not self._fixed_dtype
        z_BD = z_BD if is_wider else z_BD.to(self.dtype)
        size = self.descriptors.shape[1]
        row_BA = descriptors_of(self.descriptor, z_BD, found, size, features, join=True)
        return Rows(
            ids=integers[0],
            embeddings=z_BD,
            descriptors=row_BA,
            labels=integers[1],
            hashes=integers[2],
            born=torch.arange(self._totals.added, self._totals.added + count, device=device),
            images=found,
            producers=key_B,
            payload=entries,
        )

    # Removal.

    @changes_memory
    def remove(self, slots: Array) -> Tensor:
        """Remove the samples in these slots, and return their ids.

        The removed samples count as evicted. The remaining samples move to the first slots in order
        of arrival, so their slot numbers change, and the policy counts them again. This takes
        longer in a larger memory.

        Raises:
            ValueError: the slots are not distinct and occupied, or there are several ranks.
        """
        if self.group.size > 1:
            raise ValueError("remove and clear need a memory of one rank")
        chosen = check_slots(slots, len(self), self.device)
        if not len(chosen):
            return chosen
        ids, stays_k = self.ids[chosen], torch.ones(len(self), dtype=torch.bool, device=self.device)
        stays_k[chosen] = False
        stays = stays_k.nonzero().flatten()
        stays = stays[self.born[stays].argsort()]
        state = self._columns.state(live=True)
        rows = {name: column[stays.to(column.device)] for name, column in state.items()}
        self._totals.evicted += len(chosen)
        self._columns.load(rows)
        self._columns.occupied_of_all = len(stays)
        self._holdings = None
        self._strata.changed(len(chosen))
        before = len(stays) + len(chosen)
        self.eviction.bind_after_removal(
            self._columns, self._seed + 1 + self._totals.evicted, len(stays) / before
        )
        if self._near_duplicates is not None:
            self._near_duplicates = NearDuplicates(self)
        return ids

    def clear(self) -> None:
        """Remove all samples; see `remove`."""
        self.remove(Checked(torch.arange(len(self), device=self.device)))

    def _widen(self) -> None:
        """Change the rows to float64."""
        state = self.eviction.state()
        self._columns.promote(torch.float64)
        self.eviction.bind(self._columns, self._seed + 1)
        self.eviction.load(state)
        self._count_again(self.descriptors.clone())

    def extra_repr(self) -> str:
        return (
            f"capacity={self.capacity}, dim={self.dim}, occupied={len(self)}, "
            f"eviction={self.eviction.name}, descriptor={self.descriptor!r}"
        )
