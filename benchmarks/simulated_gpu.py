"""A simulated GPU for machines without one: real values, its own device, all kernels and waits.

A tensor "on the GPU" is a wrapper that reports the device cuda:0 and computes on the CPU. The
tested code runs unchanged, including its branches on `device.type` and `is_cuda`, and gets the same
values as on the CPU. Mixing devices fails as on a real GPU. The simulation records each operator
that a GPU would launch, and each wait of the host, with the line of code that caused it.

torch's FakeTensorMode cannot be used, because its tensors have no values and the plan of a memory
depends on values. Its backward pass also fails in a CUDA build on a machine without a GPU.

The simulation does not cover timing, CUDA kernels (CPU kernels run in their place), autocast, or
the order of several streams. Name the device with its index.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda:0")
ROOT = Path(__file__).parent.parent
LINKED = "stream_ssl/memory/"  # a link to memory/
OURS = tuple(f"{ROOT / package}/" for package in ("memory", "stream_ssl"))
aten = torch.ops.aten

# Operators whose result, or its size, the host must know, so that it waits for the GPU.
READS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "_linalg_eigh", "linalg_cholesky_ex"),
}
# Operators that take indices on either device. Indices on the host are copied, which waits.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
# Operators that only allocate or rename memory. Views launch nothing either.
LAUNCHLESS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"),
    *("resize_", "set_", "is_pinned", "_pin_memory", "_unsafe_view"),
}


class OnGpu(Tensor):
    """A tensor of the simulated GPU, with its numbers in the CPU tensor `value`."""

    value: Tensor
    device = property(lambda _: GPU)
    is_cuda = property(lambda _: True)
    is_cpu = is_meta = property(lambda _: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor) -> OnGpu:
        # The wrapper says "meta" to torch, because torch's engine would ask the driver about CUDA.
        return Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=torch.device("meta"),
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.value!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, *_: Any, **__: Any
    ) -> Any:
        raise RuntimeError(f"{func} on a tensor of a simulated GPU that was left")


@dataclass(frozen=True)
class Wait:
    """One wait of the host for the device.

    Attributes:
        kind: "read" if data comes to the host. "upload" for a copy to the device that is not
            `non_blocking`, and so waits for all earlier work.
        line: the caller, such as "stream_ssl/learning/step.py _read".
        declared: whether the call went through `stream_ssl.memory.compute.to_host`.
    """

    kind: str
    line: str
    declared: bool


@dataclass(frozen=True)
class Spent:
    """The cost of a block of code on a GPU, by calling line.

    Attributes:
        kernels: the launched operators. Copies count, but views and allocations do not.
        waits: the waits of the host for the device.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


