"""Appends to a journal until it is killed, and prints what was committed.

Run as `python journal_writer.py FOLDER SEED`; each line is "producer sequence position".
"""

import random
import sys

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import JournalEntry


def main(folder, seed):
    draw = random.Random(seed)
    journal = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
    say("open")
    while True:
        sequences = {name: journal.state(name).sequence for name in "abc"}
        entries = []
        for _ in range(draw.randint(1, 6)):
            name = draw.choice("abc")
            sequences[name] = sequence = sequences[name] + 1
            payload = bytes([sequence % 256]) * draw.choice([10, 3000, 20_000])
            entries.append(JournalEntry(name, sequence, sequence, 1.0, b"head", payload))
        commit = journal.append(entries)
        lines = [f"{e.producer} {e.sequence} {commit.first + i}" for i, e in enumerate(entries)]
        say("\n".join(lines))
        journal.trim(commit.last - 200)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
