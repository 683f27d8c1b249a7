"""The complete state of a run, as checkpoints save it and restarts read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def copied(self) -> Capture:
        """Return a copy in main memory, which does not change with the run."""
        copies = {
            file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in self.tensors.items()
        }
        return Capture(copies, self.facts)
