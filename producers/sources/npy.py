"""Vectors of NumPy files.

Shapes: N vectors, D numbers each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Skipped, own_fault
from stream_ssl.producers.sources.fields import digest, file_name, short_id
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.wire.sample import DTYPES, Sample

MAX_HEADER = 2**16  # bytes, as many as version 1 of the format allows


class NpyVectors(Finite):
    """Vectors of a NumPy file: the embeddings of another model, or sensors' readings.

    The file is mapped, not read at once. Sample ids are FILE~DIGEST/INDEX.

    Args:
        file: .npy of float16 or float32 [N, D]; float64 is sent as float32.
        labels: .npy of whole numbers [N]; null: the samples carry none.
        name: the source's name; null: that of the file.

    Raises:
        ValueError: a file is none of NumPy, or of another shape or type.
        FileNotFoundError: no such file.
    """

    def __init__(
        self, file: Path, labels: Path | None = None, name: str | None = None, **passes: Any
    ) -> None:
        file = Path(file)
        self._value_ND = mapped(file)
        if self._value_ND.dtype.kind != "f" or self._value_ND.ndim != 2:
            raise ValueError(
                f"{file}: {self._value_ND.dtype} of shape {self._value_ND.shape}: vectors are "
                "floats of shape [N, D]"
            )
        kept = self._value_ND.dtype.name
        self._dtype = kept if kept in DTYPES else "float32"
        self._label_N = None if labels is None else mapped(Path(labels))
        if self._label_N is not None and (
            self._label_N.dtype.kind not in "iu" or self._label_N.shape != self._value_ND.shape[:1]
        ):
            raise ValueError(
                f"{labels}: {self._label_N.dtype} of shape {self._label_N.shape}: the labels of "
                f"{file} are {len(self._value_ND)} whole numbers"
            )
        self._prefix = file_name(file)
        self.skipped = Skipped(name or file.stem)
        ends = [self._value_ND[:1].tobytes(), self._value_ND[-1:].tobytes()]
        label = b"" if self._label_N is None else self._label_N.tobytes()
        content = digest([str(self._value_ND.shape).encode(), *ends, label])
        super().__init__(name or file.stem, len(self._value_ND), content, **passes)

    def _sample(self, index: int) -> Sample | None:
        name = short_id(f"{self._prefix}/{index}")
        label = None if self._label_N is None else int(self._label_N[index])
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is refused
            value_D = self._value_ND[index].astype(self._dtype)
        try:
            return Sample.from_vector(value_D, name, source=self.name, label=label)
        except ValueError as error:
            self.skipped.note("bad vector", name, error)
            return None


def mapped(file: Path) -> NDArray[Any]:
    """Return the array of a .npy file, from disk as it is used.

    Raises:
        ValueError: it is none, or an archive of several (.npz), or of objects in need of pickle.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")  # opening a pipe would wait
        with file.open("rb") as begin:
            head = begin.read(12)
        if head[6:7] > b"\1" and (size := int.from_bytes(head[8:12], "little")) > MAX_HEADER:
            raise ValueError(f"its header claims {size} bytes; at most {MAX_HEADER} are read")
        return np.lib.format.open_memmap(file, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy raises whatever a damaged header leads it to
        if own_fault(error):
            raise
        raise ValueError(
            f"{file}: no array of NumPy; save one array as .npy, with numpy.save ({error})"
        ) from None
