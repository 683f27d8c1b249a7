"""What the slots hold: columns of one row a slot, and rows on their way into them.

Shapes: B newcomers, D embedding, A descriptor, K capacity, k occupied slots, R rows, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.compute import to_device
from stream_ssl.memory.fixed import Fixed
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup

Image = tuple[int, int, int]

NORM_TOLERANCE = 1e-3
"""How far from 1 a row's norm may lie: rounding passes, a forgotten normalisation does not."""

REFUSED = -1
"""In place of the slot that a newcomer takes over: it does not join."""

INTEGER_COLUMNS = (
    *("ids", "labels", "hashes", "born", "encoded", "multiplicity"),
    *("draws", "drawn_epoch", "producers"),
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Newcomers, checked and on the memory's device; images where the memory keeps its images.

    `descriptors` are what duplicates are counted on; where that is the embedding, the same tensor.
    `born` counts the samples offered to the memory before this one. `multiplicity` counts the
    samples that a row stands for; None where each stands for itself alone.
    """

    ids: Tensor  # int64 [B]
    embeddings: Tensor  # [B, D], unit rows
    descriptors: Tensor  # [B, A], unit rows
    labels: Tensor  # int64 [B], -1: none
    hashes: Tensor  # int64 [B], 0: none
    born: Tensor  # int64 [B]
    images: Tensor | None = None  # uint8 [B, C, H, W]
    multiplicity: Tensor | None = None  # int64 [B]
    producers: Tensor | None = None  # int64 [B], shares.key_of each; None: nameless

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice | Tensor) -> Rows:
        """The chosen rows, of every column; an index lies on the CPU."""
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
            producers=None if self.producers is None else self.producers[at],
        )


class Columns:
    """Storage for K slots. Slots 0 .. occupied-1 hold a sample; a row is overwritten, never moved.

    They are this process's shard of the slots of all ranks. What writes or reads its rows takes
    slots of the shard; `standing` takes slots of all.

    Args:
        capacity: K, at least 1.
        dim: D, at least 1.
        descriptor_dim: A; None where the embeddings are the descriptors, one column for both.
        device: where every column lies.
        dtype: of embeddings and descriptors.
        images: the images kept beside the embeddings, or None.
        group: who holds the other shards, as many slots each.
    """

    ids: Tensor
    labels: Tensor
    hashes: Tensor
    born: Tensor
    encoded: Tensor
    multiplicity: Tensor
    draws: Tensor  # how often a slot's sample was drawn
    drawn_epoch: Tensor  # of its last draw, see draws.by_epochs; 0: none
    producers: Tensor  # shares.key_of who sent a slot's sample; 0: nameless
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
    ) -> None:
        self.capacity, self.dim, self.device = capacity, dim, torch.device(device)
        self.group, self.occupied = group, 0
        self._elsewhere = 0  # occupied slots of the other shards
        self.embeddings = torch.zeros(capacity, dim, dtype=dtype, device=device)
        self.shared = descriptor_dim is None
        self._apart = None  # descriptors, where they are not the embeddings
        if descriptor_dim is not None:
            self._apart = torch.zeros(capacity, descriptor_dim, dtype=dtype, device=device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, torch.zeros(capacity, dtype=torch.int64, device=device))
        self.images = images
        self.on_overwrite: Callable[[Tensor], None] | None = None

    @property
    def capacity_of_all(self) -> int:
        """Slots of all shards."""
        return self.capacity * self.group.size

    @property
    def occupied_of_all(self) -> int:
        """Occupied slots of all shards."""
        return self.occupied + self._elsewhere

    @occupied_of_all.setter
    def occupied_of_all(self, held: int) -> None:
        self.occupied = self.group.share(held)
        self._elsewhere = held - self.occupied

    def standing(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Id and insertion time of what these slots of all shards hold; 0 in an empty one."""
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
        """What duplicates are counted on [K, A], unit rows where occupied."""
        return self.embeddings if self._apart is None else self._apart

    @property
    def descriptor_kA(self) -> Tensor:
        """Descriptors of the occupied slots, a view."""
        return self.descriptors[: self.occupied]

    @property
    def z_kD(self) -> Tensor:
        """Embeddings of the occupied slots, a view."""
        return self.embeddings[: self.occupied]

    def promote(self, dtype: torch.dtype) -> None:
        """Hold embeddings and descriptors in this dtype from now on."""
        self.embeddings = self.embeddings.to(dtype)
        self._apart = None if self._apart is None else self._apart.to(dtype)

    def to(self, device: torch.device) -> None:
        """Move every column, images on the device included."""
        self.device = device
        self.embeddings = self.embeddings.to(device)
        self._apart = None if self._apart is None else self._apart.to(device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, getattr(self, name).to(device))
        if self.images is not None:
            self.images.to(device)

    def write(self, slots: Tensor, rows: Rows) -> None:
        """Overwrite these slots, all distinct, with these rows."""
        if self.on_overwrite is not None:
            self.on_overwrite(slots)
        self.embeddings[slots] = rows.embeddings
        if self._apart is not None:
            self._apart[slots] = rows.descriptors
        self.ids[slots], self.labels[slots], self.hashes[slots] = rows.ids, rows.labels, rows.hashes
        self.born[slots] = self.encoded[slots] = rows.born
        self.multiplicity[slots] = 1 if rows.multiplicity is None else rows.multiplicity
        self.draws[slots] = self.drawn_epoch[slots] = 0
        self.producers[slots] = 0 if rows.producers is None else rows.producers
        if self.images is not None and rows.images is not None:
            self.images.write(slots, rows.images)

    def rows(self, slots: Tensor) -> Rows:
        """What these slots hold, copies, without images."""
        embeddings = self.embeddings[slots]
        return Rows(
            self.ids[slots],
            embeddings,
            embeddings if self._apart is None else self._apart[slots],
            self.labels[slots],
            self.hashes[slots],
            self.born[slots],
        )

    def refresh(self, slots: Tensor, z_RD: Tensor, descriptor_RA: Tensor, now: int) -> None:
        """New embeddings, and what follows from them, of the samples in these distinct slots."""
        self.embeddings[slots] = z_RD
        if self._apart is not None:
            self._apart[slots] = descriptor_RA
        self.encoded[slots] = now

    def count_draws(self, slots: Tensor) -> None:
        """These slots were drawn, again where they were in this epoch; an epoch begins with the
        first slot that is drawn again."""
        self.draws.index_add_(0, slots, torch.ones_like(slots))
        now = self.drawn_epoch[: self.occupied].amax().clamp(min=1)
        self.drawn_epoch[slots] = now + (self.drawn_epoch[slots] == now)

    def check(self, added: int) -> tuple[bool, str]:
        """Whether the occupied rows are what `added` samples offered can have left; if not, what is
        wrong, naming the first slot."""
        if not 0 <= self.occupied <= self.capacity:
            return False, f"{self.occupied} slots are occupied of {self.capacity}"
        k, born_k, encoded_k = self.occupied, self.born[: self.occupied], self.encoded
        rules = [
            (born_k < 0, "it was born before the first sample"),
            (born_k >= added, f"it was born after the last of {added} samples"),
            (encoded_k[:k] < born_k, "it was encoded before it was born"),
            (encoded_k[:k] > added, f"it was encoded after the last of {added} samples"),
            (self.multiplicity[:k] < 1, "it stands for less than itself"),
            (self.draws[:k] < 0, "it was drawn less than never"),
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
        return named if self._apart is None else named | {"descriptors": self._apart}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one slot's entry in each part of the state."""
        shapes = {name: tuple(column.shape[1:]) for name, column in self._named().items()}
        return shapes | ({} if self.images is None else self.images.shapes())

    def state(self, live: bool = False) -> dict[str, Tensor]:
        """The occupied rows of every column; `live`: the rows themselves, not copies."""
        state = {name: column[: self.occupied] for name, column in self._named().items()}
        state |= {} if self.images is None else self.images.state(self.occupied)
        return state if live else {name: rows.clone() for name, rows in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over rows that `state` made. Slots beyond them are cleared."""
        self.occupied = len(state["ids"])
        for name, column in self._named().items():
            column.zero_()
            column[: self.occupied] = state[name].to(self.device)
        if self.images is not None:
            self.images.load(state)


class Images:
    """uint8 images of K slots, in memory.

    Args:
        capacity: K.
        shape: (C, H, W).
        device: where the memory computes; the images lie there too unless `host`.
        host: keep them in the host's memory, pinned where the device is a GPU.
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
        """Serve a memory on this device; the images move along unless the host keeps them."""
        self.device, self._pinned = device, self._host and device.type == "cuda"
        if self._pinned:
            self.data_KCHW = self.data_KCHW.pin_memory()
        elif not self._host:
            self.data_KCHW = self.data_KCHW.to(device)

    def read(self, slots: Tensor) -> Tensor:
        """Copies of the images of these slots, uint8 [R, C, H, W], on the memory's device."""
        if not self._pinned:
            return self.data_KCHW[slots.to(self.data_KCHW.device)].to(self.device)
        # Gathered into pinned memory, so that the copy to the GPU need not be waited for.
        chosen = torch.empty((len(slots), *self.shape), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.data_KCHW, 0, slots.cpu(), out=chosen)
        return chosen.to(self.device, non_blocking=True)

    def write(self, slots: Tensor, image_RCHW: Tensor) -> None:
        """Overwrite these slots, all distinct. `image_RCHW` lies where the images lie."""
        self.data_KCHW[slots.to(self.data_KCHW.device)] = image_RCHW

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one slot's entry in each part of the state."""
        return {"images": self.shape}

    def state(self, occupied: int) -> dict[str, Tensor]:
        """What `load` needs to have the images of the first `occupied` slots again; not copied."""
        return {"images": self.data_KCHW[:occupied]}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave. Slots beyond are cleared."""
        images = state["images"]
        self.data_KCHW.zero_()
        self.data_KCHW[: len(images)] = images.to(self.data_KCHW.device)


def image_column(
    capacity: int,
    shape: Image | None,
    device: torch.device,
    images_on: Literal["device", "host"],
) -> Images | None:
    """Where a memory built with these arguments keeps its images; None where it keeps none."""
    if images_on not in ("device", "host"):
        raise ValueError(f'images_on is {images_on!r}: choose "device" or "host"')
    return None if shape is None else Images(capacity, shape, device, host=images_on == "host")
