"""Loggers: the learner's metrics, its configuration and pictures of its memory in other tools.

Shapes: n slots, D embedding, C H W image.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from torch import Tensor

from stream_ssl.observe.metric_spec import PREFIX
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.page.step_jobs import Busy
from stream_ssl.pictures import image_of, tiled
from stream_ssl.rate_limited_logger import printable

log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two rows of scalars."""
PICTURES_EVERY = 600.0
"""Seconds between two mosaics."""
MOSAIC = 64
"""The most slots of a mosaic."""
SHOWN = 256
"""The most slots in TensorBoard's projector."""
PROJECTOR = """embeddings {
  tensor_name: "memory"
  tensor_path: "memory.tsv"
  metadata_path: "memory-slots.tsv"
  sprite { image_path: "memory.png" single_image_dim: %d single_image_dim: %d }
}
"""
LONGEST_WAIT = 600.0
"""The longest time, in seconds, before a logger that failed is opened again."""

Name = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, slots=True)
class ShownSlots:
    """Some evenly spaced slots of the memory: embeddings, images (uint8) and facts."""

    z_nD: Tensor
    image_nCHW: Tensor
    facts: Sequence[tuple[int, int, str]]  # slot, label (-1: none), producer

    def mosaic(self) -> NDArray[np.uint8]:
        """Return at most MOSAIC of the images as one picture, [H, W, C]."""
        count = len(self.image_nCHW)
        chosen = torch.linspace(0, count - 1, min(MOSAIC, count)).long()
        return squared(self.image_nCHW[chosen])


class Logger(Protocol):
    """A logger, used from one thread. Any method may raise any exception."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def memory(self, shown: ShownSlots, step: int) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Release what the logger holds, after it failed."""


