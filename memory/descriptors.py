"""Descriptors: the rows on which duplicates are counted.

The paper counts duplicates on embeddings, which also serve as negatives. This creates a circle:
near-duplicates in the memory are negatives of each other, so training pushes them apart. Then they
no longer look like duplicates, and they stay in the memory. A descriptor that training does not
change breaks the circle, and its counts never become stale.

Shapes: B samples, D embedding, A descriptor, R slots, C H W image, F features.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize, pad

from stream_ssl.memory.checks import (
    Array,
    Checked,
    as_tensor,
    check_count,
    check_embeddings,
    check_instance,
    check_number,
)
from stream_ssl.memory.columns import Image
from stream_ssl.memory.fixed import Fixed
from stream_ssl.memory.frozen_weights import check_finite, fingerprint_of, load_weights
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup

CONTRAST = 1 / 64
"""The contrast below which a thumbnail counts as noise, as a part of the pixel range."""

MOST_FEATURES = 256
"""The size of rows of features at which `Features` begins to project them."""

LEAST_SPREAD = 1e-5
"""The norm, in units of the largest number, below which the differences in a row are rounding."""


class Descriptor(ABC):
    """A function from samples to unit rows, whose cosines measure the similarity of two samples."""

    needs_images: bool = True
    """Whether the descriptor reads images. Otherwise it reads embeddings only."""

    needs_features: bool = False
    """Whether the descriptor reads the encoder's features."""

    moves: bool = False
    """Whether a sample's descriptor changes when its embedding is computed again."""

    @property
    def moving(self) -> slice:
        """The columns that may change when embeddings are computed again, after `dim`."""
        return slice(None) if self.moves else slice(0)

    @abstractmethod
    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        """Return the size A of a descriptor.

        Args:
            embedding_dim: the size D of an embedding.
            image_shape: (C, H, W) of the uint8 images, or None without images.

        Raises:
            ValueError: the descriptor cannot describe such samples.
        """

    @abstractmethod
    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        """Return unit rows [B, A] with the dtype and the device of `z_BD`.

        Args:
            z_BD: the embeddings, unit rows.
            image_BCHW: uint8, on any device. None if `needs_images` is False.
        """

    def describe(
        self, z_BD: Tensor, image_BCHW: Tensor | None, feature_BF: Tensor | None
    ) -> Tensor:
        """Return the same with features, which are None unless `needs_features` is set."""
        del feature_BF
        return self(z_BD, image_BCHW)

    def refreshed(self, before_RA: Tensor, z_RD: Tensor) -> Tensor:
        """Return the descriptors [R, A] of samples whose embeddings were computed again."""
        del z_RD
        return before_RA

    def fit(self, features: int) -> None:
        """Choose the size of a row for an encoder with this number of features."""
        del features

    def joined(self, features: int) -> None:
        """Record how many features the samples have that were offered to the memory."""
        del features

    @property
    def is_centred(self) -> bool:
        """Whether no part of the descriptor waits for the first call of `redescribed`."""
        return True

    def redescribed(
        self, before_kA: Tensor, feature_kF: Tensor, group: RankGroup = SINGLE_PROCESS
    ) -> Tensor:
        """Return the descriptors [k, A] of all slots of this shard by new features.

        Args:
            before_kA: the present descriptors.
            feature_kF: the features of the occupied slots by the present encoder.
            group: the ranks that hold the shards, which must all make this call.
        """
        del feature_kF, group
        return before_kA

    def fixed(self) -> Descriptor | None:
        """Return the part of this descriptor that needs images only and never changes, or None.

        This part is known before a sample is encoded.
        """
        return self if self.needs_images and not self.moves else None

    def of_fixed(self, row_RA: Tensor) -> Tensor:
        """Return the unit rows of `fixed`, taken from rows of this descriptor."""
        return row_RA

    def to(self, device: torch.device) -> None:
        """Compute on this device from now on."""
        del device

    def state(self) -> dict[str, Tensor]:
        """Return what a memory must save with its rows to describe further samples alike."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`."""
        del state

    def __repr__(self) -> str:
        """Return the name of the class. A state is loaded only under a descriptor of the same repr.

        A descriptor with arguments shows them in a repr of its own.
        """
        return type(self).__name__


