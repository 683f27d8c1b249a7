"""A source of LeRobot data sets (v2.0 to v3.0), whose images lie in Parquet or MP4 files."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stream_ssl.producers.sources.base import BrokenFileError, Facts, Skipped, own_fault
from stream_ssl.producers.sources.fields import (
    digest,
    file_name,
    fitting_meta,
    fitting_time,
    short_id,
)
from stream_ssl.producers.sources.film import time_base
from stream_ssl.producers.sources.finite import select
from stream_ssl.producers.sources.frames import Frames
from stream_ssl.producers.sources.image_files import check_pulled, codec_of, no_image, read_image
from stream_ssl.producers.sources.lerobot_meta import (
    UNFINISHED,
    Clip,
    clip_of,
    described,
    episode_rows,
    indices,
    inside,
    number_in,
    tasks,
)
from stream_ssl.producers.sources.recordings import Recordings, Where
from stream_ssl.producers.sources.robot_pixels import MAX_PIXELS
from stream_ssl.producers.sources.video import VideoFiles, ahead, opened, time_of_zero
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from av import VideoFrame

COLUMNS = ["frame_index", "timestamp", "task_index"]


class LeRobot(VideoFiles):
    """Frames of a LeRobot data set on disk, ordered by episode, then by camera.

    Sample ids are CAMERA/EPISODE~DIGEST#FRAME, with a digest of the film or table that contains the
    frame. The label is the index of the task.

    The capture time is the creation time of the video file plus the frame's time in the file. If
    the file has no creation time, its last modification counts as the end of the recording. The
    format stores times only within an episode; meta contains them as `seconds`.

    Images in Parquet files are encoded again, as the frames of films are. For these images, the
    last modification of the table counts as the end of the recording. Parts that cannot be read are
    logged, counted in `skipped` and left out.

    Args:
        root: the folder of the data set, which contains meta/info.json.
        episodes: the episodes to send, as a Python slice "start:stop:step" or a list of indices.
        cameras: names of features, such as observation.images.top; null: all films and images.
        epochs: number of passes, 1 or more; null: endless.
        name: the source's name.

    Raises:
        FileNotFoundError: the data set does not exist.
        ValueError: the data set has another format, or an argument is invalid.
        ModuleNotFoundError: PyArrow, PyAV or Pillow is not installed.
    """

    LOWEST = (0, 0)  # in a position, the number of a clip stands for the time

    def __init__(
        self,
        root: Path,
        episodes: list[int] | str | None = None,
        cameras: list[str] | None = None,
        epochs: int | None = 1,
        name: str = "lerobot",
        **frames: Any,
    ) -> None:
        import av  # noqa: F401
        import pyarrow  # noqa: F401  # fail early if they are not installed

        self._frames, self._root = Frames(**frames), Path(root)
        self._info = described(self._root)
        kinds = {name: feature.get("dtype") for name, feature in self._info["features"].items()}
        known = [name for name, kind in kinds.items() if kind in ("video", "image")]
        self._cameras = known if cameras is None else list(cameras)
        wrong = [camera for camera in self._cameras if camera not in known]
        if wrong or not self._cameras:
            raise ValueError(
                f"{root}: {wrong[0] if wrong else 'no camera'!r} is none of its cameras, which "
                f"are: {', '.join(known) or 'none (no feature is of dtype video or image)'}"
            )
        count = int(self._info["total_episodes"])
        self._episodes: list[int] = select(count, episodes).tolist()
        if episodes is None:  # a recorder that crashed, or a deletion, leaves gaps among them
            self._episodes = sorted({*self._episodes, *indices(self._root)})
        if not self._episodes:
            raise ValueError(f"{root}: episodes {episodes!r} of {count}: none")
        info, facts = str(self._root / "meta" / "info.json"), self._frames.facts
        Recordings.__init__(self, info, epochs, Skipped(name), "LeRobot data set", facts)
        self._tasks = dict(tasks(self._root))

    def _facts(self, number: int, position: Position = None) -> Facts:
        """Return the facts of the set. Episodes may be added after the episodes of a position."""
        made = position.get("of") if isinstance(position, Mapping) else None
        count = made.get("episodes") if isinstance(made, Mapping) else None
        if type(count) is not int or not 0 < count <= len(self._episodes):
            count = len(self._episodes)
        chosen = digest([json.dumps([self._episodes[:count], self._cameras]).encode()])
        own: Facts = {"bytes": None, "episodes": count, "chosen": chosen}
        return {**super()._facts(number, position), **own}

    def _recorded(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        """Yield the samples; a place is [index of the clip, frame]."""
        del path  # meta/info.json, which leads to all other files
        rows = episode_rows(self._root, self._episodes, self._cameras)
        clips = [(e, camera) for e in self._episodes for camera in self._cameras]
        first, last = (0, -1) if after is None else after
        for number, (episode, camera) in enumerate(clips[first:], start=first):
            try:
                if episode not in rows:
                    raise BrokenFileError(f"meta/episodes does not have it. {UNFINISHED}")
                clip = clip_of(self._root, self._info, rows[episode], camera)
                for sample, frame in self._filmed(clip, last if number == first else -1):
                    yield sample, (number, frame)
            except Exception as error:  # damaged bytes can cause errors of any type
                self.skipped.note_damage(f"{camera} of episode {episode}", error)
            if self._stopped.is_set():
                return

    def _filmed(self, clip: Clip, last: int) -> Iterator[tuple[Sample, int]]:
        """Yield the samples of a clip after frame `last`, with their frame numbers."""
        row_N = frame_rows(clip)
        file = file_name(clip.video or clip.table).rpartition("~")[2]
        if clip.video is None:
            zero = clip.table.stat().st_mtime - clip.length / float(self._info["fps"])
            chosen = self._in_table(clip, last)
        else:
            zero, chosen = time_of_zero(clip.video), self._in_film(clip, clip.video, last)
        for (frame, number), payload in ahead(lambda each: self._frames.payload(each[0]), chosen):
            row = row_N[number]
            task = int(number_in(row, "task_index"))
            facts = {"episode": clip.episode, "frame": number, "camera": clip.camera}
            facts |= {"seconds": round(number_in(row, "timestamp"), 6)}
            yield (
                Sample(
                    id=short_id(f"{clip.camera}/{clip.episode}~{file}#{number}"),
                    time=fitting_time(zero + frame.time, zero),
                    source=self.name,
                    label=task if task >= 0 else None,
                    meta=fitting_meta(facts, {"task": self._tasks.get(task)}),
                    **payload,
                ),
                number,
            )

    def _in_table(self, clip: Clip, last: int) -> Iterator[tuple[VideoFrame, int]]:
        """Yield the images after frame `last`, with their frame numbers."""
        fps, gate = float(self._info["fps"]), self._frames.gate()
        columns = ["frame_index", clip.camera]
        for row in stored_frames(clip, columns, max(last, 0), batch=16):  # few images in memory
            if self._stopped.is_set():
                return
            number = row["frame_index"]
            try:
                frame = picture(self._root, row[clip.camera])
            except Exception as error:  # damaged bytes can cause errors of any type
                what = f"frame {number} of {clip.camera} of episode {clip.episode}"
                self.skipped.note_damage(what, error)
                continue
            frame.pts, frame.time_base = number, 1 / Fraction(fps).limit_denominator(10_000)
            if gate.takes(frame, number / fps) and number > last:
                yield frame, number

    def _in_film(self, clip: Clip, video: Path, last: int) -> Iterator[tuple[VideoFrame, int]]:
        """Yield the frames of the film after frame `last`, with their frame numbers."""
        import av

        fps, gate = float(self._info["fps"]), self._frames.gate()
        with opened(video) as (_, stream):
            unit = time_base(stream)
        seconds = clip.begins + max(last, 0) / fps
        sought, sent = round(seconds / unit) if seconds else None, last
        why = "the film ends"
        try:
            for frame in self._from(video, sought):
                number = round((frame.time - clip.begins) * fps)
                if number >= clip.length or self._stopped.is_set():
                    return
                if number == last >= 0:
                    gate.takes(frame, number / fps)  # restores the gate's state at that frame
                elif number > sent:
                    sent = number
                    if self._frames.wants(frame) and gate.takes(frame, number / fps):
                        yield frame, number
        except av.FFmpegError as error:
            why = str(error.strerror)
        if sent + 1 < clip.length and not self._frames.key_frames:
            rest = f"frames {sent + 1} to {clip.length - 1} of {video}"
            self.skipped.note("damaged", rest, why)


def stored_frames(
    clip: Clip, columns: list[str], first: int = 0, batch: int = 2**14
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an episode's frames from frame `first` on, read `batch` rows at a time.

    Some tools, such as those of GR00T, write no numbers of frames: rows are then counted.
    """
    from pyarrow import dataset

    table = dataset.dataset(clip.table)
    numbered = "frame_index" in table.schema.names
    chosen = dataset.field("episode_index") == clip.episode
    if numbered:
        number = dataset.field("frame_index")
        chosen &= (number >= first) & (number < clip.length)
    scanner = table.scanner(
        columns=columns if numbered else [name for name in columns if name != "frame_index"],
        filter=chosen,
        batch_size=batch,
        batch_readahead=1,
        fragment_readahead=1,
    )
    rows = itertools.chain.from_iterable(rows.to_pylist() for rows in scanner.to_batches())
    if numbered:
        yield from rows
        return
    for count, row in itertools.islice(enumerate(rows), first, clip.length):
        yield {**row, "frame_index": count}


