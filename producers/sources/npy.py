"""A source of vectors in NumPy files.

Shapes: N vectors of D numbers each.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Skipped, own_fault
from stream_ssl.producers.sources.fields import digest, file_name, label_of, short_id, source_name
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.producers.sources.stored_rows import StoredRows
from stream_ssl.wire.sample import DTYPES, Sample

log = logging.getLogger(__name__)

MAX_HEADER = 2**16  # bytes; version 1 of the format allows no more
HEADERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
"""The reader of the header by version of the format. Version 3 is for arrays of records."""


class NpyVectors(Finite):
    """Vectors of a NumPy file, such as embeddings of another model or sensor readings.

    The file is read vector by vector. Sample ids are FILE~DIGEST/INDEX.

    Args:
        file: a .npy file of float16 or float32 [N, D]. Vectors of float64 are sent as float32.
        labels: a .npy file of integers [N], -1 for no label; null: the samples have no labels.
        name: the source's name; null: the name of the file.

    Raises:
        ValueError: a file is not a NumPy file, or has a wrong shape or type.
        FileNotFoundError: a file does not exist.
    """

    def __init__(
        self, file: Path, labels: Path | None = None, name: str | None = None, **passes: Any
    ) -> None:
        file = Path(file)
        self._value_ND = stored(file)
        if self._value_ND.dtype.kind != "f" or len(self._value_ND.shape) != 2:
            images = self._value_ND.dtype == np.uint8 and len(self._value_ND.shape) in (3, 4)
            remedy = "; send its images with Producer.send, one at a time" * images
            raise ValueError(
                f"{file}: {self._value_ND.dtype} of shape {self._value_ND.shape}: vectors are "
                f"floats of shape [N, D]{remedy}"
            )
        kept = self._value_ND.dtype.name
        self._dtype = kept if kept in DTYPES else "float32"
        self._label_N = None if labels is None else stored(Path(labels))
        if self._label_N is not None and (
            self._label_N.dtype.kind not in "iu" or self._label_N.shape != self._value_ND.shape[:1]
        ):
            raise ValueError(
                f"{labels}: {self._label_N.dtype} of shape {self._label_N.shape}: the labels of "
                f"{file} are {len(self._value_ND)} whole numbers"
            )
        self._prefix = file_name(file)
        ends = (self._value_ND[row].tobytes() for row in (0, -1) if len(self._value_ND))
        label = () if self._label_N is None else (one.tobytes() for one in self._label_N.blocks())
        content = digest([str(self._value_ND.shape).encode(), *ends, *label])
        skipped = Skipped(name or source_name(file.stem))
        super().__init__(skipped, len(self._value_ND), content, **passes)
        if self._value_ND.columns and self.shuffle:
            log.warning(
                "source %s: %s holds its vectors column by column (Fortran order), and reads them "
                "slowly in shuffled order. Save it row by row, or send it with --source.shuffle "
                "false: numpy.save('rows.npy', numpy.load('%s', mmap_mode='r').copy('C'))",
                *(self.name, file, file),
            )

    def _sample(self, index: int) -> Sample | None:
        name = short_id(f"{self._prefix}/{index}")
        label = None
        if self._label_N is not None:
            label = label_of(int(self._label_N[index]), self.skipped, name)
        with np.errstate(over="ignore"):  # overflow gives infinite values, which are rejected
            value_D = self._value_ND[index].astype(self._dtype)
        try:
            return Sample.from_vector(value_D, name, source=self.name, label=label)
        except ValueError as error:
            self.skipped.note("bad vector", name, error)
            return None


def vector_in(data: bytes) -> NDArray[Any]:
    """Return the vector that a .npy file holds, float16 or float32 [D], from the file's bytes.

    Raises:
        ValueError: the bytes are no .npy file, they hold fewer numbers than the header claims, or
            the array is no vector of floats.
    """
    file = io.BytesIO(data)
    try:
        shape, _, dtype = HEADERS[npy_format.read_magic(file)](file)
    except Exception as error:  # NumPy raises errors of any type for a damaged header
        if own_fault(error):
            raise
        raise ValueError(f"the .npy is no array of NumPy ({error})") from None
    if dtype.kind != "f" or len(shape) != 1:
        raise ValueError(
            f"the .npy holds {dtype} of shape {shape}: a vector is floats of shape [D]"
        )
    if not 0 <= shape[0] * dtype.itemsize <= len(data) - file.tell():
        raise ValueError(f"the .npy claims {shape[0]} numbers, and ends before them")
    value_D = np.frombuffer(data, dtype, shape[0], file.tell())
    with np.errstate(over="ignore"):  # overflow gives infinite values, which are rejected
        return value_D.astype(dtype.name if dtype.name in DTYPES else "float32")


def stored(file: Path) -> StoredRows:
    """Return the rows of a .npy file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a .npy file, is an archive (.npz), or needs pickle.
    """
    if not file.exists():
        raise FileNotFoundError(f"no file {file}: write an array with numpy.save, or give another")
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")  # opening a pipe would block
        with file.open("rb") as begin:
            head = begin.read(12)
        if head[6:7] > b"\1" and (size := int.from_bytes(head[8:12], "little")) > MAX_HEADER:
            raise ValueError(f"its header claims {size} bytes; at most {MAX_HEADER} are read")
        form = np.lib.format.open_memmap(file, mode="r")  # only to check and parse the header
        columns = form.ndim == 2 and not form.flags.c_contiguous
        return StoredRows(file, form.dtype, form.shape, form.offset, columns)
    except OSError:
        raise
    except Exception as error:  # NumPy raises errors of any type for a damaged header
        if own_fault(error):
            raise
        raise ValueError(
            f"{file}: no array of NumPy; save one array as .npy, with numpy.save ({error})"
        ) from None
