"""Vectors of the journal, as bytes that batches and the memory carry like an image's.

Legend: B samples of a chunk, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stream_ssl.ingest.decode import BadSample, Pixels, Row, checked
from stream_ssl.wire import Sample
from stream_ssl.wire.sample import DTYPES


class VectorDecoder:
    """Turns vectors into their bytes, uint8 [1, 1, D * itemsize], of one dtype.

    Args:
        dim: D; vectors of another length are refused.
        dtype: of what is kept, "float16" or "float32"; vectors of the other are converted.
    """

    def __init__(self, dim: int, dtype: str = "float32") -> None:
        self.dim, self.dtype = dim, dtype
        self._kept = np.dtype(DTYPES[dtype])
        self.shape_HWC = (1, 1, dim * self._kept.itemsize)

    def __call__(self, row: Row, data: bytes | memoryview, source: str) -> Pixels:
        """The bytes of one sample; see `Decoder`.

        Raises:
            BadSample: no vector of D finite numbers.
        """
        return self.decode(checked(row, data, source))

    def decode(self, sample: Sample) -> Pixels:
        """The same of a sample that is checked already.

        Raises:
            BadSample: no vector of D finite numbers.
        """
        if sample.codec != "vector" or sample.dtype is None:
            raise BadSample(
                "format", f"an image came as {sample.codec}, and this run learns from vectors"
            )
        if sample.shape != (self.dim,):
            raise BadSample("shape", f"a vector of shape {sample.shape} came, D is {self.dim}")
        sent_D = np.frombuffer(sample.data, DTYPES[sample.dtype])
        with np.errstate(over="ignore"):  # beyond float16: infinite, and refused
            value_D = sent_D.astype(self._kept)
        if not np.isfinite(value_D).all():
            raise BadSample("damaged", f"numbers that are not finite as {self.dtype}")
        return value_D.view(np.uint8).reshape(self.shape_HWC)

    def block(self, rows: Sequence[Row], payload: bytes | memoryview) -> Pixels | None:
        """All samples at once, as a view of `payload`; None unless each is just what is kept."""
        for row in rows:
            if (
                row["codec"] != "vector"
                or row.get("dtype") != self.dtype
                or row.get("shape") != [self.dim]
                or row["size"] != self.shape_HWC[2]
            ):
                return None
        value_BD = np.frombuffer(payload, self._kept).reshape(len(rows), self.dim)
        if not np.isfinite(value_BD).all():
            return None
        return value_BD.view(np.uint8).reshape(len(rows), *self.shape_HWC)
