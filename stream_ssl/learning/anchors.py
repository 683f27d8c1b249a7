"""What an update is made on: the batch of the stream, one drawn from the memory, or a mix.

Shapes: B samples.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from memory.compute import to_device
from stream_ssl.batch import Batch
from stream_ssl.learning.exchange import Exchange, Meeting
from stream_ssl.learning.phases import Phases
from stream_ssl.learning.updates import Outcome, Updates, images_of

Source = Literal["stream", "memory", "mixed"]


class Anchors:
    """Lets a batch of the stream join the memory, and learns where an update is due.

    Args:
        source: "stream", "memory" or "mixed".
        share: of a mixed training batch that is of the stream.
        updates: who encodes and updates.
        exchange: with the memory.
    """

    def __init__(self, source: Source, share: float, updates: Updates, exchange: Exchange) -> None:
        self._source, self._share = source, share
        self._updates, self._exchange = updates, exchange

    def __call__(
        self, batch: Batch[Tensor], step: int, due: bool, phases: Phases
    ) -> tuple[Outcome, Meeting]:
        """What became of the update ("pace": none was due), and how the batch met the memory."""
        if not due:
            arrived = self._updates.encode(images_of(batch), phases)
            return arrived, self._exchange.admit(batch, arrived, phases)
        if self._source == "memory":
            return self._from_memory(batch, step, phases)
        if self._source == "mixed":
            return self._from_both(batch, step, phases)
        outcome = self._updates.update(batch, step, phases)
        return outcome, self._exchange.admit(batch, outcome, phases)

    def _from_memory(
        self, batch: Batch[Tensor], step: int, phases: Phases
    ) -> tuple[Outcome, Meeting]:
        """Let the batch join, then learn from what is drawn."""
        arrived = self._updates.encode(images_of(batch), phases)
        met = self._exchange.admit(batch, arrived, phases)
        if not self._exchange.can_draw:  # the very first keys were not usable
            return arrived._replace(skipped="keys"), met
        drawn = self._exchange.draw(len(batch), phases)
        outcome = self._updates.update(drawn, step, phases)
        return self._exchange.write_back(drawn, outcome, phases), met

    def _from_both(
        self, batch: Batch[Tensor], step: int, phases: Phases
    ) -> tuple[Outcome, Meeting]:
        """Learn from a part of the batch and from what is drawn, then let the batch join: what is
        drawn was there before, and is in its slot still when its fresh key goes back."""
        early = self._updates.keys == "before"
        arrived = self._updates.encode(images_of(batch), phases) if early else None
        count = min(len(batch) - 1, max(1, round(self._share * len(batch))))
        if not count or not self._exchange.can_draw:
            outcome = self._updates.update(batch, step, phases)
        else:
            chosen = torch.randperm(len(batch))[:count].sort().values
            drawn = self._exchange.draw(len(batch) - count, phases)
            outcome = self._updates.update(_joined(batch, chosen, drawn), step, phases)
            keys_BD = outcome.keys_BD[count:]
            outcome = self._exchange.write_back(drawn, outcome._replace(keys_BD=keys_BD), phases)
        if arrived is None:
            arrived = self._updates.encode(images_of(batch), phases)
        return outcome, self._exchange.admit(batch, arrived, phases)


def _joined(fresh: Batch[Tensor], rows: Tensor, drawn: Batch[Tensor]) -> Batch[Tensor]:
    """These rows of a fresh batch, by int64 on the CPU, and all that were drawn."""
    rows, others = to_device(rows, fresh.ids_B.device), drawn.columns()
    columns: dict[str, Any] = {
        name: torch.cat([c[rows], others[name]]) for name, c in fresh.columns().items()
    }
    return Batch(**columns)


def check_anchors(source: str, share: float) -> None:
    """ValueError unless the source is one, and the share is between nothing and all."""
    if source not in ("stream", "memory", "mixed"):
        raise ValueError(f'anchors is {source!r}: choose "stream", "memory" or "mixed"')
    if not 0 < share < 1:
        raise ValueError(
            f"stream_share is {share}: the part of a mixed batch that is of the stream lies "
            'within (0, 1). For all of one choose anchors "stream" or "memory"'
        )
