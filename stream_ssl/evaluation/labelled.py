"""A labelled source to batches of images: what is a query, what a reference.

Shapes: B samples, H height, W width, C channels, N rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.feed.decode import BadSample, Payloads, Pixels
from stream_ssl.wire.sample import Position, Sample

Part = Literal["reference", "query"]


class Labelled(Protocol):
    """Where samples come from; all of `stream_ssl.producers.sources` are such."""

    name: str

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with its position, which is not used."""
        ...


@dataclass(frozen=True)
class Division:
    """Which samples of a source are taken, and what for.

    Args:
        query_share: share of each class's samples that become queries; the rest are references.
            1: all are queries; 0: all are references.
        references_per_class: further ones are passed over. null: all.
        queries_per_class: likewise.
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
        """What a class's sample is for, by its number within the class."""
        before, after = (int(n * self.query_share + 1e-9) for n in (number, number + 1))
        return "query" if after > before else "reference"

    def most(self, part: Part) -> float:
        """How many of a class are taken."""
        most = self.queries_per_class if part == "query" else self.references_per_class
        return math.inf if most is None else most


@dataclass(frozen=True)
class LabelledBatch:
    """Images of one part: uint8 [B, H, W, C], classes int64 [B], -1 for none, and sample ids."""

    part: Part
    image_BHWC: NDArray[np.uint8]
    label_B: NDArray[np.int64]
    ids: tuple[str, ...]


class Reader:
    """Reads a source once, a batch at a time; never holds it whole.

    A class's samples are dealt out in the order of the source, so that any first part of them has
    about `query_share` queries.

    Args:
        source: ends by itself.
        decoder: that of the encoder's run, which sees images of this shape.
        division: which samples are taken, and what for.
        batch: images a batch.
        labels: whether every sample must carry one; else those without are a class of their own.

    Attributes:
        length: samples that the source has; None where it does not say.
        class_names: by class, where the source has them.
        seen: samples read so far.
        refused: samples that could not be decoded, by reason.
        scaled: samples that were of another shape than the decoder's.
    """

    def __init__(
        self,
        source: Labelled,
        decoder: Payloads,
        division: Division,
        batch: int = 256,
        labels: bool = True,
    ) -> None:
        self._source, self._decoder, self._division = source, decoder, division
        self._batch, self._labels = batch, labels
        known = len(source) if isinstance(source, Sized) else getattr(source, "count", None)
        self.length: int | None = known
        names = getattr(source, "classes", None)
        self.class_names: list[str] | None = names if isinstance(names, list) else None
        self.seen = self.scaled = 0
        self.refused: Counter[str] = Counter()
        self._met: Counter[int] = Counter()
        self._taken: Counter[tuple[Part, int]] = Counter()

    def __iter__(self) -> Iterator[LabelledBatch]:
        """Batches of either part, as they fill.

        Raises:
            ValueError: a sample without a label, or an image that the decoder refuses because of
                its shape.
        """
        waiting: dict[Part, list[tuple[Pixels, int, str]]] = {"reference": [], "query": []}
        for sample, _ in self._source.samples():
            self.seen += 1
            label = self._label(sample)
            part = self._part(label)
            pixels = None if part is None else self._decoded(sample)
            if part is None or pixels is None:
                continue
            self._taken[part, label] += 1
            waiting[part].append((pixels, label, sample.id))
            if len(waiting[part]) == 2 * self._batch:
                yield _batch(part, waiting[part][: self._batch])
                del waiting[part][: self._batch]
        for part, rest in waiting.items():
            # In halves: a batch of one image has no statistics to be normalised by.
            half = len(rest) if len(rest) <= self._batch else (len(rest) + 1) // 2
            for few in (rest[:half], rest[half:]):
                if few:
                    yield _batch(part, few)

    def _label(self, sample: Sample) -> int:
        """The sample's class; -1 for none."""
        if sample.label is not None and sample.label >= 0:
            return sample.label
        if self._labels:
            raise ValueError(
                f"source {self._source.name!r}: sample {sample.id!r} carries no label, and "
                "evaluation needs one of each; give a labelled source"
            )
        return -1

    def _part(self, label: int) -> Part | None:
        """What a sample of this class is for; None: there are enough of it."""
        part = self._division.part(self._met[label])
        self._met[label] += 1
        enough = self._taken[part, label] >= self._division.most(part)
        return None if enough else part

    def _decoded(self, sample: Sample) -> Pixels | None:
        decoder = self._decoder
        if sample.codec == "raw":
            self.scaled += sample.shape != decoder.shape_HWC
        try:
            return decoder.decode(sample)
        except BadSample as error:
            if error.reason == "shape":
                raise ValueError(
                    f"source {self._source.name!r}, sample {sample.id!r}: {error}. The run was "
                    f"configured for others (vectors.dim); give samples of "
                    f"shape {decoder.shape_HWC}"
                ) from error
            self.refused[error.reason] += 1
            return None


def balanced(label_N: Tensor, seed: int = 0) -> Tensor:
    """Rows, in order, of equally many samples of each class: as many as the rarest has.

    Args:
        label_N: int64 classes.
        seed: of the draw.

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


def _batch(part: Part, samples: list[tuple[Pixels, int, str]]) -> LabelledBatch:
    pixels, labels, ids = zip(*samples, strict=True)
    return LabelledBatch(part, np.stack(pixels), np.array(labels, np.int64), ids)
