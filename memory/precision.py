"""Full precision inside the memory, whatever the training around it has switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


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
                backend.fp32_precision = was


def in_full_precision(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a memory, under `full_precision`."""

    @wraps(method)
    def precise(*args: P.args, **kwargs: P.kwargs) -> T:
        memory: Any = args[0]
        with full_precision(memory._columns.device):
            return method(*args, **kwargs)

    return precise
