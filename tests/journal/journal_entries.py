"""Entries of journals in tests."""

from stream_ssl.journal.segment import JournalEntry


def entry(sequence, size=1000, producer="robot/1"):
    """Return an entry whose payload shows its sequence."""
    payload = bytes([sequence % 256]) * size
    return JournalEntry(producer, sequence, ["file", sequence], 1.5, b"header", payload)