class TensorBoard:
    """Event files that `tensorboard --logdir RUN` shows.

    Args:
        config: the resolved configuration, shown as text.
        step: the step at which the run continues. Events of later steps of an earlier process are
            hidden.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._folder = folder
        self._writer = writer(str(folder), purge_step=step, flush_secs=int(EVERY))
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._writer.add_text("configuration", "    " + text.replace("\n", "\n    "), step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write values by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def memory(self, shown: ShownSlots, step: int) -> None:
        """Write a mosaic, and replace the slots in the projector."""
        self._writer.add_image("memory", shown.mosaic(), step, dataformats="HWC")
        # SummaryWriter.add_embedding would add a folder at each call.
        rows = ["\t".join(f"{value:.5g}" for value in z_D) for z_D in shown.z_nD.tolist()]
        facts = [
            "\t".join(map(str, fact)) for fact in [("slot", "label", "producer"), *shown.facts]
        ]
        (self._folder / "memory.tsv").write_text("\n".join(rows) + "\n")
        (self._folder / "memory-slots.tsv").write_text("\n".join(facts) + "\n")
        count, channels, high, wide = shown.image_nCHW.shape
        # The projector finds pictures only in a sheet with as many rows as columns.
        rest = shown.image_nCHW.new_zeros(_side(count) ** 2 - count, channels, high, wide)
        sheet = squared(torch.cat([shown.image_nCHW, rest]))
        image_of(sheet).convert("RGB").save(self._folder / "memory.png")
        (self._folder / "projector_config.pbtxt").write_text(PROJECTOR % (wide, high))

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()

    def abandon(self) -> None:
        """Close what can be closed."""
        with contextlib.suppress(Exception):
            self._writer.close()


class Logging:
    """Writes the learner's metrics and pictures of its memory to a logger, in a thread.

    The scalars are the values of all gauges and counters that Prometheus reads, under the same
    names. A logger that fails is opened again at the next row, and then after 1, 2, 4, 8 and each
    10 minutes. Training never waits for a logger, and goes on.

    Args:
        opener: opens the logger at a step.
        view: the memory; it is asked between two steps.
    """

    def __init__(
        self,
        name: str,
        opener: Callable[[int], Logger],
        registry: CollectorRegistry,
        view: MemoryView | None,
        failed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._opener, self._registry = name, opener, registry
        self._view, self._failed = view, failed
        self._clock, self._pictures_at = clock, clock() + EVERY
        self._logger: Logger | None = None
        self._failures, self._open_at = 0, -math.inf  # failures since the last row that succeeded

    def write(self) -> None:
        """Write a row of scalars, and a mosaic if it is due. Never raises an exception."""
        if self._logger is None and self._clock() < self._open_at:
            return
        values = scalars(self._registry)
        step = int(values.get("step", 0))
        shown = self._slots() if self._clock() >= self._pictures_at else None
        try:
            if self._logger is None:
                self._logger = self._opener(step)
            self._logger.scalars(values, step)
            if shown is not None:
                self._logger.memory(shown, step)
        except Exception as error:  # loggers raise errors of any type
            self._fail(error)
            return
        if self._failures:
            log.info("the logger %s works again, after %d tries", self._name, self._failures)
            self._failures = 0

    def close(self) -> None:
        """Write a last row, and close the logger. Never raises an exception.

        Call it after the last call of `write` has returned.
        """
        self._pictures_at = math.inf  # the learner's thread no longer answers
        if not self._failures:  # a logger that fails would only delay the end
            self.write()
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._logger is not None:
            self._logger.abandon()
            self._logger = None
        if not self._failures:
            text = "the logger %s failed, training continues without it until it works: %s: %s"
            log.warning(text, self._name, type(error).__name__, error)
        wait = EVERY * 2**self._failures if self._failures else 0.0
        self._failures = min(self._failures + 1, 20)
        self._open_at = self._clock() + min(wait, LONGEST_WAIT)
        self._failed()

    def _slots(self) -> ShownSlots | None:
        """Return evenly spaced slots; None if there is no picture."""
        self._pictures_at = self._clock() + PICTURES_EVERY
        if self._view is None or not (most := min(SHOWN, self._view.reader.most_pictures)):
            return None
        reader = self._view.reader
        try:
            held = self._view.snapshot()
            count = len(held.slots_S)
            at = torch.linspace(0, count - 1, min(most, count)).long().numpy()
            slots = held.slots_S[at].tolist()
            if not slots:
                return None
            ids, image_nCHW = self._view.jobs.ask(lambda: reader.images(slots))
        except Busy:
            self._pictures_at = self._clock() + EVERY
            return None
        # Newcomers may have taken slots since the snapshot.
        same = [n for n, slot in enumerate(slots) if ids[n] == str(held.ids_k[slot])]
        if not same:
            return None
        origins = [held.origins_k[slots[n]] for n in same]
        facts = [
            (slots[n], int(held.labels_k[slots[n]]), printable(origin.producer if origin else ""))
            for n, origin in zip(same, origins, strict=True)
        ]
        return ShownSlots(held.z_SD[at[same]], image_nCHW[same], facts)


def squared(image_nCHW: Tensor) -> NDArray[np.uint8]:
    """Return images in a square of rows, [H, W, C]. Black images fill the last row."""
    return tiled(image_nCHW.permute(0, 2, 3, 1).numpy(), _side(len(image_nCHW)))


def _side(count: int) -> int:
    """Return the side of the smallest square that holds so many images."""
    return math.ceil(math.sqrt(count))


def scalars(registry: CollectorRegistry) -> dict[str, float]:
    """Return the finite values of our gauges and counters, by name without prefix.

    Labels follow the name: "memory_slots/working".
    """
    return {
        "/".join([sample.name.removeprefix(PREFIX), *sample.labels.values()]): sample.value
        for family in registry.collect()
        if family.type in ("gauge", "counter") and family.name.startswith(PREFIX)
        for sample in family.samples
        if math.isfinite(sample.value) and not sample.name.endswith("_created")
    }
