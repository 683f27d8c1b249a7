"""The reads of a learner's memory between two steps: copies of columns, pictures and neighbours.

Shapes: A descriptor, D embedding, K capacity, k occupied slots, S evenly spaced slots, n requested
slots, C H W image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.batch import Origin
from stream_ssl.learning.origins import Origins
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.descriptors import Embedding
from stream_ssl.memory.index import nearest
from stream_ssl.memory.scores import Linear
from stream_ssl.memory.stats import MOST_PAIRS
from stream_ssl.observe.slot_history import shrunk

MAPPED = 4096
"""The maximum number of slots on the map. A larger memory shows this many, evenly spaced."""
TILE = 96
"""The maximum side of a picture on the page, in pixels."""
PIXELS = 8 << 20
"""The maximum number of values (pixels times channels) of the pictures read at once."""
TILES = 256
"""The maximum number of pictures sent at once. Large pictures lower it; see PIXELS."""


def spaces(memory: WorkingMemory) -> dict[str, Literal["descriptors", "embeddings"]]:
    """Return the columns in which neighbours are shown, by the page's name of the space.

    Descriptors are left out if they are the embeddings.
    """
    if isinstance(memory.descriptor, Embedding):
        return {"embedding": "embeddings"}
    return {"descriptor": "descriptors", "embedding": "embeddings"}


@dataclass(frozen=True)
class SlotsCopy:
    """A copy of the occupied slots at one moment, on the host: all columns, and some embeddings.

    `duplicates_k` is None if the policy keeps no counts and counting would take too long.
    """

    at: float  # seconds since the Unix epoch
    taken: float  # monotonic seconds of the same moment
    added: int
    ids_k: NDArray[np.int64]
    labels_k: NDArray[np.int64]
    born_k: NDArray[np.int64]
    encoded_k: NDArray[np.int64]
    multiplicity_k: NDArray[np.int64]
    drawn_k: NDArray[np.int64]
    origins_k: Sequence[Origin | None]
    duplicates_k: NDArray[np.float64] | None
    slots_S: NDArray[np.int64]
    z_SD: Tensor
    seconds: float  # time that the learner spent on the copy

    def __len__(self) -> int:
        """Return k, the number of occupied slots."""
        return len(self.ids_k)


class MemoryReader:
    """The reads of a memory that only the learner's thread may make, between two steps."""

    def __init__(self, memory: WorkingMemory, origins: Origins) -> None:
        self._memory, self._origins = memory, origins
        nearest(torch.eye(2), torch.eye(2), k=1)  # load faiss now, not between two steps

    @torch.no_grad()
    def copy(self) -> SlotsCopy:
        """Return a copy of the columns, and of evenly spaced embeddings."""
        memory, k, began = self._memory, len(self._memory), time.perf_counter()
        columns = ("ids", "labels", "born", "encoded", "multiplicity", "draws")
        column_6k = to_host(torch.stack([getattr(memory, name) for name in columns])).numpy()
        count_k = self._counts()
        slots_S = np.arange(min(k, MAPPED)) * k // max(1, min(k, MAPPED))
        z_SD = to_host(memory.embeddings[torch.from_numpy(slots_S).to(memory.device)]).float()
        return SlotsCopy(
            at=time.time(),
            taken=time.monotonic(),
            added=memory.added,
            ids_k=column_6k[0],
            labels_k=column_6k[1],
            born_k=column_6k[2],
            encoded_k=column_6k[3],
            multiplicity_k=column_6k[4],
            drawn_k=column_6k[5],
            origins_k=self._origins.of(column_6k[0].tolist()),
            duplicates_k=None if count_k is None else to_host(count_k).clone().numpy(),
            slots_S=slots_S,
            z_SD=z_SD,
            seconds=time.perf_counter() - began,
        )

    def _counts(self) -> Tensor | None:
        policy, k = self._memory.eviction, len(self._memory)
        cheap = policy.keeps_counts or isinstance(policy.score, Linear) or k * k <= MOST_PAIRS
        return self._memory.counts() if cheap else None

    @property
    def most_pictures(self) -> int:
        """The largest number of pictures that one call of `images` reads; 0 without pictures."""
        shape = self._memory.image_shape
        if shape is None or shape[0] not in (1, 3):  # the images are the bytes of vectors
            return 0
        return min(TILES, max(1, PIXELS // math.prod(shape)))

    @torch.no_grad()
    def nearest(self, slot: int, neighbours: int) -> dict[str, list[tuple[int, float]]]:
        """Return the nearest (slot, cosine) of one slot, by space."""
        memory, found = self._memory, {}
        for space, columns in spaces(memory).items():
            row_kX = getattr(memory, columns)
            cosine_1n, slot_1n = nearest(row_kX[slot : slot + 1], row_kX, k=neighbours + 1)
            pairs = zip(slot_1n[0].tolist(), cosine_1n[0].tolist(), strict=True)
            found[space] = [(other, cosine) for other, cosine in pairs if other != slot]
        return {space: pairs[:neighbours] for space, pairs in found.items()}

    def samples_in(self, slots: Sequence[int]) -> list[tuple[int, Origin | None]]:
        """Return the id and the origin of the sample in each of these slots."""
        ids = to_host(self._memory.ids[torch.tensor(slots, dtype=torch.int64)]).tolist()
        return list(zip(ids, self._origins.of(ids), strict=True))

    @torch.no_grad()
    def images(self, slots: Sequence[int]) -> tuple[list[str | None], Tensor]:
        """Return the ids of these slots, None for empty slots, and their shrunk images."""
        memory = self._memory
        assert memory.image_shape is not None, "most_pictures is 0 without images"
        assert memory.images is not None, "a memory with an image shape keeps images"
        held = [slot if slot < len(memory) else None for slot in slots]
        asked = torch.tensor([0 if s is None else s for s in held], dtype=torch.int64)
        channels, side = memory.image_shape[0], min(TILE, memory.image_shape[1])
        if not any(s is not None for s in held):
            empty_nCHW = torch.zeros(len(slots), channels, side, side, dtype=torch.uint8)
            return [None] * len(slots), empty_nCHW
        image_nCHW = memory.images[asked.to(memory.images.device)]
        id_n = to_host(memory.ids[asked.to(memory.device)]).tolist()
        ids = [None if s is None else str(i) for s, i in zip(held, id_n, strict=True)]
        return ids, to_host(shrunk(image_nCHW, side))
