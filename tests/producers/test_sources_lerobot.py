"""LeRobot data sets: every frame is sent exactly once, and damage is counted."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lerobot_files
import numpy as np
import pyarrow as pa
import pytest
from lerobot_files import CAMERAS, LENGTHS, TASKS, V2, V2_VIDEO, V3_VIDEO, png, write_lerobot
from PIL import Image
from pyarrow import parquet
from table import table
from video_files import RATE, number_of

from stream_ssl.producers.sources import LeRobot, lerobot_meta
from stream_ssl.producers.sources.base import BrokenFileError
from stream_ssl.producers.sources.fields import file_name
from stream_ssl.producers.sources.lerobot import COLUMNS, frame_rows, picture
from stream_ssl.producers.sources.lerobot_meta import Clip, episode_rows, filled

BEGAN = 1_714_979_289.0  # the time in the videos
TOP, WRIST = CAMERAS
VERSIONS = ("v2.1", "v3.0")  # the source reads v2.0 in the same way as v2.1


def told(source: LeRobot, position: Any = None) -> list[tuple[int, str, int, int]]:
    """Return the episode, camera, frame and number in the picture of each sample."""
    found = []
    for sample, _ in source.samples(position):
        meta = sample.meta or {}
        found.append((meta["episode"], meta["camera"], meta["frame"], number_of(sample)))
    return found


def expected(version: str, episodes: Any = range(3), cameras: Any = CAMERAS) -> list[Any]:
    begins = {n: sum(LENGTHS[:n]) if version == "v3.0" else 0 for n in range(3)}
    return [
        (n, camera, frame, begins[n] + frame)
        for n in episodes
        for camera in cameras
        for frame in range(LENGTHS[n])
    ]


@pytest.mark.parametrize("films", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_lerobot_set_sends_every_frame_once_and_resumes_after_each(
    version: str, films: bool, tmp_path: Path
) -> None:
    root = write_lerobot(tmp_path, version, films)
    source = LeRobot(root)
    stream = list(source.samples())
    assert told(source) == expected(version)
    assert source.skipped.by_reason == {}
    for at in (0, 5, 6, 11, 25, len(stream) - 2, len(stream) - 1):
        assert list(LeRobot(root).samples(stream[at][1])) == stream[at + 1 :]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lerobot_set_ignores_hidden_files(version: str, tmp_path: Path) -> None:
    """On a disk without such attributes, macOS writes a file ._x beside each file x."""
    root = write_lerobot(tmp_path, version)
    for file in [file for file in root.rglob("*") if file.is_file()]:
        file.with_name(f"._{file.name}").write_bytes(b"attributes")
    assert told(LeRobot(root)) == expected(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sample_contains_its_episode_its_task_and_its_time(version: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path, version)
    sample = next(s for s, _ in LeRobot(root, "1:2").samples() if s.meta["frame"] == 4)
    film = root / (
        V3_VIDEO.format(chunk_index=0, file_index=0, video_key=TOP)
        if version == "v3.0"
        else V2_VIDEO.format(episode_chunk=0, episode_index=1, video_key=TOP)
    )
    digest = file_name(film).rpartition("~")[2]
    assert sample.id == f"{TOP}/1~{digest}#4"
    assert sample.label == 1
    assert sample.meta == {
        "episode": 1,
        "frame": 4,
        "camera": TOP,
        "seconds": 4 / RATE,
        "task": TASKS[1],
    }
    begins = LENGTHS[0] / RATE if version == "v3.0" else 0
    assert sample.time == pytest.approx(BEGAN + begins + 4 / RATE)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_position_fits_a_set_with_more_episodes_and_not_with_fewer(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(lerobot_files, "LENGTHS", LENGTHS[:2])
        first = LeRobot(write_lerobot(tmp_path / "early", version))
        positions = [position for _, position in first.samples()]
    assert len(positions) == 2 * sum(LENGTHS[:2])
    grown = LeRobot(write_lerobot(tmp_path / "late", version))
    for sent in (3, len(positions) - 1, len(positions)):
        assert told(grown, positions[sent - 1]) == expected(version)[sent:]
    for wrong in (LeRobot(tmp_path / "early"), LeRobot(tmp_path / "late", "1:")):
        *_, (_, position) = grown.samples()
        with pytest.raises(ValueError, match=r"position does not fit: .*episodes was 3 and is 2"):
            next(wrong.samples(position))
    with pytest.raises(ValueError, match=r"position does not fit: .*chosen was"):
        next(LeRobot(tmp_path / "late", [0, 2, 1]).samples(positions[0]))


@pytest.mark.parametrize("version", VERSIONS)
def test_arguments_choose_episodes_cameras_and_frames(version: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path, version)
    chosen = LeRobot(root, [2, 0], [WRIST])
    assert told(chosen) == expected(version, (2, 0), (WRIST,))
    slow = told(LeRobot(root, cameras=[TOP], fps=RATE / 3, codec="raw"))
    assert [(n, frame) for n, _, frame, _ in slow] == [
        (n, frame) for n in range(3) for frame in range(0, LENGTHS[n], 3)
    ]
    thin = {"cameras": [TOP], "fps": RATE / 3}
    stream = list(LeRobot(root, **thin).samples())
    for at in (0, 2, 4):
        assert list(LeRobot(root, **thin).samples(stream[at][1])) == stream[at + 1 :]
    _, position = next(chosen.samples())
    with pytest.raises(ValueError, match="chosen was"):
        next(LeRobot(root).samples(position))
    with pytest.raises(ValueError, match="position does not fit"):
        next(chosen.samples(position | {"at": [0, -1, 0]}))


def test_a_damaged_file_costs_only_its_own_clips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_lerobot(tmp_path, "v2.1")
    (root / V2_VIDEO.format(episode_chunk=0, episode_index=0, video_key=TOP)).write_bytes(b"no")
    table = root / V2.format(episode_chunk=0, episode_index=1)
    table.unlink()
    os.mkfifo(table)  # opening a pipe would block
    episodes = root / "meta" / "episodes.jsonl"
    episodes.write_text(episodes.read_text().replace('"length": 9', '"length": 8'))
    source = LeRobot(root)
    assert told(source) == [
        each for each in expected("v2.1", (0, 2)) if each[:2] != (0, TOP) and each[2] < 8
    ]
    assert source.skipped.by_reason == {"damaged": 3}
    assert f"{TOP} of episode 0" in caplog.text


def test_a_bad_image_in_a_table_costs_no_other_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_lerobot(tmp_path / "set", "v2.1", films=False)
    (tmp_path / "set" / "images").mkdir()
    (tmp_path / "set" / "images" / "six.png").write_bytes(png(6))
    (tmp_path / "outside.png").write_bytes(png(7))
    deep = io.BytesIO()
    Image.new("I;16", (64, 48)).save(deep, "png")
    cells: dict[int, Any] = {
        0: None,
        1: {"bytes": b"no image", "path": None},
        2: {"bytes": png(2)[:60], "path": None},
        3: {"bytes": deep.getvalue(), "path": None},
        6: {"bytes": None, "path": "images/six.png"},
        7: {"bytes": None, "path": "../outside.png"},
        8: {"bytes": None, "path": "images/missing.png"},
    }
    file = root / V2.format(episode_chunk=0, episode_index=1)
    rows = parquet.read_table(file).to_pylist()
    for number, cell in cells.items():
        rows[number][TOP] = cell
    parquet.write_table(pa.Table.from_pylist(rows), file)
    source = LeRobot(root, "1:2", fps=RATE / 2)
    stream = list(source.samples())
    assert [s.meta["frame"] for s, _ in stream] == [4, 6, 9, 10, 0, 2, 4, 6, 8, 10]
    assert [number_of(s) for s, _ in stream] == [4, 6, 9, 10, 0, 2, 4, 6, 8, 10]
    assert source.skipped.by_reason == {"damaged": 6}
    assert f"frame 7 of {TOP} of episode 1 (damaged): " in caplog.text
    assert "neither JPEG, PNG nor WebP by its first bytes: 6e 6f" in caplog.text
    assert "lies outside the data set" in caplog.text
    ends = file.stat().st_mtime
    assert stream[0][0].time == pytest.approx(ends - (LENGTHS[1] - 4) / RATE)


def test_an_image_of_too_many_pixels_is_refused() -> None:
    file = io.BytesIO()
    Image.new("1", (8193, 8192)).save(file, "png")
    with pytest.raises(ValueError, match="8193 x 8192 pixels; at most 67108864 are read"):
        picture(Path(), {"bytes": file.getvalue()})


def column(name: str, value: Any) -> Callable[[bytes], bytes]:
    """Return a function that replaces a table's column, or removes the column if value is None."""

    def changed(data: bytes) -> bytes:
        rows = parquet.read_table(io.BytesIO(data)).to_pylist()
        for row in rows:
            row.pop(name) if value is None else row.update({name: value})
        file = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), file)
        return file.getvalue()

    return changed


