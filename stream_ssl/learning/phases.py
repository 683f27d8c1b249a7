"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from stream_ssl.learning.records import PHASES


class Phases:
    """Adds up time under the phase that is running.

    On a CPU it is the host's monotonic time. On a GPU, whose kernels run behind the host, it is the
    device's own, from when it came to the phase until it was through; where it waited for the host,
    as for a batch, that is in it.

    Args:
        device: where the step is made; the CPU where not given.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started, begin = time.perf_counter(), self._moment()
        try:
            yield
        finally:
            end = self._moment()
            if begin is None or end is None:
                self._seconds[phase] += time.perf_counter() - started
            else:
                self._spans.append((phase, begin, end))

    @property
    def seconds(self) -> Mapping[str, float]:
        """By phase. On a GPU this waits until it is through with the last one: ask when the step's
        numbers have been read, for then it is."""
        if self._spans:
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            self._seconds[phase] += begin.elapsed_time(end) / 1000
        self._spans.clear()
        return dict(self._seconds)

    def _moment(self) -> torch.cuda.Event | None:
        """When the GPU is through with all that was launched so far."""
        if self._gpu is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._gpu))
        return event
