"""The evaluation on held-out images, as the page shows it.

Shapes: Q queries, C channels, H height, W width, P pictures, n nearest references of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stream_ssl.observe.held_out import Answered, HeldOutProbe
from stream_ssl.observe.page.memory_reader import TILE
from stream_ssl.observe.page.picture_sheet import picture_sheet
from stream_ssl.observe.slot_history import shrunk
from stream_ssl.rate_limited_logger import printable

MOST_CONFUSED = 12
"""The maximum number of confused pairs of classes on the page."""


class HeldOutView:
    """The classes that the encoder confuses, and the neighbours of some pictures, now and before.

    Args:
        probe: the probe of the learner. It has run at least once, unless the run was resumed.
    """

    def __init__(self, probe: HeldOutProbe, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe, self._clock = probe, clock

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON; `pictures` has the images under their names in `shown`."""
        probe = self._probe
        answer: dict[str, Any] = {"queries": len(probe.queries[1]), "confused": [], "shown": []}
        if not probe.past:  # after a restart, until the next probe
            return {**answer, "step": None, "age": None, "before": None, "pictures": None}
        first, newest = probe.past[0], probe.past[-1]
        answer |= {"step": newest.step, "age": self._clock() - newest.at, "before": None}
        answer["confused"] = self._confused(newest)
        if first is not newest:
            answer["before"] = self._clock() - first.at
        names: dict[str, Tensor] = {}
        for row, query in enumerate(probe.shown_P.tolist()):
            one = {"picture": f"query-{query}", "label": self._name(int(probe.queries[1][query]))}
            names[one["picture"]] = probe.queries[0][query]
            answer["shown"].append({
                **one,
                "now": self._near(newest, row, names),
                "before": [] if first is newest else self._near(first, row, names),
            })  # fmt: skip
        image_nCHW = torch.stack(list(names.values()))
        drawn = image_nCHW.shape[1] in (1, 3)
        answer["pictures"] = picture_sheet(list(names), shrunk(image_nCHW, TILE)) if drawn else None
        return answer

    def _near(self, answered: Answered, row: int, names: dict[str, Tensor]) -> list[dict[str, str]]:
        """Return the references nearest to a picture, and add their images to `names`."""
        image_NCHW, label_N = self._probe.references
        neighbours = []
        for reference in answered.near_Pn[row].tolist():
            name = f"reference-{reference}"
            names[name] = image_NCHW[reference]
            neighbours.append({"picture": name, "label": self._name(int(label_N[reference]))})
        return neighbours

    def _confused(self, answered: Answered) -> list[dict[str, Any]]:
        """Return the pairs of classes that kNN confuses most, by the share of the true class."""
        label_Q = self._probe.queries[1].tolist()
        of_class = Counter(label_Q)
        pairs = Counter(
            (true, found)
            for true, found in zip(label_Q, answered.found_Q.tolist(), strict=True)
            if true != found
        )
        rows: list[dict[str, Any]] = [
            {
                "label": self._name(true),
                "taken_for": self._name(found),
                "share": count / of_class[true],
            }
            for (true, found), count in pairs.items()
        ]
        rows.sort(key=lambda row: (-row["share"], row["label"], row["taken_for"]))
        return rows[:MOST_CONFUSED]

    def _name(self, label: int) -> str:
        names = self._probe.names
        return printable(names[label]) if names and 0 <= label < len(names) else f"class {label}"
