"""Drops near-duplicate samples before they are encoded or trained on.

Shapes: B samples of a batch, W samples that wait, A descriptor.
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
from stream_ssl.learning.records import DroppedSample
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.duplicates import Action, Found
from stream_ssl.memory.near_duplicates import NearDuplicates

PAIRS = 4
"""The most dropped samples of a batch that are recorded with both pictures."""

_OF_TEST = "test."  # the prefix of the entries of the test in a state


class Novelty:
    """A filter that drops near-duplicates. The other samples wait until they fill a batch.

    A sample is compared with all slots of the memory, with the samples that wait, and with the new
    samples before it in its batch. So the learner trains as often as the stream brings something
    new. The samples that wait are part of the learner's state: they were read from the stream, and
    are trained on later. On several ranks a sample is compared with the slots and the waiting
    samples of all ranks. The batches of all ranks count as one batch in order of rank.

    Args:
        memory: the memory to compare with. For "auto" it must store images. For a cosine its
            descriptor must be of images, or Weighted with such a part; only this part is then
            compared.
        threshold: "auto" compares pictures closely (memory.near_duplicates) and has the same
            meaning for every stream. A number is a cosine of descriptors in (-1, 1]. None drops
            nothing, and batches pass unchanged.

    Raises:
        ValueError: the threshold is outside its range, or does not fit the memory.

    Attributes:
        new_origins: origin of each sample of the last batch that is no near-duplicate, None if
            unknown.
        dropped_origins: origin of each near-duplicate of the last batch, None if unknown.
        dropped: the near-duplicates, each with the picture that it duplicates; empty for a cosine.
        distances: for each sample of the last batch, its origin and the distance of its picture to
            the nearest other picture; empty for a cosine.
        fresh: number of samples in each rank's step: the size of its batch, or 0 while too few new
            samples have come.
    """

    def __init__(self, memory: WorkingMemory, threshold: float | Literal["auto"] | None) -> None:
        self._memory = memory
        self._pictures: NearDuplicates | None = None
        self._test: NearDuplicates | _Cosine | None = None
        if threshold == "auto":
            try:
                self._test = self._pictures = NearDuplicates(memory)
            except ValueError as error:
                raise ValueError(f'novelty is "auto": {error}') from None
        elif threshold is not None:
            self._test = _Cosine(memory, threshold)
        self._waiting: Batch[Tensor] | None = None
        self.new_origins: Sequence[Origin | None] = ()
        self.dropped_origins: Sequence[Origin | None] = ()
        self.dropped: Sequence[DroppedSample] = ()
        self.distances: Sequence[tuple[Origin | None, float]] = ()
        self.fresh: Sequence[int] = ()

    @property
    def of_pictures(self) -> NearDuplicates | None:
        """A test that finds near-duplicates among the memory's pictures.

        None if the memory has no pictures, or pictures of less than 8 x 8 pixels. With "auto" it is
        the test that drops samples. Otherwise each access makes a new one.
        """
        if self._pictures is not None:
            return self._pictures
        try:
            return NearDuplicates(self._memory)
        except ValueError:  # no images, small images, or vectors
            return None

    def __len__(self) -> int:
        """Return W, the number of samples that wait."""
        return 0 if self._waiting is None else len(self._waiting)

    def __call__(self, batch: Batch[Tensor], turn: Turn | None = None) -> Batch[Tensor] | None:
        """Return as many new samples as the batch has, the oldest first; None if there are fewer.

        Args:
            batch: the batch of this rank, empty if it has none.
            turn: the numbers of all ranks; None for a single process.
        """
        turn = turn or Turn(batches=(len(batch),), waiting=(len(self),))
        self.dropped_origins, self.dropped, self.distances = (), (), ()
        size, waiting, admitted = len(batch), self._waiting, turn.batches
        self.new_origins = origins_B = batch.origins_B or [None] * size
        if self._test is not None:
            new_B, admitted = self._new(batch, turn.batches)
            new = set(new_B.tolist())
            self.new_origins = [origins_B[b] for b in new_B.tolist()]
            self.dropped_origins = [origins_B[b] for b in range(size) if b not in new]
            batch = batch[new_B]
        self.fresh = [
            came if came and kept + new >= came else 0
            for came, kept, new in zip(turn.batches, turn.waiting, admitted, strict=True)
        ]
        if waiting is None and self._test is None:
            return batch if size else None
        if not size:
            return None
        together = batch if waiting is None else _joined(waiting, batch)
        full = len(together) >= size
        rest = together[size if full else 0 :]
        self._waiting = rest if len(rest) else None
        return together[:size] if full else None

    def _new(self, batch: Batch[Tensor], batches: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return the new samples of this rank's batch, and the number of new ones on each rank."""
        assert self._test is not None
        waiting, images_BCHW = self._waiting, batch.images_BCHW
        assert images_BCHW is not None  # a learner's batch has images
        beside_WCHW = images_BCHW[:0] if waiting is None else waiting.images_BCHW
        assert beside_WCHW is not None
        found = self._test.find(images_BCHW, beside_WCHW, "refuse", batch.ids_B)
        first = sum(batches[: self._memory.group.rank])
        own = slice(first, first + len(batch))
        if found.distance_B is not None:
            self._record(batch, found, own)
        own_B = torch.from_numpy(found.admitted_B[own].nonzero()[0])
        by_rank = np.split(found.admitted_B, np.cumsum(batches)[:-1])
        return own_B, [int(of_rank.sum()) for of_rank in by_rank]

    def _record(self, batch: Batch[Tensor], found: Found, own: slice) -> None:
        """Store the samples' distances, and the pictures that the dropped samples duplicate."""
        assert found.distance_B is not None
        assert batch.images_BCHW is not None
        origins_B = batch.origins_B or [None] * len(batch)
        distances = found.distance_B[own].tolist()
        self.distances = list(zip(origins_B, distances, strict=True))
        numbers = np.flatnonzero(~found.admitted_B[own]).tolist()
        nearest = found.nearest_B[own]
        held = _Held(self._memory, self._waiting, batch, own.start)
        labels = held.labels(np.concatenate([nearest[numbers], held.rows_of_batch(numbers)]))
        self.dropped = [
            DroppedSample(
                origin=origins_B[number],
                distance=distances[number],
                label=labels[len(numbers) + at],
                twin_label=labels[at],
                picture_CHW=to_host(batch.images_BCHW[number]) if at < PAIRS else None,
                twin_CHW=held.picture(int(nearest[number])) if at < PAIRS else None,
            )
            for at, number in enumerate(numbers)
        ]

    def originals(self) -> set[str]:
        """Return the names of the original bytes of the samples that wait."""
        origins_W = () if self._waiting is None else self._waiting.origins_B or ()
        return {one.original for one in origins_W if one is not None and one.original is not None}

    def state(self) -> dict[str, Tensor]:
        """Return the waiting samples by column, with their origins, and the state of the test."""
        test = {} if self._pictures is None else self._pictures.state()
        of_test = {_OF_TEST + name: value for name, value in test.items()}
        waiting = self._waiting
        if waiting is None:
            return of_test
        origins_W = waiting.origins_B or [None] * len(waiting)
        return {
            **waiting.columns(),
            "origins": packed(one and one.row() for one in origins_W),
            **of_test,
        }

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Load a state that `state` returned."""
        if self._pictures is not None:
            of_test = (name for name in state if name.startswith(_OF_TEST))
            self._pictures.load({name.removeprefix(_OF_TEST): state[name] for name in of_test})
        columns: dict[str, Any] = {
            name: column.to(device)
            for name, column in samples_of(state).items()
            if name != "origins"
        }
        self._waiting = Batch(**columns) if columns else None
        if self._waiting is not None and "origins" in state:  # old checkpoints have no origins
            origins_W = [row and Origin(*row) for row in unpacked(state["origins"])]
            self._waiting = replace(self._waiting, origins_B=origins_W)


def samples_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state that holds the waiting samples; empty if none wait.

    The rest belongs to the test, which knows the slots of one rank only.
    """
    return {name: column for name, column in state.items() if not name.startswith(_OF_TEST)}


