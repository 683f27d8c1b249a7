"""A batch on the device that learns from it.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from memory import WorkingMemory
    from stream_ssl.ingest.batches import Batch


class Inputs(NamedTuple):
    """uint8 images [B, C, H, W] and what is known of each sample, int64 [B]."""

    image_BCHW: Tensor
    ids_B: Tensor
    labels_B: Tensor  # -1: none
    hashes_B: Tensor  # 0: none
    slots_B: Tensor | None = None  # of the memory they were drawn from

    @classmethod
    def of_batch(cls, batch: Batch, device: torch.device) -> Inputs:
        """A fresh batch; the copies to a GPU overlap with what it still computes."""
        return cls(
            _move(batch.image_BHWC, device).permute(0, 3, 1, 2),
            _move(batch.key_B, device),
            _move(batch.label_B, device),
            _move(batch.hash_B, device),
        )

    @classmethod
    def of_memory(
        cls,
        memory: WorkingMemory,
        count: int,
        device: torch.device,
        how: Literal["uniform", "inverse-count"] = "uniform",
    ) -> Inputs:
        """At most `count` samples of the memory, each at most once, as `WorkingMemory.sample`."""
        draw = memory.sample(min(count, len(memory)), how=how)
        slots, image_BCHW, ids_B = draw.slots, draw.images, draw.ids
        assert image_BCHW is not None, "only a memory that keeps images is drawn from"
        distinct = torch.unique(slots)
        if len(distinct) < len(slots):
            # Where most images are lost, the memory draws what there is more than once.
            slots, image_BCHW = distinct, memory.images_of(distinct)
            ids_B = memory.ids[slots]
        return cls(
            image_BCHW.to(device),
            ids_B.to(device),
            memory.labels[slots].to(device),
            memory.hashes[slots].to(device),
            slots,
        )

    def of(self, rows: Tensor) -> Inputs:
        """These samples of the batch, by int64 on the CPU; slots are left out."""
        rows = rows.to(self.ids_B.device)
        return Inputs(*(column[rows] for column in self._columns))

    def joined(self, other: Inputs) -> Inputs:
        """Both, one after the other; slots are left out."""
        pairs = zip(self._columns, other._columns, strict=True)
        return Inputs(*(torch.cat(pair) for pair in pairs))

    @property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.image_BCHW, self.ids_B, self.labels_B, self.hashes_B

    def __len__(self) -> int:
        return len(self.ids_B)


def _move(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
