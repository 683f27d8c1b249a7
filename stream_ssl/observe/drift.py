"""Drift detection: changes of level in loss, collisions, embeddings and images.

Shapes: B batch, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stream_ssl.memory.compute import to_host
from stream_ssl.observe.catalogue import SIGNALS
from stream_ssl.observe.thumbnails import thumbnails

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord

DELTA = 0.002
"""The bound on the probability of a false alarm of one detector."""
MOST_WAITING = 64
"""The most values that wait on the device for the next call of `take_new`."""


class Mean:
    """An exponential mean of rows, known only up to its length.

    Args:
        half_life: number of samples after which a row has half its weight.

    Attributes:
        sum_D: the direction of the mean, not normalised; None before the first batch.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self.sum_D: Tensor | None = None

    def update(self, rows_BD: Tensor) -> None:
        """Take a batch of rows."""
        decay = 0.5 ** (len(rows_BD) / self._half_life)
        new_D = rows_BD.sum(dim=0)
        self.sum_D = new_D if self.sum_D is None else self.sum_D * decay + new_D

    def cosine(self, other_D: Tensor) -> Tensor:
        """Return the cosine between the mean and another direction, 0-dimensional.

        It is 1 before the first batch.
        """
        if self.sum_D is None:
            return other_D.new_ones(())
        return cosine_similarity(self.sum_D, other_D, dim=0)


class Drift:
    """A drift detector with one ADWIN (Bifet and Gavalda, 2007) for each signal.

    The signals are:

    - "loss": the loss.
    - "collision": the logarithm of the mean score between the batch and the memory. ADWIN sees no
      change that is far below 1, and the score is about 0.001 under the default policy.
    - "embedding": the cosine between the batch's mean key and the long running mean of the keys.
    - "image": the same cosine for thumbnails.

    The first three also change because the encoder learns, mostly early in a run. "image" changes
    only with the stream.

    Args:
        short: the half-life of the mean of the present, in samples.
        long: the half-life of the mean of the past, in samples, which is longer.
        number_bytes: the bytes of a number of a vector; None for a stream of images.
    """

    def __init__(
        self, short: float = 2_000, long: float = 50_000, number_bytes: int | None = None
    ) -> None:
        self._number_bytes = number_bytes
        self._means = {one: (Mean(short), Mean(long)) for one in ("embedding", "image")}
        self._detectors = {signal: _adwin() for signal in SIGNALS}
        self._new = dict.fromkeys(SIGNALS, 0)
        self._waiting: list[tuple[str, Tensor]] = []  # signals and values still on the device

    def consume(self, record: StepRecord) -> None:
        """Take one step.

        Replays are left out, because the loss of replayed samples has another level than the loss
        of the stream. Values that are not finite are left out, too.
        """
        if record.replay:
            return
        self._watch("loss", record.loss)
        score = record.collision_expected
        self._watch("collision", math.log(score) if score > 0 else math.nan)
        if record.admission is None:
            return
        keys_BD = record.keys_BD.float()
        self._follow("embedding", keys_BD)
        if record.images_BCHW is not None:
            self._follow("image", thumbnails(keys_BD, record.images_BCHW, self._number_bytes))

    def _follow(self, signal: str, row_BD: Tensor) -> None:
        short, long = self._means[signal]
        # Compare the batch, not the short mean, with the past: ADWIN assumes independent values,
        # and running means are correlated from step to step.
        self._waiting.append((signal, long.cosine(row_BD.sum(dim=0))))
        if len(self._waiting) >= MOST_WAITING:
            self._read()
        short.update(row_BD)
        long.update(row_BD)

    def shift(self, signal: str) -> float:
        """Return 1 - cosine between the short and the long running mean, from 0 to 2.

        The means are those of the keys ("embedding") or of the thumbnails ("image"). Training does
        not change thumbnails.
        """
        short, long = self._means[signal]
        now_D = short.sum_D
        return 0.0 if now_D is None else max(0.0, 1.0 - to_host(long.cosine(now_D)).item())

    def take_new(self) -> Mapping[str, int]:
        """Return the number of changes found since the last call, by signal."""
        self._read()
        new, self._new = self._new, dict.fromkeys(SIGNALS, 0)
        return new

    def _read(self) -> None:
        """Give the detectors the values that wait, with one wait for the device."""
        if self._waiting:
            signals, values = zip(*self._waiting, strict=True)
            self._waiting = []
            for signal, value in zip(signals, to_host(torch.stack(values)).tolist(), strict=True):
                self._watch(signal, value)

    def _watch(self, signal: str, value: float) -> None:
        if not math.isfinite(value):
            return
        detector = self._detectors[signal]
        detector.update(value)
        self._new[signal] += detector.drift_detected


def _adwin() -> Any:
    from river.drift import ADWIN  # it loads scikit-learn, which takes seconds

    return ADWIN(delta=DELTA)  # type: ignore[no-untyped-call]
