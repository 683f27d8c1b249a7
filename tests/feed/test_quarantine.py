"""The quarantine is bounded, safe against hostile names, and never stops the learner."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stream_ssl.feed.decode import BadSample
from stream_ssl.feed.quarantine import Quarantine, newest

FACTS: dict[str, Any] = {"source": "cam", "producer": "robot-1", "received": 17.5}


def put(quarantine: Quarantine, sequence: int, data: bytes = b"data", **facts: Any) -> None:
    row = {"id": "a", "time": 16.0, "codec": "png", "size": len(data), **facts.pop("row", {})}
    error = facts.pop("error", BadSample("damaged", "cut short"))
    whole = {**FACTS, "sequence": sequence, "index": 3, **facts}
    quarantine.put(error, row, data, **whole)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_the_quarantine_keeps_the_payload_and_the_reason(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "deep" / "folder")
    put(quarantine, 42, b"\x89PNG", row={"shape": None})
    (note,) = notes(quarantine.folder)
    assert note == {
        "reason": "damaged",
        "message": "cut short",
        "producer": "robot-1",
        "sequence": 42,
        "index": 3,
        "source": "cam",
        "received": 17.5,
        "id": "a",
        "time": 16.0,
        "codec": "png",
        "shape": None,
        "size": 4,
    }
    (payload,) = quarantine.folder.glob("robot-1.*.000000000042.0003.png")
    assert payload.read_bytes() == b"\x89PNG"
    assert (quarantine.files, quarantine.unkept) == (2, {})
    assert quarantine.bytes == sum(map(len, files(quarantine.folder).values()))


def test_the_quarantine_counts_by_reason_and_logs_each_reason_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quarantine = Quarantine(tmp_path)
    for sequence, reason in enumerate(["shape", "pixels", "shape"]):
        put(quarantine, sequence, error=BadSample(reason, "x"))
    assert quarantine.counts == {("shape", "robot-1"): 2, ("pixels", "robot-1"): 1}
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("sample 'a' of robot-1 (shape: ")
    assert str(tmp_path) in told[1]


def test_the_quarantine_counts_a_bounded_number_of_producers_separately(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, rate=0)
    for sequence in range(300):
        put(quarantine, sequence, producer=f"robot-{sequence}")
    put(quarantine, 300, producer="robot-7")
    assert len(quarantine.counts) == 257
    assert quarantine.counts["damaged", "robot-7"] == 2
    assert quarantine.counts["damaged", "other"] == 44


def test_a_replay_adds_no_file(tmp_path: Path) -> None:
    for _ in range(3):
        quarantine = Quarantine(tmp_path)
        put(quarantine, 1)
        put(quarantine, 2)
        put(quarantine, 1)
        assert quarantine.counts["damaged", "robot-1"] == 3
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize(("bound", "kept"), [({"max_files": 7}, 3), ({"max_bytes": 2600}, 2)])
def test_a_full_quarantine_drops_the_oldest_samples(
    tmp_path: Path, bound: dict[str, int], kept: int
) -> None:
    quarantine = Quarantine(tmp_path, **bound, clock=iter(range(1000)).__next__)
    for sequence in range(1, 10):
        put(quarantine, sequence, bytes(1000))
        assert len(files(tmp_path)) <= bound.get("max_files", 1000)
        assert sum(map(len, files(tmp_path).values())) <= bound.get("max_bytes", 1 << 30)
    assert [note["sequence"] for note in notes(tmp_path)] == list(range(10 - kept, 10))


def test_the_quarantine_drops_the_oldest_samples_across_restarts(tmp_path: Path) -> None:
    for sequence in range(1, 10):
        quarantine = Quarantine(tmp_path, max_files=6)
        put(quarantine, sequence)
        for path in tmp_path.iterdir():  # the order must follow the times, not the names
            turned = 1_000_000_000 - int(path.name.split(".")[2])
            os.utime(path, ns=(turned, turned))
    # The newest file of each run has the oldest time in the next run.
    assert [note["sequence"] for note in notes(tmp_path)] == [1, 2, 9]
    assert Quarantine(tmp_path, max_files=2).files == 2
    assert len(files(tmp_path)) == 2


def test_a_payload_beyond_the_bound_leaves_its_note(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, max_bytes=1000)
    put(quarantine, 1, bytes(5000))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert not quarantine.unkept


def test_hostile_names_write_no_file_outside_the_quarantine(tmp_path: Path) -> None:
    hostile = (
        "../../x",
        "/etc/passwd",
        "a\0b",
        "x" * 5000,
        "",
        ".",
        "ß\ud800",
        "a/b",
        "-rf",
        "CON",
    )
    for number, name in enumerate(hostile):
        root = tmp_path / str(number)
        folder = root / "quarantine"
        quarantine = Quarantine(folder)
        put(quarantine, 1, producer=name, source=name, row={"id": name, "codec": name or "png"})
        put(quarantine, 1, producer=name + "2", source=name, row={"id": name, "codec": name})
        assert [path.name for path in root.iterdir()] == ["quarantine"], name
        assert len(files(folder)) == 4, name
        assert all(path.is_file() and len(path.name) < 120 for path in folder.iterdir()), name
        assert all(len(note["id"]) <= 1024 for note in notes(folder)), name
        assert Quarantine(folder).files == 4, "a restart finds all files"
    assert len(list(tmp_path.iterdir())) == len(hostile)


def test_hostile_fields_leave_small_notes_and_are_counted(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    for sequence, row in enumerate(
        [
            {"time": float("nan")},
            {"time": float("inf")},
            {"shape": ["x" * 10_000] * 9},
            {"shape": {}},
        ]
    ):
        put(quarantine, sequence, row=row)
    put(quarantine, 9, row={"shape": nested})
    assert quarantine.counts["damaged", "robot-1"] == 5
    assert len(notes(tmp_path)) + quarantine.unkept.total() == 5
    assert quarantine.unkept.total() <= 1
    assert all(path.stat().st_size < 4000 for path in tmp_path.glob("*.json"))


def test_a_start_keeps_foreign_files_and_deletes_half_written_files(tmp_path: Path) -> None:
    put(Quarantine(tmp_path), 1)
    (tmp_path / "README").write_text("mine")
    (json_path,) = tmp_path.glob("*.json")
    half = json_path.with_name(json_path.name + ".part")
    half.write_text("{")
    quarantine = Quarantine(tmp_path, max_files=2)
    assert not half.exists()
    put(quarantine, 2)
    assert (tmp_path / "README").read_text() == "mine"
    assert [note["sequence"] for note in notes(tmp_path)] == [2]


def test_a_payload_without_its_note_is_written_again(tmp_path: Path) -> None:
    put(Quarantine(tmp_path), 1)
    (json_path,) = tmp_path.glob("*.json")
    json_path.unlink()
    quarantine = Quarantine(tmp_path)
    put(quarantine, 1)
    assert json_path.exists()
    assert quarantine.bytes == sum(map(len, files(tmp_path).values()))


def test_the_quarantine_counts_the_samples_lost_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine = Quarantine(tmp_path)

    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        put(quarantine, 1)
        put(quarantine, 2)
    assert (quarantine.unkept, quarantine.counts["damaged", "robot-1"]) == ({"disk": 2}, 2)
    assert files(tmp_path) == {}
    put(quarantine, 3)
    assert (quarantine.unkept, quarantine.files) == ({"disk": 2}, 2)


def test_the_quarantine_counts_the_samples_lost_to_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    quarantine = Quarantine(tmp_path / "file" / "quarantine")
    put(quarantine, 1)
    assert quarantine.unkept == {"disk": 1}


def test_a_quarantine_that_cannot_delete_its_oldest_sample_keeps_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine = Quarantine(tmp_path, max_files=2, rate=1e9)
    put(quarantine, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    put(quarantine, 2)
    assert quarantine.unkept == {"disk": 1}
    assert [note["sequence"] for note in notes(tmp_path)] == [1]


def test_the_quarantine_makes_a_deleted_folder_again(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine", max_files=2, rate=1e9)
    put(quarantine, 1)
    for path in quarantine.folder.iterdir():
        path.unlink()
    quarantine.folder.rmdir()
    put(quarantine, 2)
    assert [note["sequence"] for note in notes(quarantine.folder)] == [2]


def test_endless_bad_samples_are_written_at_a_bounded_rate(tmp_path: Path) -> None:
    now = [0.0]
    quarantine = Quarantine(tmp_path, max_files=8, rate=2.0, clock=lambda: now[0])
    for sequence in range(1, 101):
        put(quarantine, sequence)
    assert quarantine.unkept == {"rate": 96}  # four fill the folder
    now[0] = 1.0
    for sequence in range(101, 111):
        put(quarantine, sequence)
    assert quarantine.unkept == {"rate": 96 + 8}
    assert [note["sequence"] for note in notes(tmp_path)] == [3, 4, 101, 102]


def test_the_quarantine_refuses_bounds_without_room_for_a_sample(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"max_bytes": 0}, {"max_files": 1}, {"rate": -1.0}]
    for bounds in wrong:
        with pytest.raises(ValueError, match="need at least"):
            Quarantine(tmp_path, **bounds)


def test_newest_returns_the_notes_of_the_quarantine_and_no_foreign_ones(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    put(quarantine, 1)
    put(quarantine, 2, row={"id": "\udcff"}, error=BadSample("damaged", "no JPEG"))
    for sequence, path in enumerate(sorted(tmp_path.glob("*.json"))):
        os.utime(path, (sequence, sequence))
    (tmp_path / "other.json").write_text(json.dumps({**FACTS, "reason": "", "message": ""}))
    told = newest(tmp_path, 10)
    assert [(one["id"], one["message"]) for one in told] == [("?", "no JPEG"), ("a", "cut short")]
    assert json.dumps(told, ensure_ascii=False).encode()
    assert newest(tmp_path, 1) == told[:1]


def test_other_users_cannot_read_the_quarantine(tmp_path: Path) -> None:
    folder = tmp_path / "quarantine"
    folder.mkdir(mode=0o755)  # as earlier releases made it
    quarantine = Quarantine(folder)
    put(quarantine, 1)
    paths = [folder, *folder.iterdir()]
    assert len(paths) == 3
    assert [path.stat().st_mode & 0o077 for path in paths] == [0, 0, 0]


def test_the_quarantine_does_not_change_a_folder_behind_a_link(tmp_path: Path) -> None:
    other, link = tmp_path / "etc", tmp_path / "quarantine"
    other.mkdir(mode=0o755)
    link.symlink_to(other)
    with pytest.raises(ValueError, match="quarantine: is a link, and links are not followed here"):
        Quarantine(link)
    link.unlink()
    quarantine = Quarantine(link)
    link.symlink_to(other)  # while it runs
    put(quarantine, 1)
    assert (quarantine.unkept, files(other)) == ({"disk": 1}, {})
    assert other.stat().st_mode & 0o777 == 0o755