EPISODES, SENTENCES = "meta/episodes.jsonl", "meta/tasks.jsonl"
SECOND = V2.format(episode_chunk=0, episode_index=1)
DAMAGE: list[tuple[str, Callable[[bytes], bytes], bool]] = [
    (EPISODES, lambda data: data.replace(b'{"episode_index": 1', b"3 \xff {1"), True),
    (EPISODES, lambda data: data.replace(b'{"episode_index": 1', b'{"index": 1'), True),
    (EPISODES, lambda data: data.replace(b'{"episode_index": 1', b'{"episode_index": [1]'), True),
    (EPISODES, lambda data: data.replace(b'"length": 12', b'"length": null'), True),
    (EPISODES, lambda data: data.replace(b'"length": 12', b'"length": 13'), True),
    (EPISODES, lambda data: b"[" * 100_000 + b"\n[]\n7\n" + data, False),
    (SENTENCES, lambda data: b'7\n{"task_index": [1], "task": 3}\n\xff\n' + data, False),
    (SECOND, lambda data: b"", True),
    (SECOND, lambda data: data[:-9], True),
    (SECOND, lambda data: data[:4] + bytes(500) + data[504:], True),
    (SECOND, column("task_index", None), True),
    (SECOND, column("task_index", "x"), True),
    (SECOND, column("timestamp", [1.0]), True),
    (SECOND, column("frame_index", "x"), True),
    (SECOND, column("episode_index", "x"), True),
    (SECOND, column(TOP, None), True),
    (SECOND, column(TOP, 3), True),
    (SECOND, column(TOP, {"bytes": "text", "path": None}), True),
    (SECOND, column(TOP, {"bytes": None, "path": 3}), True),
]


