"""What can be read of a memory, a column each.

Shapes: D embedding, k occupied slots, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns


class ColumnViews:
    """The columns of the occupied slots, in slot order. All are views, never copies."""

    _columns: Columns

    def __len__(self) -> int:
        """k"""
        return self._columns.occupied

    @property
    def device(self) -> torch.device:
        return self._columns.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings."""
        return self._columns.embeddings.dtype

    @property
    def ids(self) -> Tensor:
        """int64 [k]."""
        return self._columns.ids[: len(self)]

    @property
    def embeddings(self) -> Tensor:
        """Unit rows [k, D]."""
        return self._columns.z_kD

    @property
    def images(self) -> Tensor | None:
        """uint8 [k, C, H, W] where the images lie, zeros where one is lost (memory/images.py);
        None in a memory that keeps none.
        """
        images = self._columns.images
        return None if images is None else images.data_KCHW[: len(self)]

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

    @property
    def multiplicity(self) -> Tensor:
        """int64 [k]: samples that a slot stands for, those merged into it and itself."""
        return self._columns.multiplicity[: len(self)]
