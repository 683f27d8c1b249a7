"""Reads a labelled source in batches of images and divides them into queries and references.

Shapes: B samples, H height, W width, C channels, N rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sized
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.feed.decode import BadSample, Pixels, content_hashes
from stream_ssl.feed.large_pictures import OneByOne
from stream_ssl.wire.sample import Position, Sample

T = TypeVar("T")

Part = Literal["reference", "query"]

NO_LABEL = "no label"
UNLABELLED = 1000
"""A source is refused if this many samples at its start have no label."""


class Labelled(Protocol):
    """A source of samples. All of `stream_ssl.producers.sources` fit this protocol."""

    name: str

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with its position, which is not used."""
        ...


@dataclass(frozen=True)
class Division:
    """The rule that selects samples of a source as queries or references.

    Args:
        query_share: share of each class's samples that become queries, in [0, 1]. The rest become
            references.
        references_per_class: largest number of references of each class; further ones are skipped.
            null: no limit.
        queries_per_class: largest number of queries of each class. null: no limit.
    """

    query_share: float
    references_per_class: int | None = None
    queries_per_class: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.query_share <= 1:
            raise ValueError(f"query_share {self.query_share}: must lie in [0, 1]")
        for most in (self.references_per_class, self.queries_per_class):
            if most is not None and most < 1:
                raise ValueError(f"{most} samples of each class: take at least 1, or null for all")

    def part(self, number: int) -> Part:
        """Return the part of a class's sample, by its number within the class."""
        before, after = (int(n * self.query_share + 1e-9) for n in (number, number + 1))
        return "query" if after > before else "reference"

    def most(self, part: Part) -> float:
        """Return the largest number of samples of a class in this part."""
        most = self.queries_per_class if part == "query" else self.references_per_class
        return math.inf if most is None else most


@dataclass(frozen=True)
class LabelledBatch:
    """Images of one part.

    Attributes:
        part: "reference" or "query".
        image_BHWC: uint8 images.
        label_B: classes, int64; -1 without a label.
        ids: sample ids.
    """

    part: Part
    image_BHWC: NDArray[np.uint8]
    label_B: NDArray[np.int64]
    ids: tuple[str, ...]


class Reader:
    """A reader that reads a source once in batches, and never holds all of it.

    The samples of a class become queries and references in the order of the source. Any first part
    of them has about a share `query_share` of queries.

    Args:
        source: the source, which must end by itself.
        decoder: the decoder of the encoder's run, which gives images of the encoder's shape.
        batch: number of images in a batch.

    Attributes:
        length: number of samples in the source; None if the source does not report it.
        class_names: names by class; None if the source has none.
        seen: number of samples read so far.
        refused: number of samples that were left out, because they could not be decoded or have
            no label, by reason.
        scaled: number of raw samples whose shape was not the decoder's.
        hashes: hashes of the pixels of each part, a batch at a time.
    """

    def __init__(
        self,
        source: Labelled,
        decoder: OneByOne,
        division: Division,
        batch: int = 256,
    ) -> None:
        self._source, self._decoder, self._division = source, decoder, division
        self._batch = batch
        self.length = length(source)
        self.class_names = class_names(source)
        self.seen = self.scaled = 0
        self.refused: Counter[str] = Counter()
        self.hashes: dict[Part, list[NDArray[np.int64]]] = {"reference": [], "query": []}
        self._met: Counter[int] = Counter()
        self._taken: Counter[tuple[Part, int]] = Counter()

    def __iter__(self) -> Iterator[LabelledBatch]:
        """Yield batches of either part as they fill.

        Raises:
            ValueError: no sample has a label, or none of the first UNLABELLED. Or the decoder
                rejects an image because of its shape.
        """
        waiting: dict[Part, list[tuple[Pixels, int, str]]] = {"reference": [], "query": []}
        for sample, _ in self._source.samples():
            self.seen += 1
            label = -1 if sample.label is None or sample.label < 0 else sample.label
            if label < 0:
                self.refused[NO_LABEL] += 1
                if self.refused[NO_LABEL] == self.seen == UNLABELLED:
                    break
                continue
            part = self._part(label)
            pixels = None if part is None else self._decoded(sample)
            if part is None or pixels is None:
                continue
            self._taken[part, label] += 1
            waiting[part].append((pixels, label, sample.id))
            if len(waiting[part]) == 2 * self._batch:
                yield self._batched(part, waiting[part][: self._batch])
                del waiting[part][: self._batch]
        if self.seen and self.refused[NO_LABEL] == self.seen:
            raise ValueError(
                f"source {self._source.name!r}: none of its first {self.seen:,} samples carries a "
                "label, and evaluation needs labels; give a labelled source"
            )
        for part, rest in waiting.items():
            for few in last_batches(rest, self._batch):
                yield self._batched(part, few)

    def _batched(self, part: Part, samples: list[tuple[Pixels, int, str]]) -> LabelledBatch:
        pixels, labels, ids = zip(*samples, strict=True)
        image_BHWC = np.stack(pixels)
        self.hashes[part].append(content_hashes(image_BHWC))
        return LabelledBatch(part, image_BHWC, np.array(labels, np.int64), ids)

    def _part(self, label: int) -> Part | None:
        """Return the part of a sample of this class; None if the part has enough of the class."""
        part = self._division.part(self._met[label])
        self._met[label] += 1
        enough = self._taken[part, label] >= self._division.most(part)
        return None if enough else part

    def _decoded(self, sample: Sample) -> Pixels | None:
        decoder = self._decoder
        if sample.codec == "raw":
            self.scaled += sample.shape != decoder.shape_HWC
        pixels = decoded(sample, decoder, self._source.name, first=not self._taken)
        if isinstance(pixels, BadSample):
            self.refused[pixels.reason] += 1
            return None
        return pixels


