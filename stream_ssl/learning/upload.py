"""The way of a batch from main memory to the learner's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.memory.compute import to_device

ON_HOST = ("received_B",)
"""Columns that nothing on the device reads, so they are not copied to it."""


class Upload:
    """An upload of the stream's batches to the device.

    Copies to a GPU go through pinned memory, so the host does not wait for them. Two sets of pinned
    buffers are allocated once and used in turn. A set is filled only after its last copy has ended,
    while the other set may still be in use.

    Args:
        device: the target of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now, self._next = _Pinned(), _Pinned()

    def __call__(self, batch: Batch[NDArray[Any]]) -> Batch[Tensor]:
        """Return the batch as tensors on the device.

        Copies to a GPU overlap with the GPU's computations.
        """
        columns = {
            name: torch.from_numpy(column)
            for name, column in batch.columns().items()
            if name not in ON_HOST
        }
        moved: dict[str, Any]
        if self._device.type == "cuda":
            self._now, self._next = self._next, self._now
            moved = self._now.upload(columns, self._device)
        else:
            moved = {name: column.to(self._device) for name, column in columns.items()}
        return Batch(
            **moved, origins_B=batch.origins_B, offset=batch.offset, rejected=batch.rejected
        )


class _Pinned:
    """One set of pinned buffers by column, with the event of its last copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def upload(self, columns: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._copied.synchronize()
        if _shapes(self._buffers) != _shapes(columns):
            self._buffers = {
                name: torch.empty_like(column, pin_memory=True) for name, column in columns.items()
            }
        for name, column in columns.items():
            self._buffers[name].copy_(column)
        moved = {name: to_device(buffer, device) for name, buffer in self._buffers.items()}
        self._copied.record(torch.cuda.current_stream(device))
        return moved


def _shapes(columns: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: column.shape for name, column in columns.items()}
