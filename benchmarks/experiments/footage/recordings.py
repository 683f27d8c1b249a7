"""The recordings, decoded into RAM, with what is known about each frame.

The folder has the parts that are used:

- `patrol/patrol.mcap`, images of one robot, and `patrol/patrol.json`, one row for each image:
  number, log time, floor, stand (-1 while it drives), x, y, angle, {kind of object: pixels};
- `clips/*`, films. `vtest.avi` shows a yard from a fixed camera;
- `web/web.json`, one row for each file of a crawl: path, class, name of the original, and the
  kind of the copy ("original" for the file that is no copy).

Shapes: N frames, H height, W width, C channels.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.data import LabelledImages
from stream_ssl.bounded_files import read_text
from stream_ssl.feed.decode import BadSample, Decoder
from stream_ssl.producers.sources.mcap import McapFiles
from stream_ssl.producers.sources.video import VideoFiles
from stream_ssl.wire.sample import Sample

YARD = "vtest.avi"
SEEN = 100  # pixels of an object that the robot has in view
ROOM = 256  # side of the squares of a floor that count as rooms, in units of the map, about 8 m
LEG = 0.25  # the last part of each floor, which no stream contains
SUFFIXES = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}


@dataclass(frozen=True)
class Footage:
    """Frames in the order of a stream.

    Attributes:
        image_NHWC: uint8 images.
        producers: the name of each frame's producer.
        label_N: the class of each frame, -1 if unknown: a floor of the robot, or a class of files.
        room_N: the room in which the robot is, -1 for other producers.
        scene_N: frames with the same number show the same place.
        original_N: frames with the same number are copies of one picture; all differ unless files
            of a crawl are known to be copies.
        kinds: the kinds of objects in each frame.
    """

    image_NHWC: NDArray[np.uint8]
    producers: Sequence[str]
    label_N: NDArray[np.int64]
    room_N: NDArray[np.int64]
    scene_N: NDArray[np.int64]
    original_N: NDArray[np.int64]
    kinds: Sequence[frozenset[str]]

    def __len__(self) -> int:
        return len(self.image_NHWC)

    def at(self, rows: NDArray[np.int64]) -> Footage:
        """Return the frames of these rows."""
        return Footage(
            self.image_NHWC[rows],
            [self.producers[row] for row in rows],
            self.label_N[rows],
            self.room_N[rows],
            self.scene_N[rows],
            self.original_N[rows],
            [self.kinds[row] for row in rows],
        )

    def images(self, label_N: NDArray[np.int64]) -> LabelledImages:
        """Return the images that have a label, and the labels."""
        rows = np.flatnonzero(label_N >= 0)
        return LabelledImages(self.image_NHWC[rows], label_N[rows])

    def objects(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the only kind of object in each frame, -1 for none or several."""
        number = {name: place for place, name in enumerate(names)}
        return np.array(
            [number.get(next(iter(kinds)), -1) if len(kinds) == 1 else -1 for kinds in self.kinds]
        )


@dataclass(frozen=True)
class Recording:
    """A stream, and frames that it does not contain, to test an encoder with.

    Attributes:
        stream: the frames that the learner receives, once.
        tested: other frames of the same world.
    """

    stream: Footage
    tested: Footage


def _decoded(samples: Iterator[Sample], size: int) -> tuple[NDArray[np.uint8], list[int]]:
    """Return the images, and the numbers of the samples that could be decoded."""
    decode, images, numbers = Decoder(size).decode, [], []
    for number, sample in enumerate(samples):
        try:
            images.append(decode(sample))
        except BadSample:
            continue
        numbers.append(number)
    return np.stack(images), numbers


