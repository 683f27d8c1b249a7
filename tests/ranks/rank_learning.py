"""Checks of learners on several ranks: one set of weights, one memory, every sample once.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from learning_world import BATCH, DIM, SIZE, Repeatable, network, steps, with_settings
from rank_group import together
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.simulated_gpu import OnGpu, SimulatedGpu
from stream_ssl.batch import START, Batch, Offset
from stream_ssl.encoder.network import ResNet
from stream_ssl.learning import learner as loop
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.views import Views
from stream_ssl.losses import Debiased
from stream_ssl.memory import WorkingMemory, process_group
from stream_ssl.memory.descriptors import Embedding, Features, Thumbnail, Weighted
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup

SLOTS = 64


class Part:
    """Every W-th batch of a stream, from a given turn on. It ends after `count` turns."""

    def __init__(self, group: RankGroup, start: Offset = START, count: int | None = None) -> None:
        self.turn, self.count, self._group = start.record, count, group

    def next(self, timeout: float) -> Batch | None:
        if self.count is not None and self.turn > self.count:
            return None
        number = (self.turn - 1) * self._group.size + self._group.rank + 1
        self.turn += 1
        batch = Repeatable(Offset(number, 0)).next(timeout)
        assert batch is not None
        return replace(batch, offset=Offset(self.turn, 0), rejected={})

    def lag(self) -> float:
        return 0.0


class Whole:
    """The batches of all ranks in a turn, joined into one."""

    def __init__(self, ranks: int) -> None:
        self._stream, self._ranks = Repeatable(), ranks

    def next(self, timeout: float) -> Batch | None:
        parts = [self._stream.next(timeout) for _ in range(self._ranks)]
        columns = {
            name: np.concatenate([part.columns()[name] for part in parts])
            for name in parts[0].columns()
        }
        return Batch(**columns, offset=parts[-1].offset)

    def lag(self) -> float:
        return 0.0


class Wide:
    """Batches of 128 images on each rank, all of them new."""

    def __init__(self, group: RankGroup) -> None:
        self._draw, self._first = np.random.default_rng(group.rank), group.rank << 20

    def next(self, timeout: float) -> Batch | None:
        ids = np.arange(self._first, self._first + 128)
        self._first += 128
        images = self._draw.integers(0, 256, (128, 1, SIZE, SIZE), dtype=np.uint8)
        return Batch(ids, ids + 1, np.zeros_like(ids), images, np.zeros(128), offset=START)

    def lag(self) -> float:
        return 0.0


class Flat(nn.Module):
    """An encoder that returns pixels, without BatchNorm: no sample affects another."""

    dim = SIZE * SIZE

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(self.dim))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return image_BCHW.flatten(1) * self.scale


class Small(ResNet):
    """A network with BatchNorm: each sample depends on its batch."""

    def __init__(self) -> None:
        super().__init__(width=4, depths=(1, 1, 0, 0), channels=1)


class Rectified(nn.BatchNorm2d):
    """A BatchNorm that applies an activation, too, as timm's layers do."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value).relu()


class SmallRectified(nn.Module):
    """A network with such a BatchNorm."""

    dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, self.dim, 3), Rectified(self.dim))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BFHW: Tensor = self.stem(image_BCHW)
        return feature_BFHW.mean((2, 3))


class Random(nn.Module):
    """An encoder that uses one of two layers of different sizes, and assigns a new buffer."""

    dim = SIZE * SIZE

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(self.dim, self.dim)
        self.other = nn.Linear(self.dim, self.dim, bias=False)
        self.register_buffer("centre", torch.zeros(self.dim))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        pixel_BF = image_BCHW.flatten(1)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * pixel_BF.detach().mean(0)
        chosen = self.one if torch.rand(()) < 0.5 else self.other
        return pixel_BF - self.centre + chosen(pixel_BF)


class Fixed(Views):
    """Views without augmentation, because ranks draw other views than one process."""

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.plain(image_BCHW)


