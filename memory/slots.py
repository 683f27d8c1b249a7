"""Read access to a memory: the columns of its occupied slots.

Shapes: k occupied slots, D embedding, A descriptor, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stream_ssl.memory.admission import Totals
from stream_ssl.memory.columns import Columns, Image
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.descriptors import Descriptor
from stream_ssl.memory.eviction import Policy
from stream_ssl.memory.fixed import Fixed
from stream_ssl.memory.process_group import RankGroup
from stream_ssl.memory.shares import Holding, ProducerNames, Shares


class Slots(nn.Module):
    """The columns of the occupied slots, in slot order, as views.

    The parts of a memory inherit from this class. `WorkingMemory` combines them and sets the
    attributes.
    """

    capacity = Fixed[int]()
    capacity_of_all = Fixed[int]()
    dim = Fixed[int]()
    image_shape = Fixed[Image | None]()

    eviction: Policy
    descriptor: Descriptor
    group: RankGroup
    shares: Shares | None
    _columns: Columns
    _totals: Totals
    _names: ProducerNames

    def __len__(self) -> int:
        """Return the number of occupied slots, k."""
        return self._columns.occupied

    def __bool__(self) -> bool:
        """Return True, also for an empty memory."""
        return True

    @property
    def written(self) -> int:
        """The number of slots that were written so far. A load of a state writes all of them."""
        return self._columns.written

    @property
    def occupied_of_all(self) -> int:
        """The number of slots that all ranks occupy together. In a single process this is k."""
        return self._columns.occupied_of_all

    @property
    def device(self) -> torch.device:
        """The device of the columns."""
        return self._columns.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings."""
        return self._columns.embeddings.dtype

    @property
    def added(self) -> int:
        """The number of samples offered so far."""
        return self._totals.added

    @property
    def ids(self) -> Tensor:
        """The sample ids, int64 [k]."""
        return self._columns.ids[: len(self)]

    @property
    def embeddings(self) -> Tensor:
        """The embeddings, unit rows [k, D]."""
        return self._columns.z_kD

    @property
    def descriptors(self) -> Tensor:
        """The rows on which duplicates are counted, unit rows [k, A]."""
        return self._columns.descriptor_kA

    @property
    def images(self) -> Tensor | None:
        """The images, uint8 [k, C, H, W], on the device that keeps them; None if none are kept."""
        images = self._columns.images
        return None if images is None else images.data_KCHW[: len(self)]

    @property
    def payload(self) -> dict[str, Tensor]:
        """The further columns, [k, ...] each, by name."""
        return {name: column[: len(self)] for name, column in self._columns.payload.items()}

    @property
    def labels(self) -> Tensor:
        """The labels, int64 [k], -1 for no label. They are used for reports only."""
        return self._columns.labels[: len(self)]

    @property
    def hashes(self) -> Tensor:
        """The content hashes, int64 [k], 0 for no hash."""
        return self._columns.hashes[: len(self)]

    @property
    def born(self) -> Tensor:
        """The number of samples offered before each slot's sample, int64 [k]."""
        return self._columns.born[: len(self)]

    @property
    def encoded(self) -> Tensor:
        """The number of samples offered when each embedding was last computed, int64 [k]."""
        return self._columns.encoded[: len(self)]

    @property
    def multiplicity(self) -> Tensor:
        """The number of samples that each slot represents, including merged ones, int64 [k]."""
        return self._columns.multiplicity[: len(self)]

    @property
    def draws(self) -> Tensor:
        """The number of times that `sample` drew each slot's sample, int64 [k]."""
        return self._columns.draws[: len(self)]

    @property
    def producers(self) -> list[str | None]:
        """The name of the producer of each slot's sample, [k]. None means no producer."""
        keys = to_host(self._columns.producers[: len(self)]).tolist()
        return [self._names.of(key) for key in keys]

    def holdings(self) -> dict[str | None, Holding]:
        """Return the slots that each producer holds and is guaranteed, by name. None means no
        producer.

        On several ranks, both numbers cover this rank's shard only.
        """
        key_k = to_host(self._columns.producers[: len(self)])
        found = self.shares or Shares(part=0.0)
        by_key = found.holdings(key_k, self._columns.capacity)
        return {self._names.of(key): holding for key, holding in by_key.items()}
