"""What is not new is turned away before it costs an encoding or an update.

Shapes: B samples of a batch, W that wait, A descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.batch import Batch, Origin
from stream_ssl.learning.origins import packed, unpacked
from stream_ssl.learning.ranks import Turn
from stream_ssl.learning.records import Dropped
from stream_ssl.learning.step import joined
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.duplicates import Action, Found
from stream_ssl.memory.near_duplicates import NearDuplicates

PAIRS = 4
"""Samples of a batch that are kept with the picture that they are near-duplicates of."""

_OF_TEST = "test."  # before what is the test's own in a state


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
        dropped: the same, with what each is a near-duplicate of; empty under a cosine.
        distances: where each sample of the last batch came from, and its distance to the nearest
            picture; empty under a cosine.
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
        self._forget()
        self.fresh: Sequence[int] = ()

    def _forget(self) -> None:
        self.turned_away: Sequence[Origin | None] = ()
        self.dropped: Sequence[Dropped] = ()
        self.distances: Sequence[tuple[Origin | None, float]] = ()

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
        self._forget()
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
        found = self._test.find(images_BCHW, beside_WCHW, "refuse", batch.ids_B)
        first = sum(batches[: self._memory.group.rank])
        own = slice(first, first + len(batch))
        if found.distance_B is not None:
            self._tell(batch, found, own)
        own_B = torch.from_numpy(found.let_in_B[own].nonzero()[0])
        by_rank = np.split(found.let_in_B, np.cumsum(batches)[:-1])
        return own_B, [int(of_rank.sum()) for of_rank in by_rank]

    def _tell(self, batch: Batch[Tensor], found: Found, own: slice) -> None:
        """Note how near each sample of this rank came, and what those dropped are copies of."""
        assert found.distance_B is not None
        assert batch.images_BCHW is not None
        origins_B = batch.origins_B or [None] * len(batch)
        distances = found.distance_B[own].tolist()
        self.distances = list(zip(origins_B, distances, strict=True))
        numbers = np.flatnonzero(~found.let_in_B[own]).tolist()
        nearest = found.nearest_B[own]
        held = _Held(self._memory, self._waiting, batch, own.start)
        labels = held.labels(np.concatenate([nearest[numbers], held.rows_of_batch(numbers)]))
        self.dropped = [
            Dropped(
                origin=origins_B[number],
                distance=distances[number],
                label=labels[len(numbers) + at],
                twin_label=labels[at],
                picture_CHW=to_host(batch.images_BCHW[number]) if at < PAIRS else None,
                twin_CHW=held.picture(int(nearest[number])) if at < PAIRS else None,
            )
            for at, number in enumerate(numbers)
        ]

    def state(self) -> dict[str, Tensor]:
        """Return the samples that wait, by column, with their origins; and what the test needs."""
        test = self._test.state() if isinstance(self._test, NearDuplicates) else {}
        of_test = {_OF_TEST + name: value for name, value in test.items()}
        waiting = self._waiting
        if waiting is None:
            return of_test
        origins_W = waiting.origins_B or [None] * len(waiting)
        return {**waiting.columns(), "origins": packed(origins_W), **of_test}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` gave."""
        if isinstance(self._test, NearDuplicates):
            of_test = (name for name in state if name.startswith(_OF_TEST))
            self._test.load({name.removeprefix(_OF_TEST): state[name] for name in of_test})
        columns: dict[str, Any] = {
            name: column.to(device)
            for name, column in state.items()
            if name != "origins" and not name.startswith(_OF_TEST)
        }
        self._waiting = Batch(**columns) if columns else None
        if self._waiting is not None and "origins" in state:  # not in a checkpoint of old
            origins_W = [row and Origin(*row) for row in unpacked(state["origins"])]
            self._waiting = replace(self._waiting, origins_B=origins_W)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a sample was compared with, by the numbers of `NearDuplicates.find`.

    The slots come first, then the samples that wait, then the batches of all ranks.
    """

    memory: WorkingMemory
    waiting: Batch[Tensor] | None
    batch: Batch[Tensor]
    first: int  # of this rank's samples among those of all ranks

    def rows_of_batch(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return what these samples of this rank's batch are called."""
        behind = len(self.memory) + (0 if self.waiting is None else len(self.waiting))
        return np.asarray(numbers, dtype=np.int64) + behind + self.first

    def labels(self, row_N: NDArray[np.int64]) -> list[int]:
        """Return the class of each; -1 where it has none or is on another rank."""
        label_N = np.full(len(row_N), -1)
        for column, at_N, mine_N in self._parts(row_N):
            labels = column.labels if isinstance(column, WorkingMemory) else column.labels_B
            if labels is not None and mine_N.any():
                chosen = torch.from_numpy(at_N[mine_N]).to(labels.device)
                label_N[mine_N] = to_host(labels[chosen]).numpy()
        found: list[int] = label_N.tolist()
        return found

    def picture(self, row: int) -> Tensor | None:
        """Return the picture, uint8 [C, H, W] on the CPU; None where it is on another rank."""
        for column, at_N, mine_N in self._parts(np.array([row])):
            if not mine_N[0]:
                continue
            if isinstance(column, WorkingMemory):
                return to_host(column.images_of(torch.from_numpy(at_N))[0])
            assert column.images_BCHW is not None
            return to_host(column.images_BCHW[int(at_N[0])])
        return None

    def _parts(
        self, row_N: NDArray[np.int64]
    ) -> Iterator[tuple[WorkingMemory | Batch[Tensor], NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield each part, the place of each row in it, and which rows are there."""
        start = 0
        for part in (self.memory, self.waiting, self.batch):
            if part is self.batch:
                start += self.first
            size = 0 if part is None else len(part)
            if part is not None:
                at_N = row_N - start
                yield part, at_N, (row_N >= 0) & (at_N >= 0) & (at_N < size)
            start += size


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
            self._test = Duplicates(threshold)
        except ValueError as error:
            raise ValueError(f"novelty: {error}") from None
        self._memory, self._fixed = memory, fixed

    def find(
        self, image_BCHW: Tensor, beside_WCHW: Tensor, action: Action, _: Tensor | None = None
    ) -> Found:
        """Do what `NearDuplicates.find` does, by a cosine. It has no use for ids."""
        memory = self._memory
        held_kA = memory.descriptor.of_fixed(memory.descriptors)
        if len(beside_WCHW):
            held_kA = torch.cat([held_kA, self._describe(beside_WCHW).to(held_kA.dtype)])
        (every_BA,) = memory.group.all_gather(self._describe(image_BCHW).to(memory.dtype))
        return replace(self._test, action=action).find(every_BA, held_kA, memory.group)

    def _describe(self, image_BCHW: Tensor) -> Tensor:
        # A descriptor of images reads of the embeddings only their dtype and device.
        nothing_B0 = self._memory.embeddings.new_empty(len(image_BCHW), 0)
        return self._fixed(nothing_B0, image_BCHW)
