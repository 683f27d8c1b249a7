"""A model of a learner's step on a GPU: kernels, host waits, bytes and operations by part.

`python -m benchmarks gpu --simulated [CONFIG] [OPTIONS]` runs the learner of a configuration, with
options over it, on the simulated GPU of `benchmarks/simulated_gpu.py`, with a full memory. The
encoder alone is not computed. Its operators are counted on shapes, and its features are random
projections of the images.

The model: each kernel costs the host the time of a launch, and the device the larger of its bytes
over the bandwidth and its operations over the rate. Each operator counts as one kernel, which
reads its arguments and writes its results once. An operator that takes or replaces rows of a table
touches these rows alone. Host and device run at the same time, so a part
takes the longer of both, and each wait of the host adds a round trip. The model leaves out Python
between the operators, and the input's decoding.

Shapes: B batch, C channels, H height, W width, F features, D embedding.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from benchmarks import full_learner
from benchmarks.report import Result, table
from benchmarks.simulated_gpu import LAUNCHLESS, OnGpu, SimulatedGpu
from stream_ssl.batch import START
from stream_ssl.config import build
from stream_ssl.learning.learner import Learner
from stream_ssl.losses import fused

CONFIG = Path(__file__).parent.parent / "deploy/configs/gpu.yaml"
LAUNCH = 5e-6  # seconds of the host for a kernel, unless a dispatch takes longer here
ROUND_TRIP = 10e-6  # seconds of the host for a wait, besides the device's work
BANDWIDTH = 2.4e12  # bytes a second, about 70 % of an H100's peak
RATES = {torch.bfloat16: 400e12, torch.float32: 40e12, torch.float64: 20e12}
"""Operations a second by dtype, about 40 to 60 % of an H100's peak."""
TAKES, PUTS = {"index", "index_select", "gather"}, {"index_put_", "index_copy_"}
WARM_UP, STEPS = 2, 2

NOVELTY, VIEWS, TRAIN = "near-duplicate test", "views", "forward, backward, loss"
KEYS, ADD, MEMORY = "plain keys, re-encoding", "memory.add", "memory: draws, counts, refresh"
OPTIMISER, OBSERVERS, READING, REST = "optimiser", "observers", "reading", "upload and rest"
PARTS = (NOVELTY, VIEWS, TRAIN, KEYS, ADD, MEMORY, OPTIMISER, OBSERVERS, READING, REST)

# The part that a file and a function belong to. The innermost pair on the stack decides. "" stands
# for every function of the file.
LINES = {
    ("learning/novelty.py", ""): NOVELTY,
    ("learning/views.py", "forward"): VIEWS,
    ("memory/memory.py", "add"): ADD,
    ("learning/step.py", "_measure"): MEMORY,
    ("learning/step.py", "_admit"): MEMORY,
    ("learning/step.py", "_drawn"): MEMORY,
    ("learning/step.py", "_replace"): MEMORY,
    ("learning/keys.py", ""): KEYS,
    ("learning/step.py", "_stalest"): KEYS,
    ("learning/weights.py", "_gradient_norm"): OPTIMISER,
    ("learning/weights.py", "_take_step"): OPTIMISER,
    ("learning/weights.py", "_read"): READING,
    ("learning/learner.py", "_read"): READING,
    ("learning/weights.py", "update"): TRAIN,
    ("daemon/observers.py", "consume"): OBSERVERS,
}


