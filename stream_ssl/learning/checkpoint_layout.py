"""The layout of checkpoints on the disk: names of folders and files, keys of the facts, versions.

    RUN/checkpoints/              FOLDER
        latest -> step-...        LATEST
        damaged-step-.../         DAMAGED: a checkpoint that was set aside
        .incomplete-step-.../     INCOMPLETE: a checkpoint that is being written
        step-000004000/           PREFIX and the step
            manifest.json         sizes and hashes of the other files
            state.json            STATE: the facts, among them `version`
            model.safetensors     PARTS, SHARED and OWN: tensors, see `file_of`
            memory-1.safetensors  the part of rank 1

Everything that reads or writes checkpoints goes by this module. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream_ssl.batch import Offset
from stream_ssl.bounded_files import read_map
from stream_ssl.durable import entries

FORMAT = 3  # increased when an older reader could not read it; the manifest's form stays
ALONE, TOGETHER = 1, 2  # older formats: of one process, and of ranks with one journal
FOLDER = "checkpoints"
LATEST = "latest"
PREFIX, DAMAGED, INCOMPLETE = "step-", "damaged-", ".incomplete-"
STATE = "state.json"
MOST_STATE = 16 << 20
"""Largest size of `STATE`, in bytes."""
PARTS = ("model", "optimiser", "memory", "rng")
"""The files of tensors that a checkpoint must contain, named as in `Learner.capture`."""
SHARED = ("model", "optimiser")
"""The files that are the same for all ranks."""
OWN = ("memory", "rng", "waiting", "origins")
"""The files that each rank writes for itself."""
OF_OTHER_RANKS = ("memory", "rng")
"""The files among OWN that a checkpoint must contain for each rank."""
IMAGES, LABELS, IDS = "columns.images", "columns.labels", "columns.ids"
"""Columns of the slots in the file "memory"."""


def folder_of(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step in the folder of a run's checkpoints."""
    return folder / f"{PREFIX}{step:09d}"


def step_in(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if it is another name."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isdecimal() else None


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder in the order of their steps, damaged ones included.

    A folder that does not exist, or that this user may not read, has no checkpoints.
    """
    numbers = {path: step_in(path.name) for path in entries(folder, f"{PREFIX}*") if path.is_dir()}
    known = {path: number for path, number in numbers.items() if number is not None}
    return sorted(known, key=lambda path: known[path])


def file_of(name: str, rank: int = 0) -> str:
    """Return the name of a file of tensors. Rank 0 uses the names of a single process."""
    return f"{name}{rank_suffix(rank)}.safetensors"


def rank_suffix(rank: int) -> str:
    """Return the end of the names of a rank's own files, before ".safetensors"."""
    return f"-{rank}" if rank else ""


def facts_in(checkpoint: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint: all that is not a tensor.

    Raises:
        OSError, ValueError: the file is missing, too large or damaged.
    """
    return read_map(checkpoint / STATE, MOST_STATE)


def unreadable_format(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return why this program cannot read a checkpoint with these facts, or None if it can."""
    if facts.get("version", FORMAT) <= FORMAT:
        return None
    return (
        f"{path} has format {facts['version']}, this program reads up to {FORMAT}: "
        "upgrade stream-ssl, or choose another run folder"
    )


def size_of(checkpoint: Path) -> int:
    """Return the size of a checkpoint in bytes."""
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def version_of(facts: Mapping[str, Any]) -> int:
    """Return the oldest format that can hold these facts, so that older programs can read them."""
    version = TOGETHER if "divisions" in facts else ALONE
    return FORMAT if "journals" in facts else version


def made_by(facts: Mapping[str, Any]) -> int:
    """Return the step that made a checkpoint's weights.

    Older releases do not store this step. For them the result is the checkpoint's own step.
    """
    return int(facts.get("updated", facts["step"]))


def offset_as_json(offset: Offset) -> dict[str, int]:
    """Return an offset in the form that JSON stores."""
    return {"record": offset.record, "sample": offset.sample}


def offset_of(facts: Mapping[str, Any]) -> Offset:
    """Return the offset in the journal that a checkpoint's facts contain."""
    return Offset(int(facts["offset"]["record"]), int(facts["offset"]["sample"]))
