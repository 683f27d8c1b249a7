"""A run that is killed from outside: `python learning_killed.py FOLDER STEPS`.

Goes on from the newest checkpoint in FOLDER, saves every third step, prints a line per step, and
at STEPS writes FOLDER/final as a checkpoint of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from learning_world import build, steps

from stream_ssl.ingest.offset import START
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.pace import Pace


def main(folder: Path, last: int) -> None:
    checkpointer = Checkpointer(folder, every_seconds=None, every_steps=3)
    found = checkpointer.newest()
    learner = build(found.offset if found else START, pace=Pace(0.2), reencode=2)
    if found:
        found.restore(learner)
    while learner.step < last:
        record = steps(learner, 1)[0]
        if checkpointer.due(record):
            checkpointer.save(learner, {})
        print(record.step, flush=True)
    Checkpointer(folder / "final").save(learner, {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
