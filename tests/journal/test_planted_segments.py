"""Links, files and folders in a journal's folder that have the names of segments."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from journal_of_packets import build, checked
from overlay import as_image

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry, list_segments, segment_path

ONE, TWO = (JournalEntry("robot", n, ["file", n], 1.5, b"header", b"payload") for n in (1, 2))


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file", "FIFO"])
@pytest.mark.parametrize("name", [".old-segment-0000000000000009", ".new-segment-0000000000000009"])
def test_a_journal_removes_a_planted_file_or_link_but_no_target_of_a_link(
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


@pytest.mark.parametrize("name", ["segment-7", "segment-\u0663", f"segment-{'9' * 30}"])
def test_a_journal_ignores_a_folder_with_an_unknown_name(tmp_path: Path, name: str) -> None:
    with closing(Journal(tmp_path)) as opened:
        opened.append([ONE])
    (tmp_path / name).mkdir()
    with closing(Journal(tmp_path)) as opened:
        opened.append([TWO])
        assert (opened.last, opened.damaged) == (2, 0)
    assert (tmp_path / name).is_dir()


def test_a_file_in_the_place_of_a_segment_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with closing(Journal(folder)) as opened:
        opened.append([ONE])
    segment_path(folder, 2).write_text("no segment")
    with closing(JournalReader(folder)) as reader:
        assert [record.position for record in reader.read(1)] == [1]
        assert (reader.first, reader.last) == (1, 1)
    with closing(Journal(folder)) as opened:
        assert opened.damaged == 1
        opened.append([TWO])
    (aside,) = tmp_path.glob("journal.damaged-*")
    assert aside.read_text() == "no segment"


def test_a_journal_deletes_and_sets_aside_segments_of_a_container_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    build(journal)
    first, second, *rest = [path for _, path in list_segments(journal)]
    (second / "data.mdb").write_bytes(b"nonsense" * 4096)
    as_image(tmp_path, monkeypatch)
    with closing(checked(journal)) as opened:
        assert opened.damaged == 1
        (aside,) = tmp_path.glob("journal.damaged-*")
        assert (aside / "data.mdb").read_bytes() == b"nonsense" * 4096
        assert opened.trim(opened.last) > 0
    assert [path for _, path in list_segments(journal)] == rest[-1:]
    assert not first.exists()
    assert not list(journal.glob(".*"))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_cleans_up_after_a_kill_during_the_move_of_a_segment(
    tmp_path: Path, replaced: bool
) -> None:
    build(tmp_path)
    _, middle, *_ = [path for _, path in list_segments(tmp_path)]
    gone = middle.with_name(f".old-{middle.name}")
    gone.mkdir()
    (middle / "data.mdb").rename(gone / "data.mdb")
    if replaced:
        shutil.copytree(gone, middle.with_name(f".new-{middle.name}"))
    with closing(checked(tmp_path)) as opened:
        assert opened.damaged == 1 - replaced  # a segment in the middle is missing
    assert middle.exists() == replaced
    assert not list(tmp_path.glob(".*"))
