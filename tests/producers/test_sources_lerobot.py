"""LeRobot data sets: which frames are sent, exactly once, and what happens to damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lerobot_files import CAMERAS, LENGTHS, TASKS, V2, V2_VIDEO, write_lerobot
from table import table
from video_files import RATE, number_of

from producers.sources import LeRobot

BEGAN = 1_714_979_289.0  # what the videos tell
TOP, WRIST = CAMERAS
VERSIONS = ("v2.1", "v3.0")


def told(source: LeRobot, position: Any = None) -> list[tuple[int, str, int, int]]:
    """Episode, camera, frame and the number in the picture."""
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


@pytest.mark.parametrize("version", VERSIONS)
def test_every_frame_is_sent_once_and_gone_on_from(version: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path, version)
    source = LeRobot(root)
    stream = list(source.samples())
    assert told(source) == expected(version)
    assert source.skipped.by_reason == {}
    for at in (0, 5, 6, 11, 25, len(stream) - 2, len(stream) - 1):
        assert list(LeRobot(root).samples(stream[at][1])) == stream[at + 1 :]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sample_tells_episode_task_and_time(version: str, tmp_path: Path) -> None:
    sample = next(
        s
        for s, _ in LeRobot(write_lerobot(tmp_path, version), "1:2").samples()
        if s.meta["frame"] == 4
    )
    assert sample.id == f"{TOP}/1#4"
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
def test_episodes_cameras_and_frames_are_chosen(version: str, tmp_path: Path) -> None:
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


def test_damage_costs_its_clip_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_lerobot(tmp_path, "v2.1")
    (root / V2_VIDEO.format(episode_chunk=0, episode_index=0, video_key=TOP)).write_bytes(b"no")
    (root / V2.format(episode_chunk=0, episode_index=1)).unlink()
    episodes = root / "meta" / "episodes.jsonl"
    episodes.write_text(episodes.read_text().replace('"length": 9', '"length": 8'))
    source = LeRobot(root)
    assert told(source) == [
        each for each in expected("v2.1", (0, 2)) if each[:2] != (0, TOP) and each[2] < 8
    ]
    assert source.skipped.by_reason == {"damaged": 3}
    assert f"{TOP} of episode 0" in caplog.text


def test_a_film_that_ends_early_is_told(tmp_path: Path) -> None:
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
        ({"codebase_version": "v1.6"}, "format 'v1.6'; v2.1 and v3.0 are read"),
        ({"fps": 0}, "not what LeRobot writes"),
        ({"features": 3}, "not what LeRobot writes"),
        ({"features": {}}, "images in Parquet are not read"),
        ({"total_episodes": 0}, "none"),
    ],
)
def test_another_data_set_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path, "v2.1")
    info = root / "meta" / "info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        LeRobot(root)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", "v3.0")
    with pytest.raises(
        ValueError, match=f"'front' is none of its videos, which are: {TOP}, {WRIST}"
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