def robot(folder: Path, size: int) -> Recording:
    """Return the robot's frames, without the last part of each floor, which is tested."""
    rows = json.loads(read_text(folder / "patrol" / "patrol.json", 1 << 28))
    source = McapFiles(str(folder / "patrol" / "patrol.mcap"))
    image_NHWC, numbers = _decoded((sample for sample, _ in source.samples()), size)
    if len(numbers) != len(rows):
        raise ValueError(f"patrol.mcap has {len(numbers)} images, patrol.json {len(rows)} rows")
    label_N = np.array([row[2] for row in rows])
    rooms = [(row[2], row[4] // ROOM, row[5] // ROOM) for row in rows]
    stands = [(row[2], row[3]) for row in rows]
    frames = Footage(
        image_NHWC,
        ["robot"] * len(rows),
        label_N,
        _numbered(rooms),
        _numbered(stands),
        np.arange(len(rows)),
        [frozenset(name for name, pixels in row[7].items() if pixels >= SEEN) for row in rows],
    )
    last = [rows[-int(LEG * len(rows)) :] for rows in rows_by(label_N)]
    tested = np.sort(np.concatenate(last))
    return Recording(frames.at(np.setdiff1d(np.arange(len(rows)), tested)), frames.at(tested))


def _numbered(places: Sequence[tuple[float, ...]]) -> NDArray[np.int64]:
    """Return the number of each frame's place."""
    number = {place: number for number, place in enumerate(sorted({*places}))}
    return np.array([number[place] for place in places])


def rows_by(label_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each label."""
    return [np.flatnonzero(label_N == label) for label in np.unique(label_N)]


def cameras(folder: Path, size: int) -> Recording:
    """Return the robot, the yard shown twice, and each other film once, all at the same time."""
    walk = robot(folder, size)
    parts = [walk.stream]
    for number, path in enumerate(sorted((folder / "clips").iterdir())):
        image_NHWC, _ = _decoded((s for s, _ in VideoFiles(str(path)).samples()), size)
        passes = 2 if path.name == YARD else 1
        count = passes * len(image_NHWC)
        parts.append(
            Footage(
                np.concatenate([image_NHWC] * passes),
                ["yard" if path.name == YARD else "films"] * count,
                np.full(count, -1),
                np.full(count, -1),
                np.full(count, 1_000 + number),
                1_000_000 * (number + 1) + np.arange(count),
                [frozenset()] * count,
            )
        )
    return replace(walk, stream=_interleaved(parts))


def _interleaved(parts: Sequence[Footage]) -> Footage:
    """Return the frames of parts that begin and end at the same time."""
    when = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    whole = Footage(
        np.concatenate([part.image_NHWC for part in parts]),
        [name for part in parts for name in part.producers],
        np.concatenate([part.label_N for part in parts]),
        np.concatenate([part.room_N for part in parts]),
        np.concatenate([part.scene_N for part in parts]),
        np.concatenate([part.original_N for part in parts]),
        [kinds for part in parts for kinds in part.kinds],
    )
    return whole.at(np.argsort(when, kind="stable"))


def crawl(folder: Path, size: int) -> Recording:
    """Return the files of a crawl. A tenth of the originals is tested, and left out with copies."""
    named = json.loads(read_text(folder / "web" / "web.json", 1 << 28))
    rows = [row for row in named if (folder / "web" / row[0]).stat().st_size]

    def samples() -> Iterator[Sample]:
        for path, *_ in rows:
            codec: Any = SUFFIXES.get(Path(path).suffix, "jpeg")
            yield Sample(id=path, data=(folder / "web" / path).read_bytes(), codec=codec)

    image_NHWC, numbers = _decoded(samples(), size)
    rows = [rows[number] for number in numbers]
    classes = {name: number for number, name in enumerate(sorted({row[1] for row in rows}))}
    original_N = np.array([zlib.crc32(row[2].encode()) for row in rows])
    frames = Footage(
        image_NHWC,
        ["crawler"] * len(rows),
        np.array([classes[row[1]] for row in rows]),
        np.full(len(rows), -1),
        np.zeros(len(rows), np.int64),
        original_N,
        [frozenset()] * len(rows),
    )
    is_original_N = np.array([row[3] == "original" for row in rows])
    tested_N = original_N % 10 == 0
    tested = np.flatnonzero(tested_N & is_original_N)
    return Recording(frames.at(np.flatnonzero(~tested_N)), frames.at(tested))


RECORDINGS: Mapping[str, Callable[[Path, int], Recording]] = {
    "cameras": cameras,
    "crawl": crawl,
}
"""By name: a function from the folder and the side of an image in pixels."""