def build(
    group: RankGroup,
    stream: Any = None,
    kind: str = "moco",
    as_one: type[nn.Module] | None = None,
    descriptor: Any = None,
    device: str = "cpu",
    slots: int = SLOTS,
    **settings: Any,
) -> Learner:
    seed_everything(seed=3, threads=1)
    encoder = Small() if as_one is None else as_one()
    loss = Debiased(prior="memory") if as_one else None
    memory = WorkingMemory(
        slots,
        DIM,
        image_shape=(1, SIZE, SIZE),
        descriptor=descriptor,
        device=device,
        group=group,
    )
    views = Fixed(SIZE, channels=1) if as_one else Views(SIZE, channels=1)
    stream = Part(group) if stream is None else stream
    method, options = network(kind, encoder, loss), with_settings({"device": device, **settings})
    return Learner(method, memory, views, stream, **options)


def check_gradients(ranks: int) -> None:
    """Weights and memory are equal to those of one process that gets the batches joined."""
    for kind in ("moco", "simclr"):
        options: dict[str, Any] = {
            "kind": kind,
            "as_one": Flat,
            "optimiser": OptimiserSettings("sgd"),
        }

        def work(group: RankGroup, options: dict[str, Any] = options) -> list[Any]:
            learner = build(group, **options)
            steps(learner, 6)
            state = learner.method.state_dict()
            return [learner.memory.ids.tolist(), {k: v.tolist() for k, v in state.items()}]

        by_rank = together(ranks, work)
        alone = build(SINGLE_PROCESS, stream=Whole(ranks), **options)
        steps(alone, 6)
        for _, state in by_rank:
            assert state == by_rank[0][1]
            for name, value in alone.method.state_dict().items():
                torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-4, atol=1e-5)
        ids = torch.empty_like(alone.memory.ids)
        for rank, (own, _) in enumerate(by_rank):
            ids[rank::ranks] = torch.tensor(own)
        assert torch.equal(ids, alone.memory.ids)


def check_batchnorm(ranks: int) -> None:
    """With synchronised BatchNorm, loss, gradients and averages are equal to those of one process.

    This also holds if ranks train on other samples than the stream's.
    """
    for kind, encoder in (("moco", Small), ("simclr", Small), ("simclr", SmallRectified)):
        options: dict[str, Any] = {
            "kind": kind,
            "as_one": encoder,
            "optimiser": OptimiserSettings("sgd", clip=None),
        }

        def work(group: RankGroup, options: dict[str, Any] = options) -> list[Any]:
            learner = build(group, **options, sync_batchnorm=True)
            before, (record,) = group.collectives, steps(learner, 1)
            met = group.collectives - before
            gradients, averages = learned(learner)
            return [record.loss, gradients.tolist(), averages.tolist(), met]

        by_rank = together(ranks, work)
        alone = build(SINGLE_PROCESS, stream=Whole(ranks), **options)
        (record,) = steps(alone, 1)
        for loss, *found, met in by_rank:
            assert abs(loss - record.loss) < 1e-5, kind
            for own, expected in zip(found, learned(alone), strict=True):
                torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-5, atol=1e-5)
            assert met <= 60, met


def learned(learner: Learner) -> tuple[Tensor, Tensor]:
    """Return the last gradients and BatchNorm's averages, as flat tensors."""
    weights = [one.grad for one in learner.method.trained if one.grad is not None]
    averages = [one for one in learner.method.buffers() if one.is_floating_point()]
    return torch.cat([g.flatten() for g in weights]), torch.cat([a.flatten() for a in averages])


def until_idle(learner: Learner) -> list[StepRecord]:
    """Return all steps until the streams end. A rank then asks to stop, and all ranks stop."""
    loop.IDLE, stop, records = 0.05, threading.Event(), []
    for record in learner.run(stop):
        if isinstance(record, StepRecord):
            records.append(record)
        elif not any(learner.ranks.last.batches):
            stop.set()
    return records


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "as shipped": lambda: {
        "anchors": "memory",
        "draw": "epochs",
        "novelty": "auto",
        "plain_keys": True,
        "descriptor": Thumbnail(4),
    },
    "counts on features": lambda: {
        "anchors": "memory",
        "plain_keys": True,
        "descriptor": Features(5),
    },
    "counts on embeddings and features": lambda: {
        "anchors": "memory",
        "plain_keys": True,
        "descriptor": Weighted([Embedding(), Features(5)]),
    },
    "stream, counts on embeddings": lambda: {"reencode": 2, "pace": Pace(0.2)},
    "simsiam": lambda: {"kind": "simsiam", "sync_batchnorm": True},
    "d-simclr": lambda: {"kind": "d-simclr"},
}


