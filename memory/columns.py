"""The columns of a memory, with one row per slot, and the rows written to them.

Shapes: B newcomers, D embedding, A descriptor, K capacity, k occupied slots, R rows, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.compute import to_device
from stream_ssl.memory.fixed import Fixed
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup

Image = tuple[int, int, int]

NORM_TOLERANCE = 1e-3
"""The largest deviation of a row's norm from 1.

It allows rounding, but not a missing normalisation.
"""

REFUSED = -1
"""The slot number of a newcomer that does not join."""

INTEGER_COLUMNS = (
    *("ids", "labels", "hashes", "born", "encoded", "multiplicity"),
    *("draws", "drawn_epoch", "producers"),
)


WRITTEN_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""The types of the same size as which entries are written that torch cannot write by index."""


def put(column: Tensor, slots: Tensor, value: Tensor) -> None:
    """Write entries of the same dtype to these slots of a column."""
    same = WRITTEN_AS.get(column.dtype, column.dtype)
    column.view(same)[slots] = value.view(same)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that this version of torch can write and read single entries of a payload's dtype."""
    try:
        column, slot = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.int64)
        put(column, slot, column[slot])
    except RuntimeError as error:
        raise ValueError(
            f"payload {name!r} is {dtype}, and torch {torch.__version__} cannot write or read "
            "single entries of it: convert it, such as to float32 or int32"
        ) from error


@dataclass(frozen=True, slots=True)
class Rows:
    """Newcomers, checked and on the memory's device.

    Images are on the device that keeps the memory's images. `descriptors` are the rows on which
    duplicates are counted. If descriptors are the embeddings, both are the same tensor. `born` is
    the number of samples offered to the memory before this one. `multiplicity` is the number of
    samples that a row represents; None means 1 for each.
    """

    ids: Tensor  # int64 [B]
    embeddings: Tensor  # [B, D], unit rows
    descriptors: Tensor  # [B, A], unit rows
    labels: Tensor  # int64 [B], -1: none
    hashes: Tensor  # int64 [B], 0: none
    born: Tensor  # int64 [B]
    images: Tensor | None = None  # uint8 [B, C, H, W]
    multiplicity: Tensor | None = None  # int64 [B]
    producers: Tensor | None = None  # int64 [B], shares.key_of each producer; None: no producers
    payload: Mapping[str, Tensor] = field(default_factory=dict)  # [B, ...] by name

    def __len__(self) -> int:
        return self.ids.shape[0]  # len() of a tensor takes three times as long

    def __getitem__(self, index: slice | Tensor) -> Rows:
        """Return the chosen rows of every column. An index tensor must be on the CPU."""
        at = index if isinstance(index, slice) else to_device(index, self.ids.device)
        images, shared = self.images, self.descriptors is self.embeddings
        if images is not None:
            images = images[at if images.device == self.ids.device else index]
        embeddings = self.embeddings[at]
        return Rows(
            ids=self.ids[at],
            embeddings=embeddings,
            descriptors=embeddings if shared else self.descriptors[at],
            labels=self.labels[at],
            hashes=self.hashes[at],
            born=self.born[at],
            images=images,
            multiplicity=None if self.multiplicity is None else self.multiplicity[at],
            producers=None if self.producers is None else self.producers[index],
            payload={name: value[at] for name, value in self.payload.items()},
        )


