"""D-SimCLR: SimCLR with additional negatives from a memory of images, encoded again at each step.

Shapes: A anchors, D embedding, k slots of the memory, b images encoded at a time, C channels, H
height, W width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.memory.checks import Checked
from stream_ssl.memory.compute import to_host
from stream_ssl.methods.base import Transform, is_unit
from stream_ssl.methods.negatives import MemoryNegatives, NegativeSet, Sampling
from stream_ssl.methods.simclr import SimCLR

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory

CHUNK = 256
"""Largest number of memory images encoded at a time."""


class DSimCLR(SimCLR):
    """SimCLR with additional negatives from a memory of images.

    The negatives are those of SimCLR and the memory's images. The current encoder encodes these
    images before each step, with the gradient stopped (DUEL, section 4). In the paper the memory
    holds 512 images, and each step encodes all of them.

    The fresh embeddings replace the older ones in their slots, so the eviction policy counts
    duplicates by current embeddings.

    BatchNorm: as in SimCLR. The memory's images pass in separate batches of up to 256. With
    `key_statistics` "batch" their statistics differ from those of the anchors' batch. So an anchor
    could distinguish the memory from its batch. But no statistic reveals an anchor's positive,
    because the positive has the same statistics as all negatives of the batch.

    Args:
        encoder: see `Method`.
        projector: see `Method`.
        loss: see `Method`.
        negatives: number n of memory slots that an anchor is compared with; null: all.
        negatives_by: how the n slots are chosen: "uniform", "hardest" or "stratified", see
            `MemoryNegatives`.
        common: `views` and `key_statistics`, see `Method`.

    Raises:
        ValueError: an argument is outside its range, or the loss does not fit.
    """

    needs_images = True

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        negatives: int | None = None,
        negatives_by: Sampling = "uniform",
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        self.memory_negatives = MemoryNegatives(negatives, negatives_by)

    def negatives(
        self, z_AD: Tensor, keys: Batch[Tensor], anchors: Batch[Tensor], memory: WorkingMemory
    ) -> NegativeSet:
        """Return all views of the other samples, and the memory's negatives."""
        of_batch = super().negatives(z_AD, keys, anchors, memory)
        return of_batch.concat(self.memory_negatives.draw(z_AD, anchors, memory))

    @torch.no_grad()
    def prepare(self, memory: WorkingMemory, transform: Transform) -> None:
        """Encode the memory's images again and refresh its embeddings.

        The shard of this rank stays unchanged if the encoder gives rows whose norm is not 1.
        """
        slots_k, z_kD = torch.arange(len(memory), device=memory.device), memory.embeddings[:0]
        if len(slots_k):
            weight = next(self.encoder.parameters())  # a method may be cast, such as by double()
            # Chunks of equal size, because a small last chunk would have poor batch statistics.
            size = math.ceil(len(slots_k) / math.ceil(len(slots_k) / CHUNK))
            chunks = (memory.images_of(Checked(slots)) for slots in torch.split(slots_k, size))
            views = (transform(chunk.to(weight.device)).to(weight) for chunk in chunks)
            z_kD = torch.cat([self.encode_keys(view) for view in views])
        if not bool(to_host(is_unit(z_kD))):
            slots_k, z_kD = slots_k[:0], z_kD[:0]
        # Counts are kept over all ranks, so a rank refreshes together with the others.
        if len(slots_k) or memory.group.size > 1:
            memory.refresh(Checked(slots_k), Checked(z_kD))

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.memory_negatives.check(self.loss, memory, batch, self.views)