class SimulatedGpu(TorchDispatchMode):
    """A context manager that provides a device "cuda:0".

    Attributes:
        waits: the waits of the host for the device, in order.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch asks for no driver under this key

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self._spending: list[Spent] = []  # the blocks of `spending` that are running
        self._pinned: list[Tensor] = []
        self._in_flight: list[tuple[Tensor, Tensor]] = []  # pinned sources and contents
        self._patched = ExitStack()

    def count(self, *packages: str, kind: str = "read", declared: bool | None = None) -> Counter:
        """Return the waits by calling line, for lines in these folders."""
        return Counter(
            wait.line
            for wait in self.waits
            if wait.line.startswith(packages)
            and wait.kind == kind
            and declared in (None, wait.declared)
        )

    @contextmanager
    def spending(self) -> Iterator[Spent]:
        """Yield the kernels and the waits of the block, which are complete when the block ends."""
        spent, before = Spent(), len(self.waits)
        self._spending.append(spent)
        try:
            yield spent
        finally:
            self._spending.remove(spent)
            spent.waits.update(wait.line for wait in self.waits[before:])

    def __enter__(self) -> SimulatedGpu:
        stand_ins = {
            "Event": lambda **_: Event(self),
            "current_stream": lambda *_: None,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
        }
        for name, stand_in in stand_ins.items():
            self._patched.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self._switch(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors)
        # Parameters are replaced when a module moves, because their class cannot change in place.
        future = torch.__future__
        self._switch(
            future.get_overwrite_module_params_on_conversion,
            future.set_overwrite_module_params_on_conversion,
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patched.close()

    def _switch(self, get: Any, put: Any) -> None:
        self._patched.callback(put, get())
        put(True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        tensors = list(_tensors((args, *kwargs.values())))
        there = {id(one.value): one for one in tensors if isinstance(one, OnGpu)}
        to_gpu = bool(there)
        if kwargs.get("device") is not None:
            to_gpu = torch.device(kwargs["device"]).type in ("cuda", "meta")
            kwargs["device"] = torch.device("cpu")
        if name == "is_pinned":
            return any(_shared(args[0], pinned) for pinned in self._pinned)
        if name == "_pin_memory" or kwargs.pop("pin_memory", False):
            made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
            self._pinned.append(made)
            return made
        launches = (to_gpu or there) and name not in LAUNCHLESS and not func.is_view
        if to_gpu and there and name == "_to_copy":
            # A real tensor of this device and dtype would be returned as it is.
            launches = kwargs.get("dtype", args[0].dtype) != args[0].dtype
        if self._spending and launches:
            for spent in self._spending:
                spent.kernels[_asked()[0]] += 1
        if name in COPIES:
            self._note_copy(name, args, kwargs, to_gpu)
        elif there:
            self._note(name, args, tensors)
        found = _run(
            name,
            func,
            _mapped(_value, args),
            {key: _mapped(_value, given) for key, given in kwargs.items()},
        )
        if launches:
            self.launched(func, args, kwargs, found)
        if not to_gpu:
            return found
        # An in-place operation returns the same object.
        return _mapped(lambda one: there[id(one)] if id(one) in there else OnGpu(one), found)

    def launched(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Receive each operator that launches a kernel. A subclass may measure it."""

    def _note(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Record a wait of this operator, and raise RuntimeError if it mixes devices."""
        if name in READS:
            self._wait("read")
        if name in INDEXED:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self._wait("read" if isinstance(index, OnGpu) else "upload")
                elif index is not None and not isinstance(index, OnGpu):
                    self._wait("upload")
            if args[2:3] and not isinstance(args[2], OnGpu):  # a number, which is copied
                self._wait("upload")
            tensors = [args[0], *args[2:3]]
        strict = name in ("cat", "stack")  # other operators accept a single number from the host
        strangers = [one for one in tensors if not isinstance(one, OnGpu) and (one.ndim or strict)]
        if strangers:
            raise RuntimeError(
                f"{name}: expected all tensors on cuda:0, found one on {strangers[0].device}"
            )

    def _note_copy(self, name: str, args: Any, kwargs: Any, to_gpu: bool) -> None:
        given, target = (args[0], to_gpu) if name == "_to_copy" else (args[1], args[0])
        if name != "_to_copy":
            target = isinstance(next(_tensors((target,))), OnGpu)
        blocking = not kwargs.get("non_blocking", name != "_to_copy" and args[2:3] == (True,))
        for source in _tensors((given,)):
            if isinstance(source, OnGpu) and not target:
                self._wait("read")
            elif not isinstance(source, OnGpu) and target:
                if blocking:
                    self._wait("upload")
                elif any(_shared(source, pinned) for pinned in self._pinned):
                    self._in_flight.append((source, source.clone()))

    def _wait(self, kind: str) -> None:
        self.landed(len(self._in_flight))
        self.waits.append(Wait(kind, *_asked()))

    def landed(self, count: int) -> None:
        """Finish the first `count` copies from pinned memory, and check that their sources are
        intact.
        """
        done, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        for source, held in done:
            assert torch.equal(source, held), "a pinned buffer was written to while in flight"


class Event:
    """A replacement of torch.cuda.Event."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._copies: list[tuple[Tensor, Tensor]] = []

    def record(self, _: Any = None) -> None:
        self._copies = list(self._gpu._in_flight)

    def synchronize(self) -> None:
        flying = self._gpu._in_flight
        self._gpu.landed(sum(any(one is own for own in self._copies) for one in flying))

    def elapsed_time(self, _: Event) -> float:
        return 1.0


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments. This is faster than PyTorch's trees."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _mapped(to: Callable[[Tensor], Tensor], given: Any) -> Any:
    """Return arguments or results with each tensor replaced by `to(tensor)`."""
    if isinstance(given, Tensor):
        return to(given)
    if isinstance(given, (list, tuple)):
        return type(given)([_mapped(to, one) for one in given])
    return given


def _value(one: Tensor) -> Tensor:
    return one.value if isinstance(one, OnGpu) else one


def _run(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name == "_scaled_dot_product_efficient_attention":
        query, key, value, bias, *_ = args
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=kwargs["scale"]
        )
        return *found, torch.zeros(()), torch.zeros(())  # and the seed and offset of dropout
    return func(*args, **kwargs)


def _shared(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _asked() -> tuple[str, bool]:
    """Return the project's line that called, and whether it called through `to_host`."""
    frame: FrameType | None = sys._getframe(1)
    declared = False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(OURS) and name not in ("to_host", "all_to_host"):
            return f"{file.removeprefix(f'{ROOT}/').replace(LINKED, 'memory/')} {name}", declared
        declared |= file.startswith(OURS)
        frame = frame.f_back
    return "elsewhere", declared
