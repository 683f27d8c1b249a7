"""The learner: it takes batches from a stream, updates the method and yields a record per step.

On a GPU, each step waits for the device twice, in addition to the waits of the memory. The
first wait follows the backward pass and reads the numbers that decide on the update. The second
wait is at the end of the step, for the record. There is one more wait each time that keys are
made only for the memory.

Shapes: B samples, D embedding.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.batch import START, Batch, Offset, Origin
from stream_ssl.learning.capture import Capture
from stream_ssl.learning.checkpoint_layout import made_by, offset_as_json
from stream_ssl.learning.collisions import true_collisions
from stream_ssl.learning.compatibility import check_batch, check_labels, check_parts
from stream_ssl.learning.divergence import Divergence
from stream_ssl.learning.novelty import Novelty
from stream_ssl.learning.optimiser import OptimiserSettings, load_optimiser, optimiser_tensors
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.randomness import OwnRandomness, set_threads
from stream_ssl.learning.ranks import Ranks, Turn
from stream_ssl.learning.records import CheckpointDue, Idle, ReloadDue, StepRecord
from stream_ssl.learning.schedule import Constant, Schedule
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.step import Step, StepResult
from stream_ssl.learning.upload import Upload
from stream_ssl.learning.vectors import VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.compute import all_to_host, to_host
from stream_ssl.memory.shards import RANK_SEEDS
from stream_ssl.methods import Method
from stream_ssl.tensor_file import as_state

POLL = 0.1  # seconds between two checks of `stop` while no batch comes
IDLE = 1.0  # seconds without a record after which an Idle is yielded

log = logging.getLogger("stream_ssl.learner")


class Stream(Protocol):
    """A source of batches."""

    def next(self, timeout: float) -> Batch[NDArray[Any]] | None:
        """Return the next batch, or None if no batch came within `timeout` seconds."""

    def lag(self) -> float:
        """Return for how many seconds the oldest complete batch has waited; 0 if there is none."""


class Learner:
    """A trainer of `method` on `batches` against `memory`; `run` yields a record per step.

    Each step takes one batch of the stream. `step.py` describes its two forms:
     - With anchors "stream", the update uses the batch. Its keys then join the memory.
     - With anchors "memory" (DUEL's alternative: update the memory first), the keys of the batch
       join the memory. The update then uses as many samples drawn from the memory. They may be of
       the batch or older. A drawn sample is not a negative of itself, and its fresh key replaces
       the key in its slot. The keys come from the key encoder before the update.

    An update is skipped if its loss, keys or gradient are not finite, see `weights.py`. A run that
    was captured, killed and restored ends bit-equal to an uninterrupted run. This needs a CPU,
    fixed `threads` and a stream that can repeat from an offset.

    Several ranks can hold one memory (`WorkingMemory(group=...)`) and learn together. Each rank has
    its own stream. All ranks take every step at the same time and use the mean gradient, so they
    have the same weights. A rank whose stream has nothing new updates on samples from its shard,
    see `step.py`.

    Args:
        method: the method to train.
        memory: the source of negatives. It stores the keys.
        views: the augmentation.
        batches: the stream.
        settings: the options of training.
        optimiser: the optimiser's settings. The schedule multiplies its learning rate.
        schedule: factor of the learning rate for each update; constant by default.
        pace: number of updates per sample; by default one update per batch.
        offset: the position where `batches` starts.

    Raises:
        ValueError: parts do not fit each other, or an argument is outside its range.
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        views: Views | VectorViews,
        batches: Stream,
        settings: LearnerSettings | None = None,
        optimiser: OptimiserSettings | None = None,
        schedule: Schedule | None = None,
        pace: Pace | None = None,
        offset: Offset = START,
    ) -> None:
        self.settings = settings = LearnerSettings() if settings is None else settings
        check_parts(method, memory, settings)
        set_threads(settings.threads)
        self.device = torch.device(settings.device)
        # The parts that are trained, and their data.
        self.method = method.to(self.device)
        if settings.compile:
            log.info("torch compiles the encoders: the first steps take up to some minutes")
            method.compile_encoders()
        self.memory, self.batches = memory, batches
        self.views = views.to(self.device)
        self.origins = Origins()
        # The timing of updates.
        self.schedule = Constant() if schedule is None else schedule
        self.pace = Pace() if pace is None else pace
        self.divergence = Divergence()
        self.ranks = Ranks(memory.group, self.device)
        # How far the run is.
        self.step = self.samples = self._batch_size = 0
        self.offset = offset
        # The path of a batch.
        self._upload = Upload(self.device)
        self.novelty = Novelty(memory, settings.novelty)
        self._step = Step(
            self.method,
            memory,
            self.views,
            OptimiserSettings() if optimiser is None else optimiser,
            self.schedule,
            settings,
            self.ranks,
        )
        seed = settings.seed + RANK_SEEDS * memory.group.rank
        self._randomness = OwnRandomness(seed, self.device)

    def run(self, stop: threading.Event) -> Iterator[StepRecord | Idle | CheckpointDue | ReloadDue]:
        """Learn until `stop` is set on any rank. Yield a record per step.

        Between two records the state is complete and can be captured.

        An update that is due is made before the next batch is read. So an interruption does not
        change the order of a run's updates.

        When the weights have diverged, a `ReloadDue` asks the caller to call `reload`. The learner
        continues in either case. A halted learner reads no batch and makes no update.
        """
        self.method.train()
        last_record = time.monotonic()
        ignored = 0  # `skipped_in_a_row` after the last ReloadDue, to ask once for each value
        while True:
            self._step.timer.restart()
            reload = self.divergence.due and self.divergence.skipped_in_a_row != ignored
            turn, batch, replay_due = self._take_turn(stop.is_set(), reload)
            if turn.stop:
                return
            if turn.save:
                yield CheckpointDue()
            if turn.reload:
                yield ReloadDue()
                ignored = self.divergence.skipped_in_a_row
            if self.divergence.halted:
                stop.wait(POLL)
            record: StepRecord | Idle
            if replay_due and not turn.reload:
                record = self._replay()
            elif any(turn.batches):
                record = self._train(batch, turn)
            elif time.monotonic() - last_record >= IDLE:
                record = Idle(self.batches.lag(), len(self.novelty))
            else:
                continue
            if isinstance(record, StepRecord):
                self.divergence.consume(record)
            yield record
            last_record = time.monotonic()

    def _take_turn(
        self, stopping: bool, reload: bool
    ) -> tuple[Turn, Batch[NDArray[Any]] | None, bool]:
        """Take the next batch, unless an update is due, and agree with the other ranks.

        Returns:
            The turn, this rank's batch, and whether an update on samples of the memory is due.
        """
        active = not (reload or self.divergence.halted)
        can_replay = self._batch_size > 0 and self._step.can_draw
        replay_due = active and self.pace.must_update() and can_replay
        batch = None
        if active and not (stopping or replay_due):
            # Ranks with samples must not wait for a rank whose stream pauses.
            busy = not self.ranks.alone and any(self.ranks.last.batches)
            with self._step.timer("data"):
                batch = self.ranks.asked(partial(self.batches.next, 0.0 if busy else POLL))
        came, offset = (0, self.offset) if batch is None else (len(batch), batch.offset)
        with self._step.timer("data"):
            turn = self.ranks.agree(stopping, reload, came, len(self.novelty), offset)
        return turn, batch, replay_due

    def capture(self, live: bool = False) -> Capture:
        """Return the state after the last record.

        The tensors are the live ones, so save them before the learner continues.

        Args:
            live: whether the memory's tensors are live too; by default they are copies.
        """
        tensors = {
            "model": self.method.state_dict(),
            "optimiser": optimiser_tensors(self._step.weights.optimiser),
            "memory": self.memory.state_dict(keep_vars=live),
            "rng": self._randomness.state_dict(),
            "origins": self.origins.state(),
        }
        if waiting := self.novelty.state():
            tensors["waiting"] = waiting
        return Capture(tensors, self._facts())

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "batch_size": self._batch_size,
            "offset": offset_as_json(self.offset),
            "pace": self.pace.state_dict(),
            "updated": self.divergence.updated,
        }

    def originals(self) -> set[str]:
        """Return the names of the original bytes of all samples that are held or that wait."""
        return self.origins.originals() | self.novelty.originals()

    def restore(self, capture: Capture) -> None:
        """Continue from a capture. `batches` must begin at the capture's offset.

        Raises:
            ValueError: method, memory or optimiser do not fit the capture.
        """
        tensors, facts = capture.tensors, capture.facts
        _load_weights(self.method, tensors["model"])
        load_optimiser(self._step.weights.optimiser, tensors["optimiser"])
        self.memory.load_state_dict(dict(tensors["memory"]))
        self.origins.load(tensors.get("origins", {}), to_host(self.memory.ids).tolist())
        self._randomness.load_state_dict(tensors["rng"])
        self.novelty.load(tensors.get("waiting", {}), self.device)
        self.pace.load_state_dict(facts["pace"])
        self.step, self.samples = int(facts["step"]), int(facts["samples"])
        self._batch_size = int(facts["batch_size"])
        self.offset = Offset(**facts["offset"])
        self.divergence.restored(made_by(facts))

    def reload(self, capture: Capture) -> None:
        """Load weights, optimiser, memory and random state from a capture of this run.

        The position in the stream does not change: steps, samples, pace and the samples that wait
        for a batch. So the samples on which the weights diverged are not read again.

        Raises:
            ValueError: as in `restore`.
        """
        facts = {**self._facts(), "updated": made_by(capture.facts)}
        self.restore(Capture({**capture.tensors, "waiting": self.novelty.state()}, facts))
        self.divergence.reloaded(self.divergence.updated)

    def _train(self, batch: Batch[NDArray[Any]] | None, turn: Turn) -> StepRecord:
        """Make a step on new samples of the stream.

        `batch` is None on a rank that has no batch while other ranks have one.
        """
        if batch is not None:
            self._check(batch)
            self.offset = batch.offset
        self._batch_size = max(turn.batches)
        self.samples += sum(turn.batches)
        with self._randomness:
            with self._step.timer("data"):
                moved = _empty(self.memory, self.offset) if batch is None else self._upload(batch)
                new = self.novelty(moved, turn)
            fresh = self.novelty.fresh
            if any(fresh) or self.pace.counts == "received":
                self.pace.received(sum(turn.batches if self.pace.counts == "received" else fresh))
            if not any(fresh):
                result = self._step.skip(moved)
            else:
                update_due = self.pace.must_update()
                result = self._step.run(
                    moved[:0] if new is None else new,
                    self.pace.updates,
                    update_due,
                    size=max(fresh),
                    all_have=all(fresh),
                )
                if update_due:
                    self.pace.updated()
        return replace(
            self._record(result, batch if new is moved else None),
            new_origins=self.novelty.new_origins,
            dropped_origins=self.novelty.dropped_origins,
            dropped=self.novelty.dropped,
            novelty=self.novelty.distances,
        )

    def _check(self, batch: Batch[NDArray[Any]]) -> None:
        """Raise ValueError unless the learner's parts fit a batch like this."""
        if len(batch) > self._batch_size:
            check_batch(self.method, self.memory, self.pace, self.settings.anchors, len(batch))
        if self.method.needs_labels:
            check_labels(self.method, _has_labels(batch, self.memory))

    def _replay(self) -> StepRecord:
        """Make a step on samples of the memory."""
        with self._randomness:
            result = self._step.replay(self._batch_size, self.pace.updates)
            self.pace.updated()
        return self._record(result)

    def _record(self, result: StepResult, on_host: Batch[NDArray[Any]] | None = None) -> StepRecord:
        """Return the record of a step. `on_host` is a copy of its batch in main memory, if any."""
        batch, update, admission = result.batch, result.update, result.admission
        ids_labels_2B, cosines, expected, true, change = _read(result, on_host)
        evicted_origins: Sequence[Origin | None] = ()
        if admission is not None:
            ids = ids_labels_2B[0].tolist()
            evicted_origins = self.origins.follow(ids, batch.origins_B, admission)
        assert batch.hashes_B is not None, "0 where there are none"
        self.step += 1
        return StepRecord(
            step=self.step,
            samples=self.samples,
            batch=len(batch),
            replay=batch.slots_B is not None,
            loss=update.loss,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            skipped=update.skipped,
            seconds=self._step.timer.seconds,
            diagnostics={**update.diagnostics, **cosines},
            collision_expected=expected,
            collision_true=true,
            admission=admission,
            keys_BD=result.keys.keys_BD,
            ids_B=batch.ids_B,
            labels_B=ids_labels_2B[1],
            hashes_B=batch.hashes_B,
            lag_seconds=self.batches.lag(),
            offset=self.offset,
            rejected=batch.rejected,
            waiting=len(self.novelty),
            images_BCHW=batch.images_BCHW,
            features_BF=result.keys.features_BF,
            duplicates_B=None if result.collisions is None else result.collisions.duplicates_B,
            origins_B=batch.origins_B,
            evicted_origins=evicted_origins,
            relative_change=change,
        )


