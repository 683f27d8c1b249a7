"""Reads the rows of an array in a file, one at a time.

A memory map would end the process by SIGBUS if the file becomes shorter, or if its disk fails.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20


class StoredRows:
    """The rows of an array that a file contains.

    Args:
        path: the file, which stays open.
        dtype: the type of the numbers.
        shape: the shape of the array, whose first number is the number of rows.
        offset: offset of the first number, in bytes.
        columns: whether the file stores an array [N, D] column by column. Rows in another order
            than that of the file then take D reads each.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        offset: int = 0,
        columns: bool = False,
    ) -> None:
        self.dtype, self.shape, self.columns = dtype, shape, columns
        self._path, self._offset = path, offset
        self._bytes = math.prod(shape[1:]) * dtype.itemsize  # of a row
        self._next = 0  # the row after the one that was read last
        self._first = 0  # the row of the array at which `_block` begins
        self._block: NDArray[Any] = np.empty((0, *shape[1:]), dtype)
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Return a row; a negative number counts from the end.

        Raises:
            OSError: the row cannot be read.
        """
        row %= len(self)
        if self.columns:
            return self._from_columns(row)
        data = self._read(row * self._bytes, self._bytes)
        return np.frombuffer(data, self.dtype).reshape(self.shape[1:])

    def _from_columns(self, row: int) -> NDArray[Any]:
        """Return a row of columns. Rows in their order come from blocks of about BLOCK_BYTES."""
        if not self._first <= row < self._first + len(self._block):
            many = max(1, BLOCK_BYTES // self._bytes) if row == self._next else 1
            try:
                self._block = self._rows(row, min(many, len(self) - row))
            except OSError:  # a file that became shorter may still hold this row
                self._block = self._rows(row, 1)
            self._first = row
        self._next = row + 1
        value: NDArray[Any] = self._block[row - self._first]
        return value

    def _rows(self, first: int, count: int) -> NDArray[Any]:
        step = self.dtype.itemsize
        places = (step * (first + column * len(self)) for column in range(self.shape[1]))
        data = b"".join(self._read(place, step * count) for place in places)
        return np.frombuffer(data, self.dtype).reshape(self.shape[1], count).T.copy()

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all rows in order, about BLOCK_BYTES at a time.

        Raises:
            OSError: a row cannot be read.
        """
        assert not self.columns
        many = max(1, BLOCK_BYTES // self._bytes)
        for row in range(0, len(self), many):
            count = min(many, len(self) - row)
            data = self._read(row * self._bytes, count * self._bytes)
            yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def _read(self, at: int, size: int) -> bytes:
        at += self._offset
        if hasattr(os, "pread"):  # Windows lacks it
            data = os.pread(self._file.fileno(), size, at)
        else:
            self._file.seek(at)
            data = self._file.read(size)
        if len(data) < size:
            raise OSError(
                f"{self._path}: ends before byte {at + size}, and was longer when it was opened; "
                "restore the file"
            )
        return data
