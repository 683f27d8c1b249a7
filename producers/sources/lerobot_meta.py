"""The metadata of a LeRobot data set (v2.0 to v3.0): episodes, tasks and the places of images."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import read_bytes
from stream_ssl.producers.sources.base import BrokenFileError, own_fault
from stream_ssl.producers.sources.tables import table_rows
from stream_ssl.producers.sources.url_lists import bounded_lines
from stream_ssl.wire.sample import MAX_META_BYTES

VERSIONS = ("v2.0", "v2.1", "v3.0")  # v2.0 differs from v2.1 only in its statistics
MAX_INFO = 2**24  # bytes of meta/info.json
MAX_EPISODES = 10_000_000
MAX_FRAMES = 1_000_000  # of an episode: nine hours of 30 frames per second
MAX_TASKS = 100_000
PARTS = ("chunk_index", "file_index")
"""The numbers in the path of a file of v3.0."""
UNFINISHED = "If it is still recorded, end the recording: LeRobotDataset.finalize()"
FORM = re.compile(r"(0?\d{1,2})?[ds]?")
"""The formats that a number or a name may have in the path of a file."""


@dataclass(frozen=True)
class Clip:
    """The film or the images of one camera in one episode."""

    episode: int
    camera: str
    length: int  # number of frames
    table: Path
    video: Path | None  # None if the images are in the table
    begins: float  # start of the episode in the video, in seconds


def described(root: Path) -> dict[str, Any]:
    """Return the content of meta/info.json.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not from a LeRobot data set, or has another version.
    """
    file = root / "meta" / "info.json"
    if not file.is_file():
        raise FileNotFoundError(f"{root} is no LeRobot data set: there is no meta/info.json in it")
    try:
        found: dict[str, Any] = json.loads(read_bytes(file, MAX_INFO, links=True))
        version, features = found["codebase_version"], found["features"]
        numbers = (
            0 < float(found["fps"]) < math.inf
            and 0 <= int(found["total_episodes"]) <= MAX_EPISODES
            and int(found.get("chunks_size", 1)) > 0
        )
        paths = isinstance(found["data_path"], str) and "video_path" in found
        each = isinstance(features, Mapping) and all(
            isinstance(one, Mapping) for one in features.values()
        )
        if not (each and numbers and paths):
            raise ValueError("fps, total_episodes, chunks_size, features or a path is wrong")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file}: not what LeRobot writes: {error!r}") from None
    if version not in VERSIONS:
        raise ValueError(
            f"{file}: format {version!r}; read are {', '.join(VERSIONS)}. The scripts of lerobot "
            "0.3 convert older ones"
        )
    return found


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON Lines file. Lines without an object are left out."""
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in bounded_lines(text):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict):
                    yield found