class Embedding(Descriptor):
    """The embedding itself, as in the DUEL paper. It changes as the encoder learns.

    >>> Embedding()(torch.eye(2), None).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    needs_images, moves = False, True

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        del image_shape
        return embedding_dim

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        del image_BCHW
        return z_BD

    def refreshed(self, before_RA: Tensor, z_RD: Tensor) -> Tensor:
        del before_RA
        return z_RD

    def __repr__(self) -> str:
        return "Embedding()"


class Thumbnail(Descriptor):
    """The image shrunk to side x side pixels by averaging, minus its mean, at unit norm.

    Two frames of one scene have a cosine near 1. The cosines of frames of different scenes spread
    around 0. The overall brightness does not count. Images with almost no contrast, such as those
    of a dark or covered camera, all get the same row instead of their noise. For this purpose a
    constant of 1/64 of the pixel range is added after the mean is subtracted.

    Args:
        side: the side of the thumbnail in pixels, at least 2. A = C side^2, for images of any size.

    >>> dark, light = torch.zeros(1, 3, 32, 32), torch.full((1, 3, 64, 48), 200.0)
    >>> z_BD, describe = torch.ones(1, 1), Thumbnail(side=8)
    >>> round(float(describe(z_BD, dark.byte()) @ describe(z_BD, light.byte()).T), 4)
    1.0
    """

    side = Fixed[int]()

    def __init__(self, side: int = 8) -> None:
        self.side = check_count("side", side, 2, "pixels: a single one has no contrast")

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        del embedding_dim
        return shape_of(self, image_shape)[0] * self.side**2

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        image_BCHW = images_of(self, image_BCHW).to(z_BD.device)
        if len(image_BCHW) == 0:
            return z_BD.new_zeros(0, image_BCHW.shape[1] * self.side**2)
        small_BA = adaptive_avg_pool2d(image_BCHW.to(z_BD.dtype) / 255, self.side).flatten(1)
        return normalize(small_BA - small_BA.mean(dim=1, keepdim=True) + CONTRAST, dim=1)

    def __repr__(self) -> str:
        return f"Thumbnail(side={self.side})"


class Features(Descriptor):
    """The features of the encoder that is being trained, minus their mean over the memory.

    Training pushes the embeddings of slots apart, because they are negatives of each other. The
    features, from which the projector makes the embeddings, keep more of the classes. Counts on
    features balance a memory better on some streams, and worse on others (docs/study.md,
    docs/duplicates.md).

    The encoder changes. `WorkingMemory.describe_again` computes the features of all slots with the
    present encoder, and their mean. Between two calls, newcomers get the features of their time.
    Before the first call no mean is known, and none is subtracted.

    Args:
        dims: the size A of a row. Features of more numbers are projected on A orthogonal random
            directions, always the same. None: `fit` decides.

    >>> describe = Features(dims=2)
    >>> describe.redescribed(torch.eye(2), torch.tensor([[3.0, 0.0], [1.0, 0.0]])).tolist()
    [[1.0, 0.0], [-1.0, 0.0]]
    >>> describe.of_features(torch.tensor([[2.0, 7.0]])).tolist()
    [[0.0, 1.0]]
    """

    needs_images, needs_features = False, True

    def __init__(self, dims: int | None = None) -> None:
        self._given = None if dims is None else check_count("dims", dims, 1)
        self._dims = self._given
        self._mean_A: Tensor | None = None
        self._width: int | None = None  # F of the rows in the memory; None: unknown
        self._axes_FA: Tensor | None = None

    @property
    def is_centred(self) -> bool:
        """Whether a mean is known, because `redescribed` was called."""
        return self._mean_A is not None

    def fit(self, features: int) -> None:
        """Choose A for an encoder with this number of features, unless `dims` was given."""
        if self._given is None:
            self._dims = min(features, MOST_FEATURES)

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        del embedding_dim
        shape_of(self, image_shape)  # slots are described again from their images
        return self._size()

    def _size(self) -> int:
        if self._dims is None:
            raise ValueError("Features needs the size of its rows: give it dims, or call fit")
        return self._dims

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        del z_BD, image_BCHW
        raise ValueError(f"{self!r} describes samples by features: pass features=")

    def describe(
        self, z_BD: Tensor, image_BCHW: Tensor | None, feature_BF: Tensor | None
    ) -> Tensor:
        if feature_BF is None:
            return self(z_BD, image_BCHW)
        return self.of_features(feature_BF).to(z_BD)

    def of_features(self, feature_BF: Tensor) -> Tensor:
        """Return the descriptors [B, A] of samples with these features.

        Raises:
            ValueError: earlier features had another size.
        """
        if len(feature_BF) and self._width not in (None, width := feature_BF.shape[1]):
            raise ValueError(
                f"features have {width} numbers: must have {self._width}, as those in the memory "
                "have; after a change of the encoder, call describe_again first"
            )
        x_BA = self.project(feature_BF)
        return unit_or_blank(x_BA if self._mean_A is None else x_BA - self._mean_A, centre=False)

    def joined(self, features: int) -> None:
        self._width = features

    def project(self, feature_BF: Tensor) -> Tensor:
        """Return the features as rows of A numbers [B, A], float32, not centred."""
        dims, size = self._size(), feature_BF.shape[1]
        if size <= dims:
            return pad(feature_BF.float(), (0, dims - size))
        if self._axes_FA is None or len(self._axes_FA) != size:
            seeded = torch.Generator().manual_seed(0)
            random = torch.randn(size, dims, generator=seeded, dtype=torch.float32)
            self._axes_FA = torch.linalg.qr(random).Q
        self._axes_FA = self._axes_FA.to(feature_BF.device)
        return feature_BF.float() @ self._axes_FA

    def redescribed(
        self, before_kA: Tensor, feature_kF: Tensor, group: RankGroup = SINGLE_PROCESS
    ) -> Tensor:
        """Return the descriptors [k, A] of all slots of this shard, and keep the features' mean.

        Rows that are not finite do not count in the mean. They all get the same descriptor.
        """
        del before_kA
        x_kA, self._width = self.project(feature_kF), feature_kF.shape[1]
        finite_k1 = x_kA.isfinite().all(dim=1, keepdim=True)
        sum_A = torch.where(finite_k1, x_kA, 0.0).sum(dim=0, dtype=torch.float64)
        both_A = group.all_reduce_sum(torch.cat([sum_A, finite_k1.sum(dim=0).to(sum_A)]))
        self._mean_A = (both_A[:-1] / both_A[-1].clamp(min=1)).to(x_kA)
        return unit_or_blank(x_kA - self._mean_A, centre=False)

    def to(self, device: torch.device) -> None:
        if self._mean_A is not None:
            self._mean_A = self._mean_A.to(device)

    def state(self) -> dict[str, Tensor]:
        state = {} if self._mean_A is None else {"mean": self._mean_A.clone()}
        return state if self._width is None else {**state, "width": torch.tensor(self._width)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._mean_A = state["mean"].clone() if "mean" in state else None
        self._width = int(state["width"]) if "width" in state else None  # older states have none

    def __repr__(self) -> str:
        return f"Features(dims={self._dims})"


class Vector(Descriptor):
    """The vector as it was sent, minus its mean, at unit norm: for memories of vectors.

    Such a memory stores the bytes of a vector in place of pixels (uint8 [B, bytes, 1, 1]). Vectors
    that are not finite, or whose numbers are all equal, all get the same row.

    Args:
        dtype: dtype of the vectors in the memory, "float32" or "float16".

    >>> z_BD, sent_BD = torch.ones(2, 1), torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    >>> row_BA = Vector()(z_BD, sent_BD.view(torch.uint8)[:, :, None, None])
    >>> round(float(row_BA[0] @ row_BA[1]), 4)
    1.0
    """

    def __init__(self, dtype: Literal["float32", "float16"] = "float32") -> None:
        if dtype not in ("float32", "float16"):
            raise ValueError(f'dtype is {dtype!r}: choose "float32" or "float16"')
        self.dtype = dtype

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        del embedding_dim
        channels, height, width = shape_of(self, image_shape)
        size: int = getattr(torch, self.dtype).itemsize
        if (height, width) != (1, 1) or channels % size:
            raise ValueError(
                f"{self!r} describes vectors, and this memory keeps images of shape {image_shape}"
            )
        return channels // size

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        image_BCHW = images_of(self, image_BCHW).to(z_BD.device)
        value_BA = vectors_of(image_BCHW, getattr(torch, self.dtype)).to(z_BD.dtype)
        return unit_or_blank(value_BA, centre=True)

    def __repr__(self) -> str:
        return f"Vector(dtype={self.dtype!r})"


def vectors_of(image_BCHW: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [B, D] of vectors whose bytes are stored in place of pixels."""
    flat_BN = image_BCHW.flatten(1).contiguous()
    return flat_BN.view(dtype)


