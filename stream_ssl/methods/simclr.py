"""SimCLR: all views of a batch against each other. D-SimCLR: and against the memory, encoded anew.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors, M = V - 1
positives, k slots of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stream_ssl.losses import Loss
from stream_ssl.methods import against
from stream_ssl.methods.against import Against, Held, How, unit
from stream_ssl.methods.base import Method, MethodOutput, Samples, See
from stream_ssl.methods.norm import Statistics, check_statistics, normalising_by

if TYPE_CHECKING:
    from memory import WorkingMemory

CHUNK = 256
"""Images of the memory encoded at a time."""


class SimCLR(Method):
    """Every view is an anchor; its positives are the other views of its sample, its negatives the
    views of the other samples: 2 (B - 1) of them with two views (Chen et al. 2020, eq. 1).

    There is no second encoder; gradients reach anchors, positives and negatives. The memory is
    given the second view's embeddings, detached. It is no source of negatives here, but measures
    the prior, and training batches may be drawn from it. Of the same sample id or content hash
    nothing is a negative.

    BatchNorm: all views pass as one batch. Anchor, positive and negatives share their statistics,
    so that these tell nothing of who is whose positive.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: of anchors, positives and negatives.
        views: V; each is an anchor with V - 1 positives.
        key_statistics: what BatchNorm uses where images are encoded for the memory alone: the
            statistics of their "batch", as anchors have them, or the running "average".

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        views: int = 2,
        key_statistics: Statistics = "batch",
    ) -> None:
        super().__init__(encoder, projector, loss, views)
        check_statistics(key_statistics)
        self.key_statistics: Statistics = key_statistics
        self.train()

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Samples, memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW)
        z_AD = unit(self.projector(self.encoder(torch.cat(list(view_VBCHW)))))
        anchors = samples.repeated(self.views)
        compared = self.compared(z_AD, anchors, memory)
        loss = against.apply(self.loss, z_AD, others(z_AD, self.views), compared, memory)
        return MethodOutput(loss, z_AD.detach()[len(samples) : 2 * len(samples)])

    def compared(self, z_AD: Tensor, anchors: Samples, memory: WorkingMemory) -> Against:
        """All views of the other samples."""
        del memory
        return against.batch(z_AD, anchors, anchors)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        if batch is not None:
            against.check_size(self.loss, batch, self.views, drawn=0)

    @torch.no_grad()
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        with normalising_by(self.key_statistics, self.encoder, self.projector):
            return unit(self.projector(self.encoder(image_BCHW)))


class DSimCLR(SimCLR):
    """SimCLR whose negatives are those of the batch and the memory's images, encoded anew by the
    present encoder before each step, with the gradient stopped (DUEL, section 4).

    The fresh embeddings go back to their slots, so that the eviction policy counts duplicates of
    the present. The paper's memory holds 512 images; each step encodes all of them.

    BatchNorm: as SimCLR. The memory passes in batches of its own, of up to 256; with statistics by
    "batch" its embeddings are normalised as the anchors' are, but by other images, so that an
    anchor could tell the memory from its batch; no statistic singles out its positive, which shares
    its own with all negatives of the batch.

    Args:
        encoder, projector, loss, views, key_statistics: as for SimCLR.
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

    def compared(self, z_AD: Tensor, anchors: Samples, memory: WorkingMemory) -> Against:
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
        if bool(((torch.linalg.vector_norm(z_kD, dim=1) - 1).abs() < 1e-3).all()):
            memory.refresh(slots_k, z_kD)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.held.check(self.loss, memory.capacity, batch, self.views)


def others(z_AD: Tensor, views: int) -> Tensor:
    """The other views of each anchor's sample, [A, V - 1, D]; anchors are ordered view by view."""
    z_VBD = z_AD.view(views, -1, z_AD.shape[1])
    shifted = [z_VBD.roll(-shift, dims=0).flatten(0, 1) for shift in range(1, views)]
    return torch.stack(shifted, dim=1)
