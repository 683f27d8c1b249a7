"""The map of the page: slots as points on a plane, by principal axes or by UMAP.

Shapes: D embedding, S evenly spaced slots.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.observe.page.memory_reader import SlotsCopy
from stream_ssl.observe.page.umap_plane import LEAST, UmapPlane


class SlotsMap:
    """The newest maps of a memory. Any thread may call the methods.

    Attributes:
        umap: the map by UMAP, which another process computes.
    """

    def __init__(self) -> None:
        self.umap: UmapPlane[SlotsCopy] = UmapPlane()
        self._lock = threading.Lock()  # guards all below
        self._made: tuple[SlotsCopy, dict[str, Any]] | None = None
        self._axes_2D: NDArray[np.float32] | None = None

    def of(self, snapshot: SlotsCopy, by: str, producer: str | None) -> dict[str, Any]:
        """Return the points of a snapshot, or of the last snapshot that UMAP has finished.

        For the arguments, see `MemoryView.map`.
        """
        with self._lock:
            if self._made is None or self._made[0] is not snapshot:
                self._made = (snapshot, self._project(snapshot))
            axes = self._made[1]
        if by == "pca":
            return _only(producer, snapshot, axes)
        begin_S2 = np.array([axes["x"], axes["y"]], np.float32).T
        made = self.umap.newest(snapshot, snapshot.z_SD.numpy(), begin_S2)
        if made is None:
            return {**_only(producer, snapshot, axes), "note": self._why_not_yet(snapshot)}
        return _only(producer, made[0], _placed(*made, by="umap"))

    def _why_not_yet(self, snapshot: SlotsCopy) -> str:
        """Return why there is no map by UMAP."""
        if self.umap.failure:
            return f"UMAP failed: {self.umap.failure}"
        if len(snapshot.z_SD) < LEAST:
            return f"UMAP needs at least {LEAST} slots"
        return "UMAP is being computed"

    def _project(self, snapshot: SlotsCopy) -> dict[str, Any]:
        z_SD = snapshot.z_SD.numpy()
        if len(z_SD) < 3:
            return {**_placed(snapshot, np.zeros((len(z_SD), 2), np.float32)), "share": [0.0, 0.0]}
        centred_SD = z_SD - z_SD.mean(axis=0)
        variance_D, axes_DD = np.linalg.eigh(centred_SD.T @ centred_SD / len(z_SD))
        axes_2D = axes_DD[:, [-1, -2]].T.astype(np.float32)
        if self._axes_2D is not None:  # the sign of an axis is arbitrary, so keep the last sign
            axes_2D *= np.where((axes_2D * self._axes_2D).sum(axis=1, keepdims=True) < 0, -1, 1)
        self._axes_2D = axes_2D
        total = max(1e-12, float(variance_D.sum()))
        share = [round(float(variance_D[-n]) / total, 4) for n in (1, 2)]
        return {**_placed(snapshot, centred_SD @ axes_2D.T), "share": share}


def _placed(snapshot: SlotsCopy, point_S2: NDArray[np.float32], by: str = "pca") -> dict[str, Any]:
    """Return the map that puts the snapshot's slots at these points."""
    slots_S, counts_k = snapshot.slots_S, snapshot.duplicates_k
    labels_S = snapshot.labels_k[slots_S]
    if len(point_S2):
        point_S2 = point_S2 - (point_S2.max(axis=0) + point_S2.min(axis=0)) / 2 * (by != "pca")
        point_S2 = point_S2 / max(1e-9, float(np.quantile(np.abs(point_S2), 0.995)))
    point_S2 = point_S2.clip(-1, 1).round(3)
    return {
        "at": snapshot.at,
        "by": by,
        "slots": slots_S.tolist(),
        "ids": [str(number) for number in snapshot.ids_k[slots_S]],
        "x": point_S2[:, 0].tolist(),
        "y": point_S2[:, 1].tolist(),
        "labels": labels_S.tolist() if (labels_S >= 0).any() else None,
        "duplicates": None if counts_k is None else counts_k[slots_S].round(3).tolist(),
    }


def _only(producer: str | None, snapshot: SlotsCopy, points: dict[str, Any]) -> dict[str, Any]:
    """Return the points of a map whose slots hold samples of a producer; None: all points."""
    if producer is None:
        return points
    origins = [snapshot.origins_k[slot] for slot in points["slots"]]
    kept = [n for n, one in enumerate(origins) if one is not None and one.producer == producer]
    columns = ("slots", "ids", "x", "y", "labels", "duplicates")
    held = {name: points[name] for name in columns if points[name] is not None}
    return {**points, **{name: [values[n] for n in kept] for name, values in held.items()}}
