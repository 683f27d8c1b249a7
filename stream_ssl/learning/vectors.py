"""Learning from vectors instead of images: their settings, an encoder and their views.

Batches and the memory carry vectors as their bytes, uint8 [B, D * itemsize, 1, 1].

Shapes: B samples, D numbers of a vector, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from stream_ssl.memory.compute import to_device
from stream_ssl.memory.descriptors import vectors_of
from stream_ssl.methods.norm import BatchNorm1d

Dtype = Literal["float16", "float32"]

DROPOUT = 0.3
"""Probability with which each number of a view is replaced by the vector's mean."""

MOST_MIX = 0.1
"""Largest weight with which another vector of the batch is mixed into a view."""


@dataclass
class Vectors:
    """Settings to learn from vectors: sensor readings, or embeddings of any other model.

    Args:
        dim: number of values in each vector, at least 2; null: the stream has images, and the
            following options have no effect. With vectors, the sections decoder, encoder and views
            have no effect.
        dtype: type in which the memory stores vectors, float16 or float32. Producers may send
            either.
        widths: widths of the encoder's layers (linear, batch norm, ReLU), at least one.
        noise: standard deviation of the noise in a view, in units of the vector's own, 0 or more.

    Raises:
        ValueError: an argument is outside its range.
    """

    dim: int | None = None
    dtype: Dtype = "float32"
    widths: Sequence[int] = (512, 512)
    noise: float = 0.3

    def __post_init__(self) -> None:
        self.widths = tuple(self.widths)
        if self.dim is not None and self.dim < 2:
            raise ValueError(f"vectors.dim is {self.dim}: a vector has at least 2 numbers")
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"vectors.widths is {self.widths}: give at least one width above 0")
        if self.noise < 0:
            raise ValueError(f"vectors.noise is {self.noise}: it must not be negative")

    @property
    def kept(self) -> Dtype | None:
        """The dtype if the run learns from vectors, else None."""
        return None if self.dim is None else self.dtype

    @property
    def number_bytes(self) -> int:
        """The bytes of one number, as the memory stores it."""
        return 2 if self.dtype == "float16" else 4

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the bytes of one vector, as the memory stores them."""
        assert self.dim is not None
        return self.dim * self.number_bytes, 1, 1


class MLP(nn.Module):
    """An encoder of vectors [B, D] to features [B, F], F = `dim`.

    It consists of linear layers with batch norm and ReLU.

    Args:
        features: D.
        widths: widths of the layers; the last width is F.
    """

    def __init__(self, features: int, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(features, width, bias=False), BatchNorm1d(width), nn.ReLU()]
            features = width
        self.layers = nn.Sequential(*layers)
        self.dim = features

    def forward(self, value_BD: Tensor) -> Tensor:
        feature_BF: Tensor = self.layers(value_BD)
        return feature_BF


class VectorViews(nn.Module):
    """A module from the bytes of vectors to one augmented float32 view [B, D] of each.

    Each vector is first scaled to mean 0 and standard deviation 1, so the augmentation has the same
    strength for every sensor and model. It is then mixed with another vector, some of its numbers
    are dropped, and noise is added. All random numbers come from torch's global CPU generator.

    Args:
        settings: see `Vectors`.
    """

    mean: Tensor

    def __init__(self, settings: Vectors) -> None:
        super().__init__()
        self._dtype = getattr(torch, settings.dtype)
        self._noise = settings.noise
        self.register_buffer("mean", torch.zeros(1), persistent=False)  # its device is the module's

    @torch.no_grad()
    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.augmented(self.plain(image_BCHW))

    @torch.no_grad()
    def augmented(self, value_BD: Tensor) -> Tensor:
        """Return one augmented view of each standardised vector [B, D]."""
        device, count = value_BD.device, len(value_BD)
        if count > 1:
            weight_B1 = to_device(torch.rand(count, 1) * MOST_MIX, device)
            other_B = to_device(torch.randperm(count), device)
            value_BD = torch.lerp(value_BD, value_BD[other_B], weight_B1)
        value_BD = value_BD * to_device(torch.rand(value_BD.shape) >= DROPOUT, device)
        if self._noise:
            value_BD = value_BD + self._noise * to_device(torch.randn(value_BD.shape), device)
        return value_BD

    @torch.no_grad()
    def plain(self, image_BCHW: Tensor) -> Tensor:
        """Return the vectors standardised but not augmented, as evaluation needs them."""
        return self.standardised(vectors_of(image_BCHW, self._dtype))

    def standardised(self, value_BD: Tensor) -> Tensor:
        """Return vectors [B, D] standardised, after rounding to the memory's dtype."""
        value_BD = value_BD.to(self._dtype).float()
        value_BD = value_BD - value_BD.mean(dim=1, keepdim=True)
        return value_BD / value_BD.std(dim=1, keepdim=True).clamp_min(1e-6)
