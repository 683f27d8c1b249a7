"""The facts about slots on the page, computed from a snapshot on the thread that asks.

Shapes: D embedding, k occupied slots, S evenly spaced slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_ssl.memory.index import kmeans
from stream_ssl.observe.balance import entropy
from stream_ssl.observe.page.memory_reader import SlotsCopy

CELLS = 12
"""The number of clusters that replace the classes of a stream without labels."""


def near(
    snapshot: SlotsCopy, found: Mapping[str, Sequence[tuple[int, float]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of slots that were found, each with its cosine, by kind of descriptor."""
    return {
        space: [
            {**row(snapshot, slot), "cosine": round(cosine, 4)}
            for slot, cosine in pairs
            if slot < len(snapshot)
        ]
        for space, pairs in found.items()
    }


def row(snapshot: SlotsCopy, slot: int) -> dict[str, Any]:
    """Return the facts of one slot."""
    counts_k = snapshot.duplicates_k
    label, origin = int(snapshot.labels_k[slot]), snapshot.origins_k[slot]
    return {
        "slot": slot,
        "id": str(snapshot.ids_k[slot]),
        "label": label if label >= 0 else None,
        "duplicates": None if counts_k is None else number(float(counts_k[slot])),
        "age": int(snapshot.added - snapshot.born_k[slot]),
        "stale": int(snapshot.added - snapshot.encoded_k[slot]),
        "multiplicity": int(snapshot.multiplicity_k[slot]),
        "drawn": int(snapshot.drawn_k[slot]),
        "origin": None if origin is None else origin.known(),
    }


def balance(snapshot: SlotsCopy) -> dict[str, Any]:
    """Return the slots by class, or by embedding cluster without labels; the largest first."""
    if (snapshot.labels_k >= 0).any():
        names, counts = np.unique(snapshot.labels_k[snapshot.labels_k >= 0], return_counts=True)
        named = [(str(n), int(c)) for n, c in zip(names, counts, strict=True)]
        kind = "class"
    else:
        kind, named = "cluster", []
        if len(snapshot):
            _, cell_S = kmeans(snapshot.z_SD, CELLS, seed=0)
            sizes = torch.bincount(cell_S).tolist()
            scale = len(snapshot) / max(1, len(cell_S))
            named = [(str(n), round(c * scale)) for n, c in enumerate(sizes)]
    named.sort(key=lambda pair: -pair[1])
    effective = math.exp(entropy(count for _, count in named))
    return {
        "kind": kind,
        "count": len(named),
        "slots": named[:64],
        "unlabelled": len(snapshot) - sum(count for _, count in named) if kind == "class" else 0,
        "effective": round(effective, 2),
    }


def order(snapshot: SlotsCopy, sort: str) -> NDArray[np.int64]:
    """Return the slots in the order of the listing; see `MemoryView.listing`."""
    keys = {
        "duplicates": snapshot.duplicates_k,
        "drawn": snapshot.drawn_k,
        "oldest": -snapshot.born_k,
        "newest": snapshot.born_k,
        "stalest": -snapshot.encoded_k,
    }
    key_k = keys[sort]
    if key_k is None:
        key_k = -snapshot.born_k
    return np.argsort(-key_k, kind="stable")


def histogram(values_k: NDArray[Any], bins: int = 24) -> dict[str, list[float]]:
    """Return the counts of the values in `bins` equal parts of their range, and the edges."""
    if not len(values_k):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(values_k, bins=bins)
    return {"edges": [float(f"{e:.6g}") for e in edges], "counts": counts.tolist()}


def placed_slot(snapshot: SlotsCopy, slot: int | None) -> dict[str, Any] | None:
    """Return a slot and the id of its sample. The page asks for the picture by both."""
    return None if slot is None else {"slot": slot, "id": str(snapshot.ids_k[slot])}


def number(value: float) -> float | None:
    """Return a rounded number, or None if it is not finite, which JSON cannot hold."""
    return round(value, 4) if math.isfinite(value) else None
