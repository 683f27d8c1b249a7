"""What can be read of a memory: the columns of its occupied slots.

Shapes: k occupied slots, D embedding, A descriptor, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stream_ssl.memory.admission import Totals
from stream_ssl.memory.columns import Columns
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.shares import Holding, ProducerNames, Shares


class Slots(nn.Module):
    """The columns of the occupied slots, in slot order. They are views, never copies."""

    shares: Shares | None
    _columns: Columns
    _totals: Totals
    _names: ProducerNames

    def __len__(self) -> int:
        """k"""
        return self._columns.occupied

    def __bool__(self) -> bool:
        """A memory is there, empty or not."""
        return True

    @property
    def occupied_of_all(self) -> int:
        """Return how many slots all ranks occupy together. In a single process this is k."""
        return self._columns.occupied_of_all

    @property
    def device(self) -> torch.device:
        return self._columns.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings."""
        return self._columns.embeddings.dtype

    @property
    def added(self) -> int:
        """How many samples have been offered."""
        return self._totals.added

    @property
    def ids(self) -> Tensor:
        """int64 [k]."""
        return self._columns.ids[: len(self)]

    @property
    def embeddings(self) -> Tensor:
        """Unit rows [k, D]."""
        return self._columns.z_kD

    @property
    def descriptors(self) -> Tensor:
        """What duplicates are counted on, unit rows [k, A]."""
        return self._columns.descriptor_kA

    @property
    def images(self) -> Tensor | None:
        """uint8 [k, C, H, W] where the images lie; None in a memory that keeps none."""
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

    @property
    def draws(self) -> Tensor:
        """int64 [k]: how often `sample` drew what a slot holds."""
        return self._columns.draws[: len(self)]

    @property
    def producers(self) -> list[str | None]:
        """The name of who sent what each slot holds; None for nobody. [k]"""
        keys = to_host(self._columns.producers[: len(self)]).tolist()
        return [self._names.of(key) for key in keys]

    def holdings(self) -> dict[str | None, Holding]:
        """Return what each producer holds and is guaranteed, by name; None stands for nobody.

        On several ranks both numbers are of this rank's shard alone.
        """
        key_k = to_host(self._columns.producers[: len(self)])
        found = self.shares or Shares(part=0.0)
        by_key = found.holdings(key_k, self._columns.capacity)
        return {self._names.of(key): holding for key, holding in by_key.items()}
