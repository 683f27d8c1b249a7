"""What stands in the journal's folder under the name of a segment that comes or goes."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import JournalEntry

ONE, TWO = (JournalEntry("robot", n, ["file", n], 1.5, b"header", b"payload") for n in (1, 2))


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file", "FIFO"])
@pytest.mark.parametrize("name", [".old-segment-0000000000000009", ".new-segment-0000000000000009"])
def test_what_is_no_segment_is_removed_and_nothing_behind_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    other, journal = tmp_path / "other", tmp_path / "journal"
    other.mkdir()
    (other / "theirs").write_text("kept")
    with closing(Journal(journal)) as opened:
        opened.append([ONE])
    planted = journal / name
    if kind.startswith("link"):
        planted.symlink_to(other if kind == "link to a folder" else tmp_path / "nowhere")
    elif kind == "file":
        planted.write_text("no segment")
    else:
        os.mkfifo(planted)
    with closing(Journal(journal)) as opened:
        opened.append([TWO])
    assert not os.path.lexists(planted)
    assert (other / "theirs").read_text() == "kept"
