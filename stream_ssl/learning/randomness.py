"""Seeds, random generators and threads, which must be fixed for a repeatable run."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, threads: int | None = None) -> None:
    """Seed every generator and set the number of threads. Call this before the model is built.

    Args:
        seed: the seed.
        threads: number of threads of torch's operators; None keeps it. Two runs are bit-equal only
            with the same number.
    """
    set_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


MOST_THREADS = 1024
"""The most threads of torch's operators; with a million, torch ends the process."""


def check_threads(threads: int | None) -> None:
    """Raise ValueError if `threads` is not None, and not from 1 to MOST_THREADS."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads is {threads}: must be from 1 to {MOST_THREADS:,}, or null")


def set_threads(threads: int | None) -> None:
    """Set the number of threads of torch's operators; None keeps it.

    Raises:
        ValueError: as in `check_threads`.
    """
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)


class OwnRandomness:
    """The learner's random generators, which are active only while the learner computes.

    So the consumers of records may draw random numbers without any effect on training.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        outer = self._read()
        seed_everything(seed)
        self._mine = self._read()
        self._write(outer)
        self._outer: dict[str, Tensor] = {}

    def __enter__(self) -> OwnRandomness:
        self._outer = self._read()
        self._write(self._mine)
        return self

    def __exit__(self, *error: object) -> None:
        self._mine = self._read()
        self._write(self._outer)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each generator, as tensors that safetensors can store."""
        return {name: value.clone() for name, value in self._mine.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state.

        A generator without a saved state keeps its own, for example on another device.
        """
        self._mine = {name: state.get(name, value).clone() for name, value in self._mine.items()}

    def _read(self) -> dict[str, Tensor]:
        found = {"torch": torch.get_rng_state()}
        if self._cuda is not None:
            found["cuda"] = torch.cuda.get_rng_state(self._cuda)
        version, inner, gauss = random.getstate()
        found["python"] = torch.tensor([version, *inner], dtype=torch.int64)
        found["python_gauss"] = _optional(gauss)
        numpy = np.random.get_state(legacy=False)
        words = [*numpy["state"]["key"].tolist(), numpy["state"]["pos"]]
        found["numpy"] = torch.tensor(words, dtype=torch.int64)
        found["numpy_gauss"] = _optional(numpy["gauss"] if numpy["has_gauss"] else None)
        return found

    def _write(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state["torch"])
        if self._cuda is not None:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)
        version, *inner = state["python"].tolist()
        random.setstate((version, tuple(inner), _value(state["python_gauss"])))
        *keys, position = state["numpy"].tolist()
        cached = _value(state["numpy_gauss"])
        numpy_keys = np.array(keys, dtype=np.uint32)
        has_gauss = int(cached is not None)
        np.random.set_state(("MT19937", numpy_keys, position, has_gauss, cached or 0.0))


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def _value(tensor: Tensor) -> float | None:
    return float(tensor[0]) if tensor.numel() else None
