"""What the learner says about each step; metrics, displays and checkpoints consume it.

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
"""Reasons to skip an update that tell of broken weights; "pace" and "novelty" do not."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """A sample that was dropped as a near-duplicate, and the picture that it is one of.

    Attributes:
        origin: where it came from.
        distance: between the two pictures, as memory.near_duplicates measures it.
        label: its class; -1 where it has none.
        twin_label: that of the other picture; -1 where it has none, or is on another rank.
        picture_CHW: uint8, on the CPU; None but for a few of a batch.
        twin_CHW: the other picture; None likewise.
    """

    origin: Origin | None
    distance: float
    label: int
    twin_label: int
    picture_CHW: Tensor | None = None
    twin_CHW: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: on a batch of the stream, or a replay of images from the memory.

    `labels_B` lies on the CPU, the other columns where the learner computes.

    Attributes:
        step: steps so far, this one included.
        samples: of the stream, so far.
        batch: samples in this step.
        skipped: why no update was made: "loss" or "gradient" (not finite), "keys" (not of unit
            norm), "pace" (none due), "novelty" (what was new in the stream's batch waits for more,
            and this step has no samples); None if one was.
        seconds: by phase, of PHASES.
        diagnostics: what the loss tells, and the cosines of old and new embeddings.
        relative_change: norm of the change of the weights by the update over their norm; NaN
            without an update.
        collision_expected: mean h over pairs of batch and memory, before insertion.
        collision_true: share of such pairs with the same label; None without labels.
        admission: None where nothing was inserted: on replays, with keys that are not of unit norm,
            and without samples.
        lag_seconds: for how long the oldest batch has waited.
        offset: of the stream, behind this batch.
        rejected: samples left out since the record before, by reason.
        near_copies: samples of the stream's batch that were turned away.
        turned_away: where each of these came from.
        dropped: the same samples, where pictures are compared closely.
        novelty: where each sample of the stream's batch came from, and its distance to the nearest
            picture that was held; infinite where no other comes near. Where pictures are compared.
        waiting: new samples that do not fill a batch yet.
        images_BCHW: uint8, the images as they came, not copied; None where a record is made without
            a learner.
        duplicates_B: slots expected to show the same, before insertion.
        origins_B: where each sample came from; None on replays.
        evicted_origins: where each of `admission.evicted` came from.
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
    near_copies: int = 0
    turned_away: Sequence[Origin | None] = ()
    dropped: Sequence[Dropped] = ()
    novelty: Sequence[tuple[Origin | None, float]] = ()
    waiting: int = 0
    images_BCHW: Tensor | None = None
    duplicates_B: Tensor | None = None
    origins_B: Sequence[Origin | None] | None = None
    evicted_origins: Sequence[Origin | None] = ()
    relative_change: float = math.nan


@dataclass(frozen=True, slots=True)
class CheckpointDue:
    """On every rank between the same two steps, after `Ranks.save_asked` was set on one of them."""


@dataclass(frozen=True, slots=True)
class ReloadDue:
    """On every rank between the same two steps, after the weights have diverged on one of them."""


@dataclass(frozen=True, slots=True)
class Idle:
    """About each second while no batch comes."""

    lag_seconds: float