class Frozen(Descriptor):
    """The features of an encoder with fixed weights. A pretrained encoder makes counts semantic.

    Args:
        encoder: any module from normalised float images [B, C, H, W] to features of any shape,
            which are flattened. It is put into evaluation mode, also after a model that contains it
            was put into training mode, and gets no gradient.
        weights: a safetensors file with the encoder's state. None keeps the current weights. A
            memory's state contains their hash, and a memory with other weights rejects the state.
        mean: subtracted from pixels in [0, 1]: one number per channel, or one for all.
        std: then divides the pixels: one number per channel, or one for all, above 0.
        centre: subtract each row's mean, so that rows of positive features do not all look alike.
        batch: the largest number of images to encode at a time.

    Raises:
        ValueError: the weights do not fit the encoder or are not finite, or an argument is out of
            range.
    """

    def __init__(
        self,
        encoder: nn.Module,
        weights: Path | str | None = None,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
        centre: bool = True,
        batch: int = 256,
    ) -> None:
        if not isinstance(encoder, nn.Module):
            raise ValueError(
                f"encoder is {encoder!r}: must be a torch.nn.Module that takes images [B, C, H, W]"
            )
        if any(check_number("std", value) <= 0 for value in std):
            raise ValueError(f"std is {std}: must be above 0; pixels are divided by it")
        self.batch, self.centre = check_count("batch", batch, 1), bool(centre)
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        plain = getattr(encoder, "_orig_mod", encoder)  # without torch.compile, which adds a prefix
        if weights is not None:
            load_weights(plain, Path(weights))
        check_finite(plain)
        self.encoder = encoder.eval().requires_grad_(False)
        self.fingerprint, self._name = fingerprint_of(plain), type(plain).__name__

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        del embedding_dim
        shape = shape_of(self, image_shape)
        try:
            device = next(iter(self.encoder.state_dict().values()), torch.empty(0)).device
            image_BCHW = torch.zeros(1, *shape, dtype=torch.uint8, device=device)
            return int(self._features(image_BCHW).shape[1])
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"the frozen encoder {type(self.encoder).__name__} cannot take images of shape "
                f"{shape}: {error}"
            ) from error

    @torch.no_grad()
    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        image_BCHW = images_of(self, image_BCHW).to(z_BD.device)
        parts = [self._features(part_bCHW) for part_bCHW in torch.split(image_BCHW, self.batch)]
        return unit_or_blank(torch.cat(parts).to(z_BD.dtype), self.centre)

    @torch.no_grad()
    def _features(self, image_bCHW: Tensor) -> Tensor:
        if self.encoder.training:  # a model that contains it was put into training mode
            self.encoder.eval()
        pixels = image_bCHW.to(torch.float32) / 255
        mean, std = (pixels.new_tensor(value).view(1, -1, 1, 1) for value in (self.mean, self.std))
        feature_bF: Tensor = self.encoder((pixels - mean) / std)
        return feature_bF.flatten(1)

    def to(self, device: torch.device) -> None:
        self.encoder.to(device)

    def __repr__(self) -> str:
        return f"Frozen({self._name}, weights={self.fingerprint}, centre={self.centre})"


