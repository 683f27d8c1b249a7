"""What is not new is turned away before it costs an encoding or an update.

Shapes: B samples of a batch, W that wait, A descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory import Duplicates, WorkingMemory
from memory.near_duplicates import NearDuplicates
from stream_ssl.batch import Batch, Origin
from stream_ssl.learning.origins import packed, unpacked
from stream_ssl.learning.ranks import Turn
from stream_ssl.learning.step import joined


class Novelty:
    """Turns away near-duplicates of what the memory holds; the others wait until they fill a batch.

    A sample is compared with all slots, with the samples that wait, and with the earlier ones of
    its batch that were not turned away. So the learner trains as often as the stream brings
    something new. What waits is part of the learner's state: it was read from the stream, and is
    trained on later. On several ranks a sample is compared with what all hold and have waiting, and
    with the batches of all in order of rank.

    Args:
        memory: it keeps images for "auto"; for a cosine its descriptor must be of images alone, or
            Weighted with such a part, which alone is compared then.
        threshold: "auto" compares pictures closely (memory.near_duplicates), and means the same
            for every stream. A number is a cosine of descriptors in (-1, 1]. None turns nothing
            away, and batches pass as they are.

    Raises:
        ValueError: the threshold lies outside its range, or does not fit the memory.

    Attributes:
        turned_away: where the near-duplicates of the last batch came from, each None where that is
            not known.
        fresh: samples that each rank's step has: as many as came in its batch, or 0 while too few
            of them were new.
    """

    def __init__(self, memory: WorkingMemory, threshold: float | Literal["auto"] | None) -> None:
        self._memory = memory
        self._test: NearDuplicates | _Cosine | None = None
        if threshold == "auto":
            try:
                self._test = NearDuplicates(memory)
            except ValueError as error:
                raise ValueError(f'novelty is "auto": {error}') from None
        elif threshold is not None:
            self._test = _Cosine(memory, threshold)
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
        waiting, images_BCHW = self._waiting, batch.images_BCHW
        assert images_BCHW is not None  # a learner's batch has them
        beside_WCHW = images_BCHW[:0] if waiting is None else waiting.images_BCHW
        assert beside_WCHW is not None
        let_in_B = self._test.let_in(images_BCHW, beside_WCHW)
        by_rank = np.split(let_in_B, np.cumsum(batches)[:-1])
        own_B = torch.from_numpy(by_rank[self._memory.group.rank].nonzero()[0])
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


class _Cosine:
    """Near-duplicates by a cosine of descriptors that are known before a sample is encoded."""

    def __init__(self, memory: WorkingMemory, threshold: float) -> None:
        fixed = memory.descriptor.fixed()
        if fixed is None:
            raise ValueError(
                f"novelty is {threshold} and memory.descriptor {memory.descriptor!r}: samples "
                "are compared before they are encoded, which takes a descriptor of images "
                "alone, or Weighted with one. Choose memory.descriptor: Thumbnail, novelty: "
                '"auto", or novelty: null'
            )
        try:
            self._test = Duplicates(threshold, "refuse")
        except ValueError as error:
            raise ValueError(f"novelty: {error}") from None
        self._memory, self._fixed = memory, fixed

    def let_in(self, image_BCHW: Tensor, beside_WCHW: Tensor) -> NDArray[np.bool_]:
        """As `NearDuplicates.let_in` does."""
        memory = self._memory
        held_kA = memory.descriptor.of_fixed(memory.descriptors)
        if len(beside_WCHW):
            held_kA = torch.cat([held_kA, self._describe(beside_WCHW).to(held_kA.dtype)])
        (every_BA,) = memory.group.all_gather(self._describe(image_BCHW).to(memory.dtype))
        return self._test.find(every_BA, held_kA, memory.group).let_in_B

    def _describe(self, image_BCHW: Tensor) -> Tensor:
        # A descriptor of images reads of the embeddings only their dtype and device.
        nothing_B0 = self._memory.embeddings.new_empty(len(image_BCHW), 0)
        return self._fixed(nothing_B0, image_BCHW)
