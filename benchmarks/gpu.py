"""Measures on a GPU: the daemon's step, admission to the memory, and the loss.

`make gpu`, or `python -m benchmarks gpu`. A step is that of `deploy/configs/gpu.yaml`, with options
over it, on a full memory. Its rows tell the milliseconds by phase on the device, the milliseconds
of the host by part, and the launched kernels and the waits that torch's profiler counted. The goals
are those of `python -m benchmarks gpu --simulated`, which models the same step without a GPU.

Shapes: B batch, D embedding, N negatives.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import full_learner
from benchmarks.simulated import CONFIG, Meter
from stream_ssl.batch import START
from stream_ssl.config import build
from stream_ssl.learning.records import PHASES
from stream_ssl.losses import InfoNCE, negatives
from stream_ssl.losses.fused import can_fuse
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy
from stream_ssl.memory.scores import VonMisesFisher

POLICIES: dict[str, Callable[[], Policy]] = {
    "queue": Oldest,
    "linear": MostDuplicated,
    "vMF 0.1": lambda: MostDuplicated(VonMisesFisher(0.1)),
}


SMALL = (
    *("--decoder.size=32", "--encoder.stem=cifar"),
    *("--encoder.block=basic", "--encoder.depths=[2,2,2,2]"),
)
COMPILED = "--learner.compile=true"
STEPS: dict[str, tuple[str, ...]] = {
    "gpu.yaml, ResNet-18, 32 px": SMALL,
    "gpu.yaml, ResNet-18, 32 px, batch 1,024": (*SMALL, "--batches.batch_size=1024"),
    "gpu.yaml, ResNet-18, 32 px, compiled": (*SMALL, COMPILED),
    "gpu.yaml as shipped": (),
    "gpu.yaml as shipped, compiled": (COMPILED,),
}
"""The measured steps: options over `gpu.yaml`."""
PROFILED = 3  # steps


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured workloads.

    Attributes:
        options: options over all configurations of `STEPS`.
    """

    slots: int = 65_536
    batch: int = 512
    dim: int = 128
    warm_up: int = 10
    steps: int = 20
    options: tuple[str, ...] = ()