def check_zeros(ranks: int) -> None:
    """D-SimCLR continues if the encoder gives zeros for images of one rank's shard."""

    def work(group: RankGroup) -> list[Any]:
        learner = build(group, **SETTINGS["d-simclr"]())
        steps(learner, 2)
        encode, zeros = learner.method.encode_keys, group.rank == 0

        def some_zeros(image_BCHW: Tensor) -> Tensor:
            return encode(image_BCHW) * (0.0 if zeros else 1.0)

        with mock.patch.object(learner.method, "encode_keys", some_zeros):
            before = learner.memory.encoded.tolist()
            learner.method.prepare(learner.memory, learner.views.plain)
            return [before == learner.memory.encoded.tolist(), learner.memory.check_valid()]

    assert together(ranks, work) == [[rank == 0, [True, ""]] for rank in range(ranks)]


def check_layers(ranks: int) -> None:
    """The ranks keep the same weights and buffers if each of them leaves out other layers."""

    def work(group: RankGroup) -> tuple[list[Any], list[Any]]:
        with mock.patch(f"{__name__}.Small", Random):
            learner = build(group, kind="simclr")
        records = steps(learner, 6)
        state = learner.method.state_dict()
        sums = {name: value.double().sum().item() for name, value in state.items()}
        return [one.skipped for one in records], sorted(sums.items())

    first, *others = together(ranks, work)
    assert first[0] == [None] * 6
    assert all(other == first for other in others)


def check_turns(ranks: int) -> None:
    """Each rank knows which ranks are ready, and whose own work takes longest."""

    def work(group: RankGroup) -> list[Any]:
        began = time.perf_counter()
        joint = Ranks(group, torch.device("cpu"))
        joint.agree(False, False, 0, 0, START)
        joint.ready = group.rank > 0
        if group.rank == 1:
            time.sleep(0.3)
        joint.agree(False, False, 8 * group.rank, 0, START)
        if group.rank == 0:
            assert joint.asked(lambda: time.sleep(0.3)) is None  # its stream pauses
        turn = joint.agree(False, False, 0, 0, START)
        elapsed = time.perf_counter() - began
        return [list(turn.ready), [astuple(one) for one in joint.work], group.bytes, elapsed]

    by_rank = together(ranks, work)
    for ready, known, _, _ in by_rank:
        assert ready == [False] + [True] * (ranks - 1)
        assert known == by_rank[0][1]
        busy, waited, sent, samples = zip(*known, strict=True)
        assert busy.index(max(busy)) == 1
        assert busy[1] >= 0.3
        assert busy[0] + 0.3 <= by_rank[0][-1], "a pause is no work"
        assert waited[0] >= 0.2, "the others wait"
        assert all(0 < told <= one[2] for told, one in zip(sent, by_rank, strict=True))
        assert list(samples) == [8 * rank for rank in range(ranks)]


def check_devices(ranks: int) -> None:
    """Ranks on GPUs exchange no CPU tensors, as NCCL requires, and learn the same as on CPUs.

    The GPU is simulated, the exchange is real.
    """

    def work(group: RankGroup) -> list[Any]:
        found = []
        for name in ("as shipped", "stream, counts on embeddings"):
            on_cpu = build(group, **SETTINGS[name]())
            for part in on_cpu._step.weights.optimiser.param_groups:  # it rounds as on a GPU
                part.update(fused=True)
            steps(on_cpu, 5)
            with SimulatedGpu(), of_device_tensors() as exchanged:
                on_gpu = build(group, device="cuda:0", **SETTINGS[name]())
                steps(on_gpu, 5)
                assert on_gpu.ranks.tell(group.rank) == list(range(ranks))
                ids = on_gpu.memory.ids
                weights = [w.double().sum() for w in on_gpu.method.state_dict().values()]
                weights = [w.value if isinstance(w, OnGpu) else w for w in weights]
                found.append([ids.value.tolist(), [float(w) for w in weights], len(exchanged)])
            theirs = [float(w.double().sum()) for w in on_cpu.method.state_dict().values()]
            assert found[-1][:2] == [on_cpu.memory.ids.tolist(), theirs], name
        return found

    for parts in zip(*together(ranks, work), strict=True):
        assert all(count > 5 for _, _, count in parts)