@dataclass(frozen=True, slots=True)
class _Held:
    """The samples that a batch was compared with, by the row numbers of `NearDuplicates.find`.

    The slots come first, then the samples that wait, then the batches of all ranks.
    """

    memory: WorkingMemory
    waiting: Batch[Tensor] | None
    batch: Batch[Tensor]
    first: int  # number of samples in the batches of the ranks before this one

    def rows_of_batch(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return the row numbers of these samples of this rank's batch."""
        behind = len(self.memory) + (0 if self.waiting is None else len(self.waiting))
        return np.asarray(numbers, dtype=np.int64) + behind + self.first

    def labels(self, row_N: NDArray[np.int64]) -> list[int]:
        """Return the class of each row; -1 without a label, or if the row is on another rank."""
        label_N = np.full(len(row_N), -1)
        for column, at_N, mine_N in self._parts(row_N):
            labels = column.labels if isinstance(column, WorkingMemory) else column.labels_B
            if labels is not None and mine_N.any():
                chosen = torch.from_numpy(at_N[mine_N]).to(labels.device)
                label_N[mine_N] = to_host(labels[chosen]).numpy()
        found: list[int] = label_N.tolist()
        return found

    def picture(self, row: int) -> Tensor | None:
        """Return the picture, uint8 [C, H, W] on the CPU; None if it is on another rank."""
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
        """Yield each part, the position of each row in it, and which rows it contains."""
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
    """A test for near-duplicates by a cosine of descriptors that need no encoding."""

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
        """Find near-duplicates as `NearDuplicates.find` does, but by a cosine and without ids."""
        memory = self._memory
        held_kA = memory.descriptor.of_fixed(memory.descriptors)
        if len(beside_WCHW):
            held_kA = torch.cat([held_kA, self._describe(beside_WCHW).to(held_kA.dtype)])
        (every_BA,) = memory.group.all_gather(self._describe(image_BCHW).to(memory.dtype))
        return replace(self._test, action=action).find(every_BA, held_kA, memory.group)

    def _describe(self, image_BCHW: Tensor) -> Tensor:
        # A descriptor of images uses only the dtype and the device of the embeddings.
        nothing_B0 = self._memory.embeddings.new_empty(len(image_BCHW), 0)
        return self._fixed(nothing_B0, image_BCHW)


def _joined(first: Batch[Tensor], second: Batch[Tensor]) -> Batch[Tensor]:
    """Return the samples of both batches, without slots.

    `offset` and `rejected` are the second batch's.
    """
    others = second.columns()
    columns: dict[str, Any] = {
        name: torch.cat([column, others[name]]) for name, column in first.columns().items()
    }
    origins = [part.origins_B or [None] * len(part) for part in (first, second)]
    return replace(second, **columns, origins_B=[*origins[0], *origins[1]], slots_B=None)