@table(("file", "change", "costs"), DAMAGE)
def test_a_damaged_file_costs_no_other_episode(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    change: Callable[[bytes], bytes],
    costs: bool,
) -> None:
    root = write_lerobot(tmp_path / "set", "v2.1", films=False)
    (root / file).write_bytes(change((root / file).read_bytes()))
    source = LeRobot(root, cameras=[TOP], codec="raw")
    assert told(source) == expected("v2.1", (0, 2) if costs else range(3), (TOP,))
    assert set(source.skipped.by_reason) == ({"damaged"} if costs else set())
    assert (f"{TOP} of episode 1" in caplog.text) == costs


@table("films", [True, False])
def test_rows_without_frame_numbers_are_numbered_in_order(tmp_path: Path, films: bool) -> None:
    """Tools that write data for GR00T make such rows."""
    root = write_lerobot(tmp_path / f"{films}", "v2.0", films)
    for file in root.glob("data/**/*.parquet"):
        parquet.write_table(parquet.read_table(file).drop_columns(["frame_index"]), file)
    source = LeRobot(root)
    assert told(source) == expected("v2.0")
    assert source.skipped.by_reason == {}
    positions = [position for _, position in source.samples()]
    assert told(source, positions[8]) == expected("v2.0")[9:]


@table("there", [True, False])
def test_the_log_names_an_unfinished_recording_and_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    """LeRobot 0.4 writes the end of its tables, or the tables themselves, when it ends."""
    root = write_lerobot(tmp_path / "set", "v3.0")
    (file,) = (root / "meta" / "episodes").rglob("*.parquet")
    if there:
        file.write_bytes(file.read_bytes()[:-99])
    else:
        file.unlink()
    with pytest.raises(ValueError, match="not one sample"):
        list(LeRobot(root).samples())
    assert "If it is still recorded, end the recording: LeRobotDataset.finalize()" in caplog.text


def test_a_small_file_of_many_rows_takes_little_memory(tmp_path: Path) -> None:
    file, sentences = tmp_path / "meta/episodes/a.parquet", tmp_path / "meta/tasks.parquet"
    names = (*COLUMNS, "episode_index", "length")
    equal = pa.table(dict.fromkeys(names, np.zeros(60_000, np.int64)))
    file.parent.mkdir(parents=True)
    parquet.write_table(equal, file)
    parquet.write_table(equal, sentences)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenFileError, match="it has frame 0 of episode 0 twice"):
            frame_rows(Clip(0, TOP, 12, file, None, 0.0))
        assert list(episode_rows(tmp_path, [0], [])) == [0]
        assert dict(lerobot_meta.tasks(tmp_path)) == {}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.stat().st_size < 2**16
    assert peak < 2**23


@table(
    ("file", "change", "says"),
    [
        (EPISODES, lambda data: data.replace(b": 12", b": 1000001"), "length is 1000001; at most"),
        (SECOND, column("frame_index", 3), "it has frame 3 of episode 1 twice"),
        (SECOND, column("frame_index", 12), "has 0 of 12 frames"),
        (SECOND, column("timestamp", "x"), "is string, and holds no numbers"),
    ],
)
def test_the_log_says_why_the_frames_of_an_episode_do_not_fit(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    change: Callable[[bytes], bytes],
    says: str,
) -> None:
    root = write_lerobot(tmp_path / "set", "v2.1")
    (root / file).write_bytes(change((root / file).read_bytes()))
    assert told(LeRobot(root)) == expected("v2.1", (0, 2))
    assert says in caplog.text


