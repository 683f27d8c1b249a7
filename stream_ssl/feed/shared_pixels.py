"""Pixels in memory that two processes share."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SharedPixels:
    """An array of uint8 that a process started by `multiprocessing` shares with this one.

    It lies in no file system: containers limit /dev/shm to 64 MB, and a write beyond that limit
    kills the process. It is freed when both processes have ended or dropped it.

    Args:
        shape: the shape of the array.
        file: the open file that holds it; None makes a new one.

    Attributes:
        array: the array.
    """

    def __init__(self, shape: tuple[int, ...], file: int | None = None) -> None:
        size = math.prod(shape)
        self._file, self._shape = _new_file() if file is None else file, shape
        if file is None:
            os.ftruncate(self._file, size)
        mapped = mmap.mmap(self._file, size)
        self.array: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8).reshape(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes this array in a process that is being started."""
        return _received, (self._shape, reduction.DupFd(self._file))

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # no file could be opened
            os.close(self._file)


def _received(shape: tuple[int, ...], file: Any) -> SharedPixels:
    return SharedPixels(shape, file.detach())


def _new_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("stream-ssl-pixels")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