class Columns:
    """The storage of K slots. Slots 0 to occupied - 1 hold a sample.

    A sample keeps its slot until the slot is overwritten. Only `load` moves samples.

    The slots are this process's shard of the slots of all ranks. Methods take slots of the shard,
    except `standing`, which takes slots numbered over all ranks.

    Args:
        capacity: K, at least 1.
        dim: D, at least 1.
        descriptor_dim: A. None means that the embeddings are the descriptors, in one column.
        device: the device of every column.
        dtype: the dtype of embeddings and descriptors.
        images: the images kept beside the embeddings, or None.
        group: the ranks that hold the shards, with equally many slots each.
        payload: an example of one slot's entry in each further column, by name.

    Raises:
        ValueError: torch cannot write or read single entries of a further column's dtype.
    """

    ids: Tensor
    labels: Tensor
    hashes: Tensor
    born: Tensor
    encoded: Tensor
    multiplicity: Tensor
    draws: Tensor  # how often a slot's sample was drawn
    drawn_epoch: Tensor  # epoch of its last draw, see draws.by_epochs; 0: none
    producers: Tensor  # shares.key_of the producer of a slot's sample; 0: none
    capacity = Fixed[int]()
    dim = Fixed[int]()

    def __init__(
        self,
        capacity: int,
        dim: int,
        descriptor_dim: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        images: Images | None = None,
        group: RankGroup = SINGLE_PROCESS,
        payload: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.capacity, self.dim, self.device = capacity, dim, torch.device(device)
        self.group, self.occupied = group, 0
        self._elsewhere = 0  # occupied slots of the other shards
        self.written = 0  # slots written so far, known without waiting for the device
        self.embeddings = torch.zeros(capacity, dim, dtype=dtype, device=device)
        self.shared = descriptor_dim is None
        self._apart = None  # descriptors, unless they are the embeddings
        if descriptor_dim is not None:
            self._apart = torch.zeros(capacity, descriptor_dim, dtype=dtype, device=device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, torch.zeros(capacity, dtype=torch.int64, device=device))
        for name, example in (payload or {}).items():
            check_dtype(name, example.dtype)
        self.payload = {
            name: torch.zeros(capacity, *example.shape, dtype=example.dtype, device=device)
            for name, example in (payload or {}).items()
        }
        self.images = images
        self.moving = slice(None)  # the descriptors' columns that new embeddings may change
        self.on_overwrite: Callable[[Tensor], None] | None = None

    @property
    def capacity_of_all(self) -> int:
        """The number of slots of all shards."""
        return self.capacity * self.group.size

    @property
    def occupied_of_all(self) -> int:
        """The number of occupied slots of all shards."""
        return self.occupied + self._elsewhere

    @occupied_of_all.setter
    def occupied_of_all(self, held: int) -> None:
        self.occupied = self.group.share(held)
        self._elsewhere = held - self.occupied

    def standing(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids and births of the samples in these slots of all shards; 0 if empty."""
        if self.group.size == 1:
            return self.ids[slots], self.born[slots]
        mine = self.group.mine(slots)
        at = self.group.own(slots[mine])
        found_2R = slots.new_zeros(2, len(slots))
        found_2R[:, mine] = torch.stack([self.ids[at], self.born[at]])
        ids, born = self.group.all_reduce_sum(found_2R)
        return ids, born

    @property
    def descriptors(self) -> Tensor:
        """The rows on which duplicates are counted, [K, A], unit rows where occupied."""
        return self.embeddings if self._apart is None else self._apart

    @property
    def descriptor_kA(self) -> Tensor:
        """The descriptors of the occupied slots, as a view."""
        return self.descriptors[: self.occupied]

    @property
    def z_kD(self) -> Tensor:
        """The embeddings of the occupied slots, as a view."""
        return self.embeddings[: self.occupied]

    def promote(self, dtype: torch.dtype) -> None:
        """Store embeddings and descriptors in this dtype from now on."""
        self.embeddings = self.embeddings.to(dtype)
        self._apart = None if self._apart is None else self._apart.to(dtype)

    def to(self, device: torch.device) -> None:
        """Move every column to this device, including images that are kept on the device."""
        self.device = device
        self.embeddings = self.embeddings.to(device)
        self._apart = None if self._apart is None else self._apart.to(device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, getattr(self, name).to(device))
        self.payload = {name: column.to(device) for name, column in self.payload.items()}
        if self.images is not None:
            self.images.to(device)

    def write(self, slots: Tensor, rows: Rows) -> None:
        """Overwrite these distinct slots with these rows."""
        if self.on_overwrite is not None:
            self.on_overwrite(slots)
        self.written += len(slots)
        self.embeddings[slots] = rows.embeddings
        if self._apart is not None:
            self._apart[slots] = rows.descriptors
        self.ids[slots], self.labels[slots], self.hashes[slots] = rows.ids, rows.labels, rows.hashes
        self.born[slots] = self.encoded[slots] = rows.born
        # An assignment of a number by index would wait for a GPU.
        for column in (self.draws, self.drawn_epoch):
            column.index_fill_(0, slots, 0)
        if rows.multiplicity is None:
            self.multiplicity.index_fill_(0, slots, 1)
        else:
            self.multiplicity[slots] = rows.multiplicity
        if rows.producers is None:
            self.producers.index_fill_(0, slots, 0)
        else:
            self.producers[slots] = to_device(rows.producers, self.device)
        for name, value in rows.payload.items():
            put(self.payload[name], slots, value)
        if self.images is not None and rows.images is not None:
            self.images.write(slots, rows.images)

    def refresh(self, slots: Tensor, z_RD: Tensor, descriptor_RA: Tensor, now: int) -> None:
        """Write new embeddings and descriptors of the samples in these distinct slots."""
        self.embeddings[slots] = z_RD
        if self._apart is not None:
            self._apart[slots] = descriptor_RA
        self.encoded.index_fill_(0, slots, now)

    def count_draws(self, slots: Tensor) -> None:
        """Count draws of these slots, and record the epoch of each draw.

        A new epoch begins when a slot is drawn that was already drawn in the current epoch.
        """
        self.draws.index_add_(0, slots, torch.ones_like(slots))
        now = self.drawn_epoch[: self.occupied].amax().clamp(min=1)
        self.drawn_epoch[slots] = now + (self.drawn_epoch[slots] == now)

    def check(self, added: int) -> tuple[bool, str]:
        """Check that the occupied rows are possible after `added` samples.

        Errors name the first slot.
        """
        if not 0 <= self.occupied <= self.capacity:
            return False, f"{self.occupied} slots are occupied of {self.capacity}"
        k, born_k, encoded_k = self.occupied, self.born[: self.occupied], self.encoded
        rules = [
            (born_k < 0, "it was born before the first sample"),
            (born_k >= added, f"it was born after the last of {added} samples"),
            (encoded_k[:k] < born_k, "it was encoded before it was born"),
            (encoded_k[:k] > added, f"it was encoded after the last of {added} samples"),
            (self.multiplicity[:k] < 1, "its multiplicity is below 1"),
            (self.draws[:k] < 0, "its number of draws is negative"),
            ((self.draws[:k] == 0) != (self.drawn_epoch[:k] == 0), "its draws have no epoch"),
        ]
        for name, row_kX in (("embedding", self.z_kD), ("descriptor", self.descriptor_kA)):
            norm_k = torch.linalg.vector_norm(row_kX, dim=1)
            rules.append((~torch.isfinite(norm_k), f"its {name} is not finite"))
            rules.append(
                (~((norm_k - 1).abs() <= NORM_TOLERANCE), f"its {name} is not of unit norm")
            )
        for broken_k, what in rules:
            if bool(broken_k.any()):
                return False, f"slot {int(broken_k.nonzero()[0, 0])}: {what}"
        if len(torch.unique(born_k)) != k:
            return False, "two slots were born at the same sample: a row was copied"
        return True, ""

    def _named(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in (*INTEGER_COLUMNS, "embeddings")}
        named |= {f"payload.{name}": column for name, column in self.payload.items()}
        return named if self._apart is None else named | {"descriptors": self._apart}

    def state(self, live: bool = False) -> dict[str, Tensor]:
        """Return the occupied rows of every column.

        With `live` they are views of the columns, otherwise copies.
        """
        state = {name: column[: self.occupied] for name, column in self._named().items()}
        state |= {} if self.images is None else self.images.state(self.occupied)
        return state if live else {name: rows.clone() for name, rows in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load rows that `state` returned, and clear the slots beyond them.

        Images that `state` lacks stay as they are.
        """
        self.occupied = len(state["ids"])
        self.written += self.capacity
        for name, column in self._named().items():
            column.zero_()
            column[: self.occupied] = state[name].to(self.device)
        if self.images is not None and "images" in state:
            self.images.load(state)


class Images:
    """The uint8 images of K slots, in memory.

    Args:
        capacity: K.
        shape: (C, H, W).
        device: the device of the memory, which also keeps the images unless `host` is set.
        host: keep the images in the host's memory, pinned if the device is a GPU.
    """

    shape = Fixed[Image]()

    def __init__(self, capacity: int, shape: Image, device: torch.device, host: bool) -> None:
        self.shape, self.device, self._host = shape, device, host
        self._pinned = host and device.type == "cuda"
        self.data_KCHW = torch.zeros(
            capacity,
            *shape,
            dtype=torch.uint8,
            device="cpu" if host else device,
            pin_memory=self._pinned,
        )

    data_KCHW: Tensor

    def to(self, device: torch.device) -> None:
        """Serve a memory on this device. The images move too, unless the host keeps them."""
        self.device, self._pinned = device, self._host and device.type == "cuda"
        if self._pinned:
            self.data_KCHW = self.data_KCHW.pin_memory()
        elif not self._host:
            self.data_KCHW = self.data_KCHW.to(device)

    def read(self, slots: Tensor) -> Tensor:
        """Return copies of these slots' images, uint8 [R, C, H, W], on the memory's device."""
        if not self._pinned:
            return self.data_KCHW[slots.to(self.data_KCHW.device)].to(self.device)
        # Gather into pinned memory, so that the copy to the GPU is asynchronous.
        chosen = torch.empty((len(slots), *self.shape), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.data_KCHW, 0, slots.cpu(), out=chosen)
        return chosen.to(self.device, non_blocking=True)

    def write(self, slots: Tensor, image_RCHW: Tensor) -> None:
        """Overwrite these distinct slots.

        `image_RCHW` must be on the device that keeps the images.
        """
        self.data_KCHW[slots.to(self.data_KCHW.device)] = image_RCHW

    def state(self, occupied: int) -> dict[str, Tensor]:
        """Return the images of the first `occupied` slots, without a copy."""
        return {"images": self.data_KCHW[:occupied]}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load images that `state` returned, and clear the slots beyond them."""
        images = state["images"]
        self.data_KCHW.zero_()
        self.data_KCHW[: len(images)] = images.to(self.data_KCHW.device)


def image_column(
    capacity: int,
    shape: Image | None,
    device: torch.device,
    images_on: Literal["device", "host"],
) -> Images | None:
    """Return the image storage of a memory with these arguments, or None if it keeps no images."""
    if images_on not in ("device", "host"):
        raise ValueError(f'images_on is {images_on!r}: choose "device" or "host"')
    return None if shape is None else Images(capacity, shape, device, host=images_on == "host")
