"""The learner's records of its steps, which metrics, displays and checkpoints consume.

Shapes: B samples, D embedding, C H W image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stream_ssl.batch import Offset, Origin

if TYPE_CHECKING:
    from torch import Tensor

    from stream_ssl.memory import Admission

PHASES = ("data", "forward", "backward", "memory")
NOT_FINITE = ("loss", "gradient", "keys")
"""Reasons to skip an update that indicate broken weights. "pace" and "novelty" do not."""


@dataclass(frozen=True, slots=True, eq=False)
class DroppedSample:
    """A sample that was dropped as a near-duplicate, with the picture that it duplicates.

    Attributes:
        origin: where the sample came from.
        distance: distance between the two pictures, as memory.near_duplicates measures it.
        label: the sample's class; -1 without a label.
        twin_label: class of the other picture; -1 without a label, or if the picture is on another
            rank.
        picture_CHW: the sample's picture, uint8, on the CPU. Only a few samples of a batch have it;
            None for the others.
        twin_CHW: the other picture, uint8, on the CPU; None as for `picture_CHW`, or if it is on
            another rank.
    """

    origin: Origin | None
    distance: float
    label: int
    twin_label: int
    picture_CHW: Tensor | None = None
    twin_CHW: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step: a batch of the stream, or a replay of images from the memory.

    `labels_B` is on the CPU. The other columns are on the learner's device.

    Attributes:
        step: number of steps so far, including this one.
        samples: number of samples of the stream so far.
        batch: number of samples in this step.
        skipped: why no update was made, or None if one was made. "loss" or "gradient": it is not
            finite. "keys": they are not of unit norm. "pace": no update is due. "novelty": the
            stream's batch has too few new samples, which wait for more, so this step has no
            samples.
        seconds: seconds by phase, see `PHASES`.
        diagnostics: the loss's diagnostics, and the cosines of old and new embeddings.
        relative_change: norm of the change of the weights by the update over their norm; NaN
            without an update.
        collision_expected: mean h over pairs of batch and memory, before insertion.
        collision_true: share of these pairs with the same label; None without labels.
        admission: the memory's admission of the batch. None if nothing was inserted: on replays,
            with keys that are not of unit norm, and without samples.
        lag_seconds: seconds for which the oldest batch has waited.
        offset: position in the stream after this batch.
        rejected: number of samples rejected since the record before, by reason.
        new_origins: origin of each sample of the stream's batch that passed the near-duplicate
            test. It trains now, or as soon as new samples fill a batch.
        dropped_origins: origin of each sample of the batch that was dropped as a near-duplicate.
        dropped: the dropped samples, if pictures are compared closely.
        novelty: origin of each sample of the stream's batch, and its distance to the nearest
            picture in the memory, infinite if no picture is near. Empty unless pictures are
            compared closely.
        waiting: number of new samples that do not fill a batch yet.
        images_BCHW: the received images, uint8, not a copy; None for a record made without a
            learner.
        features_BF: the encoder's features of the batch; None unless the memory's descriptor reads
            them and the batch joined the memory.
        duplicates_B: expected number of slots that duplicate each sample, before insertion.
        origins_B: origin of each sample; None on replays.
        evicted_origins: origin of each sample in `admission.evicted`.
    """

    step: int
    samples: int
    batch: int
    replay: bool
    loss: float
    grad_norm: float
    learning_rate: float
    skipped: str | None
    seconds: Mapping[str, float]
    diagnostics: Mapping[str, float]
    collision_expected: float
    collision_true: float | None
    admission: Admission | None
    keys_BD: Tensor
    ids_B: Tensor
    labels_B: Tensor
    hashes_B: Tensor
    lag_seconds: float
    offset: Offset
    rejected: Mapping[str, int] = field(default_factory=dict)
    new_origins: Sequence[Origin | None] = ()
    dropped_origins: Sequence[Origin | None] = ()
    dropped: Sequence[DroppedSample] = ()
    novelty: Sequence[tuple[Origin | None, float]] = ()
    waiting: int = 0
    images_BCHW: Tensor | None = None
    features_BF: Tensor | None = None
    duplicates_B: Tensor | None = None
    origins_B: Sequence[Origin | None] | None = None
    evicted_origins: Sequence[Origin | None] = ()
    relative_change: float = math.nan

    @property
    def near_duplicates(self) -> int:
        """The number of samples of the batch that were dropped as near-duplicates."""
        return len(self.dropped_origins)


@dataclass(frozen=True, slots=True)
class CheckpointDue:
    """A request for a checkpoint, yielded on every rank between the same two steps.

    It follows `Ranks.save_asked` on any rank.
    """


@dataclass(frozen=True, slots=True)
class ReloadDue:
    """A request to reload a checkpoint, yielded on every rank between the same two steps.

    It follows a divergence of the weights on any rank.
    """


@dataclass(frozen=True, slots=True)
class Idle:
    """A record that is yielded about once per second while no batch comes.

    Attributes:
        lag_seconds: seconds for which the oldest batch has waited.
        waiting: number of new samples that do not fill a batch yet.
    """

    lag_seconds: float
    waiting: int = 0
