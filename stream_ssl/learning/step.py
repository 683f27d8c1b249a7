"""One step of the learner: a batch joins the memory, and the weights are updated once.

`Step.run` is DUEL's Algorithm 2. It has two forms, which differ in the anchors of the update:

    stream   update on the batch; the batch joins the memory
    memory   the batch joins the memory; update on samples drawn from it

The update is skipped if the loss or the gradient is not finite, or if the keys are not of unit
norm. Weights, optimiser and BatchNorm's averages then stay unchanged, and `StepRecord.skipped`
gives the reason. The schedule and the pace count a skipped update as made, and the learner
continues with the next batch. The batch still joins the memory if its own keys are of unit norm.

Several ranks take each step together, and their mean loss decides for all ranks. A rank whose
stream has nothing new has an empty batch. It updates on samples from its shard of the memory and
adds no samples.

Shapes: B samples, R re-encoded slots, K slots, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import PHASES
from stream_ssl.learning.schedule import Schedule
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.vectors import VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.losses import Diagnostics
from stream_ssl.memory import Admission, WorkingMemory
from stream_ssl.memory.checks import Checked
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.descriptors import Features
from stream_ssl.memory.draws import DrawOrder
from stream_ssl.methods import Method
from stream_ssl.methods.norm import synchronised

LEAST_PERIOD = 50
"""The least number of updates between two descriptions of all slots by features."""
DESCRIBED_SHARE = 4
"""One slot is described again for this many samples of an update, which bounds the cost."""


class BatchKeys(NamedTuple):
    """Embeddings [B, D], and whether the memory accepts them: all finite and of unit norm.

    Features [B, F] are computed if the memory's descriptor needs them.
    """

    keys_BD: Tensor
    usable: bool
    features_BF: Tensor | None = None


class Update(NamedTuple):
    """The result of an update.

    Attributes:
        skipped: the reason for a skipped update, as in `StepRecord`; None if the weights were
            updated.
        loss: the mean loss over ranks.
        grad_norm: norm of the gradient before clipping; NaN if the loss or the keys were not
            usable.
        learning_rate: the learning rate of this update.
        diagnostics: the loss's diagnostics.
        change: norm of the change of the weights over their norm, 0-dimensional, on the device;
            None if they were not updated.
    """

    skipped: str | None
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    diagnostics: Mapping[str, float] = {}
    change: Tensor | None = None


class CollisionStats(NamedTuple):
    """Collisions of a batch with the memory before the batch joins, on the memory's device."""

    expected: Tensor  # mean collision probability, 0-dimensional
    pairs: Tensor  # the result of `count_pairs`
    duplicates_B: Tensor  # expected number of slots that duplicate each sample


class StepResult(NamedTuple):
    """The result of a step, from which the learner makes its record."""

    batch: Batch[Tensor]  # the batch of the stream; in a replay the drawn samples
    keys_BD: Tensor  # the keys of this batch
    update: Update
    collisions: CollisionStats | None  # None: the keys are not usable, or there is no batch
    admission: Admission | None  # None: nothing joined the memory
    cosines: Mapping[str, Tensor]  # mean cosines of old and new embeddings, 0-dimensional


