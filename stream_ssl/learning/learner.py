"""The loop: batch, views, loss against the memory, update, insertion, record.

Shapes: B samples, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from memory import Admission, WorkingMemory
from stream_ssl.ingest.offset import START, Offset
from stream_ssl.learning.collisions import true_collisions
from stream_ssl.learning.inputs import Inputs
from stream_ssl.learning.optimiser import OptimiserSettings, load_optimiser, optimiser_tensors
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.phases import Phases
from stream_ssl.learning.randomness import OwnRandomness, settle_threads
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.learning.schedule import Constant, Schedule
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method

if TYPE_CHECKING:
    from stream_ssl.ingest.batches import Batch

POLL = 0.1  # seconds between looks at `stop` while no batch comes
QUIET = 1.0  # seconds without a record after which an Idle is due


class Stream(Protocol):
    """Where batches come from."""

    def next(self, timeout: float) -> Batch | None:
        """The next batch, or None if none came within `timeout` seconds."""

    def lag(self) -> float:
        """Seconds since the oldest unread sample was received; 0 if all are read."""


@dataclass(frozen=True, slots=True)
class Capture:
    """All that a run consists of: tensors by file, and facts that JSON holds."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


class Learner:
    """Trains `method` on `batches` against `memory`; `run` yields a record per step.

    On a CPU with fixed `threads`, a pace without band and a stream that repeats itself from an
    offset, a run that was captured, killed and restored ends bit-equal to one that was not.

    Args:
        method: what is trained.
        memory: where negatives come from, and keys go.
        views: the augmentation.
        batches: the stream.
        optimiser: with `schedule` it gives the learning rate.
        schedule: factor of the learning rate by step; constant where not given.
        pace: updates per sample; one per batch where not given.
        device: "cpu", "cuda" or "cuda:1".
        precision: what the method computes in; losses, keys and memory stay in float32.
        seed: of all the learner's draws, and of the first weights.
        threads: of torch on the CPU; null leaves its default. A run repeats with the same number.
        reencode: stalest slots of the memory to encode anew after each step.
        offset: where `batches` begins.

    Raises:
        ValueError: parts that do not fit each other, or an argument outside its range.
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        views: Views,
        batches: Stream,
        optimiser: OptimiserSettings | None = None,
        schedule: Schedule | None = None,
        pace: Pace | None = None,
        device: str = "cpu",
        precision: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        threads: int | None = None,
        reencode: int = 0,
        offset: Offset = START,
    ) -> None:
        self.pace = Pace() if pace is None else pace
        _check(method, memory, self.pace, precision, reencode)
        settle_threads(threads)
        self.device = torch.device(device)
        self.method = method.to(self.device)
        self.views = views.to(self.device)
        self.memory, self.batches, self.reencode = memory, batches, reencode
        self.precision = precision
        self.settings = OptimiserSettings() if optimiser is None else optimiser
        self.schedule = Constant() if schedule is None else schedule
        self.step = 0
        self.samples = 0
        self.offset = offset
        self._parameters = list(method.trained)
        self._optimiser = self.settings.build(self._parameters)
        self._randomness = OwnRandomness(seed, self.device)
        self._batch_size = 0

    def run(self, stop: threading.Event) -> Iterator[StepRecord | Idle]:
        """Learn until `stop` is set. Between two records the state is whole and can be captured.

        An update that is owed comes before the next batch, so that where a run was interrupted
        makes no difference to the order of its updates.
        """
        self.method.train()
        spoke = time.monotonic()
        while not stop.is_set():
            record: StepRecord | Idle
            if self.pace.must_update() and self._can_replay():
                record = self._replay(Phases())
            else:
                ahead = self.pace.may_update() and self._can_replay()
                phases = Phases()
                with phases("data"):
                    batch = self.batches.next(0.0 if ahead else POLL)
                if batch is not None:
                    record = self._fresh(batch, phases)
                elif ahead:
                    record = self._replay(phases)
                elif time.monotonic() - spoke >= QUIET:
                    record = Idle(self.batches.lag())
                else:
                    continue
            yield record
            spoke = time.monotonic()

    def capture(self) -> Capture:
        """The state after the last record; the tensors are the live ones, so save them now."""
        return Capture(
            tensors={
                "model": self.method.state_dict(),
                "optimiser": optimiser_tensors(self._optimiser),
                "memory": self.memory.state_dict(),
                "rng": self._randomness.state_dict(),
            },
            facts={
                "step": self.step,
                "samples": self.samples,
                "batch_size": self._batch_size,
                "offset": {"record": self.offset.record, "sample": self.offset.sample},
                "pace": self.pace.state_dict(),
                "schedule": {"factor": self.schedule(self.step)},
            },
        )

    def restore(self, capture: Capture) -> None:
        """Go on from a capture. `batches` must begin at its offset.

        Raises ValueError if method, memory or optimiser are not those it was made with.
        """
        tensors, facts = capture.tensors, capture.facts
        try:
            self.method.load_state_dict(dict(tensors["model"]), strict=True)
        except RuntimeError as error:
            raise ValueError(
                f"the checkpoint's weights do not fit this model: {error}. "
                "Build it with the configuration stored in the checkpoint"
            ) from error
        load_optimiser(self._optimiser, tensors["optimiser"])
        self.memory.load_state_dict(dict(tensors["memory"]))
        self._randomness.load_state_dict(tensors["rng"])
        self.pace.load_state_dict(facts["pace"])
        self.step, self.samples = int(facts["step"]), int(facts["samples"])
        self._batch_size = int(facts["batch_size"])
        self.offset = Offset(**facts["offset"])

    def _can_replay(self) -> bool:
        return len(self.memory) > 0 and self.memory.images is not None and self._batch_size > 0

    def _fresh(self, batch: Batch, phases: Phases) -> StepRecord:
        self.pace.received(len(batch))
        self._batch_size = len(batch)
        self.samples += len(batch)
        self.offset = batch.offset
        if self.pace.replays(len(batch)) and self.memory.images is None:
            raise ValueError(
                f"the pace asks for more updates than batches of {len(batch)} samples: a memory "
                "that keeps images is needed to train on again. Give it image_shape"
            )
        with self._randomness:
            with phases("data"):
                inputs = Inputs.of_batch(batch, self.device)
            if self.pace.may_update():
                outcome = self._update(inputs, phases)
            else:
                outcome = self._encode(inputs, phases)
            return self._record(inputs, outcome, phases, batch.rejected)

    def _replay(self, phases: Phases) -> StepRecord:
        with self._randomness:
            with phases("data"):
                inputs = Inputs.of_memory(self.memory, self._batch_size, self.device)
            outcome = self._update(inputs, phases)
            return self._record(inputs, outcome, phases, {})

    def _update(self, inputs: Inputs, phases: Phases) -> _Outcome:
        with phases("data"):
            views = [self.views(inputs.image_BCHW) for _ in range(self.method.views)]
        # A forward pass on numbers that are not finite leaves them in BatchNorm's averages.
        buffers = [(buffer, buffer.clone()) for buffer in self.method.buffers()]
        rate = self.settings.learning_rate * self.schedule(self.step)
        with phases("forward"), self._autocast():
            output = self.method(views, inputs.ids_B, inputs.hashes_B, self.memory)
            loss = float(output.loss.loss.detach())
            usable = _usable(output.keys_BD)
        with phases("backward"):
            skipped, norm = self._descend(output.loss.loss, loss, rate, usable)
        if skipped is not None:
            for buffer, before in buffers:
                buffer.copy_(before)
        self.pace.updated()
        found = dict(output.loss.diagnostics)
        return _Outcome(output.keys_BD, usable, skipped, loss, norm, rate, found)

    def _descend(
        self, loss: Tensor, value: float, rate: float, usable: bool
    ) -> tuple[str | None, float]:
        """One optimiser step; the reason why there was none, and the norm of the gradient."""
        self._optimiser.zero_grad(set_to_none=True)
        if not math.isfinite(value):
            return "loss", math.nan
        if not usable:
            return "keys", math.nan
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not math.isfinite(float(norm)):
            self._optimiser.zero_grad(set_to_none=True)
            return "gradient", float(norm)
        if self.settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.settings.clip, norm)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self.method.after_update()
        return None, float(norm)

    def _encode(self, inputs: Inputs, phases: Phases) -> _Outcome:
        """Keys alone, for a batch to which the pace grants no update."""
        with phases("data"):
            view_BCHW = self.views(inputs.image_BCHW)
        with phases("forward"), self._autocast():
            keys_BD = self.method.encode_keys(view_BCHW)
        return _Outcome(keys_BD, _usable(keys_BD), "pace", math.nan, math.nan, 0.0, {})

    def _record(
        self, inputs: Inputs, outcome: _Outcome, phases: Phases, rejected: Mapping[str, int]
    ) -> StepRecord:
        expected, true, admission = math.nan, None, None
        with phases("memory"):
            if outcome.usable:
                expected = float(self.memory.collisions(outcome.keys_BD).mean())
                true = true_collisions(inputs.labels_B.to(self.memory.device), self.memory.labels)
                admission = self._remember(inputs, outcome.keys_BD)
                self._reencode(outcome.diagnostics)
        self.step += 1
        return StepRecord(
            step=self.step,
            samples=self.samples,
            batch=len(inputs),
            replay=inputs.slots_B is not None,
            loss=outcome.loss,
            grad_norm=outcome.norm,
            learning_rate=outcome.rate,
            skipped=outcome.skipped,
            seconds=phases.seconds,
            diagnostics=outcome.diagnostics,
            collision_expected=expected,
            collision_true=true,
            admission=admission,
            keys_BD=outcome.keys_BD,
            ids_B=inputs.ids_B,
            labels_B=inputs.labels_B,
            hashes_B=inputs.hashes_B,
            lag_seconds=self.batches.lag(),
            offset=self.offset,
            rejected=rejected,
        )

    def _remember(self, inputs: Inputs, keys_BD: Tensor) -> Admission | None:
        if inputs.slots_B is not None:
            self.memory.refresh(inputs.slots_B, keys_BD)
            return None
        images_BCHW = None if self.memory.images is None else inputs.image_BCHW
        return self.memory.add(
            inputs.ids_B,
            keys_BD,
            images=images_BCHW,
            labels=inputs.labels_B,
            hashes=inputs.hashes_B,
        )

    def _reencode(self, diagnostics: dict[str, float]) -> None:
        if not self.reencode or self.memory.images is None:
            return
        slots = self.memory.stalest(self.reencode)
        view_RCHW = self.views(self.memory.images[slots].to(self.device))
        with self._autocast():
            keys_RD = self.method.encode_keys(view_RCHW)
        if _usable(keys_RD):
            diagnostics["drift_cosine"] = float(self.memory.refresh(slots, keys_RD).mean())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"
        )


class _Outcome(NamedTuple):
    keys_BD: Tensor
    usable: bool
    skipped: str | None
    loss: float
    norm: float
    rate: float
    diagnostics: dict[str, float]


def _usable(keys_BD: Tensor) -> bool:
    """Finite and of unit norm: what the memory takes. An encoder that died gives zeros."""
    norm_B = torch.linalg.vector_norm(keys_BD, dim=1)
    return bool(((norm_B - 1).abs() < 1e-3).all())


def _check(
    method: Method, memory: WorkingMemory, pace: Pace, precision: str, reencode: int
) -> None:
    if method.dim != memory.dim:
        raise ValueError(
            f"the method embeds in {method.dim} dimensions, the memory holds {memory.dim}: "
            "give both the same dim"
        )
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}: choose "float32" or "bfloat16"')
    if reencode < 0:
        raise ValueError(f"reencode is {reencode}: it is a number of slots, 0 or more")
    if (pace.band or reencode) and memory.images is None:
        raise ValueError(
            f"band={pace.band} and reencode={reencode} train on or encode images of the memory "
            "again, and this one keeps none: give it image_shape, or set both to 0"
        )
