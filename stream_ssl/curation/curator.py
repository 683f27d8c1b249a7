"""One pass over a source that keeps a fixed number of different pictures.

Shapes: B samples of a batch, K pictures kept, D features of a picture, C H W image.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, normalize

from stream_ssl.curation.rows import Rows
from stream_ssl.curation.saves import Saves
from stream_ssl.durable import make_folder
from stream_ssl.encoder.efficientnet_lite import EfficientNetLite0
from stream_ssl.feed.decode import BadSample, Decoder, content_hashes, sample_ids
from stream_ssl.feed.large_pictures import LargePictures
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Frozen, Thumbnail
from stream_ssl.memory.eviction import Oldest, Redundant
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.sketches import SIDE
from stream_ssl.memory.state import part
from stream_ssl.originals import Originals
from stream_ssl.producers.sources.base import Skipped, Source
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

T = TypeVar("T")

Features = Literal["thumbnail", "pretrained"]
Decoded = tuple[Sample, Position, NDArray[np.uint8]]
"""A sample, the position of the source after it, and its pixels [H, W, C]."""

BATCH: Final = 256
BATCH_BYTES: Final = 64 << 20
"""The size at which a batch ends early. Raw pixels of a 4K video have 25 MB a frame."""
PIXEL_BYTES: Final = 12
"""The memory that comparing a decoded picture takes, for each of its bytes."""
SEEN: Final = 65_536
"""The number of different pictures that are remembered, as thumbnails of 3 KB."""
SAVE_SECONDS: Final = 30.0
SAVE_SHARE: Final = 0.05  # the largest share of the time that goes into saving
DROPPED: Final = "dropped.jsonl"
BAD: Final = "bad.jsonl"
PAIRS: Final = 24
"""The number of dropped pictures that are remembered, each with the picture that it repeats."""


@dataclass(frozen=True, slots=True)
class Row:
    """The facts about each sample that was read.

    Attributes:
        id: the sample's name within its source.
        source: the sample's source.
        label: its class, or None.
        position: the position of the source after the sample, as JSON.
    """

    id: str
    source: str
    label: int | None
    position: str


@dataclass(frozen=True, slots=True)
class Kept(Row):
    """A picture that is kept.

    Attributes:
        time: its capture time, in seconds since the Unix epoch.
        codec: "jpeg", "png", "webp" or "raw".
        shape: (H, W, C) of raw pixels, or None.
        original: the name of its bytes in `Curator.originals`.
        meta: the source's facts about it, such as the kept columns of a crawl, as JSON, or None.
    """

    time: float
    codec: str
    shape: tuple[int, ...] | None
    original: str
    meta: str | None = None  # states of earlier versions have none


@dataclass(frozen=True, slots=True)
class Dropped(Row):
    """A picture that repeats another picture.

    Attributes:
        of_id, of_source: the picture that it repeats, which may have been evicted since.
        distance: the distance of the two pictures (memory/near_duplicates.py).
    """

    of_id: str
    of_source: str
    distance: float


@dataclass(frozen=True, slots=True)
class Bad(Row):
    """A sample that cannot be decoded.

    Attributes:
        reason: one of `stream_ssl.feed.decode.REASONS`.
        message: what is wrong, for people.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts so far.

    Attributes:
        read: samples of the source.
        dropped: samples that repeat another picture.
        bad: samples that cannot be decoded, by reason.
        kept: pictures that are kept.
        left_out: what the source left out, by reason.
    """

    read: int
    dropped: int
    bad: dict[str, int]
    kept: int
    left_out: dict[str, int]


class Curator:
    """A memory of K different pictures, with their original bytes, that survives a stop.

    A picture is dropped if it repeats a kept picture, or one of the last 65,536 different pictures
    (docs/duplicates.md). So a picture that occurs often is not kept more often. When K pictures are
    kept, each new picture evicts the most duplicated one, and otherwise a random one (`Redundant`).

    Args:
        folder: the folder of the state. If it holds a state, the pass continues from there.
        keep: the number of pictures K, at least 1.
        features: how expected duplicates are counted: on "thumbnail"s of 8 x 8 pixels, or on
            "pretrained" features of EfficientNet-lite0 (the extra `pretrained`).
        size: the side to which pictures are decoded for comparison, in pixels, at least 32.
        seed: the seed of the random evictions.
        threads: the number of threads that decode.
        fit: compare the middle of a picture ("crop"), or the whole ("letterbox"); see `Decoder`.

    Attributes:
        memory: the memory of the kept pictures.
        originals: the bytes of the kept pictures, as the source sent them.
        pair_P2CHW: a sample of dropped pictures, each with the picture that it repeats, uint8.

    Raises:
        ValueError: an argument is outside its range, the folder belongs to other arguments, or the
            pretrained weights are not installed.
        OSError: the folder cannot be written.
        MemoryError, RuntimeError: `keep` pictures do not fit into the memory.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        features: Features = "thumbnail",
        size: int = 64,
        seed: int = 0,
        threads: int = 1,
        fit: Literal["crop", "letterbox"] = "crop",
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: must be at least 1 picture")
        if keep * 3 * size**2 >= 1 << 63:  # torch would raise errors about its integers
            raise MemoryError
        if size < 32:
            raise ValueError(f"size is {size}: pictures are compared at 32 x 32 pixels or more")
        named = {"keep": keep, "features": features, "size": size, "seed": seed, "fit": fit}
        self._settings: dict[str, Any] = named
        self._folder = folder
        self._decoder = LargePictures(Decoder(size, fit=fit))
        self._threads = threads
        shape = (3, size, size)
        self._describe = _describer(features)
        dim = self._describe(torch.zeros(1, *shape, dtype=torch.uint8)).shape[1]
        self.memory = WorkingMemory(keep, dim, Redundant(), shape, seed=seed)
        self._seen = WorkingMemory(SEEN, 1, Oldest(), (3, SIDE, SIDE))
        self._near_kept, self._near_seen = NearDuplicates(self.memory), NearDuplicates(self._seen)
        make_folder(folder)
        self.originals = Originals(folder / "originals")
        self._kept: list[Kept | None] = [None] * keep
        self._dropped_rows, self._bad_rows = Rows(folder / DROPPED), Rows(folder / BAD)
        self._names: list[tuple[str, str]] = []  # source and id of each picture in `_seen`
        self._read, self._dropped, self._bad = 0, 0, Counter[str]()
        self._left_out = Counter[str]()
        self.pair_P2CHW = torch.zeros(0, 2, *shape, dtype=torch.uint8)
        self._position: Position = None
        self._saves = Saves(folder)
        self._restore()
        # A power cut may have damaged the files that were written after the saved state.
        self.originals.keep_only({one.original for one in self.kept})

    @property
    def kept(self) -> list[Kept]:
        """The kept pictures, in the order of the memory's slots."""
        return [one for one in self._kept[: len(self.memory)] if one is not None]

    @property
    def progress(self) -> Progress:
        """The counts so far."""
        counts = self._read, self._dropped, dict(self._bad), len(self.memory)
        return Progress(*counts, dict(self._left_out))

    def dropped(self) -> Iterator[Dropped]:
        """Yield the pictures that were dropped as near-duplicates, in order."""
        return (Dropped(**row) for row in self._dropped_rows)

    def bad(self) -> Iterator[Bad]:
        """Yield the samples that could not be decoded, in order."""
        return (Bad(**row) for row in self._bad_rows)

    def run(
        self, source: Source, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Progress]:
        """Read the source to its end, and yield the counts after each batch.

        The state is saved every 30 seconds, or less often if saving takes long. It is also saved at
        the end, and when `stopped` returns True.

        Args:
            source: the source, from the position of the state.
            stopped: asked after each batch whether to stop.

        Raises:
            SourceError: the source cannot be read.
            OSError: the disk is full or failed. The last saved state remains.
        """
        due_s = time.monotonic() + SAVE_SECONDS
        left_out = _left_out(source, self._left_out, again=self._position is not None)
        samples = source.samples(self._position)
        decoded = PIXEL_BYTES * 3 * self._settings["size"] ** 2
        with ThreadPoolExecutor(self._threads) as pool:
            for batch in batches(samples, lambda pair: max(len(pair[0].data), decoded)):
                self._take(batch, pool)
                self._left_out = left_out()
                self._dropped_rows.write()
                self._bad_rows.write()
                yield self.progress
                if stopped():
                    break
                if (start_s := time.monotonic()) >= due_s:
                    self.save()
                    end_s = time.monotonic()
                    due_s = end_s + max(SAVE_SECONDS, (end_s - start_s) / SAVE_SHARE)
        self._left_out = left_out()
        self.save()

    def _take(self, batch: list[tuple[Sample, Position]], pool: ThreadPoolExecutor) -> None:
        """Drop, keep or reject each sample of a batch."""
        pixels = pool.map(partial(_decoded, self._decoder), [sample for sample, _ in batch])
        good: list[Decoded] = []
        for (sample, after), found in zip(batch, pixels, strict=True):
            if isinstance(found, BadSample):
                self._reject(sample, after, found)
            else:
                good.append((sample, after, found))
        self._read += len(batch)
        self._position = batch[-1][1]
        if not good:
            return
        image_BHWC = np.stack([image for *_, image in good])
        image_BCHW = torch.from_numpy(image_BHWC).permute(0, 3, 1, 2).contiguous()
        keys = [f"{sample.source}\0{sample.id}" for sample, *_ in good]
        ids_B = torch.from_numpy(sample_ids("", keys))
        new_n = self._not_kept(good, image_BCHW, ids_B)
        new_n, small_nCHW = self._not_seen(good, new_n, image_BCHW, ids_B)
        admission = self.memory.add(
            ids_B[new_n],
            self._describe(image_BCHW[new_n]),
            image_BCHW[new_n],
            hashes=torch.from_numpy(content_hashes(image_BHWC[new_n.numpy()])),
        )
        for b, slot in zip(new_n.tolist(), admission.slots.tolist(), strict=True):
            if slot >= 0:
                sample, position, _ = good[b]
                self._kept[slot] = _kept(sample, position, self.originals.put(sample.data))
        admission = self._seen.add(ids_B[new_n], torch.ones(len(new_n), 1), small_nCHW)
        self._names += [("", "")] * (len(self._seen) - len(self._names))
        for b, slot in zip(new_n.tolist(), admission.slots.tolist(), strict=True):
            self._names[slot] = good[b][0].source, good[b][0].id

    def _not_kept(self, good: list[Decoded], image_BCHW: Tensor, ids_B: Tensor) -> Tensor:
        """Drop samples that repeat a kept picture or another of the batch. Return the rest."""
        found = self._near_kept.find(image_BCHW, image_BCHW[:0], "refuse", ids_B)
        held, distance_B = len(self.memory), found.distance_B
        assert distance_B is not None  # "refuse" measures it
        for b in np.flatnonzero(~found.admitted_B).tolist():
            nearest = int(found.nearest_B[b])
            if nearest < held:
                kept = self._kept[nearest]
                assert kept is not None
                twin, twin_CHW = (kept.source, kept.id), self._image(nearest)
            else:
                other = good[nearest - held][0]
                twin, twin_CHW = (other.source, other.id), image_BCHW[nearest - held]
            self._drop(good[b], twin, float(distance_B[b]), twin_CHW)
        return torch.from_numpy(np.flatnonzero(found.admitted_B))

    def _not_seen(
        self, good: list[Decoded], row_n: Tensor, image_BCHW: Tensor, ids_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drop rows that repeat a picture seen before. Return the others, and thumbnails."""
        small_nCHW = _thumbnails(image_BCHW[row_n])
        found = self._near_seen.find(small_nCHW, small_nCHW[:0], "refuse", ids_B[row_n])
        distance_n, held = found.distance_B, len(self._seen)
        assert distance_n is not None  # "refuse" measures it
        new_n = found.admitted_B.copy()
        for n in np.flatnonzero(~new_n).tolist():
            nearest = int(found.nearest_B[n])
            if nearest >= held:  # the first test compared the batch in full size
                new_n[n] = True
                continue
            twin_CHW = self._seen.images_of(torch.tensor([nearest]))[0]
            side = image_BCHW.shape[-1]
            larger_CHW = interpolate(twin_CHW[None].float(), size=(side, side), mode="bilinear")[0]
            seen, twin_CHW = self._names[nearest], larger_CHW.to(torch.uint8)
            self._drop(good[row_n[n]], seen, float(distance_n[n]), twin_CHW)
        chosen = torch.from_numpy(np.flatnonzero(new_n))
        return row_n[chosen], small_nCHW[chosen]

    def _image(self, slot: int) -> Tensor:
        return self.memory.images_of(torch.tensor([slot]))[0]

    def _reject(self, sample: Sample, position: Position, error: BadSample) -> None:
        """Record a sample that cannot be decoded."""
        self._bad[error.reason] += 1
        self._bad_rows.add(Bad(*_about(sample, position), error.reason, str(error)))

    def _drop(self, one: Decoded, twin: tuple[str, str], distance: float, twin_CHW: Tensor) -> None:
        """Record that a sample repeats another picture."""
        sample, position, image_HWC = one
        of_source, of_id = twin
        row = Dropped(*_about(sample, position), of_id, of_source, round(distance, 4))
        self._dropped_rows.add(row)
        self._dropped += 1
        image_CHW = torch.tensor(image_HWC).permute(2, 0, 1)  # Pillow's pixels are read-only
        self.pair_P2CHW = sampled(
            self.pair_P2CHW,
            torch.stack([image_CHW, twin_CHW]),
            self._dropped,
            self._settings["seed"],
        )

    def save(self) -> None:
        """Save the state, so that a new `Curator` continues from here.

        Raises:
            OSError: the disk is full or failed. The last saved state remains.
        """
        dropped_bytes, bad_bytes = self._dropped_rows.sync(), self._bad_rows.sync()
        kept = self.kept
        self.originals.flush({one.original for one in kept})
        tensors = {"pairs": self.pair_P2CHW}
        for name, state in self._states_of_parts().items():
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in state.items()}
        facts = {
            "settings": self._settings,
            "read": self._read,
            "dropped": self._dropped,
            "dropped_bytes": dropped_bytes,
            "bad_bytes": bad_bytes,
            "bad": dict(self._bad),
            "left_out": dict(self._left_out),
            "position": self._position,
            "kept": [asdict(one) for one in kept],
            "names": self._names,
        }
        self._saves.write(tensors, facts)
        self.originals.keep_only({one.original for one in kept})

    def _states_of_parts(self) -> dict[str, dict[str, Tensor]]:
        return {
            "memory": self.memory.state_dict(),
            "seen": self._seen.state_dict(),
            "door": self._near_kept.state(),
            "seen_door": self._near_seen.state(),
        }

    def _restore(self) -> None:
        """Load the newest undamaged state. Raise ValueError if it belongs to other arguments."""
        found = self._saves.read()
        if found is None:
            self._dropped_rows.go_back(0)
            self._bad_rows.go_back(0)
            return
        tensors, facts = found
        begun = {"fit": "crop"} | facts["settings"]  # passes of earlier versions saved no "fit"
        for name, value in self._settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r}, and the pass in {self._folder} was begun with "
                    f"{begun.get(name)!r}: use that value, or choose another folder"
                )
        self.memory.load_state_dict(part(tensors, "memory"))
        seen = part(tensors, "seen")
        images = seen["columns.images"]  # of earlier versions, in grey
        seen["columns.images"] = images.expand(-1, 3, -1, -1)
        self._seen.load_state_dict(seen)
        self._near_kept.load(part(tensors, "door"))
        self._near_seen.load(part(tensors, "seen_door"))
        self.pair_P2CHW = tensors["pairs"]
        self._names = [(source, name) for source, name in facts["names"]]
        for slot, row in enumerate(facts["kept"]):
            shape = None if row["shape"] is None else tuple(row["shape"])
            self._kept[slot] = Kept(**{**row, "shape": shape})
        self._read, self._dropped = facts["read"], facts["dropped"]
        self._bad.update(facts["bad"])
        self._left_out.update(facts.get("left_out", {}))  # earlier versions saved no such counts
        self._position = facts["position"]
        self._dropped_rows.go_back(facts["dropped_bytes"])
        self._bad_rows.go_back(facts.get("bad_bytes", 0))  # earlier versions kept no such rows


def _left_out(source: Source, before: Counter[str], again: bool) -> Callable[[], Counter[str]]:
    """Return a function that returns how many samples the source has left out, by reason.

    Args:
        before: the counts in the saved state.
        again: whether the pass continues. Then the constructor of the source has listed the files
            once more, and has counted what it left out a second time.
    """
    found = getattr(source, "skipped", None)
    skipped = found.by_reason if isinstance(found, Skipped) else Counter[str]()
    earlier = before.copy()
    if again:
        earlier.subtract(skipped)
    return lambda: earlier + skipped


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of BATCH items. A list ends early once the sizes of its items reach BATCH_BYTES.

    >>> [len(batch) for batch in batches(range(600), lambda _: 1)]
    [256, 256, 88]
    """
    batch: list[T] = []
    held = 0
    for item in items:
        batch.append(item)
        held += size(item)
        if len(batch) == BATCH or held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _about(sample: Sample, position: Position) -> tuple[str, str, int | None, str]:
    """Return the values of a `Row`."""
    return sample.id, sample.source, sample.label, json.dumps(position)


def _kept(sample: Sample, position: Position, original: str) -> Kept:
    """Return the facts about a sample that is kept; JSON has no number like infinity."""
    facts = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (sample.meta or {}).items()
    }
    meta = json.dumps(facts) if facts else None
    about = _about(sample, position)
    return Kept(*about, sample.time, sample.codec, sample.shape, original, meta)


