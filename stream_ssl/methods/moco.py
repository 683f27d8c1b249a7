"""MoCo v2 and D-MoCo: momentum contrast against a working memory.

Shapes: V views, B samples, C channels, H height, W width, D embedding, M positives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods import against
from stream_ssl.methods.against import Against, Held, How, unit
from stream_ssl.methods.base import MethodOutput
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.norm import Statistics

if TYPE_CHECKING:
    from memory import WorkingMemory


class MoCo(Momentum):
    """Anchors from the trained encoder, keys and memory from a slow average of it.

    DUEL, Algorithm 2, line 8: the negatives of anchor b are the other keys of the batch and the
    memory. Left out are entries of the same sample id or the same content hash (0: unknown). The
    memory's eviction policy is the whole difference between MoCo v2 (a queue, Oldest) and D-MoCo
    (MostDuplicated).

    BatchNorm: see `key_statistics`.

    Args:
        encoder: images to features; copied for the keys.
        projector: features to embeddings; states its `dim`.
        loss: of anchors, positives and negatives.
        momentum: share of the key encoder that each update keeps, in [0, 1).
        views: an anchor, and views - 1 positives; the first of these goes to the memory.
        key_statistics: what the key encoder's BatchNorm uses. "batch": the statistics of the batch
            of keys, sound from the first step on; what a key knows of its batch can leak to its
            anchor. "average": buffers that follow the trained encoder's, so that nothing leaks
            (EMAN); for runs of many times 1 / (1 - momentum) updates.
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform"; "hardest", for each anchor those most similar to
            it; "stratified", from each k-means cell as many as from any other. Drawn by torch's
            global generator. The hardest are another set for each anchor: B x N x D numbers.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        momentum: float = 0.99,
        views: int = 2,
        key_statistics: Statistics = "batch",
        negatives: int | None = None,
        negatives_by: How = "uniform",
    ) -> None:
        super().__init__(encoder, projector, loss, views, momentum, key_statistics)
        self.held = Held(negatives, negatives_by)
        self.train()

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW)
        z_BD = unit(self.projector(self.encoder(view_VBCHW[0])))
        positive_BMD = self.positives(view_VBCHW)
        key_BD = positive_BMD[:, 0]
        compared = self.compared(z_BD, key_BD, samples, memory)
        return MethodOutput(against.apply(self.loss, z_BD, positive_BMD, compared, memory), key_BD)

    def positives(self, view_VBCHW: Sequence[Tensor]) -> Tensor:
        """Keys of every view but the anchor's, [B, M, D]."""
        return torch.stack([self.encode_keys(view) for view in view_VBCHW[1:]], dim=1)

    def compared(
        self, z_BD: Tensor, key_BD: Tensor, samples: Batch[Tensor], memory: WorkingMemory
    ) -> Against:
        """The keys of the batch and of the memory."""
        return against.batch(key_BD, samples, samples).joined(self.held(z_BD, samples, memory))

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        self.held.check(self.loss, memory.capacity, batch)