def _empty(memory: WorkingMemory, offset: Offset) -> Batch[Tensor]:
    """Return a batch without samples, on the memory's device, for a rank without a batch."""
    none_B = torch.empty(0, dtype=torch.int64, device=memory.device)
    shape, images_BCHW = memory.image_shape, None
    if shape is not None:
        images_BCHW = torch.empty(0, *shape, dtype=torch.uint8, device=memory.device)
    return Batch(none_B, none_B, none_B, images_BCHW, offset=offset)


def _load_weights(method: Method, weights: Mapping[str, Tensor]) -> None:
    try:
        method.load_state_dict(as_state(weights, method), strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"the checkpoint's weights do not fit this model: {error}. "
            "Build it with the configuration stored in the checkpoint"
        ) from error


def _has_labels(batch: Batch[NDArray[Any]], memory: WorkingMemory) -> bool:
    """Return whether a sample of the batch or of the memory has a label."""
    labelled = batch.labels_B is not None and bool((batch.labels_B >= 0).any())
    return labelled or bool(to_host((memory.labels >= 0).any()))


def _read(
    result: StepResult, on_host: Batch[NDArray[Any]] | None
) -> tuple[Tensor, dict[str, float], float, float | None, float]:
    """Read the numbers of a step. The host waits for the device once.

    Returns:
        Ids and labels, int64 [2, B], on the CPU; the cosines by name; the expected and the true
        collisions; and the relative change of the weights.
    """
    names, collisions, change = list(result.cosines), result.collisions, result.update.change
    if on_host is not None:
        ids_labels_2B = torch.from_numpy(np.stack([on_host.ids_B, np.asarray(on_host.labels_B)]))
    else:
        assert result.batch.labels_B is not None, "-1 where there are none"
        ids_labels_2B = torch.stack([result.batch.ids_B, result.batch.labels_B])
    parts = [cosine.reshape(1) for cosine in result.cosines.values()]
    if change is not None:
        parts.append(change.reshape(1))
    if collisions is not None:
        parts += [collisions.expected.reshape(1), collisions.pairs]
    # Whole numbers up to 2**53 are exact in float64.
    number_N = torch.cat([part.double() for part in parts]) if parts else torch.empty(0)
    ids_labels_2B, number_N = all_to_host(ids_labels_2B, number_N)
    numbers = number_N.tolist()
    cosines = {name: numbers.pop(0) for name in names}
    changed = math.nan if change is None else numbers.pop(0)
    if collisions is None:
        return ids_labels_2B, cosines, math.nan, None, changed
    expected, *pairs = numbers
    return ids_labels_2B, cosines, expected, true_collisions(pairs), changed