def decoded(
    sample: Sample, decoder: OneByOne, source: str, first: bool = True
) -> Pixels | BadSample:
    """Return the pixels of a sample, or the error if it cannot be decoded.

    Args:
        decoder: the decoder of the encoder's run.
        first: whether no sample of the source was decoded yet. One vector among many images is
            only left out.

    Raises:
        ValueError: a first sample is an image and the run learns from vectors, or the reverse, or
            it is a vector of another length.
    """
    try:
        return decoder.decode(sample)
    except BadSample as error:
        dim = getattr(decoder, "dim", None)
        other_kind = (sample.codec == "vector") != (dim is not None)
        if error.reason == "shape" or (other_kind and first):
            asked = "images" if dim is None else f"vectors of {dim} numbers (vectors.dim)"
            raise ValueError(
                f"source {source!r}, sample {sample.id!r}: {error}. The run was configured for "
                f"others: give {asked}"
            ) from error
        return error


def last_batches(rest: list[T], size: int) -> list[list[T]]:
    """Return the last rows, at most 2 `size` of them, as one batch or in two halves.

    The halves avoid a batch of one image, which has no statistics for BatchNorm.

    >>> [len(batch) for batch in last_batches([0] * 11, 10)]
    [6, 5]
    """
    half = len(rest) if len(rest) <= size else (len(rest) + 1) // 2
    return [few for few in (rest[:half], rest[half:]) if few]


def shared_queries(readers: Collection[Reader]) -> tuple[int, int]:
    """Return how many queries have the pixels of a reference, and the number of all queries."""
    none = np.empty(0, np.int64)
    hash_N = np.concatenate([none, *(h for reader in readers for h in reader.hashes["reference"])])
    hash_Q = np.concatenate([none, *(h for reader in readers for h in reader.hashes["query"])])
    return int(np.isin(hash_Q, hash_N).sum()), len(hash_Q)


def class_names(source: object) -> list[str] | None:
    """Return the names of a source's classes, by label; None if it has none, or only their number.

    >>> from stream_ssl.producers.sources import Synthetic
    >>> class_names(Synthetic(classes=10)) is None
    True
    """
    names = getattr(source, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return list(names)
    return None


def length(source: Labelled) -> int | None:
    """Return the number of samples in a source; None if the source does not report it."""
    known: int | None = len(source) if isinstance(source, Sized) else None
    return getattr(source, "count", None) if known is None else known


def balanced(label_N: Tensor, seed: int = 0) -> Tensor:
    """Return row numbers, in order, of equally many samples of each class.

    Each class has as many rows as the rarest class.

    Args:
        label_N: int64 classes.
        seed: seed of the random selection.

    >>> len(balanced(torch.tensor([0, 0, 0, 1, 1])))
    4
    """
    generator = torch.Generator().manual_seed(seed)
    found, count_C = torch.unique(label_N, return_counts=True)
    rows = []
    for label in found.tolist():
        of_class = torch.nonzero(label_N == label).flatten()
        drawn = torch.randperm(len(of_class), generator=generator)[: int(count_C.min())]
        rows.append(of_class[drawn])
    return torch.cat(rows).sort().values