def test_a_film_that_ends_early_is_counted_as_damaged(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path, "v2.1")
    long = V2_VIDEO.format(episode_chunk=0, episode_index=1, video_key=TOP)
    short = V2_VIDEO.format(episode_chunk=0, episode_index=0, video_key=TOP)
    (root / long).write_bytes((root / short).read_bytes())
    source = LeRobot(root, "1:2")
    assert told(source) == expected("v2.1", (1,), (TOP,))[:6] + expected("v2.1", (1,), (WRIST,))
    assert source.skipped.by_reason == {"damaged": 1}


@table(
    ("change", "says"),
    [
        ({"codebase_version": "v1.6"}, "format 'v1.6'; read are v2.0, v2.1, v3.0"),
        ({"fps": 0}, "not what LeRobot writes"),
        ({"features": 3}, "not what LeRobot writes"),
        ({"features": {"a": 3}}, "not what LeRobot writes"),
        ({"chunks_size": 0}, "not what LeRobot writes"),
        ({"total_episodes": 10**12}, "not what LeRobot writes"),
        ({"features": {}}, "no feature is of dtype video or image"),
    ],
)
def test_a_data_set_of_another_format_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    root = write_lerobot(tmp_path, "v2.1")
    info = root / "meta" / "info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        LeRobot(root)


@pytest.mark.parametrize("version", VERSIONS)
def test_episodes_beyond_the_total_in_the_metadata_are_sent(version: str, tmp_path: Path) -> None:
    """A crash of a recorder, or a deletion that leaves a gap, makes such metadata."""
    root = write_lerobot(tmp_path, version)
    info = root / "meta" / "info.json"
    whole = json.loads(info.read_text())
    for count in (2, 0):
        info.write_text(json.dumps(whole | {"total_episodes": count}))
        assert told(LeRobot(root)) == expected(version)
    with pytest.raises(ValueError, match="episodes '0:' of 0: none"):
        LeRobot(root, "0:")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", "v3.0")
    with pytest.raises(
        ValueError, match=f"'front' is none of its cameras, which are: {TOP}, {WRIST}"
    ):
        LeRobot(root, cameras=["front"])
    with pytest.raises(ValueError, match=r"index 3 lies outside \[0, 3\)"):
        LeRobot(root, episodes=[3])
    with pytest.raises(FileNotFoundError, match="no LeRobot data set"):
        LeRobot(tmp_path)


def test_paths_cannot_leave_the_data_set(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", "v2.1")
    info = root / "meta" / "info.json"
    said = json.loads(info.read_text()) | {"video_path": "../film.mp4"}
    info.write_text(json.dumps(said))
    inside = root / V2_VIDEO.format(episode_chunk=0, episode_index=1, video_key=TOP)
    (tmp_path / "film.mp4").write_bytes(inside.read_bytes())
    with pytest.raises(ValueError, match="not one sample"):
        list(LeRobot(root).samples())


@pytest.mark.parametrize(
    "pattern", ["{a.__class__}", "{a[0]}", "{b}", "{a!r}", "{a:{b}}", "{a:99999999999d}", "{"]
)
def test_a_path_pattern_accepts_only_plain_fields(pattern: str) -> None:
    with pytest.raises(BrokenFileError, match=r"meta/info\.json: the path"):
        filled(pattern, a=1)
    assert filled("x-{a:03d}/{b}.mp4", a=1, b="top") == "x-001/top.mp4"


def test_unreadable_task_sentences_raise_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta").mkdir()
    file = tmp_path / "meta" / "tasks.parquet"
    parquet.write_table(pa.table({"task_index": [[1]], "task": ["x"]}), file)
    assert dict(lerobot_meta.tasks(tmp_path)) == {}

    def damaged(_: Path, **__: Any) -> None:
        raise pa.ArrowNotImplementedError("Integers with more than 64 bits not implemented")

    monkeypatch.setattr(parquet, "ParquetFile", damaged)
    assert dict(lerobot_meta.tasks(tmp_path)) == {}
    row = {"task_index": 1, "task": "x", "note": "y"}
    (tmp_path / "meta" / "tasks.jsonl").write_text(json.dumps(row))
    assert dict(lerobot_meta.tasks(tmp_path)) == {1: "x"}
