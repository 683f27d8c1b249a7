"""Reads and writes tensors in safetensors files, without a leak in a daemon that writes for weeks.

Safetensors takes only paths in UTF-8, maps files into memory, and gives its errors no number. These
functions take any path on any file system.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.numpy
import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn


def load_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the file is damaged.
    """
    try:
        with _numbered(path), _in_utf8(path) as place:
            return safetensors.torch.load_file(place)
    except OSError as error:
        if error.errno != errno.ENODEV or not path.is_file():
            raise
        return safetensors.torch.load(path.read_bytes())  # the file system cannot map files


def as_state(tensors: Mapping[str, Tensor], network: nn.Module) -> OrderedDict[str, Tensor]:
    """Return a file's tensors as the state of a network, with the versions of its layers.

    `state_dict` keeps these versions beside the tensors, and a file holds only tensors. Some layers
    refuse a state without a version, such as those of torchvision's MNASNet.
    """
    state = OrderedDict(tensors)
    state._metadata = network.state_dict()._metadata  # type: ignore[attr-defined]
    return state


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors of a file; see `load_file`."""
    try:
        with _numbered(path), _in_utf8(path) as place, safe_open(place, "pt") as tensors:
            return list(tensors.keys())
    except OSError as error:
        if error.errno != errno.ENODEV or not path.is_file():
            raise
        return list(safetensors.torch.load(path.read_bytes()))


@contextmanager
def _numbered(path: Path) -> Iterator[None]:
    """Give an error of the system its number.

    Safetensors says that a file does not exist, for every reason why it cannot be opened. Without
    the number, a lack of descriptors would look like a damaged file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        if error.errno is None:
            with path.open("rb"):  # raises the error with its number
                pass
        raise


@contextmanager
def _in_utf8(path: Path) -> Iterator[Path]:
    """Yield a path of the same file in UTF-8."""
    if str(path) == str(path).encode(errors="ignore").decode():
        yield path
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield Path(f"/proc/self/fd/{folder}") / path.name
    finally:
        os.close(folder)


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
        with _in_utf8(path) as place:
            try:
                arrays = {name: tensor.numpy() for name, tensor in whole.items()}
            except TypeError:  # NumPy has no bfloat16
                safetensors.torch.save_file(unshared(whole), place)
            else:
                safetensors.numpy.save_file(arrays, place)
    except SafetensorError as error:  # safetensors raises it when the disk is full
        raise OSError(f"{path}: {error}") from error


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
