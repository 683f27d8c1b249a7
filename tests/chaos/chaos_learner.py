"""A learner that saves every third step: `python chaos_learner.py FOLDER STEPS`.

After each save it writes the step to FOLDER/told: from then on the checkpoint must be there.
"""

import os
import sys
from pathlib import Path

from learning_world import build, steps

from stream_ssl.learning.checkpoint import Checkpointer


def main(folder: Path, last: int) -> None:
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT, 0o600)
    checkpointer = Checkpointer(folder / "checkpoints", keep=2, every_seconds=None, every_steps=3)
    learner = build()
    while learner.step < last:
        record = steps(learner, 1)[0]
        if checkpointer.due(record):
            checkpointer.save(learner, {})
            os.pwrite(told, f"{learner.step:09d}".encode(), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