class Weighted(Descriptor):
    """Several descriptors side by side, whose cosine is the weighted mean of their cosines.

    `Weighted([Embedding(), Features()])` counts duplicates on embeddings and features alike.

    Args:
        parts: the descriptors, at least one.
        weights: one weight per part, above 0. They are divided by their sum. None gives all parts
            the same weight.

    >>> both = Weighted([Embedding(), Embedding()], weights=[3, 1])
    >>> both(torch.eye(2), None).square().tolist()
    [[0.75, 0.0, 0.25, 0.0], [0.0, 0.75, 0.0, 0.25]]
    """

    def __init__(self, parts: Sequence[Descriptor], weights: Sequence[float] | None = None) -> None:
        parts = list(parts)
        for part in parts:
            check_descriptor(part)
        if not parts:
            raise ValueError("Weighted has no parts: give it one descriptor or more")
        shares = [1.0] * len(parts) if weights is None else list(weights)
        if len(shares) != len(parts):
            raise ValueError(f"{len(shares)} weights for {len(parts)} parts: give each part one")
        if any(check_number("weight", share, "a number above 0") <= 0 for share in shares):
            raise ValueError(f"weights are {shares}: must be above 0; leave out what has none")
        self.parts = parts
        self.weights = tuple(float(share) / sum(shares) for share in shares)
        self.needs_images = any(part.needs_images for part in parts)
        self.needs_features = any(part.needs_features for part in parts)
        self.moves = any(part.moves for part in parts)
        self._is_fixed = [part.fixed() is part for part in parts]
        self._dims: list[int] = []

    @property
    def moving(self) -> slice:
        ends = list(itertools.accumulate(self._dims, initial=0))
        parts = [index for index, part in enumerate(self.parts) if part.moves]
        return slice(ends[parts[0]], ends[parts[-1] + 1]) if parts else slice(0)

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        self._dims = [part.dim(embedding_dim, image_shape) for part in self.parts]
        return sum(self._dims)

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        return self.describe(z_BD, image_BCHW, None)

    def describe(
        self, z_BD: Tensor, image_BCHW: Tensor | None, feature_BF: Tensor | None
    ) -> Tensor:
        rows = [
            weight**0.5 * part.describe(z_BD, image_BCHW, feature_BF)
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]
        return torch.cat(rows, dim=1)

    def refreshed(self, before_RA: Tensor, z_RD: Tensor) -> Tensor:
        moving = [part.moves for part in self.parts]
        return self._replaced(before_RA, moving, lambda part, row: part.refreshed(row, z_RD))

    def fit(self, features: int) -> None:
        for part in self.parts:
            part.fit(features)

    def joined(self, features: int) -> None:
        for part in self.parts:
            part.joined(features)

    @property
    def is_centred(self) -> bool:
        return all(part.is_centred for part in self.parts)

    def redescribed(
        self, before_kA: Tensor, feature_kF: Tensor, group: RankGroup = SINGLE_PROCESS
    ) -> Tensor:
        def again(part: Descriptor, row_ka: Tensor) -> Tensor:
            return part.redescribed(row_ka, feature_kF, group).to(row_ka)

        return self._replaced(before_kA, [part.needs_features for part in self.parts], again)

    def _replaced(
        self,
        row_RA: Tensor,
        chosen: Sequence[bool],
        again: Callable[[Descriptor, Tensor], Tensor],
    ) -> Tensor:
        """Return the rows, in which `again` computes the chosen parts. Others keep all bits."""
        rows = [
            weight**0.5 * again(part, row_Ra / weight**0.5) if is_chosen else row_Ra
            for part, weight, is_chosen, row_Ra in zip(
                self.parts,
                self.weights,
                chosen,
                torch.split(row_RA, self._dims, dim=1),
                strict=True,
            )
        ]
        return torch.cat(rows, dim=1)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": value
            for index, part in enumerate(self.parts)
            for name, value in part.state().items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        for index, part in enumerate(self.parts):
            prefix = f"{index}."
            part.load({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})

    def fixed(self) -> Descriptor | None:
        if not any(self._is_fixed):
            return None
        parts = list(itertools.compress(self.parts, self._is_fixed))
        return Weighted(parts, list(itertools.compress(self.weights, self._is_fixed)))

    def of_fixed(self, row_RA: Tensor) -> Tensor:
        rows = itertools.compress(torch.split(row_RA, self._dims, dim=1), self._is_fixed)
        share = sum(itertools.compress(self.weights, self._is_fixed))
        return torch.cat(list(rows), dim=1) / math.sqrt(share)

    def to(self, device: torch.device) -> None:
        for part in self.parts:
            part.to(device)

    def __repr__(self) -> str:
        return f"Weighted({self.parts!r}, weights={list(self.weights)})"


