"""A learner that notes which samples each step was given: `python noting_learner.py CONFIG ...`.

Torchrun starts it in place of `-m stream_ssl learner`. A process appends to a file of its own in
$NOTES, before any checkpoint can hold the step; `counted` tells what the last one holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from stream_ssl.app.cli import main
from stream_ssl.batch import Offset
from stream_ssl.feed.journal_tasks import JournalShare
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import journal_id
from stream_ssl.learning.learner import Learner
from stream_ssl.wire import Data

NOTING = Path(__file__)
plain_run, plain_train = Learner.run, Learner._train


def _note(*told: Any) -> None:
    path = Path(os.environ["NOTES"]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps([time.time(), *told]) + "\n")


def _run(self: Learner, stop: Any) -> Iterator[Any]:
    _note("from", self.step, [])
    return plain_run(self, stop)


def _train(self: Learner, batch: Any, turn: Any) -> Any:
    origins_B = [] if batch is None else batch.origins_B
    _note("step", self.step + 1, [[one.producer, one.id] for one in origins_B])
    return plain_train(self, batch, turn)


def counted(notes: Path) -> Counter[tuple[str, str]]:
    """(producer, id) of what all ranks were given, by how often: in steps that no process which
    began later has taken once more."""
    lines = [json.loads(line) for path in notes.iterdir() for line in path.open()]
    begun = [(when, step) for when, what, step, _ in lines if what == "from"]
    return Counter(
        (producer, name)
        for when, what, step, names in lines
        for producer, name in names
        if not any(later > when and first < step for later, first in begun)
    )


def accounts(run: Path, inboxes: Sequence[Path], sent: Set[tuple[str, str]]) -> dict[str, int]:
    """How many of the samples that were acknowledged were counted in the last checkpoint, wait in
    the journals for their batch to be full, were lost, and were counted twice."""
    facts, given = (
        json.loads((run / "checkpoints/latest/state.json").read_text()),
        counted(run / "notes"),
    )
    assert given.total() == facts["samples"], "the notes are not those of the checkpoint"
    rest = [one for inbox in inboxes for one in _not_read(inbox, facts)]
    return {
        "acknowledged": len(sent),
        "counted": given.total(),
        "short_of_a_batch": len(rest),
        "lost": len(sent - set(given) - set(rest)),
        "twice": given.total() - len(given) + len(set(given) & set(rest)),
    }


def _not_read(inbox: Path, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the samples that the next start would read: fewer than a batch of each rank."""
    told = facts["journals"][journal_id(inbox / "journal")]
    *before, places = [[Offset(**place) for place in division] for division in told]
    reader, found = JournalReader(inbox / "journal"), list[tuple[str, str]]()
    for rank, place in enumerate(places):
        share, position = JournalShare(rank, len(places), before), place.record
        while records := reader.read(position):
            for record in records:
                first, skip = share.first(record.position), place.sample
                if first is not None:
                    first = max(first, skip if record.position == place.record else 0)
                    rows = list(Data(record.sequence, record.header, record.payload).rows())[first:]
                    found += [(record.producer, row["id"]) for row, _ in rows]
            position = records[-1].position + 1
    reader.close()
    return found


if __name__ == "__main__":
    Learner.run, Learner._train = _run, _train  # type: ignore[method-assign]
    sys.exit(main(["learner", *sys.argv[1:]]))
