"""Writes tensors to safetensors files, without a leak in a daemon that writes for weeks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.numpy
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name, which `safetensors.torch.load_file` reads.

    Safetensors gets NumPy arrays of the same memory. `safetensors.torch.save_file` would leak 6 kB
    for each new size of a tensor, because ctypes keeps two types for each size for ever. A daemon
    writes for weeks, and some of its tensors have another size each time.

    Raises:
        OSError: the disk is full or failed.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        try:
            arrays = {name: tensor.numpy() for name, tensor in whole.items()}
        except TypeError:  # NumPy has no bfloat16
            safetensors.torch.save_file(unshared(whole), path)
        else:
            safetensors.numpy.save_file(arrays, path)
    except SafetensorError as error:  # safetensors raises it when the disk is full
        raise OSError(str(error)) from error


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that do not share memory, as safetensors requires.

    A network whose layer has two names has two tensors in the same memory.
    """
    known, found = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        at = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if at in known else whole
        known.add(at)
    return found