def episode_rows(
    root: Path, episodes: Sequence[int], cameras: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Return the metadata of each of the episodes, by its index.

    Raises:
        BrokenFileError: the metadata cannot be read.
    """
    wanted = set(episodes)
    names = [f"data/{part}" for part in PARTS]
    names += [f"videos/{one}/{part}" for one in cameras for part in (*PARTS, "from_timestamp")]
    rows = whole_rows(root, ["length", *names])
    return {index: row for row in rows if (index := row["episode_index"]) in wanted}


def indices(root: Path) -> Iterator[int]:
    """Yield the index of each episode in the metadata, as far as it can be read.

    Damage is counted when the episodes themselves are read.
    """
    try:
        for row in itertools.islice(whole_rows(root, []), MAX_EPISODES):
            if row["episode_index"] >= 0:
                yield row["episode_index"]
    except Exception as error:  # damaged bytes can cause errors of any type
        if own_fault(error):
            raise


def whole_rows(root: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the columns of the metadata of each episode that has an index.

    Raises:
        BrokenFileError: the metadata cannot be read.
    """
    meta, names = root / "meta", ["episode_index", *columns]
    try:
        if (jsonl := meta / "episodes.jsonl").is_file():
            rows = lines(jsonl)
        else:
            found = meta.glob("episodes/**/[!.]*.parquet")  # not the ._ files of macOS
            files = sorted(one for one in found if one.is_file())
            rows = itertools.chain.from_iterable(table_rows(file, names) for file in files)
        yield from (row for row in rows if type(row.get("episode_index")) is int)
    except (OSError, ValueError) as error:
        why = f"what meta says of the episodes cannot be read: {str(error).rstrip('.')}"
        raise BrokenFileError(f"{why}. {UNFINISHED}") from error


def tasks(root: Path) -> Iterator[tuple[int, str]]:
    """Yield (index, sentence) of each task, as far as the metadata can be read.

    Sentences that do not fit into meta are left out, and tasks after MAX_TASKS.
    """
    meta, jsonl = root / "meta", root / "meta" / "tasks.jsonl"
    try:
        rows: Iterator[dict[str, Any]] = iter(())
        if jsonl.is_file():
            rows = lines(jsonl)
        elif (table := meta / "tasks.parquet").is_file():
            from pyarrow import parquet

            rows = table_rows(table, parquet.read_schema(table).names)
        for row in itertools.islice(rows, MAX_TASKS):
            if type(index := row.pop("task_index", None)) is int:
                for text in [row["task"]] if "task" in row else row.values():  # else pandas' index
                    if isinstance(text, str) and len(text) <= MAX_META_BYTES:
                        yield index, text
    except Exception as error:  # damaged bytes can cause errors of any type
        if own_fault(error):
            raise
        return  # samples are sent without the sentences


def clip_of(root: Path, info: Mapping[str, Any], row: Mapping[str, Any], camera: str) -> Clip:
    """Return where the film or the images of a camera are stored for an episode."""
    episode, length = (int(number_in(row, name)) for name in ("episode_index", "length"))
    if length > MAX_FRAMES:
        raise BrokenFileError(f"length is {length}; at most {MAX_FRAMES} frames are read")
    filmed = info["features"][camera]["dtype"] == "video"
    of_video, begins = {}, 0.0
    if info["codebase_version"] == "v3.0":
        at = {part: row[f"data/{part}"] for part in PARTS}
        if filmed:
            of_video = {part: row[f"videos/{camera}/{part}"] for part in PARTS}
            begins = number_in(row, f"videos/{camera}/from_timestamp")
    else:
        chunk = episode // int(info.get("chunks_size", 1000))
        at = of_video = {"episode_chunk": chunk, "episode_index": episode}
    table, video = inside(root, filled(info["data_path"], **at)), None
    if filmed:
        video = inside(root, filled(info["video_path"], video_key=camera, **of_video))
    return Clip(episode, camera, length, table, video, begins)


def number_in(row: Mapping[str, Any], name: str) -> float:
    """Return a finite number from a row of a table.

    Raises:
        BrokenFileError: the value is not a finite number.
    """
    value = row.get(name)
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    raise BrokenFileError(f"{name} is {value!r:.40}, and not a finite number")


def filled(pattern: Any, **values: Any) -> str:
    """Return the path that a pattern of meta/info.json gives for `values`.

    Raises:
        BrokenFileError: the pattern is invalid.
    """
    try:
        for _, name, form, change in string.Formatter().parse(pattern):
            # Others could read attributes, or ask for gigabytes of padding.
            plain = name in values and not change and FORM.fullmatch(form or "")
            if name is not None and not plain:
                raise ValueError(f"{name!r:.40} with {form!r:.40} is no field of a path")
        return str(pattern.format(**values))
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise BrokenFileError(f"meta/info.json: the path {pattern!r:.80}: {error!r}") from error


def inside(root: Path, name: str) -> Path:
    """Return the path of a file in the data set.

    Raises:
        ValueError: the path lies outside the data set, or is not that of a file.
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path} lies outside the data set")
    if not path.is_file():  # opening a pipe would block
        raise ValueError(f"{path} is missing, or is no regular file")
    return path
