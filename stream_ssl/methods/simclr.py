"""SimCLR: contrast between all views of a batch.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.methods.base import Method, MethodOutput, others, repeated, unit
from stream_ssl.methods.negatives import (
    NegativeSet,
    batch_negatives,
    check_size,
    contrast,
    of_all_ranks,
)

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class SimCLR(Method):
    """Contrast between all views of a batch.

    Each view is an anchor. Its positives are the other views of its sample, and its negatives are
    the views of the other samples: 2 (B - 1) negatives with two views (Chen et al. 2020, eq. 1).
    Samples with the same id or content hash are not negatives of each other.

    There is no second encoder: gradients reach anchors, positives and negatives. The memory stores
    the detached embeddings of the second view. SimCLR takes no negatives from the memory, but the
    memory measures the prior, and training batches may be drawn from it.

    BatchNorm: all views pass as one batch. Anchors, positives and negatives share the same
    statistics, so the statistics do not reveal which row is the positive of an anchor.

    Args: see `Method`.
    """

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW, samples)
        z_AD = unit(self.projector(self.encoder(torch.cat(list(view_VBCHW)))))
        anchors = repeated(samples, self.views)
        negatives = self.negatives(z_AD, anchors, of_all_ranks(anchors, memory), memory)
        loss = contrast(self.loss, z_AD, anchors.ids_B, others(z_AD, self.views), negatives, memory)
        return MethodOutput(loss, z_AD.detach()[len(samples) : 2 * len(samples)])

    def negatives(
        self, z_AD: Tensor, keys: Batch[Tensor], anchors: Batch[Tensor], memory: WorkingMemory
    ) -> NegativeSet:
        """Return all views of the other samples.

        Args:
            z_AD: the views' embeddings on this rank.
            keys: ids, hashes and labels of the views on this rank.
            anchors: ids, hashes and labels of the anchors of all ranks.
            memory: not used here.
        """
        del memory
        return batch_negatives(z_AD, anchors, keys)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        if batch is not None:
            check_size(self.loss, batch * memory.group.size, self.views, drawn=0)
