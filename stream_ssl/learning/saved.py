"""The content of a checkpoint's folder, and how a run resumes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from stream_ssl.batch import START, Offset, Origin
from stream_ssl.durable import MANIFEST, UNREADABLE, damage, damage_of, listed
from stream_ssl.learning.capture import Capture
from stream_ssl.learning.checkpoint_layout import (
    FORMAT,
    OF_OTHER_RANKS,
    OWN,
    PARTS,
    SHARED,
    STATE,
    facts_in,
    file_of,
    made_by,
    offset_as_json,
    offset_of,
    rank_suffix,
    step_in,
)
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.novelty import samples_of
from stream_ssl.learning.origins import unpacked
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.shards import resharded
from stream_ssl.tensor_file import load_file, names_in

Divisions = Mapping[str, Sequence[Sequence[Mapping[str, int]]]]
"""Positions by rank, for each division of a journal, by the journal's id; see `Saved.divisions`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A verified checkpoint. Build the learner from `config` and its stream from `offset`."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration when the checkpoint was written."""
        config: Mapping[str, Any] = self.facts["config"]
        return config

    @property
    def step(self) -> int:
        """The number of steps that the learner had made."""
        return int(self.facts["step"])

    @property
    def updated(self) -> int:
        """The step that made the weights."""
        return made_by(self.facts)

    @property
    def offset(self) -> Offset:
        """The smallest offset from which any rank resumes."""
        return offset_of(self.facts)

    @property
    def journal(self) -> str | None:
        """The id of the journal to which `offset` refers; None if an old release wrote it."""
        return self.facts.get("journal")

    @property
    def ranks(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return int(self.facts.get("ranks", 1))

    def start(self, rank: int, ranks: int, journal: str | None = None) -> Offset:
        """Return the offset from which a rank's stream resumes.

        With the same number of ranks this is the rank's own offset. With another number it is the
        smallest offset of all ranks.

        Args:
            rank, ranks: the rank, and the number of ranks that read this journal.
            journal: id of the journal, if the run may have several; None if it has one.
        """
        if not (divisions := self.divisions(journal)):
            return START  # nobody has read this journal yet: its receiver is new
        ended = divisions[-1]
        return ended[rank] if ranks == len(ended) else min(ended)

    def before(self, ranks: int, journal: str | None = None) -> Sequence[Sequence[Offset]]:
        """Return how other numbers of ranks divided the journal, as `JournalShare` needs it."""
        divisions = self.divisions(journal)
        return divisions[:-1] if divisions and ranks == len(divisions[-1]) else divisions

    @property
    def journals(self) -> Divisions | None:
        """The divisions of each journal by id; None for a run with one journal."""
        found: Divisions | None = self.facts.get("journals")
        return found

    def divisions(self, journal: str | None = None) -> list[list[Offset]]:
        """Return the offsets by rank, for each division of a journal that still matters.

        The last division belongs to the ranks that wrote this checkpoint, or that read the journal
        last. The list is empty for a journal that no rank has read.
        """
        divisions = self.facts.get("divisions", [[self.facts["offset"]]])
        if self.journals is not None:
            divisions = self.journals.get(journal or "", [])
        elif journal is not None and self.journal not in (None, journal):
            divisions = []
        return [[Offset(**offset) for offset in offsets] for offsets in divisions]

    def restore(
        self, learner: Learner, rank: int = 0, ranks: int = 1, start: Offset | None = None
    ) -> None:
        """Restore the learner to the state of the checkpoint.

        If the number of ranks has changed, the memory and the waiting samples are distributed anew.
        The ranks then augment and draw with other seeds.

        Args:
            learner: the learner to restore.
            rank, ranks: the rank, and the number of ranks.
            start: the offset in the rank's own journal, if it has one.

        Raises:
            ValueError: the learner's parts do not fit the checkpoint.
        """
        start = self.start(rank, ranks) if start is None else start
        learner.restore(self.capture(rank, ranks, start))

    def check_memory(self, memory: WorkingMemory, ranks: int = 1) -> None:
        """Raise ValueError unless the first of `ranks` ranks can resume with this memory.

        Args:
            memory: the memory that this rank builds. It is unchanged.
            ranks: the number of ranks.
        """
        if ranks == self.ranks:
            memory.check_state(load_file(self.path / file_of("memory")))
        else:
            memory.check_state(resharded(self._parts("memory"), 0, ranks))

    def capture(self, rank: int, ranks: int, start: Offset) -> Capture:
        """Return the capture for `Learner.restore` and `Learner.reload` on one of `ranks` ranks."""
        facts = dict(self.facts)
        tensors = {name: load_file(self.path / file_of(name)) for name in SHARED}
        if ranks == self.ranks:
            for path in self.path.glob(file_of("*", rank)):
                name = path.stem.removesuffix(rank_suffix(rank))
                if name in OWN:
                    tensors[name] = load_file(path)
        else:
            tensors["memory"] = resharded(self._parts("memory"), rank, ranks)
            tensors["rng"] = {}
            samples = [found for part in self._parts("waiting") if (found := samples_of(part))]
            if mine := samples[rank::ranks]:
                tensors["waiting"] = _joined(mine)
            # Each rank keeps only the origins of samples in its own shard.
            tensors["origins"] = _joined(self._parts("origins"))
            facts["batch_size"] = facts["batch_size"] * self.ranks // ranks
        facts["offset"] = offset_as_json(start)
        return Capture(tensors, facts)

    def _parts(self, name: str) -> list[dict[str, Tensor]]:
        paths = [self.path / file_of(name, rank) for rank in range(self.ranks)]
        return [load_file(path) for path in paths if path.exists()]


def _joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = states[0] if states else ()
    return {name: torch.cat([state[name] for state in states]) for name in names}


def model_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's method.

    Raises:
        OSError: the file does not exist.
    """
    return load_file(checkpoint / file_of("model"))


def memory_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the state of a checkpoint's memory, with the shards of all ranks together.

    Raises:
        OSError: the file does not exist.
    """
    saved = Saved(checkpoint, facts_in(checkpoint))
    parts = saved._parts("memory")
    return parts[0] if saved.ranks == 1 else resharded(parts, 0, 1)


def origins_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the state of a checkpoint's `Origins`, of all ranks together.

    The result is empty for old checkpoints, which do not store origins.

    Raises:
        OSError: the file does not exist.
    """
    return _joined(Saved(checkpoint, facts_in(checkpoint))._parts("origins"))


def originals_of(checkpoint: Path) -> set[str]:
    """Return the names of the original bytes of the samples in a checkpoint.

    These are the samples of the memory, and those that wait for a full batch.

    Raises:
        OSError: a file does not exist.
    """
    saved = Saved(checkpoint, facts_in(checkpoint))
    held = [row[1:] for part in saved._parts("origins") for row in unpacked(part["rows"])]
    for part in saved._parts("waiting"):
        if "origins" in part:
            held += [row for row in unpacked(part["origins"]) if row]
    return {name for row in held if (name := Origin(*row).original) is not None}


def checkpoint_damage(folder: Path) -> str | None:
    """Return why a checkpoint is damaged, or None if it is whole.

    A checkpoint is damaged if a file has changed since it was sealed, or is not a checkpoint's
    file. A checkpoint of a newer version counts as whole.

    Raises:
        OSError: as in `damage`.
    """
    if (reason := damage(folder)) is not None:
        return reason
    try:
        files = listed(folder)
        due = {STATE, *(file_of(name) for name in PARTS)}
        if missing := sorted(due - set(files)):
            return f"{MANIFEST} does not list {', '.join(missing)}"
        facts = facts_in(folder)
        numbers = {"ranks": 1, "updated": 0} | facts
        for name in ("version", "step", "samples", "ranks", "updated"):
            if type(numbers[name]) is not int or numbers[name] < 0:
                return f"{name} in {STATE} is {numbers[name]!r:.80}, and must be a whole number"
            if name == "version" and numbers[name] > FORMAT:
                return None
        if not 1 <= numbers["ranks"] <= len(files):
            return f"{STATE} is of {numbers['ranks']} ranks, and there are {len(files)} files"
        others = range(1, numbers["ranks"])
        due = {file_of(name, rank) for name in OF_OTHER_RANKS for rank in others}
        if missing := sorted(due - set(files)):
            return f"{MANIFEST} does not list {', '.join(missing)}"
        if (step := step_in(folder.name)) is not None and step != facts["step"]:
            return f"{STATE} is of step {facts['step']}"
        offset_of(facts)
        float(facts["created"])
        dict(facts["config"])
        for name in PARTS:
            names_in(folder / file_of(name))
    except (*UNREADABLE, SafetensorError) as error:
        return damage_of(error)
    return None