@contextmanager
def of_device_tensors() -> Iterator[list[str]]:
    """Record the names of exchanges of simulated tensors. AssertionError for a CPU tensor."""
    exchanged: list[str] = []

    def stand_in(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def exchange(*arguments: Any, **options: Any) -> Any:
            tensors = [one for one in arguments if isinstance(one, Tensor)]
            assert all(isinstance(one, OnGpu) for one in tensors), f"{name} of a CPU's tensor"
            exchanged.append(name)
            plain = [one.value if isinstance(one, OnGpu) else one for one in arguments]
            with _disable_current_modes():
                return real(*plain, **options)

        return exchange

    with ExitStack() as stack:
        for name in (process_group.GATHER, "all_to_all_single", "all_reduce"):
            real = getattr(torch.distributed, name)
            stack.enter_context(mock.patch.object(torch.distributed, name, stand_in(name, real)))
        yield exchanged


def check_meetings(ranks: int) -> None:
    """Ranks exchange less than once per two newcomers in the worst case for eviction.

    In this case all 128 samples of each rank join a memory of unrelated pictures.
    """

    def work(group: RankGroup) -> list[int]:
        learner = build(group, Wide(group), slots=2048, **SETTINGS["as shipped"]())
        steps(learner, 2 + 2048 // (128 * ranks))  # every later sample evicts
        before, added = group.collectives, learner.memory.added
        steps(learner, 8)
        return [group.collectives - before, learner.memory.added - added]

    for met, added in together(ranks, work):
        assert added == 8 * 128 * ranks
        assert met / 8 <= 20 + 128 * ranks / 2, met / 8


def check_steps(ranks: int) -> None:
    """Test every kind of anchors, with streams that end at different turns.

    No rank stalls, weights stay equal, every sample counts once, and a step needs a bounded number
    of exchanges.
    """

    def work(group: RankGroup) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            make = SETTINGS[name]
            learner = build(group, Part(group, count=4 + 3 * group.rank), **make())
            before, records = group.collectives, until_idle(learner)
            found[name] = {
                "steps": learner.step,
                "skipped": [record.skipped for record in records],
                "samples": learner.samples,
                "added": learner.memory.added,
                "near": sum(record.near_duplicates for record in records),
                "waiting": records[-1].waiting,
                "valid": learner.memory.check_valid(),
                "mean": [one.tolist() for one in learner.memory.descriptor.state().values()],
                "meetings": (group.collectives - before) / len(records),
                "weights": [float(w.double().sum()) for w in learner.method.state_dict().values()],
            }
        return found

    names = list(SETTINGS)[: 1 if ranks > 2 else None]
    by_rank = together(ranks, work)
    for name in names:
        parts = [rank[name] for rank in by_rank]
        first = parts[0]
        assert all(part["weights"] == first["weights"] for part in parts), name
        assert all(part["mean"] == first["mean"] for part in parts), name
        assert bool(first["mean"]) == ("features" in name), name
        assert all(part["valid"] == [True, ""] for part in parts), (name, parts)
        for same in ("added", "samples", "steps"):
            assert all(part[same] == first[same] for part in parts), (name, same)
        kept = sum(part["near"] + part["waiting"] for part in parts)
        assert first["samples"] == first["added"] + kept, (name, parts)
        assert first["samples"] == BATCH * sum(4 + 3 * rank for rank in range(ranks)), name
        assert first["steps"] >= 4 + 3 * (ranks - 1), name
        assert set(first["skipped"]) <= {None, "novelty"}, (name, first["skipped"])
        most = 80 if "sync_batchnorm" in SETTINGS[name]() else 40
        assert first["meetings"] <= most, (name, first["meetings"])
