"""The origins of the memory's samples, for displays and exports. Training does not use them.

Shapes: B samples of a batch, k occupied slots, L bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from stream_ssl.batch import Origin
from stream_ssl.memory import Admission


class Origins:
    """The origin of each sample that the memory holds, by id.

    On several ranks these are the samples that this rank read and its own shard holds. If one id is
    in the memory twice, its origin is removed with the first of the two that is evicted.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Origin] = {}

    def of(self, ids: Iterable[int]) -> list[Origin | None]:
        """Return the origin of each of these ids, None if unknown."""
        return [self._by_id.get(number) for number in ids]

    def originals(self) -> set[str]:
        """Return the names of the original bytes that are kept."""
        return {one.original for one in self._by_id.values() if one.original is not None}

    def follow(
        self, ids: Sequence[int], origins_B: Sequence[Origin | None] | None, admission: Admission
    ) -> list[Origin | None]:
        """Record the admission of a batch. Return the origin of each sample that was evicted.

        Without `origins_B`, the origins of the batch are unknown.
        """
        origins_B = origins_B or [None] * len(ids)
        came = dict(zip(ids, origins_B, strict=True))
        evicted = [
            self._by_id.pop(number, None) or came.get(number)
            for number in admission.evicted.tolist()
        ]
        for number, origin, slot in zip(ids, origins_B, admission.slots.tolist(), strict=True):
            if slot >= 0 and origin is not None:
                self._by_id[number] = origin
        return evicted

    def state(self) -> dict[str, Tensor]:
        """Return one row for each origin, see `packed`.

        A row has the id, the producer, the source, the source's id, the time, and the name of the
        original bytes if they are kept.
        """
        return {"rows": packed((number, *origin.row()) for number, origin in self._by_id.items())}

    def forget_originals(self) -> None:
        """Forget the names of the original bytes, which another run keeps."""
        self._by_id = {
            number: origin._replace(original=None) for number, origin in self._by_id.items()
        }

    def load(self, state: Mapping[str, Tensor], ids: Iterable[int]) -> None:
        """Load a state that `state` returned, but only the ids that the memory holds.

        Raises:
            ValueError: the state is damaged. The origins are then unchanged.
        """
        held = set(ids)
        try:
            rows = [_row(row) for row in unpacked(state["rows"])] if "rows" in state else []
        except ValueError as error:
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"the origins of the samples are damaged: {reason}; give an earlier checkpoint"
            ) from error
        self._by_id = {number: origin for number, origin in rows if number in held}


def _row(row: Any) -> tuple[int, Origin]:
    """Return the id and the origin of a row, see `Origins.state`."""
    number, *fields = row if isinstance(row, list) else [None]
    kinds = (str, str, str, int | float, str)
    fits = len(fields) in (4, 5) and all(map(isinstance, fields, kinds))
    if not (fits and isinstance(number, int)):
        raise ValueError(f"{row!r:.80} is no origin")
    return number, Origin(*fields)


def packed(rows: Iterable[Sequence[object] | None]) -> Tensor:
    """Return the rows as concatenated msgpack, uint8 [L]. `torch.cat` joins the parts of ranks."""
    packer = msgpack.Packer()
    text = b"".join(packer.pack(row) for row in rows)
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def unpacked(rows_L: Tensor) -> list[Any]:
    """Return the rows that were given to `packed`."""
    text = rows_L.numpy().tobytes()
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(text)))
    unpacker.feed(text)
    return list(unpacker)
