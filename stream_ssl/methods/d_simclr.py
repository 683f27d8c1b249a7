"""D-SimCLR: SimCLR, and against a memory of images that is encoded anew at each step.

Shapes: A anchors, D embedding, k slots of the memory, b images encoded at a time, C channels, H
height, W width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memory.compute import to_host
from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods.against import Against, Held, How
from stream_ssl.methods.base import See
from stream_ssl.methods.norm import Statistics
from stream_ssl.methods.simclr import SimCLR

if TYPE_CHECKING:
    from memory import WorkingMemory

CHUNK = 256
"""Images of the memory encoded at a time."""


class DSimCLR(SimCLR):
    """SimCLR against a memory of images besides.

    Negatives are those of the batch and the memory's images, encoded anew by the present encoder
    before each step, with the gradient stopped (DUEL, section 4).

    The fresh embeddings go back to their slots, so that the eviction policy counts duplicates of
    the present. The paper's memory holds 512 images; each step encodes all of them.

    BatchNorm: as SimCLR. The memory passes in batches of its own, of up to 256; with statistics by
    "batch" its embeddings are normalised as the anchors' are, but by other images, so that an
    anchor could tell the memory from its batch; no statistic singles out its positive, which shares
    its own with all negatives of the batch.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: of anchors, positives and negatives.
        views: V; each is an anchor with V - 1 positives.
        key_statistics: what BatchNorm uses where the memory's images are encoded: the statistics of
            their "batch", as anchors have them, or the running "average".
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform", "hardest" for each anchor, or "stratified".

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    needs_images = True

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        views: int = 2,
        key_statistics: Statistics = "batch",
        negatives: int | None = None,
        negatives_by: How = "uniform",
    ) -> None:
        super().__init__(encoder, projector, loss, views, key_statistics)
        self.held = Held(negatives, negatives_by)

    def compared(self, z_AD: Tensor, anchors: Batch[Tensor], memory: WorkingMemory) -> Against:
        """All views of the other samples, and the memory."""
        return super().compared(z_AD, anchors, memory).joined(self.held(z_AD, anchors, memory))

    @torch.no_grad()
    def prepare(self, memory: WorkingMemory, see: See) -> None:
        """Encode the memory anew; nothing changes where the encoder gives no unit rows."""
        slots_k = memory.stalest(len(memory)).sort().values  # without those whose image is lost
        if not len(slots_k):
            return
        device = next(self.encoder.parameters()).device
        # Even chunks: the statistics of a last one of few images would be poor.
        size = math.ceil(len(slots_k) / math.ceil(len(slots_k) / CHUNK))
        chunks = [memory.images_of(slots).to(device) for slots in torch.split(slots_k, size)]
        z_kD = torch.cat([self.encode_keys(see(image_bCHW)) for image_bCHW in chunks])
        sound = ((torch.linalg.vector_norm(z_kD, dim=1) - 1).abs() < 1e-3).all()
        if bool(to_host(sound)):
            memory.refresh(slots_k, z_kD)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.held.check(self.loss, memory.capacity, batch, self.views)
