"""The keys of images that are encoded only for the memory.

Shapes: B samples, b images of a block, C channels, H height, W width, D embedding, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.learning.phase_timer import PhaseTimer
from stream_ssl.memory.compute import to_host
from stream_ssl.methods import Method
from stream_ssl.methods.base import is_unit


class BatchKeys(NamedTuple):
    """Embeddings [B, D], whether the memory accepts them, and the features [B, F] they are made of.

    The memory accepts embeddings that are all finite and of unit norm. Features are computed only
    if the memory's descriptor needs them, and never by an update.
    """

    keys_BD: Tensor
    usable: bool
    features_BF: Tensor | None = None


class KeyEncoder:
    """The method's key encoder, with the view and the number type that the run is set to.

    Args:
        method: the method whose key encoder is used.
        view: makes the view of the images that is encoded.
        needs_features: whether the memory's descriptor needs features.
        device: the device of the method.
        precision: number type of the computation, "float32" or "bfloat16".
        timer: takes the seconds of the phases "data" and "forward".

    Attributes:
        view: as in the arguments.
    """

    def __init__(
        self,
        method: Method,
        view: Callable[[Tensor], Tensor],
        needs_features: bool,
        device: torch.device,
        precision: str,
        timer: PhaseTimer,
    ) -> None:
        self._method, self.view, self._needs_features = method, view, needs_features
        self._device, self._precision, self._timer = device, precision, timer

    def __call__(self, *images_BCHW: Tensor) -> list[BatchKeys]:
        """Return the keys of each of these groups of images on the device, from one pass."""
        sizes = [len(group) for group in images_BCHW]
        with self._timer("data"):
            view_BCHW = self.view(torch.cat(images_BCHW) if len(sizes) > 1 else images_BCHW[0])
        with self._timer("forward"), self.autocast():
            if self._needs_features:
                keys_BD, features_BF = self._method.encode_newcomers(view_BCHW)
            else:
                keys_BD, features_BF = self._method.encode_keys(view_BCHW), None
            keys = torch.split(keys_BD, sizes)
            usable = to_host(torch.stack([is_unit(key_BD) for key_BD in keys])).tolist()
            features = (
                [None] * len(sizes) if features_BF is None else torch.split(features_BF, sizes)
            )
            return [BatchKeys(*one) for one in zip(keys, usable, features, strict=True)]

    def features(self, images_bCHW: Tensor) -> Tensor:
        """Return the features [b, F] of images on any device."""
        view_bCHW = self.view(images_bCHW.to(self._device))
        with self.autocast():
            return self._method.encode_newcomers(view_bCHW)[1]

    def autocast(self) -> torch.autocast:
        """Return the context in which the method computes."""
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"
        )


def images_of(batch: Batch[Tensor]) -> Tensor:
    """Return the images of a batch that is to be encoded."""
    assert batch.images_BCHW is not None, "only images can be encoded"
    return batch.images_BCHW
