"""One step of the learner: a batch joins the memory, and the weights are updated once.

`Step.run` is DUEL's Algorithm 2. It has two forms, which differ in the anchors of the update:

    stream   update on the batch; the batch joins the memory
    memory   the batch joins the memory; update on samples drawn from it

`weights.py` makes the update, or skips it if numbers are not usable. The schedule and the pace
count a skipped update as made, and the learner continues with the next batch. The batch still
joins the memory if its own keys are of unit norm.

Several ranks take each step together. A rank whose stream has nothing new has an empty batch. It
updates on samples from its shard of the memory and adds no samples.

Shapes: B samples, R re-encoded slots, K slots, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.learning.collisions import CollisionStats, count_pairs
from stream_ssl.learning.keys import BatchKeys, KeyEncoder, images_of
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.phase_timer import PhaseTimer
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.schedule import Schedule
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.vectors import VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.learning.weights import Update, Weights
from stream_ssl.memory import Admission, WorkingMemory
from stream_ssl.memory.checks import Checked
from stream_ssl.memory.draws import DrawOrder
from stream_ssl.methods import Method

LEAST_PERIOD = 50
"""The least number of updates between two descriptions of all slots by features."""
DESCRIBED_SHARE = 4
"""One slot is described again for this many samples of an update, which bounds the cost."""


class StepResult(NamedTuple):
    """The result of a step, from which the learner makes its record."""

    batch: Batch[Tensor]  # the batch of the stream; in a replay the drawn samples
    keys: BatchKeys  # of this batch
    update: Update
    collisions: CollisionStats | None  # None: the keys are not usable, or there is no batch
    admission: Admission | None  # None: nothing joined the memory
    cosines: Mapping[str, Tensor]  # mean cosines of old and new embeddings, 0-dimensional


class Step:
    """The step of one run. `Learner` and `LearnerSettings` document the arguments.

    Attributes:
        weights: the weights and their updates.
        timer: seconds of the step by phase.
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        views: Views | VectorViews,
        optimiser: OptimiserSettings,
        schedule: Schedule,
        settings: LearnerSettings,
        ranks: Ranks,
    ) -> None:
        self._memory, self._settings, self._ranks = memory, settings, ranks
        self._device = torch.device(settings.device)
        self.timer = PhaseTimer(self._device)
        key_view = views.plain if settings.plain_keys else views
        self._keys = KeyEncoder(
            method,
            key_view,
            memory.descriptor.needs_features,
            self._device,
            settings.precision,
            self.timer,
        )
        self.weights = Weights(
            method,
            memory,
            views,
            optimiser,
            schedule,
            self._keys,
            ranks,
            settings.sync_batchnorm,
            self.timer,
        )
        # Duplicate counts are kept over all ranks, so all ranks must refresh their slots together.
        self._refresh_together = memory.descriptor.moves and not ranks.alone

    def run(
        self, batch: Batch[Tensor], number: int, update_due: bool, size: int, all_have: bool = True
    ) -> StepResult:
        """Make a step on a batch of the stream.

        Without a due update the batch only joins the memory.

        Args:
            batch: the batch on the device; empty on a rank that has none.
            number: number of updates made before.
            update_due: whether to make an update.
            size: number of samples in a batch that is not empty.
            all_have: whether every rank has a batch with samples.
        """
        if not update_due:
            result = self._join(batch)
        elif self._settings.anchors == "memory":
            result = self._train_on_memory(batch, number, size)
        elif not all_have and not self._shards_have(size):
            result = self._join(batch)
        elif not len(batch):
            result = self._train_without_batch(batch, number, size)
        else:
            result = self._train_on_stream(batch, number)
        if update_due:
            self._describe_again(number + 1, size)
        return result

    def skip(self, batch: Batch[Tensor]) -> StepResult:
        """Return the result of a step without new samples."""
        none = self._encode_batch(batch[:0])
        return StepResult(batch[:0], none, Update("novelty"), None, None, {})

    def replay(self, count: int, number: int) -> StepResult:
        """Make a step on `count` samples drawn from the memory, without a batch of the stream."""
        drawn = self._drawn(count)
        update, keys = self.weights.update(drawn, number)
        collisions = self._measure(drawn, keys)
        cosines = self._refresh(drawn, keys)
        cosines = {**cosines, **self._reencode()}
        self._describe_again(number + 1, count)
        return StepResult(drawn, keys, update, collisions, None, cosines)

    @property
    def can_draw(self) -> bool:
        """Whether each rank can draw at least one sample."""
        return self._shards_have(1)

    def _shards_have(self, samples: int) -> bool:
        """Return whether each rank's shard has at least this number of samples, with images."""
        memory = self._memory
        there = memory.occupied_of_all // memory.group.size
        return there >= samples and memory.images is not None

    # -- Algorithm 2

    def _join(self, batch: Batch[Tensor]) -> StepResult:
        keys, cosines = self._encode_with_stalest(batch)
        return StepResult(batch, keys, Update("pace"), *self._admit(batch, keys), cosines)

    def _train_on_stream(self, batch: Batch[Tensor], number: int) -> StepResult:
        """Update on the batch, then let its keys join the memory."""
        update, keys = self.weights.update(batch, number)
        if self._memory.descriptor.needs_features and keys.usable:
            keys = keys._replace(features_BF=self._encode_batch(batch).features_BF)
        self._refresh_nothing()
        admitted = self._admit(batch, keys)
        return StepResult(batch, keys, update, *admitted, self._reencode())

    def _train_without_batch(self, batch: Batch[Tensor], number: int, size: int) -> StepResult:
        """Update on samples drawn from the memory, while other ranks update on a batch."""
        drawn = self._drawn(size)
        update, drawn_keys = self.weights.update(drawn, number)
        cosines, none = self._refresh(drawn, drawn_keys), self._encode_batch(batch)
        admitted = self._admit(batch, none)
        cosines = {**cosines, **self._reencode()}
        return StepResult(batch, none, update, *admitted, cosines)

    def _train_on_memory(self, batch: Batch[Tensor], number: int, size: int) -> StepResult:
        """Let the batch join the memory, then update on as many samples drawn from the memory.

        This is the alternative that the DUEL paper names: update the memory first.
        """
        keys, cosines = self._encode_with_stalest(batch)
        admitted = self._admit(batch, keys)
        if not self.can_draw:  # the first keys of the run were not usable
            return StepResult(batch, keys, Update("keys"), *admitted, cosines)
        drawn = self._drawn(size)
        update, drawn_keys = self.weights.update(drawn, number)
        cosines = {**cosines, **self._refresh(drawn, drawn_keys)}
        return StepResult(batch, keys, update, *admitted, cosines)

    def _encode_batch(self, batch: Batch[Tensor]) -> BatchKeys:
        if len(batch):
            return self._keys(images_of(batch))[0]
        return BatchKeys(self._memory.embeddings.new_empty(0, self._memory.dim), True)

    def _encode_with_stalest(self, batch: Batch[Tensor]) -> tuple[BatchKeys, Mapping[str, Tensor]]:
        """Return the keys of a batch, and `_reencode`. One pass of the network serves both."""
        if not len(batch) or not self._reencodes:
            return self._encode_batch(batch), self._reencode()
        slots_R, image_RCHW = self._stalest()
        keys, again = self._keys(images_of(batch), image_RCHW)
        return keys, self._drift(slots_R, again)

    # -- Memory

    def _drawn(self, count: int) -> Batch[Tensor]:
        # Every rank must draw the same number, but shards differ by one slot while they fill.
        count = min(count, self._memory.occupied_of_all // self._memory.group.size)
        with self.timer("data"):
            return draw_batch(self._memory, count, self._device, self._settings.draw)

    def _measure(self, drawn: Batch[Tensor], keys: BatchKeys) -> CollisionStats | None:
        """Return the collisions of samples drawn from the memory with the memory."""
        if not keys.usable or not len(drawn):
            return None
        assert drawn.slots_B is not None, "what is drawn from the memory has slots"
        with self.timer("memory"):
            each_B = self._memory.collisions(
                Checked(keys.keys_BD),
                drawn.images_BCHW,
                keys.features_BF,
                Checked(drawn.slots_B),
            )
            return CollisionStats(each_B.mean(), self._pairs(drawn), each_B * len(self._memory))

    def _pairs(self, batch: Batch[Tensor]) -> Tensor:
        """Return `count_pairs` of a batch with the present memory."""
        assert batch.labels_B is not None, "-1 where there are none"
        return count_pairs(batch.labels_B.to(self._memory.device), self._memory.labels)

    def _admit(
        self, batch: Batch[Tensor], keys: BatchKeys
    ) -> tuple[CollisionStats | None, Admission | None]:
        """Let a batch join the memory, and return its collisions with the memory before."""
        if not keys.usable and self._ranks.alone:
            return None, None
        if not keys.usable:  # the other ranks still add theirs, so this rank adds none
            self._admit(batch[:0], self._encode_batch(batch[:0]))
            return None, None
        with self.timer("memory"):
            held, pairs = len(self._memory), self._pairs(batch)
            admission = self._memory.add(
                batch.ids_B,
                Checked(keys.keys_BD),
                images=None if self._memory.images is None else batch.images_BCHW,
                labels=batch.labels_B,
                hashes=batch.hashes_B,
                producers=batch.producers_B,
                features=keys.features_BF,
                measure=True,
            )
            each_B = admission.collisions
            if each_B is None or not len(batch):
                return None, admission
            return CollisionStats(each_B.mean(), pairs, each_B * held), admission

    def _refresh(self, drawn: Batch[Tensor], keys: BatchKeys) -> Mapping[str, Tensor]:
        """Replace the keys in the slots of drawn samples by their fresh keys."""
        if not self._settings.write_back:
            return {}
        assert drawn.slots_B is not None, "what is drawn from the memory has slots"
        drift = self._replace(drawn.slots_B, keys)
        return {} if drift is None else {"written_back_cosine": drift}

    def _refresh_nothing(self) -> None:
        """Take part in the other ranks' refresh, without any slots."""
        if self._refresh_together and self._settings.write_back:
            self._replace(torch.empty(0, dtype=torch.int64), BatchKeys(torch.empty(0), False))

    def _replace(self, slots_R: Tensor, keys: BatchKeys) -> Tensor | None:
        """Replace the embeddings of these slots, if the keys are usable.

        Returns:
            The mean cosine of old and new embeddings; None if none was replaced.
        """
        if keys.usable:
            with self.timer("memory"):
                return self._memory.refresh(Checked(slots_R), Checked(keys.keys_BD)).mean()
        if self._refresh_together:
            none = self._memory.embeddings.new_empty(0, self._memory.dim)
            self._memory.refresh(slots_R[:0], none)
        return None

    def _describe_again(self, updates: int, size: int) -> None:
        """Describe all slots by the present features, if the memory needs it and it is due.

        It is due at equal distances, and as soon as the memory is full and was never described.
        The distance keeps the cost at a part of an update's, see DESCRIBED_SHARE.
        """
        memory, descriptor = self._memory, self._memory.descriptor
        if not descriptor.needs_features or not self.can_draw:
            return
        least = -(-DESCRIBED_SHARE * memory.capacity // max(1, size))
        never = not descriptor.is_centred and memory.occupied_of_all == memory.capacity_of_all
        if updates % max(LEAST_PERIOD, least) and not never:
            return

        with self.timer("memory"):
            memory.describe_again(lambda images: self._keys.features(images).to(memory.device))

    @property
    def _reencodes(self) -> bool:
        return bool(self._settings.reencode) and self.can_draw

    def _stalest(self) -> tuple[Tensor, Tensor]:
        """Return the stalest slots [R] and their images [R, C, H, W] on the device."""
        slots_R = self._memory.stalest(self._settings.reencode)
        return slots_R, self._memory.images_of(Checked(slots_R)).to(self._device)

    def _reencode(self) -> Mapping[str, Tensor]:
        """Re-encode the stalest slots, if configured. Return the mean cosine of old and new."""
        if not self._reencodes:
            return {}
        slots_R, image_RCHW = self._stalest()
        return self._drift(slots_R, *self._keys(image_RCHW))

    def _drift(self, slots_R: Tensor, keys: BatchKeys) -> Mapping[str, Tensor]:
        drift = self._replace(slots_R, keys)
        return {} if drift is None else {"drift_cosine": drift}


def draw_batch(
    memory: WorkingMemory,
    count: int,
    device: torch.device,
    how: DrawOrder = "uniform",
) -> Batch[Tensor]:
    """Draw at most `count` samples of the memory, each at most once, see `WorkingMemory.sample`."""
    draw = memory.sample(min(count, len(memory)), how=how)
    slots_B, images_BCHW, ids_B = draw.slots, draw.images, draw.ids
    assert images_BCHW is not None, "only a memory that keeps images is drawn from"
    return Batch(
        ids_B.to(device),
        memory.hashes[slots_B].to(device),
        memory.labels[slots_B].to(device),
        images_BCHW.to(device),
        slots_B=slots_B,
    )