def run(device: str = "cuda:0", sizes: Sizes | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows for a step by phase, an admission by policy, and the loss by its pass."""
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU here")
    where, sizes = torch.device(device), sizes or Sizes()
    for measured in (_steps, _admissions, _losses):
        yield from measured(where, sizes)


def _steps(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the mean milliseconds of the daemon's step, by phase and by part."""
    for name, options in STEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            given = [str(CONFIG), *options, f"--run={folder}", f"--learner.device={device}"]
            settings = full_learner.settings_of([*given, *sizes.options])
            stream = full_learner.noise(settings, sizes.warm_up + 2 * sizes.steps + PROFILED)
            learner = build.learner(settings, stream, START)
            full_learner.fill(learner.memory, learner.method.encoder.dim)
            records = full_learner.steps(learner, settings)
            for _ in range(sizes.warm_up):
                next(records)
            _wait(device)
            started = time.perf_counter()
            seen = [next(records) for _ in range(sizes.steps)]
            _wait(device)
            wall = (time.perf_counter() - started) / sizes.steps
            yield {
                "what": f"step, {name}, {settings.memory.capacity:,} slots",
                "ms": 1000 * wall,
                "images/s": settings.batches.batch_size / wall,
                "updates": sum(record.skipped is None for record in seen) / sizes.steps,
                **{f"{p} ms": statistics.median(1000 * r.seconds[p] for r in seen) for p in PHASES},
                **_profiled(records, device),
            }
            yield {
                "what": f"host, {name}",
                **{f"{p} ms": 1000 * s for p, s in _host_seconds(records, sizes.steps).items()},
            }


def _profiled(records: Iterator[Any], device: torch.device) -> dict[str, Any]:
    """Return the kernels and waits of a step, and the milliseconds in which the device computes."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(acc_events=True) as profile:
        for _ in range(PROFILED):
            next(records)
        _wait(device)
    ran = [event for event in profile.events() if event.device_type.name == "CUDA"]
    called = Counter(event.name for event in profile.events() if event.device_type.name == "CPU")
    waits = sum(number for name, number in called.items() if "Synchronize" in name)
    return {
        "kernels": len(ran) / PROFILED,
        "waits": (waits - 1) / PROFILED,  # the last one is ours
        "device ms": sum(event.device_time for event in ran) / 1000 / PROFILED,
    }


def _host_seconds(records: Iterator[Any], steps: int) -> dict[str, float]:
    """Return the host's mean seconds in each part of a step, from samples of its stack."""
    host, ended, seen = threading.get_ident(), threading.Event(), Counter[str]()

    def watch() -> None:
        meter = Meter()
        while not ended.wait(0.0002):
            seen[meter.part_of(sys._current_frames()[host])] += 1

    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    started = time.perf_counter()
    watcher.start()
    try:
        for _ in range(steps):
            next(records)
    finally:
        seconds = (time.perf_counter() - started) / steps
        ended.set()
        watcher.join()
        sys.setswitchinterval(interval)
    return {part: seconds * number / seen.total() for part, number in seen.most_common()}


def _admissions(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the median milliseconds in which a full memory admits a batch."""
    for name, policy in POLICIES.items():
        memory = WorkingMemory(sizes.slots, sizes.dim, policy(), device=device)
        full_learner.fill(memory)
        draw, first = torch.Generator().manual_seed(1), iter(range(1 << 40, 1 << 50, sizes.batch))
        z_BD = _rows(sizes.batch, sizes.dim, draw).to(device)

        def admit(memory: WorkingMemory = memory, z_BD: Tensor = z_BD, first: Any = first) -> None:
            start = next(first)
            memory.add(torch.arange(start, start + len(z_BD), device=z_BD.device), z_BD)

        yield {
            "what": f"add {sizes.batch}, {name}, {sizes.slots:,} slots",
            "ms": _median_ms(admit, device, sizes),
        }


def _losses(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield milliseconds and megabytes of a loss and its gradient, by the pass over negatives."""
    draw = torch.Generator().manual_seed(2)
    anchor_BD = _rows(sizes.batch, sizes.dim, draw).to(device)
    positive_BMD = _rows(sizes.batch, sizes.dim, draw).to(device).unsqueeze(1)
    negative_ND = _rows(sizes.slots, sizes.dim, draw).to(device)
    mask_BN = (torch.rand(sizes.batch, sizes.slots, generator=draw) < 1e-3).to(device)
    loss, passes = InfoNCE(0.2), {"chunked": lambda *_: False}
    if device.type == "cuda":
        passes = {"fused": can_fuse, **passes}
    for name, fits in passes.items():
        for masked in (False, True):

            def learn(mask_BN: Tensor | None = mask_BN if masked else None) -> None:
                z_BD = anchor_BD.clone().requires_grad_()
                loss(z_BD, positive_BMD, negative_ND, mask_BN).loss.backward()

            with mock.patch.object(negatives, "can_fuse", fits):
                yield {
                    "what": f"InfoNCE, {name}{', masked' if masked else ''}, N {sizes.slots:,}",
                    "ms": _median_ms(learn, device, sizes),
                    "MB": _peak_mb(learn, device),
                }


def _rows(count: int, dim: int, draw: torch.Generator) -> Tensor:
    return normalize(torch.randn(count, dim, generator=draw), dim=1)


def _median_ms(act: Callable[[], None], device: torch.device, sizes: Sizes) -> float:
    """Return the median milliseconds of a call, which includes the wait for the GPU."""
    seconds = []
    for _ in range(sizes.warm_up + sizes.steps):
        _wait(device)
        started = time.perf_counter()
        act()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[sizes.warm_up :])


def _peak_mb(act: Callable[[], None], device: torch.device) -> float | None:
    """Return the additional GPU memory that a call needs at its peak; None on a CPU."""
    if device.type != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    act()
    _wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
