"""Saved states of a pass: each is a sealed folder, and the newest undamaged one counts."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from stream_ssl.bounded_files import read_map
from stream_ssl.durable import damage, discard, entries, publish, seal, write_json
from stream_ssl.tensor_file import load_file, write_tensors

log = logging.getLogger(__name__)

TENSORS: Final = "state.safetensors"
FACTS: Final = "state.json"
INCOMPLETE: Final = "incomplete"
MOST_BYTES: Final = 1 << 32


class Saves:
    """The states in a folder. A crash at any time leaves a whole state.

    Args:
        folder: the folder of the states, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # A crash may have left the folders of a save that did not end.
        for rest in (folder / INCOMPLETE, *entries(folder, ".discarded-*")):
            shutil.rmtree(rest, ignore_errors=True)

    def write(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save a state, and delete the earlier ones.

        Args:
            facts: a map that JSON can represent.

        Raises:
            OSError: the disk is full or failed. The earlier state remains.
        """
        before = self._all()
        number = int(before[-1].name.rpartition("-")[2]) + 1 if before else 1
        scratch = self._folder / INCOMPLETE
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        write_tensors(tensors, scratch / TENSORS)
        write_json(scratch / FACTS, facts)
        seal(scratch)
        publish(scratch, self._folder / f"state-{number:06d}")
        for old in before:
            discard(old)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest undamaged state, or None if there is none.

        Raises:
            OSError: a state cannot be read, for lack of permission, descriptors or memory.
        """
        for folder in reversed(self._all()):
            if why := damage(folder):
                log.warning("%s is damaged (%s) and is not used", folder, why)
                continue
            return load_file(folder / TENSORS), read_map(folder / FACTS, MOST_BYTES)
        return None

    def _all(self) -> list[Path]:
        return sorted(entries(self._folder, "state-*"))
