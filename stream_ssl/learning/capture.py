"""The complete state of a run, as checkpoints save it and restarts read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capture:
    """The complete state of a run.

    Attributes:
        tensors: tensors by file name and tensor name.
        facts: values that JSON can store.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


class Copies:
    """Copies of a run's state in main memory, which do not change with the run.

    The copies reuse the same memory each time, because the allocation of new pages takes longer
    than the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def take(self, capture: Capture) -> Capture:
        """Return a copy, which is valid until the next call."""
        files = capture.tensors
        live = {(file, name): tensor for file in files for name, tensor in files[file].items()}
        self._kept = {key: self._copied(key, tensor) for key, tensor in live.items()}
        if any(tensor.is_cuda for tensor in live.values()):
            torch.cuda.synchronize()
        tensors = {file: {name: self._kept[file, name] for name in files[file]} for file in files}
        return Capture(tensors, capture.facts)

    def _copied(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        room = self._kept.get(key)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return room.copy_(tensor.detach(), non_blocking=True)
