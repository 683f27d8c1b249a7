"""Measures on a GPU: the learner's step by phase, admission to the memory, and the loss.

`make gpu`, or `python -m benchmarks gpu`. The rows have no targets, because no GPU was available to
derive them.

Shapes: B batch, D embedding, C channels, N negatives.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.batch import Batch, Offset
from stream_ssl.encoder.network import Projector, ResNet
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import PHASES, StepRecord
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.views import Views
from stream_ssl.losses import InfoNCE, negatives
from stream_ssl.losses.fused import can_fuse
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.methods import MoCo

POLICIES: dict[str, Callable[[], Policy]] = {
    "queue": Oldest,
    "linear": MostDuplicated,
    "vMF 0.1": lambda: MostDuplicated(VonMisesFisher(0.1)),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured workloads. The defaults are a ResNet-18 on small images."""

    slots: int = 65_536
    batch: int = 512
    dim: int = 128
    side: int = 32
    width: int = 64
    depths: tuple[int, int, int, int] = (2, 2, 2, 2)
    warm_up: int = 5
    steps: int = 20


class Ram:
    """A stream that repeats batches made beforehand."""

    def __init__(self, sizes: Sizes, count: int = 8) -> None:
        draw = np.random.default_rng(0)
        shape = (count, sizes.batch, sizes.side, sizes.side, 3)
        self._images = draw.integers(0, 256, shape, dtype=np.uint8)
        self._next = 0

    def next(self, timeout: float) -> Batch:  # noqa: ARG002
        image_BHWC = self._images[self._next % len(self._images)]
        self._next += 1
        ids_B = np.arange(len(image_BHWC), dtype=np.int64) + (self._next << 32)
        zeros_B = np.zeros(len(image_BHWC))
        offset = Offset(self._next + 1, 0)
        images_BCHW = image_BHWC.transpose(0, 3, 1, 2)
        return Batch(ids_B, ids_B, ids_B % 10, images_BCHW, zeros_B, offset=offset)

    def lag(self) -> float:
        return 0.0


def run(device: str = "cuda:0", sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """Return rows for a step by phase, an admission by policy, and the loss by its pass."""
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU here")
    where, sizes = torch.device(device), sizes or Sizes()
    return [*_steps(where, sizes), *_admissions(where, sizes), *_losses(where, sizes)]


def _steps(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the median milliseconds of a step, by phase."""
    kinds: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    for precision in kinds:
        seed_everything(0)
        encoder = ResNet(width=sizes.width, depths=sizes.depths)
        method = MoCo(encoder, Projector(encoder.dim, sizes.dim), InfoNCE(0.2))
        memory = _filled("linear", device, sizes, images=True)
        views = Views(sizes.side)
        settings = LearnerSettings(device=str(device), precision=precision)
        subject = Learner(method, memory, views, Ram(sizes), settings)
        records = (r for r in subject.run(threading.Event()) if isinstance(r, StepRecord))
        for _ in range(sizes.warm_up):
            next(records)
        started = time.perf_counter()
        seen = [next(records).seconds for _ in range(sizes.steps)]
        wall = (time.perf_counter() - started) / sizes.steps
        yield {
            "what": f"step, {precision}, batch {sizes.batch}, {sizes.slots:,} slots",
            "ms": 1000 * wall,
            "samples/s": sizes.batch / wall,
            **{f"{p} ms": statistics.median(1000 * s[p] for s in seen) for p in PHASES},
        }


def _admissions(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the median milliseconds in which a full memory admits a batch."""
    for name in POLICIES:
        memory = _filled(name, device, sizes)
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


def _filled(name: str, device: torch.device, sizes: Sizes, images: bool = False) -> WorkingMemory:
    """Return a full memory with this policy."""
    shape = (3, sizes.side, sizes.side) if images else None
    memory = WorkingMemory(sizes.slots, sizes.dim, POLICIES[name](), shape, device)
    draw = torch.Generator().manual_seed(0)
    for start in range(0, sizes.slots, 4096):
        z_BD = _rows(min(4096, sizes.slots - start), sizes.dim, draw)
        image_BCHW = torch.zeros(len(z_BD), *shape, dtype=torch.uint8) if shape else None
        memory.add(torch.arange(start, start + len(z_BD)), z_BD, images=image_BCHW)
    return memory


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


if __name__ == "__main__":
    for row in run():
        print(row)
