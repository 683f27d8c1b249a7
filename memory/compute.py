"""Functions to compute in full precision, in blocks, and with few waits for the device."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

CACHED_ELEMENTS = 1 << 20
"""The similarities to hold at a time on a CPU: as many as fit its cache."""

LARGE_ELEMENTS = 1 << 26
"""The similarities to hold at a time on a GPU: enough to make kernel launches negligible."""


EXACT = ("ieee", "none")
"""The settings of torch under which a product of float32 matrices is not shortened."""

SUMMED_TOGETHER = 256
"""The numbers that are summed in their own dtype, before these sums are added in float64."""


class Generator(torch.Generator):
    """A generator on the CPU that can be sent to a process that is spawned.

    torch pickles a generator with a tensor that no longer exists when the process starts.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _generator, (self.get_state().numpy().tobytes(),)


def _generator(state: bytes) -> Generator:
    generator = Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def sum_in_float64(value: Tensor, dim: int) -> Tensor:
    """Return the sum over a dimension of a matrix, float64.

    A CPU widens single numbers to float64 some twenty times as slowly as it adds float32. So short
    sums are made in the numbers' dtype. Their rounding is that of the numbers themselves.
    """
    size = value.shape[dim]
    whole = size - size % SUMMED_TOGETHER
    parts = torch.unflatten(value.narrow(dim, 0, whole), dim, (-1, SUMMED_TOGETHER)).sum(dim + 1)
    total: Tensor = parts.sum(dim, dtype=torch.float64)
    return total if whole == size else total + value.narrow(dim, whole, size - whole).sum(dim)


def columns_at_a_time(rows: int, device: torch.device) -> int:
    """Return the number of columns, at least 1, of a block with this number of rows."""
    elements = CACHED_ELEMENTS if device.type == "cpu" else LARGE_ELEMENTS
    return max(1, elements // max(1, rows))


def fast_in_bfloat16(device: torch.device) -> bool:
    """Return whether this is a CPU that multiplies bfloat16 about twice as fast as float32."""
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.10
    return device.type == "cpu" and bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def to_host(value: Tensor) -> Tensor:
    """Return the values on the CPU. On a GPU this waits for all work launched before.

    The memory reads device values only through this function, so that a test can count the waits.
    """
    return value if value.device.type == "cpu" else value.cpu()


def all_to_host(*values: Tensor) -> list[Tensor]:
    """Return these values on the CPU. On a GPU this waits once for all of them.

    Values with large elements come first.
    """
    there = [value for value in values if value.device.type != "cpu"]
    if not there:
        return list(values)
    parts = [value.contiguous().flatten().view(torch.uint8) for value in there]
    read = iter(torch.split(to_host(torch.cat(parts)), [len(part) for part in parts]))
    return [
        one if one.device.type == "cpu" else next(read).view(one.dtype).view(one.shape)
        for one in values
    ]


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return the host's values on the device, without waiting for the copy."""
    return value.to(device, non_blocking=True)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Turn off autocast, and float32 products in TF32 or bfloat16.

    Callers may turn them on globally. They would then affect the counts, whose error bounds assume
    the precision of the rows' dtype.
    """
    casts = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if casts else nullcontext():
        backends: Any = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
        if not hasattr(backends[1], "fp32_precision"):  # before torch 2.9
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)
            return
        were = [backend.fp32_precision for backend in backends]
        changed = [(b, was) for b, was in zip(backends, were, strict=True) if was not in EXACT]
        try:
            for backend, _ in changed:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, was in changed:
                backend.fp32_precision = "none"  # the inherited setting
                if backend.fp32_precision != was:
                    backend.fp32_precision = was


def made_on_host() -> AbstractContextManager[Any]:
    """Return a context in which torch makes tensors on the CPU if no device is named.

    Callers may name another device by `torch.set_default_device`. Seeded draws and bookkeeping
    would then be made there, and fail.
    """
    is_host = torch.empty(0).device.type == "cpu"
    return nullcontext() if is_host else torch.device("cpu")  # the latter slows each operator


def on_host(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function under `made_on_host`."""

    @wraps(function)
    def here(*args: P.args, **kwargs: P.kwargs) -> T:
        with made_on_host():
            return function(*args, **kwargs)

    return here


def in_full_precision(method: Callable[P, T]) -> Callable[P, T]:
    """Run a memory's method under `full_precision` and `made_on_host`, without gradient.

    It runs outside inference mode, because Lightning validates in inference mode, and tensors made
    in inference mode cannot be changed later.
    """

    @wraps(method)
    def precise(*args: P.args, **kwargs: P.kwargs) -> T:
        memory: Any = args[0]
        precise_there = full_precision(memory.device)
        with torch.inference_mode(False), torch.no_grad(), made_on_host(), precise_there:
            return method(*args, **kwargs)

    return precise


def changes_memory(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method under `in_full_precision`, and delay Ctrl-C until the method has ended.

    KeyboardInterrupt within the method would leave slots and counts that do not fit each other, and
    users of a notebook go on. If the program has its own handler of the signal, nothing is delayed.
    """
    method = in_full_precision(method)

    @wraps(method)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not own or threading.current_thread() is not threading.main_thread():
            return method(*args, **kwargs)
        asked: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
        try:
            return method(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if asked:
                raise KeyboardInterrupt

    return whole
