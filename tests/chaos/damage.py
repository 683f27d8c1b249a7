"""Gate 5: bits flipped, pages zeroed, tails torn and files gone, in journal and checkpoints."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from learning_world import build, steps

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry, list_segments
from stream_ssl.learning.checkpoint import Checkpointer

PAGE = 4096
RECORDS = 60


def journal(scratch: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Damage one file in each of `count` copies of a journal of 60 records, and open the copies.

    Returns:
        `damages`: the copies. `harmless`: copies that lost no record. `lost`: lost records in all.
        `uncounted`: copies that lost records and counted no damage. `wrong`: records with another
        payload than was written. `failed`: copies that could not be opened.
    """
    whole, draw = scratch / "whole", random.Random(seed)
    found = {"damages": count, "harmless": 0, "lost": 0, "uncounted": 0, "wrong": 0, "failed": 0}
    written = Journal(whole, budget=8 << 20, segment_bytes=256 << 10)
    for sequence in range(1, RECORDS + 1):
        written.append([JournalEntry("robot", sequence, None, 1.0, b"head", body(sequence))])
    written.close()
    for number in range(count):
        folder = scratch / f"harmed-{number}"  # damaged segments are set aside beside it
        shutil.copytree(whole, folder)
        harm(draw.choice(list_segments(folder))[1] / "data.mdb", draw)
        try:
            opened = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
            opened.take_checked(wait=True)
            damaged = opened.damaged
            opened.append([JournalEntry("robot", opened.state("robot").sequence + 1, payload=b"")])
            opened.close()
        except Exception:
            found["failed"] += 1
            continue
        reader, position, there = JournalReader(folder), 1, set[int]()
        while records := reader.read(position):
            for record in records:
                there.add(record.sequence)
                found["wrong"] += record.payload not in (body(record.sequence), b"")
            position = records[-1].position + 1
        reader.close()
        lost = len(set(range(1, RECORDS + 1)) - there)
        found["lost"] += lost
        found["harmless"] += not lost
        found["uncounted"] += bool(lost) and not damaged + reader.corrupt
    return found


def checkpoints(scratch: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Damage one file of the newest of three checkpoints, `count` times, and load the newest.

    Returns:
        `damages`: the attempts. `fell_back`: those that loaded the checkpoint before. `harmless`:
        those that loaded the newest. `failed`: those that loaded neither.
    """
    whole, draw = scratch / "whole", random.Random(seed)
    learner, writer = build(), Checkpointer(whole)
    for _ in range(3):
        steps(learner, 1)
        writer.save(learner, {})
    found = {"damages": count, "fell_back": 0, "harmless": 0, "failed": 0}
    for _ in range(count):
        folder = scratch / "harmed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, symlinks=True)
        harm(draw.choice(sorted((folder / "step-000000003").iterdir())), draw)
        saved = Checkpointer(folder).newest()
        if saved is None or saved.step not in (2, 3):
            found["failed"] += 1
            continue
        saved.restore(build(saved.offset))
        found["fell_back"] += saved.step == 2
        found["harmless"] += saved.step == 3
    return found


def body(sequence: int) -> bytes:
    return random.Random(sequence).randbytes(9000)


def harm(path: Path, draw: random.Random) -> None:
    """Flip a bit, clear a page, cut the end off, overwrite a page, or delete the file."""
    content, how = bytearray(path.read_bytes()), draw.randrange(5)
    at = draw.randrange(len(content))
    if how == 0:
        content[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        start = at // PAGE * PAGE
        content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    elif how == 2:
        del content[at:]
    elif how == 3:
        content[at : at + PAGE] = draw.randbytes(len(content[at : at + PAGE]))
    if how == 4:
        path.unlink()
    else:
        path.write_bytes(content)
