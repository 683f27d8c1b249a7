"""MoCo v2 and D-MoCo: momentum contrast against a working memory.

Shapes: V views, B samples, C channels, H height, W width, D embedding, M positives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods.base import MethodOutput, unit
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.negatives import (
    MemoryNegatives,
    NegativeSet,
    Sampling,
    batch_negatives,
    contrast,
    of_all_ranks,
)

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class MoCo(Momentum):
    """Anchors from the trained encoder, keys and memory from a slow average of it.

    DUEL, Algorithm 2, line 8: the negatives of anchor b are the other keys of the batch and the
    memory. Entries of the same sample id or the same content hash (0: unknown) are masked. The
    memory's eviction policy is the whole difference between MoCo v2 (a queue, Oldest) and D-MoCo
    (MostDuplicated).

    Args:
        encoder, projector, loss: see `Method`.
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform", "hardest" or "stratified", see `MemoryNegatives`.
        common: `momentum` and `key_statistics`, see `Momentum`; and `views`: an anchor, and
            views - 1 positives, the first of which goes to the memory.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
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
        self.check_views(view_VBCHW)
        z_BD = unit(self.projector(self.encoder(view_VBCHW[0])))
        positive_BMD = self.positives(view_VBCHW)
        key_BD = positive_BMD[:, 0]
        negatives = self.negatives(z_BD, key_BD, samples, memory)
        return MethodOutput(contrast(self.loss, z_BD, positive_BMD, negatives, memory), key_BD)

    def positives(self, view_VBCHW: Sequence[Tensor]) -> Tensor:
        """Keys of every view but the anchor's, [B, M, D]."""
        return torch.stack([self.encode_keys(view) for view in view_VBCHW[1:]], dim=1)

    def negatives(
        self, z_BD: Tensor, key_BD: Tensor, samples: Batch[Tensor], memory: WorkingMemory
    ) -> NegativeSet:
        """The keys of the batch and of the memory."""
        anchors = of_all_ranks(samples, memory)
        of_batch = batch_negatives(key_BD, anchors, samples)
        return of_batch.concat(self.memory_negatives.draw(z_BD, anchors, memory))

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.memory_negatives.check(self.loss, memory, batch)