def picture(root: Path, cell: Any) -> VideoFrame:
    """Return the image in a cell {"bytes": encoded file, "path": path that is used without bytes}.

    The image is rotated as its EXIF data says. Transparent pixels are composited over white.

    Raises:
        OSError: the file cannot be read.
        ValueError: the data is not an image, it has too many pixels, or its pixels are not 8-bit
            numbers.
    """
    import av
    from PIL import Image

    from stream_ssl.pictures import over_white, upright

    held = cell if isinstance(cell, Mapping) else {}
    data, path = held.get("bytes"), held.get("path")
    if not (data and isinstance(data, bytes)):
        if not (path and isinstance(path, str)):
            raise ValueError("neither bytes nor a path")
        data = read_image(inside(root, path))
    if codec_of(data) is None:
        raise ValueError(no_image(data))
    with Image.open(io.BytesIO(data)) as image:
        if image.width * image.height > MAX_PIXELS:
            why = f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} are read"
            raise ValueError(why)
        if image.mode[0] in "IF":
            raise ValueError(f"pixels of mode {image.mode} are no 8-bit numbers")
        shown = over_white(upright(image))
    return av.VideoFrame.from_ndarray(
        np.asarray(shown), format="gray" if shown.mode == "L" else "rgb24"
    )


def frame_rows(clip: Clip) -> dict[int, dict[str, Any]]:
    """Return the data row of each frame of an episode, by frame number.

    Raises:
        BrokenFileError: the file cannot be read, lacks frames, or has a frame twice.
    """
    from pyarrow import parquet, types

    found: dict[int, dict[str, Any]] = {}
    check_pulled(clip.table)
    try:
        schema = parquet.read_schema(clip.table)
        for name in COLUMNS:
            if name == "frame_index" and name not in schema.names:
                continue  # `stored_frames` counts
            kind = schema.field(name).type
            if not (types.is_integer(kind) or types.is_floating(kind)):  # texts may be of any size
                raise ValueError(f"column {name!r} is {kind}, and holds no numbers")
        for row in stored_frames(clip, COLUMNS):
            if (number := int(row["frame_index"])) in found:
                raise ValueError(f"it has frame {number} of episode {clip.episode} twice")
            found[number] = row
    except Exception as error:
        if own_fault(error):
            raise
        raise BrokenFileError(f"{clip.table} cannot be read: {error!r}") from error
    if len(found) < clip.length:
        raise BrokenFileError(f"{clip.table} has {len(found)} of {clip.length} frames")
    return found
