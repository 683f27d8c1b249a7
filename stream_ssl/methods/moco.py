"""MoCo v2 and D-MoCo: momentum contrast against a working memory.

Shapes: V views, B samples, C channels, H height, W width, D embedding, M positives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, Mix
from stream_ssl.methods.base import MethodOutput, unit
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.negatives import (
    MemoryNegatives,
    Sampling,
    batch_negatives,
    contrast,
    of_all_ranks,
)

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class MoCo(Momentum):
    """Contrast of anchors from the trained encoder with keys from its slow average.

    The negatives of an anchor are the other keys of the batch and the memory (DUEL, Algorithm 2,
    line 8). Entries with the anchor's sample id or content hash are masked (hash 0: unknown). MoCo
    v2 and D-MoCo differ only in the memory's eviction policy: a queue (Oldest) for MoCo v2, and
    MostDuplicated for D-MoCo.

    Args:
        encoder: see `Method`.
        projector: see `Method`.
        loss: see `Method`.
        negatives: number n of memory slots that an anchor is compared with; null: all.
        negatives_by: how the n slots are chosen: "uniform", "hardest" or "stratified", see
            `MemoryNegatives`.
        common: `momentum` and `key_statistics`, see `Momentum`; and `views`: one anchor and
            views - 1 positives. The memory stores the first positive.

    Raises:
        ValueError: an argument is outside its range, or the loss does not fit.
    """

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

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW, samples)
        z_BD = unit(self.projector(self.encoder(view_VBCHW[0])))
        return self.contrasted(z_BD, view_VBCHW, samples, memory)

    def contrasted(
        self,
        z_BD: Tensor,
        view_VBCHW: Sequence[Tensor],
        samples: Batch[Tensor],
        memory: WorkingMemory,
        mix: Mix | None = None,
    ) -> MethodOutput:
        """Return the loss of anchors, and the keys of their first positives.

        Args:
            z_BD: the anchors, unit rows.
            view_VBCHW: the views; all views except the first are positives.
            samples: the samples of the anchors.
            memory: the memory. Its keys and the keys of the batch are the negatives.
            mix: how pairs of samples were mixed to make the anchors; None: not at all.
        """
        positive_BMD = torch.stack([self.encode_keys(view) for view in view_VBCHW[1:]], dim=1)
        key_BD = positive_BMD[:, 0]
        of_ranks = of_all_ranks(samples, memory)
        of_batch = batch_negatives(key_BD, of_ranks, samples)
        negatives = of_batch.concat(self.memory_negatives.draw(z_BD, of_ranks, memory))
        loss = contrast(self.loss, z_BD, samples.ids_B, positive_BMD, negatives, memory, mix)
        return MethodOutput(loss, key_BD)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.memory_negatives.check(self.loss, memory, batch)