def _decoded(decoder: LargePictures, sample: Sample) -> NDArray[np.uint8] | BadSample:
    try:
        return decoder.decode(sample)
    except BadSample as error:
        return error


def sampled(pair_P2CHW: Tensor, pair_2CHW: Tensor, number: int, seed: int) -> Tensor:
    """Return a uniform sample of at most PAIRS pairs, by Vitter's algorithm R.

    Args:
        pair_P2CHW: the sample of the pairs before this one, which may be changed.
        pair_2CHW: the next pair.
        number: its number, from 1.
        seed: the seed of the draws.
    """
    if len(pair_P2CHW) < PAIRS:
        return torch.cat([pair_P2CHW, pair_2CHW[None]])
    place = np.random.default_rng([seed % (1 << 64), number]).integers(number)
    if place < PAIRS:
        pair_P2CHW[place] = pair_2CHW
    return pair_P2CHW


def _thumbnails(image_BCHW: Tensor) -> Tensor:
    """Return thumbnails, uint8 [B, 3, SIDE, SIDE], for the comparison with pictures seen."""
    return adaptive_avg_pool2d(image_BCHW.float(), SIDE).round().to(torch.uint8)


def _describer(features: Features) -> Callable[[Tensor], Tensor]:
    """Return a function from uint8 images [B, C, H, W] to unit rows [B, D], or raise ValueError."""
    if features == "thumbnail":
        thumbnail = Thumbnail(side=8)
        return lambda image_BCHW: thumbnail(torch.zeros(len(image_BCHW), 1), image_BCHW)
    if features == "pretrained":
        frozen = Frozen(EfficientNetLite0(pretrained=True), mean=(0.498,), std=(0.502,))
        return lambda image_BCHW: normalize(
            frozen(torch.zeros(len(image_BCHW), 1), image_BCHW), dim=1
        )
    raise ValueError(f'features is {features!r}: choose "thumbnail" or "pretrained"')
