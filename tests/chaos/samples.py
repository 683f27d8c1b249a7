"""The samples that a journal holds, by producer."""

from __future__ import annotations

from pathlib import Path

from stream_ssl.journal.reader import JournalReader
from stream_ssl.wire import Data


def held(folder: Path) -> list[tuple[str, str]]:
    """Return (producer, id) of all samples in the journal of a run, in order.

    Raises:
        AssertionError: a record is damaged.
    """
    reader, position = JournalReader(folder / "journal"), 1
    found: list[tuple[str, str]] = []
    while records := reader.read(position):
        for record in records:
            data = Data(record.sequence, record.header, record.payload)
            found += [(record.producer, row["id"]) for row, _ in data.rows()]
        position = records[-1].position + 1
    reader.close()
    assert reader.corrupt == 0, f"{reader.corrupt} damaged records"
    return found