@dataclass
class Cost:
    """The cost of a part of the steps: its counts, and the seconds that the model gives it."""

    kernels: int = 0
    waits: int = 0
    bytes: int = 0
    operations: int = 0
    device: float = 0.0  # seconds

    def launched(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Count one kernel."""
        name = func._schema.name.removeprefix("aten::")
        touched = [args, list(kwargs.values()), found]
        if name in TAKES:
            touched = [args[1:], found, found]
        elif name in PUTS:
            touched = [args[1:], args[2:]]
        tensors = list(_tensors(touched))
        size = sum(one.numel() * one.element_size() for one in tensors)
        operations = 0
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            operations = int(formula(*args, **kwargs, out_val=found))
        rate = RATES.get(tensors[0].dtype, RATES[torch.float32]) if tensors else math.inf
        self.add(Cost(1, 0, size, operations, max(size / BANDWIDTH, operations / rate)))

    def add(self, other: Cost) -> None:
        """Add the counts of another cost."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def seconds(self, launch: float) -> float:
        """Return the seconds of the model, if the host takes `launch` seconds for a kernel."""
        return max(self.device, self.kernels * launch) + self.waits * ROUND_TRIP


class Meter:
    """The costs of a learner's steps by part."""

    def __init__(self) -> None:
        self.costs = {part: Cost() for part in PARTS}
        self._parts: dict[CodeType, str | None] = {}

    def part(self) -> Cost:
        """Return the cost of the part that runs now."""
        return self.costs[self.part_of(sys._getframe(1))]

    def part_of(self, frame: FrameType | None) -> str:
        """Return the part that a stack is in, by its innermost line that names one."""
        while frame is not None:
            code = frame.f_code
            if code not in self._parts:
                self._parts[code] = _part_of(code)
            if (part := self._parts[code]) is not None:
                return part
            frame = frame.f_back
        return REST


def _part_of(code: CodeType) -> str | None:
    for (file, function), part in LINES.items():
        if code.co_filename.endswith(f"/{file}") and function in ("", code.co_name):
            return part
    return None


def _tensors(given: Any) -> Iterator[Tensor]:
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


class MeasuredGpu(SimulatedGpu):
    """A simulated GPU that gives each kernel and each wait to a meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._as_real = ExitStack()

    def __enter__(self) -> SimulatedGpu:
        # torch changes all weights of a GPU together, but tests for its own classes of tensors.
        for module in (sys.modules[torch.optim.Optimizer.__module__], _foreach_utils):
            together = [*module._foreach_supported_types, OnGpu]
            patch = mock.patch.object(module, "_foreach_supported_types", together)
            self._as_real.enter_context(patch)
        support = mock.patch.object(
            _foreach_utils, "_device_has_foreach_support", return_value=True
        )
        self._as_real.enter_context(support)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_real.close()

    def launched(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        self._meter.part().launched(func, args, kwargs, found)

    def _wait(self, kind: str) -> None:
        super()._wait(kind)
        self._meter.part().waits += 1


class OnShapes(TorchDispatchMode):
    """Adds the operators on tensors without numbers to a cost."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in LAUNCHLESS and func.namespace == "aten":
            self._cost.launched(func, args, kwargs or {}, found)
        return found


class Hollow:
    """An encoder that computes shapes and no numbers, once for each shape of the images.

    The features are random projections of the images, so that different images differ.

    Args:
        twin: the encoder, without numbers.
        features: F.
        half: whether the encoder computes in bfloat16, with float32 weights.
    """

    def __init__(self, twin: nn.Module, features: int, half: bool, meter: Meter) -> None:
        self._twin, self._half, self._meter = twin.to("meta"), half, meter
        self._pooled = nn.AdaptiveAvgPool2d(4)
        self._draw = torch.Generator().manual_seed(0)
        self._projection_PF = torch.empty(0, features)
        self._costs: dict[tuple[torch.Size, bool], tuple[Cost, Cost]] = {}

    def features(self, image_BCHW: Tensor) -> Tensor:
        """Return features [B, F] of images on the CPU."""
        pooled_BP = self._pooled(image_BCHW.float()).flatten(1)
        if not len(self._projection_PF):
            shape = pooled_BP.shape[1], self._projection_PF.shape[1]
            self._projection_PF = torch.randn(shape, generator=self._draw)
        return pooled_BP @ self._projection_PF

    def costs(self, shape: torch.Size, learn: bool) -> tuple[Cost, Cost]:
        """Return the costs of a forward and a backward pass on images of this shape."""
        if (shape, learn) not in self._costs:
            forward, backward = Cost(), Cost()
            weights = {n: p.detach().requires_grad_() for n, p in self._twin.named_parameters()}
            with OnShapes(forward), torch.set_grad_enabled(learn):
                image_BCHW, used = torch.empty(shape, device="meta"), weights
                if self._half:  # as autocast, which casts the images and the weights of products
                    image_BCHW = image_BCHW.bfloat16()
                    used = {n: p.bfloat16() if p.ndim > 1 else p for n, p in weights.items()}
                result = functional_call(self._twin, used, (image_BCHW,))
            if learn:
                with OnShapes(backward):
                    torch.autograd.grad(result, list(weights.values()), torch.empty_like(result))
            self._costs[shape, learn] = forward, backward
        return self._costs[shape, learn]

    def forward_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the forward pass for this encoder."""
        parameters = list(module.parameters())

        def forward(image_BCHW: Tensor) -> Tensor:
            learn = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            result: Tensor = _Pass.apply(self, learn, image_BCHW, *parameters)
            return result

        return forward

    def count(self, cost: Cost) -> None:
        """Add a cost to the part that runs now."""
        self._meter.part().add(cost)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hollow: Hollow, learn: bool, image: Any, *parameters: Any) -> Tensor:
        with _disable_current_modes():
            forward, backward = hollow.costs(image.shape, learn)
            hollow.count(forward)
            ctx.hollow, ctx.backward = hollow, backward
            ctx.shapes = [one.shape for one in parameters]
            return OnGpu(hollow.features(image.value))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with _disable_current_modes():
            ctx.hollow.count(ctx.backward)
            return None, None, None, *(OnGpu(torch.zeros(shape)) for shape in ctx.shapes)


def simulate(arguments: Sequence[str] = (str(CONFIG),)) -> dict[str, Any]:
    """Return the costs of a step of this configuration on a full memory.

    Returns:
        `kernels`, `host_waits`, `images_per_s` and `memory_share` of a step, and its `parts`.
    """
    settings = full_learner.settings_of([*arguments, "--learner.device", "cuda:0"])
    launch = max(LAUNCH, dispatch_seconds())
    encoder, meter = build.backbone(settings), Meter()
    hollow = Hollow(encoder, encoder.dim, settings.learner.precision == "bfloat16", meter)
    fused.sound.cache_clear()
    try:
        with warnings.catch_warnings(), MeasuredGpu(meter):
            warnings.filterwarnings("ignore", "CUDA is not available")  # autocast says so
            learner = _learner(settings, hollow, type(encoder))
            full_learner.fill(learner.memory, learner.method.encoder.dim)
            _run(learner, settings, meter)
    finally:
        fused.sound.cache_clear()
    return _summary(meter, launch, settings.batches.batch_size)


def dispatch_seconds() -> float:
    """Return the median seconds in which this machine dispatches a tiny operator."""
    one, seconds = torch.ones(1), []
    for _ in range(2000):
        started = time.perf_counter()
        torch.add(one, one)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _learner(settings: Any, hollow: Hollow, encoder: type[nn.Module]) -> Learner:
    with mock.patch.object(build, "check_memory"):  # it asks the driver
        learner = build.learner(settings, full_learner.noise(settings), START)
    for module in learner.method.modules():
        if type(module) is encoder:
            module.forward = hollow.forward_of(module)
    return learner


def _run(learner: Learner, settings: Any, meter: Meter) -> None:
    """Make the steps, and keep the costs of those after the warm-up."""
    records = full_learner.steps(learner, settings)
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            meter.costs = {part: Cost() for part in PARTS}
        next(records)


def _summary(meter: Meter, launch: float, batch: int) -> dict[str, Any]:
    parts = {
        name: {
            "kernels": cost.kernels / STEPS,
            "host_waits": cost.waits / STEPS,
            "MB": cost.bytes / STEPS / 1e6,
            "GFLOP": cost.operations / STEPS / 1e9,
            "ms": 1000 * cost.seconds(launch) / STEPS,
        }
        for name, cost in meter.costs.items()
    }
    whole = {key: sum(part[key] for part in parts.values()) for key in parts[REST]}
    ours = sum(parts[name]["ms"] for name in (NOVELTY, ADD, MEMORY))
    return {
        "kernels": whole["kernels"],
        "host_waits": whole["host_waits"],
        "images_per_s": 1000 * batch / whole["ms"],
        "memory_share": ours / whole["ms"],
        "launch_us": 1e6 * launch,
        "parts": parts | {"step": whole},
    }


def report(file: Path, target: Path | None, console: Console, options: Sequence[str] = ()) -> None:
    """Print the table of a configuration, and write its numbers to a JSON file if one is given."""
    started = time.monotonic()
    found = simulate([str(file), *options])
    rows = [{"part of a step": name, **part} for name, part in found["parts"].items()]
    console.print(table(Result(f"simulated GPU, {file}", rows, time.monotonic() - started)))
    console.print(
        f"{found['images_per_s']:,.0f} images/s, {100 * found['memory_share']:.1f} % for the "
        f"memory and the near-duplicate test. The model: {found['launch_us']:.1f} us a launch, "
        f"{1e6 * ROUND_TRIP:.0f} us a wait, {BANDWIDTH / 1e12:g} TB/s, "
        + ", ".join(f"{r / 1e12:g} TFLOP/s in {str(d)[6:]}" for d, r in RATES.items())
        + ". A part takes the longer of launches and device.",
        soft_wrap=True,
    )
    if target is not None:
        target.write_text(json.dumps(found, indent=2) + "\n")
