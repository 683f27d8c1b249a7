"""The checkpoint that a run continues from when it starts, without loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.learning.checkpoint_layout import (
    DAMAGED,
    FOLDER,
    facts_in,
    steps_in,
    unreadable_format,
)
from stream_ssl.learning.saved import checkpoint_damage


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run would continue from if it started now.

    Attributes:
        checkpoint: the newest whole checkpoint, or None.
        config: the configuration that it stores; None without a whole checkpoint.
        damaged: the names of the newer checkpoints, which are all damaged, each with the reason.
    """

    checkpoint: Path | None
    config: Mapping[str, Any] | None
    damaged: Sequence[str]


def start_of(run: Path) -> Start:
    """Return the checkpoint that this run would continue from. Nothing is changed.

    Raises:
        ValueError: a newer version of this program wrote the checkpoint.
        OSError: the files cannot be opened for now.
    """
    damaged: list[str] = []
    for path in reversed(steps_in(run / FOLDER)):
        if (reason := checkpoint_damage(path)) is None:
            facts = facts_in(path)
            if why := unreadable_format(path, facts):
                raise ValueError(why)
            return Start(path, facts["config"], damaged)
        if path.exists():  # a running learner may have removed it
            damaged.append(f"{path.name} ({reason})")
    return Start(None, None, damaged)


def check_not_lost(run: Path) -> None:
    """Check that a run whose folder holds no checkpoint never had one.

    A run that begins again with new weights lets the receiver trim the journal, which an absent
    checkpoint needs. A damaged checkpoint counts as held, because the log reports it.

    Raises:
        ValueError: the run had a checkpoint.
    """
    if any((run / FOLDER).glob(f"{DAMAGED}*")):
        return  # the log and a condition report damaged checkpoints
    for folder in (run, *sorted(run.glob("receiver-*"))):
        offsets = ConsumerOffsets(folder)
        if step := offsets.load().step:
            raise ValueError(
                f"{run / FOLDER} holds no checkpoint, and {offsets.path} says that the run had one "
                f"at step {step}: if the folder is on a disk that is not mounted, mount it, or "
                "put a checkpoint from a backup into it. To begin with new weights instead, "
                f"remove {offsets.path}"
            )
