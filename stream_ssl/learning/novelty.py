"""What is not new is turned away before it costs an encoding or an update.

Shapes: B samples of a batch, W that wait, A descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memory import Duplicates, WorkingMemory
from stream_ssl.batch import Batch, Origin
from stream_ssl.learning.origins import packed, unpacked
from stream_ssl.learning.ranks import Turn
from stream_ssl.learning.step import joined


class Novelty:
    """Turns away near-copies of what the memory holds; the others wait until they fill a batch.

    A sample is a near-copy if its descriptor has a cosine of `threshold` or more with a slot, with
    a sample that waits, or with an earlier one of its batch that was not turned away. Of a weighted
    descriptor its part of images alone counts, which training does not move. So the learner trains
    as often as the stream brings something new. What waits is part of the learner's state: it was
    read from the stream, and is trained on later. On several ranks a sample is compared with what
    all hold and have waiting, and with the batches of all in order of rank.

    Args:
        memory: its descriptor must be of images alone, or Weighted with such a part.
        threshold: a cosine in (-1, 1]; None: nothing is turned away, and batches pass as they are.

    Raises:
        ValueError: the threshold lies outside its range, or the memory's descriptor is made of
            embeddings alone.

    Attributes:
        turned_away: where the near-copies of the last batch came from, each None where that is not
            known.
        fresh: samples that each rank's step has: as many as came in its batch, or 0 while too few
            of them were new.
    """

    def __init__(self, memory: WorkingMemory, threshold: float | None) -> None:
        self._memory, self._test = memory, None
        self._fixed = memory.descriptor.fixed()
        if threshold is not None:
            if self._fixed is None:
                raise ValueError(
                    f"novelty is {threshold} and memory.descriptor {memory.descriptor!r}: samples "
                    "are compared before they are encoded, which takes a descriptor of images "
                    "alone, or Weighted with one. Choose memory.descriptor: Thumbnail, or "
                    "novelty: null"
                )
            try:
                self._test = Duplicates(threshold, "refuse")
            except ValueError as error:
                raise ValueError(f"novelty: {error}") from None
        self._waiting: Batch[Tensor] | None = None
        self.turned_away: Sequence[Origin | None] = ()
        self.fresh: Sequence[int] = ()

    def __len__(self) -> int:
        """W"""
        return 0 if self._waiting is None else len(self._waiting)

    def __call__(self, batch: Batch[Tensor], turn: Turn | None = None) -> Batch[Tensor] | None:
        """As many new samples as the batch has, the oldest first; None while there are fewer.

        Args:
            batch: of this rank; empty where it has none.
            turn: what all ranks have; None: there is no other.
        """
        turn = turn or Turn(batches=(len(batch),), waiting=(len(self),))
        self.turned_away = ()
        size, waiting, let_in = len(batch), self._waiting, turn.batches
        if self._test is not None:
            new_B, let_in = self._new(batch, turn.batches)
            new, origins = set(new_B.tolist()), batch.origins_B or [None] * size
            self.turned_away = [origins[b] for b in range(size) if b not in new]
            batch = batch[new_B]
        self.fresh = [
            came if came and kept + new >= came else 0
            for came, kept, new in zip(turn.batches, turn.waiting, let_in, strict=True)
        ]
        if waiting is None and self._test is None:
            return batch if size else None
        if not size:
            return None
        together = batch if waiting is None else joined(waiting, batch)
        full = len(together) >= size
        rest = together[size if full else 0 :]
        self._waiting = rest if len(rest) else None
        return together[:size] if full else None

    def _new(self, batch: Batch[Tensor], batches: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Which samples of this rank's batch are new, and how many of each rank's are."""
        assert self._test is not None
        group = self._memory.group
        (every_BA,) = group.all_gather(self._describe(batch).to(self._memory.dtype))
        let_in_B = self._test.find(every_BA, self._known(), group).let_in_B
        by_rank = np.split(let_in_B, np.cumsum(batches)[:-1])
        own_B = torch.from_numpy(by_rank[group.rank].nonzero()[0])
        return own_B, [int(of_rank.sum()) for of_rank in by_rank]

    def state(self) -> dict[str, Tensor]:
        """The samples that wait, by column, and their origins; empty where there are
        none."""
        waiting = self._waiting
        if waiting is None:
            return {}
        origins_W = waiting.origins_B or [None] * len(waiting)
        return {**waiting.columns(), "origins": packed(origins_W)}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` gave."""
        columns: dict[str, Any] = {
            name: column.to(device) for name, column in state.items() if name != "origins"
        }
        self._waiting = Batch(**columns) if columns else None
        if self._waiting is not None and "origins" in state:  # not in a checkpoint of old
            origins_W = [row and Origin(*row) for row in unpacked(state["origins"])]
            self._waiting = replace(self._waiting, origins_B=origins_W)

    def _describe(self, batch: Batch[Tensor]) -> Tensor:
        assert self._fixed is not None
        # A descriptor of images reads of the embeddings only their dtype and device.
        nothing_B0 = self._memory.embeddings.new_empty(len(batch), 0)
        return self._fixed(nothing_B0, batch.images_BCHW)

    def _known(self) -> Tensor:
        """Descriptors of all slots and of what waits."""
        held_kA = self._memory.descriptor.of_fixed(self._memory.descriptors)
        if self._waiting is None:
            return held_kA
        return torch.cat([held_kA, self._describe(self._waiting).to(held_kA.dtype)])