def unit_or_blank(value_BA: Tensor, centre: bool) -> Tensor:
    """Return the rows at unit norm, after subtracting each row's mean if `centre` is set.

    Rows that are not finite, or that contain only rounding errors, carry no information. They all
    get the same row.
    """
    row_BA = value_BA / value_BA.abs().amax(dim=1, keepdim=True)  # prevents overflow of squares
    if centre:
        row_BA = row_BA - row_BA.mean(dim=1, keepdim=True)
    norm_B1 = torch.linalg.vector_norm(row_BA, dim=1, keepdim=True)
    blank_A = torch.full_like(row_BA[:1], row_BA.shape[1] ** -0.5)
    return torch.where(norm_B1 > LEAST_SPREAD, row_BA / norm_B1, blank_A)


def descriptors_of(
    descriptor: Descriptor,
    z_BD: Tensor,
    images: Tensor | None,
    dim: int,
    features: Array | None = None,
    join: bool = False,
) -> Tensor:
    """Return the descriptors [B, A] of samples, where A is `dim`.

    With `join`, the samples are newcomers: later features must be of the same size.

    Raises:
        ValueError: the descriptor did not return one unit row [A] for each sample, or it needs
            features, and there is not one row of them for each sample.
    """
    feature_BF = None
    if descriptor.needs_features:
        feature_BF = check_features(features, len(z_BD), z_BD.device)
    row_BA = descriptor.describe(z_BD, images, feature_BF)
    if row_BA is z_BD:
        return row_BA
    given = Checked(row_BA) if _gives_unit_rows(descriptor) else row_BA
    row_BA = check_embeddings(given, dim, z_BD.device, f"of {descriptor!r} the descriptor")
    if len(row_BA) != len(z_BD):
        raise ValueError(f"{descriptor!r} gave {len(row_BA)} rows for {len(z_BD)} samples")
    if join and feature_BF is not None and len(feature_BF):
        descriptor.joined(feature_BF.shape[1])
    return row_BA.to(z_BD.dtype)


