"""D-SimCLR: SimCLR, and against a memory of images that is encoded again at each step.

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
from stream_ssl.memory.compute import to_host
from stream_ssl.methods.base import Transform
from stream_ssl.methods.negatives import MemoryNegatives, NegativeSet, Sampling
from stream_ssl.methods.simclr import SimCLR

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory

CHUNK = 256
"""Images of the memory encoded at a time."""


class DSimCLR(SimCLR):
    """SimCLR with negatives from a memory of images besides.

    Negatives are those of the batch and the memory's images, which the current encoder encodes
    before each step, with the gradient stopped (DUEL, section 4).

    The fresh embeddings go back to their slots, so that the eviction policy counts duplicates of
    the current embeddings. The paper's memory holds 512 images; each step encodes all of them.

    BatchNorm: as SimCLR. The memory passes in batches of its own, of up to 256; with statistics by
    "batch" its embeddings are normalised as the anchors' are, but by other images, so that an
    anchor could tell the memory from its batch; no statistic singles out its positive, which shares
    its own with all negatives of the batch.

    Args:
        encoder, projector, loss: see `Method`.
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform", "hardest" or "stratified", see `MemoryNegatives`.
        common: `views` and `key_statistics`, see `Method`.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
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
        """All views of the other samples, and the memory."""
        of_batch = super().negatives(z_AD, keys, anchors, memory)
        return of_batch.concat(self.memory_negatives.draw(z_AD, anchors, memory))

    @torch.no_grad()
    def prepare(self, memory: WorkingMemory, transform: Transform) -> None:
        """Encode the memory again; it stays as it is where the encoder gives no unit rows."""
        slots_k = torch.arange(len(memory), device=memory.device)
        if not len(slots_k):
            return
        device = next(self.encoder.parameters()).device
        # Even chunks: the statistics of a last one of few images would be poor.
        size = math.ceil(len(slots_k) / math.ceil(len(slots_k) / CHUNK))
        chunks = [memory.images_of(slots).to(device) for slots in torch.split(slots_k, size)]
        z_kD = torch.cat([self.encode_keys(transform(image_bCHW)) for image_bCHW in chunks])
        all_unit = ((torch.linalg.vector_norm(z_kD, dim=1) - 1).abs() < 1e-3).all()
        if bool(to_host(all_unit)):
            memory.refresh(slots_k, z_kD)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.memory_negatives.check(self.loss, memory, batch, self.views)
