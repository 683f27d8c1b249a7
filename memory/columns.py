"""The columns of the memory, one row a slot, and rows on their way into them.

Shapes: B newcomers, D embedding, K capacity, k occupied slots, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Image = tuple[int, int, int]

INTEGER_COLUMNS = ("ids", "labels", "hashes", "born", "encoded")


@dataclass(frozen=True, slots=True)
class Rows:
    """Newcomers, checked and on the memory's device.

    `born` counts the samples offered to the memory before this one.
    """

    ids: Tensor  # int64 [B]
    embeddings: Tensor  # [B, D], unit rows
    labels: Tensor  # int64 [B], -1: none
    hashes: Tensor  # int64 [B], 0: none
    born: Tensor  # int64 [B]
    images: Tensor | None = None  # uint8 [B, C, H, W]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice | Tensor) -> Rows:
        """The chosen rows, of every column."""
        return Rows(
            ids=self.ids[index],
            embeddings=self.embeddings[index],
            labels=self.labels[index],
            hashes=self.hashes[index],
            born=self.born[index],
            images=None if self.images is None else self.images[index],
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
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        image_shape: Image | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.capacity, self.dim, self.image_shape, self.device = capacity, dim, image_shape, device
        self.occupied = 0
        self.embeddings = torch.zeros(capacity, dim, dtype=dtype, device=device)
        for name in INTEGER_COLUMNS:
            setattr(self, name, torch.zeros(capacity, dtype=torch.int64, device=device))
        self.images = (
            None
            if image_shape is None
            else torch.zeros(capacity, *image_shape, dtype=torch.uint8, device=device)
        )

    ids: Tensor
    labels: Tensor
    hashes: Tensor
    born: Tensor
    encoded: Tensor

    @property
    def full(self) -> bool:
        return self.occupied == self.capacity

    @property
    def z_kD(self) -> Tensor:
        """Embeddings of the occupied slots, a view."""
        return self.embeddings[: self.occupied]

    def promote(self, dtype: torch.dtype) -> None:
        """Hold the embeddings in a wider dtype from now on."""
        self.embeddings = self.embeddings.to(dtype)

    def write(self, slots: Tensor, rows: Rows) -> None:
        """Overwrite these slots, all distinct, with these rows."""
        self.embeddings[slots] = rows.embeddings
        self.ids[slots], self.labels[slots], self.hashes[slots] = rows.ids, rows.labels, rows.hashes
        self.born[slots] = self.encoded[slots] = rows.born
        if self.images is not None and rows.images is not None:
            self.images[slots] = rows.images

    def names(self) -> tuple[str, ...]:
        """The columns in use, by name."""
        return (*INTEGER_COLUMNS, "embeddings", *(("images",) if self.images is not None else ()))

    def state(self) -> dict[str, Tensor]:
        """Copies of the occupied rows of every column."""
        return {name: getattr(self, name)[: self.occupied].clone() for name in self.names()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over rows that `state` made. Slots beyond them are cleared."""
        self.occupied = len(state["ids"])
        for name in self.names():
            column: Tensor = getattr(self, name)
            column.zero_()
            column[: self.occupied] = state[name].to(self.device)
