"""The slots of a memory that look like a picture from outside.

Shapes: B images, k occupied slots, D embedding, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stream_ssl.feed.decode import content_hashes
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.descriptors import descriptors_of
from stream_ssl.observe.page.memory_reader import spaces

BESIDE = 31
"""Images of the memory that are encoded beside the picture.

BatchNorm may use the statistics of the batch, and a batch of one image has none."""


class PictureSearch:
    """A search of a learner's memory for pictures. It changes neither memory nor learner.

    Args:
        memory: the working memory, which must keep images.
        decode: returns the pixels [C, H, W] on which the learner would train for the bytes of a
            file, or raises ValueError. Any thread may call it.
        encode: returns unit rows [B, D] and features [B, F] of uint8 images, as the learner encodes
            them for the memory. Only the learner's thread calls it.
    """

    def __init__(
        self,
        memory: WorkingMemory,
        decode: Callable[[bytes], Tensor],
        encode: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self.decode = decode
        self._memory, self._encode = memory, encode

    @torch.no_grad()
    def nearest(self, image_CHW: Tensor, count: int) -> dict[str, list[tuple[int, float]]]:
        """Return the nearest (slot, cosine) of a picture, by space, on the learner's thread.

        Slots that hold the picture itself come first, with a cosine of 1, however old their rows
        are. An empty memory has no slots.
        """
        memory = self._memory
        if not len(memory):
            return {space: [] for space in spaces(memory)}
        assert memory.images is not None, "the constructor's caller checked it"
        held = torch.linspace(0, len(memory) - 1, min(len(memory), BESIDE)).long()
        beside_BCHW = memory.images[held.to(memory.images.device)]
        image_1CHW = image_CHW[None].to(beside_BCHW.device)
        encoded = self._encode(torch.cat([image_1CHW, beside_BCHW]))
        z_1D, feature_1F = (rows_BX[:1].to(memory.device) for rows_BX in encoded)
        width = memory.descriptors.shape[1]
        row_1A = descriptors_of(memory.descriptor, z_1D, image_1CHW, width, feature_1F)
        rows = {"embeddings": z_1D, "descriptors": row_1A}
        same = self._holding(image_CHW)[:count]
        found = {}
        for space, by in spaces(memory).items():
            cosine_1n, slot_1n = memory.nearest(rows[by].float(), count, by)
            pairs = zip(to_host(slot_1n[0]).tolist(), to_host(cosine_1n[0]).tolist(), strict=True)
            others = [(slot, cosine) for slot, cosine in pairs if slot not in same]
            found[space] = [*((slot, 1.0) for slot in same), *others][:count]
        return found

    def _holding(self, image_CHW: Tensor) -> list[int]:
        """Return the slots whose image has the pixels of this one."""
        image_1HWC = image_CHW[None].permute(0, 2, 3, 1).contiguous().numpy()
        same_k = self._memory.hashes == int(content_hashes(image_1HWC)[0])
        slots: list[int] = to_host(same_k.nonzero()[:, 0]).tolist()
        return slots
