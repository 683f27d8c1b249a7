"""The effective rank of the recent keys and its recent maximum, which reveal a collapse.

Shapes: B batch, D embedding.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stream_ssl import durable
from stream_ssl.bounded_files import read_map
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.stats import spectral_rank
from stream_ssl.observe.conditions import RANK_SHARE
from stream_ssl.observe.thumbnails import thumbnails

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord

log = logging.getLogger("stream_ssl.health")

HALF_LIFE = 256.0
"""The half-life of a sample in a rank, in samples. A collapse shows within a thousand samples."""
LEAST_SAMPLES = 256
"""The least number of samples for a rank."""
PEAK_HALF_LIFE = 200_000.0
"""The half-life of a maximum minus 1, in samples, while the rank does not reach it again."""
COLLAPSED_HALF_LIFE = 10 * PEAK_HALF_LIFE
"""The half-life during a collapse.

It is long, so that a collapse stays visible. It is finite, so that a wrong maximum ends."""
FILE = "ranks.json"
MOST_BYTES = 4096


class RecentRank:
    """The effective ranks of the keys and of the thumbnails, each with its recent maximum.

    A covered camera lowers both ranks. A collapse lowers only the rank of the keys. A file in the
    run's folder keeps the maxima, so that a restart does not hide a collapse.

    Args:
        folder: the run's folder; None saves nothing.
        number_bytes: the bytes of a number of a vector; None for a stream of images.

    Attributes:
        peaks: the maxima by "keys" and "images".
    """

    def __init__(self, folder: Path | None = None, number_bytes: int | None = None) -> None:
        self.number_bytes = number_bytes
        # Older versions kept the maximum of a vector's bytes, not of its numbers, as "images".
        self._names = {"keys": "keys", "images": "images" if number_bytes is None else "vectors"}
        self._file = None if folder is None else folder / FILE
        self._moments: dict[str, Tensor] = {}
        self._samples = self._new = torch.tensor(0)
        self.peaks = self._load()
        self._saved = dict(self.peaks)

    def consume(self, record: StepRecord) -> None:
        """Take the keys of a step. Replays count, too, because an encoder may collapse on them."""
        keys_BD = record.keys_BD.float()
        if not len(keys_BD):
            return
        usable = torch.isfinite(keys_BD).all()  # on the device, so that the host need not wait
        more = len(keys_BD) * usable
        self._samples = self._samples.to(more.device) + more
        self._new = self._new.to(more.device) + more
        self._add("keys", keys_BD, usable)
        if record.images_BCHW is not None:
            row_BA = thumbnails(keys_BD, record.images_BCHW, self.number_bytes)
            self._add("images", row_BA, usable)

    def measure(self) -> dict[str, float]:
        """Return the current ranks by "keys" and "images".

        The result is empty before LEAST_SAMPLES samples. The call also updates the maxima, and
        saves them if they have changed.
        """
        samples, new = to_host(torch.stack([self._samples, self._new])).tolist()
        if samples < LEAST_SAMPLES:
            return {}
        ranks = {name: spectral_rank(moment) for name, moment in self._moments.items()}
        for name, rank in ranks.items():
            peak, most = self.peaks.get(name, rank), len(self._moments[name])
            if peak > 1.01 * most:  # rounding may put a rank above the dimension
                log.warning(
                    "%s: the maximum %.6g of %s is above its dimension %d; the run starts "
                    "a new maximum", self._file, peak, name, most,
                )  # fmt: skip
                peak = rank
            collapsed = rank - 1 < RANK_SHARE * (peak - 1)
            half_life = COLLAPSED_HALF_LIFE if collapsed else PEAK_HALF_LIFE
            self.peaks[name] = max(1 + (peak - 1) * 0.5 ** (new / half_life), rank)
        self._new = torch.zeros_like(self._new)
        self._save()
        return ranks

    def _add(self, name: str, rows_BD: Tensor, usable: Tensor) -> None:
        moment_DD = rows_BD.T @ rows_BD
        before_DD = self._moments.get(name)
        if before_DD is None or before_DD.shape != moment_DD.shape:
            before_DD = torch.zeros_like(moment_DD)
        moment_DD = moment_DD + before_DD * 0.5 ** (len(rows_BD) / HALF_LIFE)
        self._moments[name] = torch.where(usable, moment_DD, before_DD)

    def _load(self) -> dict[str, float]:
        """Return the saved maxima of the run. Ignore invalid values, with a warning."""
        if self._file is None:
            return {}
        try:
            saved = read_map(self._file, MOST_BYTES)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s; the run starts new maxima of its ranks", error)
            return {}
        found: dict[str, float] = {}
        for name, saved_as in self._names.items():
            if saved_as not in saved:
                continue
            peak = saved[saved_as]
            if type(peak) in (int, float) and peak >= 1:
                found[name] = float(peak)
            else:
                text = "%s: the maximum %.40r of %s is not a number of at least 1; it is ignored"
                log.warning(text, self._file, peak, name)
        return found

    def _save(self) -> None:
        near = all(
            abs(peak - self._saved.get(name, 0.0)) < 0.02 * peak
            for name, peak in self.peaks.items()
        )
        if self._file is None or near:
            return
        try:
            saved = {self._names[name]: peak for name, peak in self.peaks.items()}
            durable.write(self._file, json.dumps(saved), wait=False)
        except OSError:
            return  # other conditions report a full disk; the next change tries again
        self._saved = dict(self.peaks)
