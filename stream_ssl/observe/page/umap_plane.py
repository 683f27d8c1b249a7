"""A map of embeddings by UMAP, computed in a separate process.

UMAP takes seconds and compiles code at its start, so it must not run in the learner's process. Run
as a module, this file is the UMAP process. It reads embeddings, float32 [n, D], and start points,
float32 [n, 2], from standard input. It writes the map to standard output. All are .npy data.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SHARE = 0.05
"""The share of one processor that UMAP may take, at low priority, while a viewer asks for it."""
LEAST = 4
"""The least number of rows for UMAP, which needs neighbours."""


class UmapPlane(Generic[T]):
    """The newest UMAP map. A new map is computed in the background when it is due.

    Any thread may call the methods.

    Attributes:
        failure: why the last attempt failed; empty if it succeeded.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._lock = threading.Lock()
        self._made: tuple[T, NDArray[np.float32]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    @staticmethod
    def installed() -> bool:
        """Return whether UMAP is installed."""
        return find_spec("umap") is not None

    def newest(
        self, key: T, z_nD: NDArray[np.float32], begin_n2: NDArray[np.float32]
    ) -> tuple[T, NDArray[np.float32]] | None:
        """Return the key and the map, float32 [n, 2], of the newest finished UMAP.

        Return None if no map is finished. Start a new process if one is due.

        Args:
            key: identifies the rows, such as the snapshot that they come from.
            begin_n2: start points, so that a new map has the orientation of the last one.
        """
        with self._lock:
            if self._process is None and time.monotonic() >= self._due and len(z_nD) >= LEAST:
                self._process = _start()
                arguments = (self._process, key, z_nD, begin_n2)
                threading.Thread(target=self._make, args=arguments, daemon=True).start()
            return self._made

    def close(self) -> None:
        """Kill the UMAP process if it runs, and start no further process."""
        with self._lock:
            self._due = float("inf")
            if self._process is not None:
                self._process.kill()

    def _make(
        self,
        process: subprocess.Popen[bytes],
        key: T,
        z_nD: NDArray[np.float32],
        begin_n2: NDArray[np.float32],
    ) -> None:
        began = time.monotonic()
        out, said = process.communicate(_packed(z_nD, begin_n2))
        with self._lock:
            self._process = None
            self._due = max(self._due, time.monotonic() + (time.monotonic() - began) / SHARE)
            if process.returncode == 0:
                self.failure, self._made = "", (key, np.load(io.BytesIO(out)))
            else:
                lines = said.decode(errors="replace").strip().splitlines()
                self.failure = (
                    lines[-1] if lines else f"the process ended with status {process.returncode}"
                )


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def _packed(*arrays: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, allow_pickle=False)
    return file.getvalue()


def main() -> None:
    """Run the UMAP process."""
    os.nice(10)
    import umap

    file = io.BytesIO(sys.stdin.buffer.read())
    z_nD, begin_n2 = np.load(file), np.load(file)
    neighbours = min(15, len(z_nD) - 1)
    shaped = umap.UMAP(
        n_neighbors=neighbours, metric="cosine", init=10 * begin_n2, random_state=0, n_jobs=1
    )
    plane_n2 = np.asarray(shaped.fit_transform(z_nD), np.float32)
    sys.stdout.buffer.write(_packed(plane_n2))


if __name__ == "__main__":
    main()
