"""The columns of the memory, one row a slot, and rows on their way into them.

Shapes: B newcomers, D embedding, K capacity, k occupied slots, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memory.images import Image, Images

INTEGER_COLUMNS = ("ids", "labels", "hashes", "born", "encoded", "multiplicity")


@dataclass(frozen=True, slots=True)
class Rows:
    """Newcomers, checked and on the memory's device; images where the memory keeps its images.

    `born` counts the samples offered to the memory before this one. `multiplicity` counts the
    samples that a row stands for; None where each stands for itself alone.
    """

    ids: Tensor  # int64 [B]
    embeddings: Tensor  # [B, D], unit rows
    labels: Tensor  # int64 [B], -1: none
    hashes: Tensor  # int64 [B], 0: none
    born: Tensor  # int64 [B]
    images: Tensor | None = None  # uint8 [B, C, H, W]
    multiplicity: Tensor | None = None  # int64 [B]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice | Tensor) -> Rows:
        """The chosen rows, of every column; an index lies on the CPU."""
        return Rows(
            ids=self.ids[index],
            embeddings=self.embeddings[index],
            labels=self.labels[index],
            hashes=self.hashes[index],
            born=self.born[index],
            images=None if self.images is None else self.images[index],
            multiplicity=None if self.multiplicity is None else self.multiplicity[index],
        )

    def with_embeddings(self, z_BD: Tensor) -> Rows:
        """The same samples with these embeddings."""
        return replace(self, embeddings=z_BD)


class Columns:
    """Storage for K slots. Slots 0 .. occupied-1 hold a sample; a row is overwritten, never moved.

    Args:
        capacity: K, at least 1.
        dim: D, at least 1.
        image_shape: (C, H, W) of the uint8 images kept beside the embeddings, or None.
        device: where every column lies.
        dtype: of the embeddings.
        images: where the images lie; with the embeddings where not given.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        image_shape: Image | None,
        device: torch.device,
        dtype: torch.dtype,
        images: Images | None = None,
    ) -> None:
        self.capacity, self.dim, self.image_shape, self.device = capacity, dim, image_shape, device
        self.occupied = 0
        self.embeddings = torch.zeros(capacity, dim, dtype=dtype, device=device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, torch.zeros(capacity, dtype=torch.int64, device=device))
        self.images = images
        if images is None and image_shape is not None:
            self.images = Images(capacity, image_shape, device, host=False)

    ids: Tensor
    labels: Tensor
    hashes: Tensor
    born: Tensor
    encoded: Tensor
    multiplicity: Tensor

    @property
    def full(self) -> bool:
        return self.occupied == self.capacity

    @property
    def z_kD(self) -> Tensor:
        """Embeddings of the occupied slots, a view."""
        return self.embeddings[: self.occupied]

    def promote(self, dtype: torch.dtype) -> None:
        """Hold the embeddings in this dtype from now on."""
        self.embeddings = self.embeddings.to(dtype)

    def write(self, slots: Tensor, rows: Rows) -> None:
        """Overwrite these slots, all distinct, with these rows."""
        self.embeddings[slots] = rows.embeddings
        self.ids[slots], self.labels[slots], self.hashes[slots] = rows.ids, rows.labels, rows.hashes
        self.born[slots] = self.encoded[slots] = rows.born
        if rows.multiplicity is None:
            self.multiplicity[slots] = 1
        else:
            self.multiplicity[slots] = rows.multiplicity
        if self.images is not None and rows.images is not None:
            self.images.write(slots, rows.images)

    def with_images(self) -> Tensor | None:
        """Slots whose image is there, int64 in slot order; None for all occupied ones."""
        lost_k = None if self.images is None else self.images.lost(self.occupied)
        return None if lost_k is None else (~lost_k).nonzero()[:, 0].to(self.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one slot's entry in each part of the state."""
        names = dict.fromkeys(INTEGER_COLUMNS, ()) | {"embeddings": (self.dim,)}
        return names | ({} if self.images is None else self.images.shapes())

    def state(self) -> dict[str, Tensor]:
        """Copies of the occupied rows of every column."""
        state = {name: getattr(self, name)[: self.occupied].clone() for name in INTEGER_COLUMNS}
        state["embeddings"] = self.z_kD.clone()
        return state | ({} if self.images is None else self.images.state(self.occupied))

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over rows that `state` made. Slots beyond them are cleared."""
        self.occupied = len(state["ids"])
        for name in (*INTEGER_COLUMNS, "embeddings"):
            column: Tensor = getattr(self, name)
            column.zero_()
            column[: self.occupied] = state[name].to(self.device)
        if self.images is not None:
            self.images.load(state)
