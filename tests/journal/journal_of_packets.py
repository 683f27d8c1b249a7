"""A journal of packets whose content follows from their sequence."""

import random

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry

SIZE = 9000


def build(folder, groups=12):
    """Write a journal with segments of 256 KiB and groups of 5 packets, and close it."""
    journal = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
    for group in range(groups):
        journal.append([packet(5 * group + n) for n in range(1, 6)])
    journal.close()


def checked(folder):
    """Return an open journal whose segments have all been checked."""
    journal = Journal(folder, budget=8 << 20, segment_bytes=256 << 10)
    journal.take_checked(wait=True)
    return journal


def packet(sequence):
    return JournalEntry("robot", sequence, None, float(sequence), b"head", body(sequence))


def body(sequence):
    return random.Random(sequence).randbytes(SIZE)


def read_all(folder):
    reader, records, position = JournalReader(folder), [], 1
    while found := reader.read(position):
        records += found
        position = found[-1].position + 1
    reader.close()
    for record in records:
        assert record.payload == body(record.sequence)
        assert record.header == b"head"
    return records, reader.corrupt
