"""A run that is killed repeatedly: `python learning_killed.py FOLDER STEPS SEED KILLS`.

Each life is a separate process, forked before any computation. It resumes from the newest
checkpoint, starts a background save after every third step, and writes one byte to a pipe per step.
SIGKILL ends it during its next operation. The last life reaches STEPS and saves.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from learning_world import build, steps

from stream_ssl.batch import START
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.pace import Pace


def live(folder: Path, last: int, pipe: int) -> None:
    checkpointer = Checkpointer(folder, every_seconds=None, every_steps=3)
    found = checkpointer.newest()
    learner = build(found.offset if found else START, pace=Pace(0.2), reencode=2)
    if found:
        found.restore(learner)
    while learner.step < last:
        record = steps(learner, 1)[0]
        os.write(pipe, b".")
        checkpointer.finished()
        if checkpointer.due(record):
            checkpointer.begin(learner, {})
    checkpointer.finished(wait=True)
    checkpointer.save(learner, {})


def life(folder: Path, last: int, kill_after: int | None) -> int:
    """Return the exit status of one life, which is killed after `kill_after` steps."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        live(folder, last, writing)
        os._exit(0)
    os.close(writing)
    told = 0
    while (kill_after is None or told < kill_after) and os.read(reading, 1):
        told += 1
    if kill_after is not None:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def live_and_die(folder: Path, last: int, seed: int, kills: int) -> bool:
    """Return whether any life ended with an unexpected status."""
    draw = random.Random(seed)
    statuses = [life(folder, last, draw.randint(3, 9)) for _ in range(kills)]
    statuses.append(life(folder, last, None))
    return statuses != [-signal.SIGKILL] * kills + [0]


if __name__ == "__main__":
    sys.exit(live_and_die(Path(sys.argv[1]), *map(int, sys.argv[2:])))