class Step:
    """The step of one run. `Learner` and `LearnerSettings` document the arguments.

    The numbers that decide on an update are read from the device once, after the backward pass:
    whether loss, keys and gradient are finite.

    Attributes:
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
        self._method, self._memory, self._views, self._ranks = method, memory, views, ranks
        self._settings, self._optimisation, self._schedule = settings, optimiser, schedule
        self._device = torch.device(settings.device)
        self._key_view = views.plain if settings.plain_keys else views
        self._parameters = list(method.trained)
        self._sync_batchnorm = settings.sync_batchnorm and not ranks.alone
        self._buffers = Backup(list(method.buffers()))
        self._weights = Backup(self._parameters)
        self._averages = [one for one in method.buffers() if one.is_floating_point()]
        # Duplicate counts are kept over all ranks, so all ranks must refresh their slots together.
        self._refresh_together = memory.descriptor.moves and not ranks.alone
        self._needs_features = memory.descriptor.needs_features
        self.timer = PhaseTimer(self._device)

    @cached_property
    def optimiser(self) -> torch.optim.Optimizer:
        """The optimiser of the method's weights.

        It is built on first use, because torch then loads its compiler, which takes as long as
        torch itself. A check of the configuration needs no optimiser.
        """
        return self._optimisation.build(self._parameters)

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
        return self._with_reencoding(result)

    def skip(self, batch: Batch[Tensor]) -> StepResult:
        """Return the result of a step without new samples."""
        keys_0D = self._memory.embeddings.new_empty(0, self._memory.dim)
        return StepResult(batch[:0], keys_0D, Update("novelty"), None, None, {})

    def replay(self, count: int, number: int) -> StepResult:
        """Make a step on `count` samples drawn from the memory, without a batch of the stream."""
        drawn = self._drawn(count)
        update, keys = self._update(drawn, number)
        collisions = self._measure(drawn, keys)
        cosines = self._refresh(drawn, keys)
        result = StepResult(drawn, keys.keys_BD, update, collisions, None, cosines)
        self._describe_again(number + 1, count)
        return self._with_reencoding(result)

    @property
    def can_draw(self) -> bool:
        """Whether each rank can draw at least one sample."""
        return self._shards_have(1)

    def _shards_have(self, samples: int) -> bool:
        """Return whether each rank's shard has at least so many samples, with images."""
        memory = self._memory
        there = memory.occupied_of_all // memory.group.size
        return there >= samples and memory.images is not None

    # -- Algorithm 2

    def _join(self, batch: Batch[Tensor]) -> StepResult:
        keys = self._encode_batch(batch)
        return StepResult(batch, keys.keys_BD, Update("pace"), *self._admit(batch, keys), {})

    def _train_on_stream(self, batch: Batch[Tensor], number: int) -> StepResult:
        """Update on the batch, then let its keys join the memory."""
        update, keys = self._update(batch, number)
        if self._needs_features and keys.usable:
            keys = keys._replace(features_BF=self._encode(images_of(batch)).features_BF)
        self._refresh_nothing()
        return StepResult(batch, keys.keys_BD, update, *self._admit(batch, keys), {})

    def _train_without_batch(self, batch: Batch[Tensor], number: int, size: int) -> StepResult:
        """Update on samples drawn from the memory, while other ranks update on a batch."""
        drawn = self._drawn(size)
        update, drawn_keys = self._update(drawn, number)
        cosines, none = self._refresh(drawn, drawn_keys), self._encode_batch(batch)
        return StepResult(batch, none.keys_BD, update, *self._admit(batch, none), cosines)

    def _train_on_memory(self, batch: Batch[Tensor], number: int, size: int) -> StepResult:
        """Let the batch join the memory, then update on as many samples drawn from the memory.

        This is the alternative that the DUEL paper names: update the memory first.
        """
        keys = self._encode_batch(batch)
        admitted = self._admit(batch, keys)
        if not self.can_draw:  # the first keys of the run were not usable
            return StepResult(batch, keys.keys_BD, Update("keys"), *admitted, {})
        drawn = self._drawn(size)
        update, drawn_keys = self._update(drawn, number)
        cosines = self._refresh(drawn, drawn_keys)
        return StepResult(batch, keys.keys_BD, update, *admitted, cosines)

    # -- Weights

    def _update(self, batch: Batch[Tensor], number: int) -> tuple[Update, BatchKeys]:
        """Make views, loss, gradient and optimiser step. Return the update and the batch's keys."""
        self._method.begin(number)
        rate = self._optimisation.learning_rate * self._schedule(number)
        images_BCHW = images_of(batch)
        with self.timer("data"):
            views = [self._views(images_BCHW) for _ in range(self._method.views)]
        # A forward pass on numbers that are not finite spoils BatchNorm's averages.
        self._buffers.save()
        with self.timer("memory"), self._autocast():
            self._method.prepare(self._memory, self._key_view)
        with self.timer("forward"), self._autocast(), self._synchronised():
            # Only a loss that is an oracle may read the labels.
            known = batch if self._method.needs_labels else replace(batch, labels_B=None)
            output = self._method(views, known, self._memory)
        with self.timer("backward"):
            self.optimiser.zero_grad(set_to_none=True)
            output.loss.loss.backward()
            mean_loss, keys_usable = self._ranks.average(
                [*self._gradients(), *self._averages], output.loss.loss, is_usable(output.keys_BD)
            )
            norm = self._gradient_norm()
            loss, usable, grad_norm, diagnostics = _read(
                mean_loss, keys_usable, norm, output.loss.diagnostics
            )
            skipped, change = _reason_to_skip(loss, usable, grad_norm), None
            if skipped is None:
                change = self._step_optimiser(norm, rate)
            else:
                self.optimiser.zero_grad(set_to_none=True)
                self._buffers.restore()
        keys = BatchKeys(output.keys_BD, usable)
        grad_norm = grad_norm if skipped in (None, "gradient") else math.nan
        return Update(skipped, loss, grad_norm, rate, diagnostics, change), keys

    def _synchronised(self) -> AbstractContextManager[None]:
        # Only updates can synchronise, because all ranks make them with the same passes.
        together = self._sync_batchnorm
        return synchronised(self._memory.group, self._method) if together else nullcontext()

    def _gradient_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(self._gradients()).to(self._device)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _step_optimiser(self, norm: Tensor, rate: float) -> Tensor:
        """Make one optimiser step along a gradient of this norm.

        Returns:
            The norm of the weights' change over their norm, 0-dimensional.
        """
        if (clip := self._optimisation.clip) is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, clip, norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self._weights.save()
        self.optimiser.step()
        change = self._weights.change().to(self._device)
        self._method.after_update()
        return change

    def _encode_batch(self, batch: Batch[Tensor]) -> BatchKeys:
        if len(batch):
            return self._encode(images_of(batch))
        return BatchKeys(self._memory.embeddings.new_empty(0, self._memory.dim), True)

    def _encode(self, images_BCHW: Tensor) -> BatchKeys:
        """Return keys of images that are encoded only for the memory."""
        with self.timer("data"):
            view_BCHW = self._key_view(images_BCHW)
        return self._keys_of(view_BCHW)

    def _keys_of(self, view_BCHW: Tensor) -> BatchKeys:
        with self.timer("forward"), self._autocast():
            if self._needs_features:
                keys_BD, features_BF = self._method.encode_newcomers(view_BCHW)
            else:
                keys_BD, features_BF = self._method.encode_keys(view_BCHW), None
            return BatchKeys(keys_BD, bool(to_host(is_usable(keys_BD))), features_BF)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"
        )

    # -- Memory

    def _drawn(self, count: int) -> Batch[Tensor]:
        # Every rank must draw the same number, but shards differ by one slot while they fill.
        count = min(count, self._memory.occupied_of_all // self._memory.group.size)
        with self.timer("data"):
            return draw_batch(self._memory, count, self._device, self._settings.draw)

    def _measure(self, batch: Batch[Tensor], keys: BatchKeys) -> CollisionStats | None:
        """Return the collisions of a batch with the present memory."""
        if not keys.usable or not len(batch):
            return None
        with self.timer("memory"):
            held = None if batch.slots_B is None else Checked(batch.slots_B)
            each_B = self._memory.collisions(
                Checked(keys.keys_BD), batch.images_BCHW, keys.features_BF, held
            )
            assert batch.labels_B is not None, "-1 where there are none"
            labels_B = batch.labels_B.to(self._memory.device)
            pairs = count_pairs(labels_B, self._memory.labels)
            return CollisionStats(each_B.mean(), pairs, each_B * len(self._memory))

    def _admit(
        self, batch: Batch[Tensor], keys: BatchKeys
    ) -> tuple[CollisionStats | None, Admission | None]:
        """Measure the collisions of a batch, then let the batch join the memory."""
        collisions = self._measure(batch, keys)
        if not keys.usable and self._ranks.alone:
            return None, None
        if not keys.usable:  # the other ranks still add theirs, so this rank adds none
            self._admit(batch[:0], self._encode_batch(batch[:0]))
            return None, None
        with self.timer("memory"):
            admission = self._memory.add(
                batch.ids_B,
                Checked(keys.keys_BD),
                images=None if self._memory.images is None else batch.images_BCHW,
                labels=batch.labels_B,
                hashes=batch.hashes_B,
                producers=producers_of(batch),
                features=keys.features_BF,
            )
        return collisions, admission

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
        if not isinstance(descriptor, Features) or not self.can_draw:
            return
        least = -(-DESCRIBED_SHARE * memory.capacity // max(1, size))
        never = not descriptor.is_centred and memory.occupied_of_all == memory.capacity_of_all
        if updates % max(LEAST_PERIOD, least) and not never:
            return

        def features(image_bCHW: Tensor) -> Tensor:
            view_bCHW = self._key_view(image_bCHW.to(self._device))
            with self._autocast():
                return self._method.encode_newcomers(view_bCHW)[1].to(memory.device)

        with self.timer("memory"):
            memory.describe_again(features)

    def _with_reencoding(self, result: StepResult) -> StepResult:
        """Re-encode the stalest slots, if configured, and add their mean cosine to the result."""
        if not self._settings.reencode or not self.can_draw:
            return result
        slots_R = self._memory.stalest(self._settings.reencode)
        keys = self._encode(self._memory.images_of(Checked(slots_R)).to(self._device))
        if (drift := self._replace(slots_R, keys)) is None:
            return result
        return result._replace(cosines={**result.cosines, "drift_cosine": drift})


class PhaseTimer:
    """A sum of seconds for each phase of the current step.

    On a CPU the seconds are the host's monotonic time. A GPU runs kernels asynchronously, so there
    the seconds are the device's time between the phase's first and last kernel. They include the
    device's waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._read: list[torch.cuda.Event] = []  # events of earlier steps, to use again

    def restart(self) -> None:
        """Start a new step with 0 seconds in each phase."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._spans.clear()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started, begin = time.perf_counter(), self._event()
        try:
            yield
        finally:
            end = self._event()
            if begin is None or end is None:
                self._seconds[phase] += time.perf_counter() - started
            else:
                self._spans.append((phase, begin, end))

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase.

        On a GPU this waits for the end of the last phase. Read it after the step's other numbers,
        so that it does not add a wait.
        """
        if self._spans:
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            self._seconds[phase] += begin.elapsed_time(end) / 1000
            self._read += begin, end
        self._spans.clear()
        return dict(self._seconds)

    def _event(self) -> torch.cuda.Event | None:
        """Return an event that the GPU records after all work launched so far; None on a CPU."""
        if self._gpu is None:
            return None
        new: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch has no types for the call
        event = self._read.pop() if self._read else new(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event


class Backup:
    """Copies of tensors, to undo changes. One kernel per dtype saves or restores them.

    Args:
        live: the tensors to save, which must stay the same objects.
    """

    def __init__(self, live: Iterable[Tensor]) -> None:
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in live:
            by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._pairs = [(same, [torch.empty_like(one) for one in same]) for same in by_type.values()]

    @torch.no_grad()
    def save(self) -> None:
        """Save the present values."""
        for live, kept in self._pairs:
            torch._foreach_copy_(kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to the saved values."""
        for live, kept in self._pairs:
            torch._foreach_copy_(live, kept)

    @torch.no_grad()
    def change(self) -> Tensor:
        """Return the norm of the change since `save` over the norm at `save`, 0-dimensional.

        The saved values become the differences, so `restore` is not possible afterwards.
        """
        kept = [one for _, tensors in self._pairs for one in tensors]
        before = torch.nn.utils.get_total_norm(kept)
        for live, tensors in self._pairs:
            torch._foreach_sub_(tensors, live)
        return torch.nn.utils.get_total_norm(kept) / before


def images_of(batch: Batch[Tensor]) -> Tensor:
    """Return the images of a batch that is to be encoded."""
    assert batch.images_BCHW is not None, "only images can be encoded"
    return batch.images_BCHW


def producers_of(batch: Batch[Tensor]) -> list[str | None] | None:
    """Return the name of each sample's producer, None if unknown."""
    if batch.origins_B is None:
        return None
    return [origin and (origin.producer or None) for origin in batch.origins_B]


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


def joined(first: Batch[Tensor], second: Batch[Tensor]) -> Batch[Tensor]:
    """Return the samples of both batches, without slots.

    `offset` and `rejected` are the second batch's.
    """
    others = second.columns()
    columns: dict[str, Any] = {
        name: torch.cat([column, others[name]]) for name, column in first.columns().items()
    }
    origins = [part.origins_B or [None] * len(part) for part in (first, second)]
    return replace(second, **columns, origins_B=[*origins[0], *origins[1]], slots_B=None)


def is_usable(keys_BD: Tensor) -> Tensor:
    """Return a 0-dimensional bool: all rows are finite and of unit norm, as the memory requires.

    A collapsed encoder can give zeros, which are not usable.
    """
    norm_B = torch.linalg.vector_norm(keys_BD, dim=1)
    usable: Tensor = ((norm_B - 1).abs() < 1e-3).all()
    return usable


def count_pairs(labels_B: Tensor, labels_K: Tensor) -> Tensor:
    """Return int64 [3]: pairs with equal labels, labelled samples, labelled slots.

    Class numbers may be any integers from 0. They are looked up, not counted in a table of their
    range. The function neither waits for the device nor makes a [B, K] tensor.
    """
    known_B, known_K = labels_B >= 0, labels_K >= 0
    sorted_B = labels_B.sort().values
    ahead_K = torch.searchsorted(sorted_B, labels_K)
    equal_K = torch.searchsorted(sorted_B, labels_K, right=True) - ahead_K
    return torch.stack([(equal_K * known_K).sum(), known_B.sum(), known_K.sum()])


def true_collisions(pairs: Sequence[float]) -> float | None:
    """Return the share, in [0, 1], of labelled pairs of sample and slot that have the same label.

    DUEL's Definition 2 estimates this share without labels.

    Args:
        pairs: the result of `count_pairs`.

    Returns:
        The share; None if no sample or no slot has a label.
    """
    equal, samples, slots = pairs
    return equal / (samples * slots) if samples and slots else None


def _read(
    loss: Tensor, usable: Tensor, norm: Tensor, diagnostics: Mapping[str, float]
) -> tuple[float, bool, float, Mapping[str, float]]:
    """Read all numbers on the host, with one wait for the device."""
    parts = [torch.stack([loss.detach().double(), usable.double(), norm.double()])]
    if isinstance(diagnostics, Diagnostics):
        parts.append(diagnostics.on_device.double())
    value, good, size, *rest = to_host(torch.cat(parts)).tolist()
    if isinstance(diagnostics, Diagnostics):
        diagnostics = diagnostics.read(rest)
    return value, bool(good), size, diagnostics


def _reason_to_skip(loss: float, usable: bool, norm: float) -> str | None:
    """Return the reason to skip the update, or None."""
    if not math.isfinite(loss):
        return "loss"
    if not usable:
        return "keys"
    return None if math.isfinite(norm) else "gradient"
