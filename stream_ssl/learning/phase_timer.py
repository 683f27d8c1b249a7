"""The seconds that each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from stream_ssl.learning.records import PHASES


class PhaseTimer:
    """A sum of seconds for each phase of the current step.

    On a CPU the seconds are the host's monotonic time. A GPU runs kernels asynchronously, so there
    the seconds are the device's time between the phase's first and last kernel. They include the
    device's waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._read: list[torch.cuda.Event] = []  # events of earlier steps, to use again

    def restart(self) -> None:
        """Start a new step with 0 seconds in each phase."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._spans.clear()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started, begin = time.perf_counter(), self._event()
        try:
            yield
        finally:
            end = self._event()
            if begin is None or end is None:
                self._seconds[phase] += time.perf_counter() - started
            else:
                self._spans.append((phase, begin, end))

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase.

        On a GPU this waits for the end of the last phase. Read it after the step's other numbers,
        so that it does not add a wait.
        """
        if self._spans:
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            self._seconds[phase] += begin.elapsed_time(end) / 1000
            self._read += begin, end
        self._spans.clear()
        return dict(self._seconds)

    def _event(self) -> torch.cuda.Event | None:
        """Return an event that the GPU records after all work launched so far; None on a CPU."""
        if self._gpu is None:
            return None
        new: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch has no types for the call
        event = self._read.pop() if self._read else new(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event
