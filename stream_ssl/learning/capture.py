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


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors of which no two share memory, because safetensors refuses others.

    A network whose layer has two names has two tensors in the same memory.
    """
    known, found = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        at = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if at in known else whole
        known.add(at)
    return found
