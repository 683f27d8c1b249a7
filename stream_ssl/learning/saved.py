"""What a checkpoint's folder holds, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from stream_ssl.batch import START, Offset
from stream_ssl.bounded_files import read_map
from stream_ssl.durable import MANIFEST, UNREADABLE, damage, damage_told_by, listed
from stream_ssl.learning.learner import Capture, Learner, made_by
from stream_ssl.memory.shards import resharded

FORMAT = 3  # raised when an older reader could not read it; the manifest's form stays
STATE = "state.json"
MOST_STATE = 16 << 20
"""Bytes of `STATE`, at most."""
LATEST = "latest"
PREFIX = "step-"
PARTS = ("model", "optimiser", "memory", "rng")
"""Of `Learner.capture`: the tensors without which nothing can go on."""
SHARED = ("model", "optimiser")
"""Those that are alike on all ranks, ..."""
OWN = ("memory", "rng", "waiting", "origins")
"""... and those of which each rank has its own."""

Divisions = Mapping[str, Sequence[Sequence[Mapping[str, int]]]]
"""Places by rank, of each division of a journal, by its id; see `Saved.divisions`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A verified checkpoint. Build the learner from `config`, its stream from `offset`."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the run went on with when this was written."""
        config: Mapping[str, Any] = self.facts["config"]
        return config

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def updated(self) -> int:
        """The step that made the weights."""
        return made_by(self.facts)

    @property
    def offset(self) -> Offset:
        """The least from which any rank goes on."""
        return offset_of(self.facts)

    @property
    def journal(self) -> str | None:
        """The id of the journal that `offset` is a place in; None: of a release without ids."""
        return self.facts.get("journal")

    @property
    def ranks(self) -> int:
        """How many wrote it."""
        return int(self.facts.get("ranks", 1))

    def start(self, rank: int, ranks: int, journal: str | None = None) -> Offset:
        """Where a rank's stream goes on: where it was, or with other ranks where the least was.

        Args:
            rank, ranks: of those that read this journal.
            journal: its id, where there may be several; None: there is one.
        """
        if not (divisions := self.divisions(journal)):
            return START  # of a receiver that is new
        ended = divisions[-1]
        return ended[rank] if ranks == len(ended) else min(ended)

    def before(self, ranks: int, journal: str | None = None) -> Sequence[Sequence[Offset]]:
        """What `JournalShare` needs to know of how other numbers of ranks divided the journal."""
        divisions = self.divisions(journal)
        return divisions[:-1] if divisions and ranks == len(divisions[-1]) else divisions

    @property
    def journals(self) -> Divisions | None:
        """By id, the divisions of each journal of a run that has several; None: it has one."""
        found: Divisions | None = self.facts.get("journals")
        return found

    def divisions(self, journal: str | None = None) -> list[list[Offset]]:
        """Offsets by rank, of each division of a journal that still matters; the last is that of
        the ranks that wrote this, or that read it last. Empty for one that nobody has read."""
        told = self.facts.get("divisions", [[self.facts["offset"]]])
        if self.journals is not None:
            told = self.journals.get(journal or "", [])
        elif journal is not None and self.journal not in (None, journal):
            told = []
        return [[Offset(**offset) for offset in offsets] for offsets in told]

    def restore(
        self, learner: Learner, rank: int = 0, ranks: int = 1, start: Offset | None = None
    ) -> None:
        """Put the learner where the run was; ValueError if it is built otherwise.

        Other ranks than wrote it get the memory dealt anew, and the samples that waited; each views
        and draws with other seeds then. `start` is of the rank's own journal, where it has one.
        """
        start = self.start(rank, ranks) if start is None else start
        learner.restore(self.capture(rank, ranks, start))

    def capture(self, rank: int, ranks: int, start: Offset) -> Capture:
        """Read what `Learner.restore` and `Learner.reload` take on one of so many ranks."""
        facts = dict(self.facts)
        tensors = {name: load_file(self.path / f"{name}.safetensors") for name in SHARED}
        if ranks == self.ranks:
            for path in self.path.glob(f"*{suffix_of(rank)}.safetensors"):
                name = path.stem.removesuffix(suffix_of(rank))
                if name in OWN:
                    tensors[name] = load_file(path)
        else:
            tensors["memory"] = resharded(self._parts("memory"), rank, ranks)
            tensors["rng"] = {}
            mine = self._parts("waiting")[rank::ranks]
            if mine:
                tensors["waiting"] = _joined(mine)
            tensors["origins"] = _joined(self._parts("origins"))  # each takes those that it holds
            facts["batch_size"] = facts["batch_size"] * self.ranks // ranks
        facts["offset"] = place(start)
        return Capture(tensors, facts)

    def _parts(self, name: str) -> list[dict[str, Tensor]]:
        paths = [self.path / f"{name}{suffix_of(rank)}.safetensors" for rank in range(self.ranks)]
        return [load_file(path) for path in paths if path.exists()]


def _joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = states[0] if states else ()
    return {name: torch.cat([state[name] for state in states]) for name in names}


def memory_of(checkpoint: Path) -> dict[str, Tensor]:
    """The state of a checkpoint's memory, all ranks' shards together.

    Raises:
        OSError: there is no such file.
    """
    saved = Saved(checkpoint, read_map(checkpoint / STATE, MOST_STATE))
    parts = saved._parts("memory")
    return parts[0] if saved.ranks == 1 else resharded(parts, 0, 1)


def origins_of(checkpoint: Path) -> dict[str, Tensor]:
    """The state of `Origins` of a checkpoint, of all ranks together; empty in one of old.

    Raises:
        OSError: there is no such file.
    """
    return _joined(Saved(checkpoint, read_map(checkpoint / STATE, MOST_STATE))._parts("origins"))


def place(offset: Offset) -> dict[str, int]:
    """An offset as JSON has it."""
    return {"record": offset.record, "sample": offset.sample}


def offset_of(facts: Mapping[str, Any]) -> Offset:
    """The place in the journal that a checkpoint's facts tell of."""
    return Offset(int(facts["offset"]["record"]), int(facts["offset"]["sample"]))


def suffix_of(rank: int) -> str:
    """Of the names of a rank's files: the first's are called as those of one process."""
    return f"-{rank}" if rank else ""


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is not as it was sealed, or that was never a
    checkpoint's. One of a newer version is taken to be whole. Raises as `damage`."""
    if (reason := damage(folder)) is not None:
        return reason
    try:
        files = listed(folder)
        due = {STATE, *(f"{name}.safetensors" for name in PARTS)}
        if missing := sorted(due - set(files)):
            return f"{MANIFEST} does not list {', '.join(missing)}"
        facts = read_map(folder / STATE, MOST_STATE)
        if int(facts["version"]) > FORMAT:
            return None
        others = range(1, int(facts.get("ranks", 1)))
        due = {
            f"{name}{suffix_of(rank)}.safetensors" for name in ("memory", "rng") for rank in others
        }
        if missing := sorted(due - set(files)):
            return f"{MANIFEST} does not list {', '.join(missing)}"
        number = folder.name.removeprefix(PREFIX)
        if number.isdigit() and int(number) != int(facts["step"]):
            return f"{STATE} is of step {facts['step']}"
        offset_of(facts)
        float(facts["created"])
        dict(facts["config"])
        for name in PARTS:
            with safe_open(folder / f"{name}.safetensors", "pt") as tensors:
                tensors.keys()
    except (*UNREADABLE, SafetensorError) as error:
        return damage_told_by(error)
    return None
