"""The .npz file of `stream-ssl embed`, whose arrays grow on the disk until they are whole.

Shapes: B images of a batch, N images in all, F features of an image.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stream_ssl import durable
from stream_ssl.bounded_files import read_map
from stream_ssl.wire.sample import Position

STATE: Final = "state.json"
MOST_BYTES: Final = 1 << 28
"""Limit for the size of the state: a source's position may list files."""
PARTS: Final = ("features", "labels", "ids")
"""The files of the rows: float32 and int64 numbers, and a JSON text in each line."""
LINES: Final = 10_000
"""Ids that are held in memory while the result is written."""


@dataclass(frozen=True, slots=True)
class Read:
    """The part of a source that was read.

    Attributes:
        position: the position of the source after this part.
        samples: the number of samples in this part.
        bad: the number of samples that cannot be decoded, by reason.
    """

    position: Position = None
    samples: int = 0
    bad: dict[str, int] = field(default_factory=dict)


class FeatureFile:
    """Rows of features that survive a stop, and become an .npz file once all are there.

    The rows are appended to files in the folder OUT.state. A state beside them counts the rows that
    are on the disk. After a crash, the rows from after the newest state are cut off.

    Args:
        out: the .npz file. `state_folder(out)` exists.
        dim: F.
        settings: all settings that the rows depend on, as values that JSON can represent.

    Attributes:
        folder: the folder of the unfinished rows.
        read: the part of the source whose rows are here.
        rows: N so far.

    Raises:
        ValueError: the folder holds rows of other settings, or it is damaged.
        OSError: the folder cannot be written.
    """

    def __init__(self, out: Path, dim: int, settings: Mapping[str, Any]) -> None:
        self._out, self._dim, self._settings = out, dim, dict(settings)
        self.folder = state_folder(out)
        self.read, self.rows = Read(), 0
        self._longest = 1  # characters of an id
        sizes = dict.fromkeys(PARTS, 0)
        if (self.folder / STATE).exists():
            with self._refusing_damage(STATE):
                state = read_map(self.folder / STATE, MOST_BYTES)
                begun, sizes = dict(state["settings"]), {n: int(state["sizes"][n]) for n in PARTS}
                self.read, self.rows = Read(**state["read"]), int(state["rows"])
                self._longest = int(state["longest"])
            self._check(begun)
        with ExitStack() as stack:
            paths = {name: self.folder / name for name in PARTS}
            self._files = {n: stack.enter_context(path.open("ab")) for n, path in paths.items()}
            for name, file in self._files.items():
                with self._refusing_damage(name):
                    if os.fstat(file.fileno()).st_size < sizes[name]:
                        raise ValueError("rows are missing")
                file.truncate(sizes[name])
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the files. The folder stays if it has saved rows."""
        try:
            self._stack.close()
        finally:  # on a full disk, closing fails too
            if not (self.folder / STATE).exists():
                shutil.rmtree(self.folder, ignore_errors=True)

    def append(
        self,
        feature_BF: NDArray[np.float32],
        label_B: NDArray[np.int64],
        ids: list[str],
        read: Read,
    ) -> None:
        """Add rows. A crash may lose them until `save` has returned.

        Args:
            feature_BF, label_B, ids: the rows.
            read: the part of the source that ends with these rows.
        """
        self._files["features"].write(np.ascontiguousarray(feature_BF, "<f4").tobytes())
        self._files["labels"].write(label_B.astype("<i8").tobytes())
        self._files["ids"].write("".join(f"{json.dumps(name)}\n" for name in ids).encode())
        self.rows += len(ids)
        self.read = read
        self._longest = max(self._longest, *map(len, ids))

    def save(self) -> None:
        """Make the rows durable.

        Raises:
            OSError: the disk is full or failed. The last saved rows remain.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {
            "settings": self._settings,
            "read": asdict(self.read),
            "rows": self.rows,
            "longest": self._longest,
            "sizes": {name: file.tell() for name, file in self._files.items()},
        }
        durable.write(self.folder / STATE, json.dumps(state))

    def publish(self) -> None:
        """Write the .npz file from the saved rows, and delete the folder.

        Raises:
            ValueError: the saved ids are damaged. The folder remains.
            OSError: the disk is full or failed. The folder remains.
        """
        kinds = {
            "features": ("<f4", (self.rows, self._dim)),
            "ids": (f"<U{self._longest}", (self.rows,)),
            "labels": ("<i8", (self.rows,)),
        }
        with durable.replacing(self._out) as file, zipfile.ZipFile(file, "w") as archive:
            for name, (dtype, shape) in kinds.items():
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                part = zipfile.ZipInfo(f"{name}.npy")
                with (
                    (self.folder / name).open("rb") as rows,
                    archive.open(part, "w", force_zip64=True) as member,
                ):
                    np.lib.format.write_array_header_1_0(member, header)
                    if name != "ids":
                        shutil.copyfileobj(rows, member, 1 << 20)
                        continue
                    with self._refusing_damage(name):
                        for ids in _lists(map(json.loads, rows)):
                            member.write(np.array(ids, dtype).tobytes())
        self.discard()

    def discard(self) -> None:
        """Delete the folder. A crash meanwhile leaves no state."""
        (self.folder / STATE).unlink(missing_ok=True)
        self.close()

    @contextmanager
    def _refusing_damage(self, name: str) -> Iterator[None]:
        """Turn errors of a file's content into a ValueError with the remedy."""
        try:
            yield
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.folder / name} is damaged: delete {self.folder} to start anew"
            ) from error

    def _check(self, begun: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"--out {self._out}: {self.folder} holds unfinished features with {name} "
                    f"{begun.get(name)}, and this command has {name} {value}. Repeat the earlier "
                    "command to continue, choose another --out, or delete that folder"
                )


def state_folder(out: Path) -> Path:
    """Return the folder of the unfinished rows of an .npz file."""
    return out.with_name(f"{out.name}.state")


def _lists(ids: Iterator[str]) -> Iterator[list[str]]:
    while some := list(islice(ids, LINES)):
        yield some
