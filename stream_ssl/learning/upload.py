"""Batches to the device that learns from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.compute import to_device
from stream_ssl.batch import Batch

ON_HOST = ("received_B",)
"""Columns that nothing on the device reads: they are not copied."""


class Upload:
    """Brings batches of the stream to the device.

    To a GPU they go through pinned memory, so that the host does not wait for a copy. There are two
    sets of pinned buffers, made once and used in turn: one is filled while the other may still be
    copied from, and none before its last copy is done.

    Args:
        device: where batches are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now, self._next = _Pinned(), _Pinned()

    def __call__(self, batch: Batch[NDArray[Any]]) -> Batch[Tensor]:
        """The batch as tensors there; copies to a GPU overlap with what it still computes."""
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
    """One set of pinned buffers by column, and the moment when they were last copied from."""

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
