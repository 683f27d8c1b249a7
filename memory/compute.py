"""How the memory computes: in full precision, in blocks, and what it waits for a device for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

CACHED_ELEMENTS = 1 << 20
"""Similarities held at a time on a CPU: as many as its cache holds, where they are read as fast as
they were multiplied."""

LARGE_ELEMENTS = 1 << 26
"""The same on a GPU: enough that launching a kernel takes no time beside running it."""


def columns_at_a_time(rows: int, device: torch.device) -> int:
    """Columns of a block of so many rows, at least 1, where any number will do."""
    elements = CACHED_ELEMENTS if device.type == "cpu" else LARGE_ELEMENTS
    return max(1, elements // max(1, rows))


def fast_in_bfloat16(device: torch.device) -> bool:
    """Whether this is a CPU that multiplies bfloat16 some two times as fast as float32."""
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 and later say
    return device.type == "cpu" and bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def to_host(value: Tensor) -> Tensor:
    """The values on the CPU. On a GPU this waits for all that was launched before.

    Every number of a device that the memory looks at comes through here, so that a test can count
    how often that is.
    """
    return value if value.device.type == "cpu" else value.cpu()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """The host's values on the device, without waiting until they are there."""
    return value.to(device, non_blocking=True)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, and no float32 products in TF32 or bfloat16.

    Both are switched on from outside and reach every product, so they would reach the counts, whose
    errors are taken to be those of the rows' own type.
    """
    with torch.autocast(device.type, enabled=False):
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
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, was in zip(backends, were, strict=True):
                backend.fp32_precision = "none"  # inherited, as it may have been
                if backend.fp32_precision != was:
                    backend.fp32_precision = was


def in_full_precision(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a memory, under `full_precision` and without gradient.

    Nor in inference mode, as Lightning validates: what it made there could not be changed later.
    """

    @wraps(method)
    def precise(*args: P.args, **kwargs: P.kwargs) -> T:
        memory: Any = args[0]
        with torch.inference_mode(False), torch.no_grad(), full_precision(memory.device):
            return method(*args, **kwargs)

    return precise
