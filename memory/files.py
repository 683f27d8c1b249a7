"""A memory as one file of safetensors.

safetensors is an optional dependency: pip install safetensors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memory.eviction import Policy
from memory.state import decode
from memory.working import WorkingMemory


def save(memory: WorkingMemory, path: Path | str) -> None:
    """Write the state of a memory; when this returns it survives a power cut.

    The file is the new one whole, or the one before: it is written beside `path` and then renamed.
    Images that lie in an `image_file` stay there.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the disk does not take it.
    """
    path = Path(path)
    flat = {name: value.contiguous() for name, value in memory.state_dict().items()}
    scratch = path.with_name(f".{path.name}.{os.getpid()}.incomplete")
    try:
        _safetensors().save_file(flat, scratch)
        _sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    _sync(path.parent)


def load(path: Path | str, eviction: Policy | None = None, **options: Any) -> WorkingMemory:
    """The memory that `save` wrote, which goes on bit-equal.

    Args:
        path: the file.
        eviction: built as the saved memory's was.
        options: other arguments of WorkingMemory; capacity, dim and image_shape are the file's.

    Raises:
        ImportError: safetensors is not installed.
        OSError: there is no such file.
        ValueError: the file is no memory, or of another eviction policy, score, version, or other
            options of these or of `duplicates`.
    """
    library = _safetensors()
    try:
        state = library.load_file(path)
        capacity, dim = int(state["counters"][1]), state["columns.embeddings"].shape[1]
        shape = decode(state)["image_shape"]
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} holds no memory that was saved here: {error}") from error
    image_shape = None if shape is None else (shape[0], shape[1], shape[2])
    memory = WorkingMemory(capacity, dim, eviction, image_shape, **options)
    memory.load_state_dict(state)
    return memory


def _sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "a memory is saved with safetensors, which is not installed: pip install safetensors"
        ) from error
    return safetensors.torch