def check_features(features: Array | None, count: int, device: torch.device) -> Tensor:
    """Return the features [B, F] of `count` samples on the device.

    Raises:
        ValueError: they are not a matrix of floating-point numbers with one row for each sample.
    """
    if features is None:
        if count:
            raise ValueError(f"{count} samples without features: pass features= [B, F]")
        return torch.zeros(0, 1, dtype=torch.float32, device=device)
    feature_BF = as_tensor("features", features, device)
    if feature_BF.ndim != 2 or len(feature_BF) != count or not feature_BF.is_floating_point():
        raise ValueError(
            f"features are {feature_BF.dtype} {tuple(feature_BF.shape)}: must be floating-point "
            f"numbers [{count}, F], one row for each sample"
        )
    return feature_BF


def _gives_unit_rows(descriptor: Descriptor) -> bool:
    """Return whether this is a descriptor of this file, whose rows need no check."""
    if type(descriptor) is Weighted:
        return all(_gives_unit_rows(part) for part in descriptor.parts)
    return type(descriptor) in (Embedding, Thumbnail, Features, Vector, Frozen)


def check_descriptor(given: Any) -> None:
    """Raise ValueError unless `given` is a descriptor."""
    path = "stream_ssl.memory.descriptors.Descriptor"
    check_instance("descriptor", given, Descriptor, path, "such as Thumbnail(side=8)")


def shape_of(descriptor: Descriptor, image_shape: Image | None) -> Image:
    """Return the memory's image shape, or raise ValueError if there is none."""
    if image_shape is None:
        raise ValueError(
            f"{descriptor!r} describes images, and this memory keeps none: give it image_shape, or "
            "descriptor=Embedding()"
        )
    return image_shape


def images_of(descriptor: Descriptor, image_BCHW: Tensor | None) -> Tensor:
    """Return the images, or raise ValueError if there are none."""
    if image_BCHW is None:
        raise ValueError(f"{descriptor!r} describes images: pass images=")
    return image_BCHW
