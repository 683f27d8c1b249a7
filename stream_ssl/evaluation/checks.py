"""Checks of the arguments that all measures share.

Shapes: N rows, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory.checks import as_tensor

Array = Tensor | NDArray[Any]
"""The type of the measures' arguments: a tensor on any device, or a numpy array."""


def as_rows(features: Array, what: str = "features") -> Tensor:
    """Return rows [N, F] as float32 or float64. Half precision becomes float32.

    Raises:
        ValueError: the value is no array, does not have two dimensions, is empty, has integers, or
            has values that are not finite.
    """
    row_NF = as_tensor(what, features)
    if row_NF.ndim != 2 or 0 in row_NF.shape:
        raise ValueError(
            f"{what} have shape {list(row_NF.shape)}: must be [N, F], with N and F at least 1"
        )
    if not row_NF.is_floating_point():
        raise ValueError(f"{what} are {row_NF.dtype}: pass floating-point features")
    row_NF = row_NF.to(torch.promote_types(row_NF.dtype, torch.float32))
    if not bool(torch.isfinite(row_NF).all()):
        raise ValueError(f"{what} are not finite; the encoder that made them has diverged")
    return row_NF


def as_unit_rows(features: Array, what: str = "features") -> Tensor:
    """Return `as_rows`, scaled to unit norm; rows of zeros stay zero."""
    return normalize(as_rows(features, what), dim=1)


def as_labels(labels: Array, rows: Tensor, what: str = "labels") -> Tensor:
    """Return classes int64 [N] on the device of the rows.

    Raises:
        ValueError: there is not one label per row, or a label is not a whole number or is negative,
            which means "no label".
    """
    label_N = as_tensor(what, labels)
    if label_N.shape != rows.shape[:1] or label_N.is_floating_point() or label_N.is_complex():
        raise ValueError(
            f"{what} are {label_N.dtype} of shape {list(label_N.shape)}: must be whole numbers "
            f"[{len(rows)}], one for each row"
        )
    label_N = label_N.to(rows.device, torch.int64)
    if int(label_N.min()) < 0:
        raise ValueError(f"{what} hold negative values, which mean no label; leave such rows out")
    return label_N


def check_width(query_QF: Tensor, reference_NF: Tensor) -> None:
    """Raise ValueError unless queries and references have the same number of features."""
    if query_QF.shape[1] != reference_NF.shape[1]:
        raise ValueError(
            f"queries {list(query_QF.shape)} and references {list(reference_NF.shape)} must be "
            f"[Q, F] and [N, F] with the same F"
        )
