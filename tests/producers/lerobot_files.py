"""Small LeRobot data sets, written by PyArrow and PyAV in the layout of formats v2.0 to v3.0."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image
from pyarrow import parquet
from video_files import RATE, numbered, write_video

CAMERAS = ("observation.images.top", "observation.images.wrist")
TASKS = ("pick the cube", "place the cube")
LENGTHS = (6, 12, 9)
V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def write_lerobot(root: Path, version: str, films: bool = True) -> Path:
    """Write three episodes of two cameras: in v2.0 and v2.1 a film of each, in v3.0 one of all.

    Without films the images lie in the tables, as PNG files.
    """
    three = version == "v3.0"
    image = {
        "dtype": "video" if films else "image",
        "shape": [48, 64, 3],
        "names": ["height", "width", "channels"],
    }
    features: dict[str, Any] = {"observation.state": {"dtype": "float32", "shape": [2]}}
    info = {
        "codebase_version": version,
        "fps": RATE,
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "chunks_size": 2 if not three else 1000,
        "data_path": V3 if three else V2,
        "video_path": (V3_VIDEO if three else V2_VIDEO) if films else None,
        "features": features | dict.fromkeys(CAMERAS, image),
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    data = [rows_of(episode) for episode in range(len(LENGTHS))]
    if not films:
        for row in (row for rows in data for row in rows):
            number = row["index"] if three else row["frame_index"]
            row |= {camera: {"bytes": png(number), "path": None} for camera in CAMERAS}
    if three:
        write_v3(root, data, films)
    else:
        write_v2(root, data, films)
    return root


def png(number: int) -> bytes:
    """Return a PNG picture of a number."""
    file = io.BytesIO()
    Image.fromarray(numbered(number)).save(file, "png")
    return file.getvalue()


def rows_of(episode: int) -> list[dict[str, Any]]:
    begins = sum(LENGTHS[:episode])
    return [
        {
            "observation.state": [0.0, float(n)],
            "timestamp": n / RATE,
            "frame_index": n,
            "episode_index": episode,
            "index": begins + n,
            "task_index": episode % 2,
        }
        for n in range(LENGTHS[episode])
    ]


def table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def film(path: Path, frames: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_video(path, frames)


def write_v2(root: Path, data: list[list[dict[str, Any]]], films: bool) -> None:
    for episode, rows in enumerate(data):
        at = {"episode_chunk": episode // 2, "episode_index": episode}
        table(root / V2.format(**at), rows)
        for camera in CAMERAS if films else ():
            film(root / V2_VIDEO.format(video_key=camera, **at), len(rows))
    episodes = [
        {"episode_index": n, "tasks": [TASKS[n % 2]], "length": length}
        for n, length in enumerate(LENGTHS)
    ]
    tasks = [{"task_index": n, "task": task} for n, task in enumerate(TASKS)]
    for name, rows in (("episodes", episodes), ("tasks", tasks)):
        (root / "meta" / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def write_v3(root: Path, data: list[list[dict[str, Any]]], films: bool) -> None:
    at = {"chunk_index": 0, "file_index": 0}
    table(root / V3.format(**at), [row for rows in data for row in rows])
    episodes = []
    for camera in CAMERAS if films else ():
        film(root / V3_VIDEO.format(video_key=camera, **at), sum(LENGTHS))
    for n, length in enumerate(LENGTHS):
        row: dict[str, Any] = {"episode_index": n, "length": length, "tasks": [TASKS[n % 2]]}
        row |= {"data/chunk_index": 0, "data/file_index": 0, "stats/timestamp/max": [1.0]}
        for camera in CAMERAS if films else ():
            row[f"videos/{camera}/chunk_index"] = row[f"videos/{camera}/file_index"] = 0
            row[f"videos/{camera}/from_timestamp"] = sum(LENGTHS[:n]) / RATE
            row[f"videos/{camera}/to_timestamp"] = sum(LENGTHS[: n + 1]) / RATE
        episodes.append(row)
    table(root / "meta/episodes/chunk-000/file-000.parquet", episodes)
    # pandas writes the sentences as the index.
    columns = {"task_index": [0, 1], "__index_level_0__": list(TASKS)}
    parquet.write_table(pa.table(columns), root / "meta" / "tasks.parquet")
