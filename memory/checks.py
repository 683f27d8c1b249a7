"""What the memory lets in: inputs as tensors, and errors that name the row and the remedy.

Shapes: B rows, D embedding, C H W image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.columns import Columns, Rows
from memory.images import Image

Array = Tensor | NDArray[Any]

NORM_TOLERANCE = 1e-3
"""How far from 1 a row's norm may lie: rounding passes, a forgotten normalisation does not."""

NARROW_TOLERANCE = 1e-2
"""The same of rows that came in bfloat16 or float16; they are normalised anew when widened."""


def as_tensor(value: Array, device: torch.device) -> Tensor:
    """`value` on `device`, without gradient and without a copy where none is needed."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns about sharing memory that must not be written
    return torch.as_tensor(value, device=device).detach()


def check_embeddings(z: Array, dim: int, device: torch.device) -> Tensor:
    """Embeddings as [B, D] float32, or float64 where they came as float64.

    Raises:
        ValueError: not a matrix of `dim` columns, not floating point, or a row that is not finite
            or not of unit norm. The error names the first such row.
    """
    z_BD = as_tensor(z, device)
    if z_BD.ndim != 2 or z_BD.shape[1] != dim:
        raise ValueError(f"embeddings have shape {tuple(z_BD.shape)}: must be [B, {dim}]")
    if not z_BD.is_floating_point():
        raise ValueError(f"embeddings are {z_BD.dtype}: must be floating point")
    tolerance, narrow = NORM_TOLERANCE, z_BD.dtype not in (torch.float32, torch.float64)
    if narrow:
        z_BD, tolerance = z_BD.to(torch.float32), NARROW_TOLERANCE
    norm_B = torch.linalg.vector_norm(z_BD, dim=1)
    bad_B = ~((norm_B - 1).abs() <= tolerance)  # written so that nan is bad
    if bool(bad_B.any()):
        row = int(bad_B.nonzero()[0, 0])
        norm = float(norm_B[row])
        if not bool(torch.isfinite(z_BD[row]).all()):
            raise ValueError(
                f"embedding row {row} is not finite: leave such samples out before adding"
            )
        raise ValueError(
            f"embedding row {row} has norm {norm:.6g}: must be 1 within {tolerance}; "
            "divide it by its norm (torch.nn.functional.normalize)"
        )
    return z_BD / norm_B[:, None] if narrow else z_BD


def check_integers(
    name: str, value: Array | None, count: int, none: int, device: torch.device
) -> Tensor:
    """An int64 column of `count` values; `none` stands for every value when there are none."""
    if value is None:
        return torch.full((count,), none, dtype=torch.int64, device=device)
    column = as_tensor(value, device)
    other = column.is_floating_point() or column.is_complex() or column.dtype == torch.bool
    if other and column.numel():  # an empty list becomes float32
        raise ValueError(f"{name} are {column.dtype}: must be integers (int64)")
    if column.shape != (count,):
        raise ValueError(f"{name} have shape {tuple(column.shape)}: must be [{count}], one a row")
    return column.to(torch.int64)


def check_images(
    images: Array | None, shape: Image | None, count: int, device: torch.device
) -> Tensor | None:
    """uint8 images [B, C, H, W] for a memory that keeps them; None for one that does not."""
    if shape is None:
        return None
    if images is None:
        raise ValueError(
            f"this memory keeps images of shape {shape}: pass images=, "
            "or build it with image_shape=None"
        )
    image_BCHW = as_tensor(images, device)
    if image_BCHW.dtype != torch.uint8 or image_BCHW.shape != (count, *shape):
        raise ValueError(
            f"images are {image_BCHW.dtype} {tuple(image_BCHW.shape)}: must be uint8 "
            f"{(count, *shape)}, channels first"
        )
    return image_BCHW


def check_rows(
    columns: Columns,
    added: int,
    ids: Array,
    z: Array,
    images: Array | None,
    labels: Array | None,
    hashes: Array | None,
) -> Rows:
    """A batch of newcomers, of the dtype that it came in; `added` were offered before it."""
    if ids is None:
        raise ValueError("ids are None: must be integers (int64), one a row")
    z_BD = check_embeddings(z, columns.dim, columns.device)
    count, device = len(z_BD), columns.device
    where = device if columns.images is None else columns.images.data_KCHW.device
    return Rows(
        ids=check_integers("ids", ids, count, 0, device),
        embeddings=z_BD,
        labels=check_integers("labels", labels, count, -1, device),
        hashes=check_integers("hashes", hashes, count, 0, device),
        born=torch.arange(added, added + count, device=device),
        images=check_images(images, columns.image_shape, count, where),
    )


def check_slots(slots: Array, occupied: int, device: torch.device) -> Tensor:
    """Distinct occupied slots, int64."""
    chosen = check_integers("slots", slots, len(slots), 0, device)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < occupied:
        raise ValueError(
            f"slots span {int(chosen.min())} to {int(chosen.max())}: must lie in [0, {occupied}), "
            "the occupied slots"
        )
    if len(torch.unique(chosen)) != len(chosen):
        raise ValueError("slots hold a slot twice: name each slot once")
    return chosen


def check_drawn(count: int, how: str, ways: Sequence[str]) -> None:
    """How many to draw, and how."""
    if count < 0:
        raise ValueError(f"n is {count}: draw 0 or more")
    if how not in ways:
        raise ValueError(f"how is {how!r}: choose one of {', '.join(ways)}")
