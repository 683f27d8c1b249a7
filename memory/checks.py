"""Checks of arguments. The errors name the value, the rule and the remedy.

Shapes: B rows, D embedding, A descriptor, C H W image.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.columns import NORM_TOLERANCE, Image
from stream_ssl.memory.compute import to_device, to_host


@dataclass(frozen=True, slots=True)
class Checked:
    """Rows or slots that the caller has checked, so that the memory need not wait for the device.

    Args:
        tensor: unit rows, or distinct occupied slots.
    """

    tensor: Tensor


Array = Tensor | NDArray[Any] | Checked

LARGEST_SEED = (1 << 63) - 4
"""The largest seed. A memory uses the next numbers as seeds of its policy and its cells."""

NARROW_TOLERANCE = 1e-2
"""The norm tolerance for bfloat16 and float16 rows, which are normalised again when widened."""


def check_count(name: str, value: Any, least: int | None = None, what: str = "") -> int:
    """Return `value` as an int, of at least `least` if given.

    >>> check_count("n", 3, least=0)
    3
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise ValueError(f"{name} is {value!r}: must be a whole number (int)")
    if least is not None and count < least:
        raise ValueError(f"{name} is {count}: must be at least {least}{what and f' {what}'}")
    return count


def check_number(name: str, value: Any, rule: str = "a finite number") -> float:
    """Return `value` as a finite float. `rule` is the rule that the error states."""
    try:
        if math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"{name} is {value!r}: must be {rule}")


def check_instance(name: str, given: Any, kind: type, path: str, remedy: str) -> None:
    """Raise ValueError unless `given` is an instance of a class.

    Args:
        name: the argument that has the value `given`.
        kind: the class.
        path: the name of the class, with its package, as users import it.
        remedy: the end of the error, unless `given` is the class itself or a subclass.

    >>> check_instance("count", "7", int, "builtins.int", "such as 7")
    Traceback (most recent call last):
    ValueError: count is '7': must be an instance of builtins.int; such as 7
    """
    if isinstance(given, kind):
        return
    if isinstance(given, type) and issubclass(given, kind):
        remedy = f"build it with {given.__name__}()"
    raise ValueError(f"{name} is {given!r}: must be an instance of {path}; {remedy}")


def check_seed(seed: Any) -> int:
    """Return `seed` as an int in the range that torch accepts."""
    count = check_count("seed", seed)
    if not -LARGEST_SEED <= count <= LARGEST_SEED:
        raise ValueError(f"seed is {count}: must lie within 2**63 - 4 of 0; take a smaller one")
    return count


def check_device(device: Any) -> torch.device:
    """Return the device, if this torch can place tensors there."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device is {device!r}: torch cannot place tensors there ({_first_line(error)}); "
            'choose "cpu", or "cuda" on a machine with a GPU and a torch built for it'
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def as_tensor(
    name: str,
    value: Array,
    device: torch.device | None = None,
    rule: str = "a tensor or an array",
) -> Tensor:
    """Return `value` on `device`, without gradient, and without a copy if possible.

    Without `device`, a tensor stays on its own device. `rule` is the rule that the error states.
    """
    if isinstance(value, Checked):
        value = value.tensor
    # torch rejects views with negative strides and numbers of another byte order, and warns about
    # read-only arrays.
    if isinstance(value, np.ndarray) and (
        not value.flags.writeable or min(value.strides, default=0) < 0
    ):
        value = value.copy()
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    try:
        # A default device of torch would move a tensor there.
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} are {reprlib.repr(value)}: must be {rule}; {error}") from None
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} are {tensor.layout}: must be dense; convert them by to_dense()")
    return tensor.detach() if device is None else to_device(tensor.detach(), device)


def check_embeddings(z: Array, dim: int, device: torch.device, what: str = "embedding") -> Tensor:
    """Return embeddings as [B, D] float32, or float64 if they are float64.

    Raises:
        ValueError: the value is not a floating point matrix of `dim` columns, or a row is not
            finite or not of unit norm. The error names the first such row.
    """
    z_BD = as_tensor(f"{what}s", z, device).contiguous()  # sums do not depend on the memory layout
    try:
        z_BD.data_ptr()
    except RuntimeError:
        raise ValueError(
            f"{what}s are within a transform of torch.func, which hides their values: return them "
            "from the transformed function (has_aux=True), and pass them on afterwards"
        ) from None
    if z_BD.ndim != 2 or z_BD.shape[1] != dim:
        raise ValueError(f"{what}s have shape {tuple(z_BD.shape)}: must be [B, {dim}]")
    if not z_BD.is_floating_point():
        raise ValueError(f"{what}s are {z_BD.dtype}: must be floating point")
    tolerance, narrow = NORM_TOLERANCE, z_BD.dtype not in (torch.float32, torch.float64)
    if narrow:
        z_BD, tolerance = z_BD.to(torch.float32), NARROW_TOLERANCE
    if isinstance(z, Checked) and not narrow:
        return z_BD
    norm_B = torch.linalg.vector_norm(z_BD, dim=1)
    bad_B = ~((norm_B - 1).abs() <= tolerance)  # NaN counts as bad
    if bool(to_host(bad_B.any())):
        row = int(bad_B.nonzero()[0, 0])
        norm = float(norm_B[row])
        named = "row" if what == "row" else f"{what} row"
        if not bool(torch.isfinite(z_BD[row]).all()):
            raise ValueError(f"{named} {row} is not finite: leave such samples out")
        raise ValueError(
            f"{named} {row} has norm {norm:.6g}: must be 1 within {tolerance}; "
            "divide it by its norm (torch.nn.functional.normalize)"
        )
    return z_BD / norm_B[:, None] if narrow else z_BD


def check_integers(
    name: str, value: Array, device: torch.device, count: int | None = None
) -> Tensor:
    """Return an int64 column, of `count` values if given."""
    column = as_tensor(name, value, device, "a tensor, an array or a list of int64")
    other = column.is_floating_point() or column.is_complex() or column.dtype == torch.bool
    if other and column.numel():  # an empty list becomes float32
        raise ValueError(f"{name} are {column.dtype}: must be integers (int64)")
    if column.ndim != 1 or count not in (None, len(column)):
        wanted = "one-dimensional, such as [3]" if count is None else f"[{count}], one for each row"
        raise ValueError(f"{name} have shape {tuple(column.shape)}: must be {wanted}")
    whole = column.to(torch.int64)
    if column.dtype == torch.uint64 and bool(to_host((whole < 0).any())):
        largest = int(whole[whole < 0].max()) + (1 << 64)
        raise ValueError(
            f"{name} hold {largest}: must be below 2**63 (int64); drop a bit, such as by >> 1"
        )
    return whole


def check_images(
    images: Array | None, shape: Image | None, count: int, device: torch.device
) -> Tensor | None:
    """Return uint8 images [B, C, H, W], or None for a memory without images."""
    if shape is None:
        if images is not None:
            raise ValueError(
                "images are given to a memory that keeps none: leave images= out, or build it "
                "with image_shape"
            )
        return None
    if images is None:
        raise ValueError(
            f"this memory keeps images of shape {shape}: pass images=, "
            "or build it with image_shape=None"
        )
    image_BCHW = as_tensor("images", images, device)
    if image_BCHW.dtype != torch.uint8 or image_BCHW.shape != (count, *shape):
        raise ValueError(
            f"images are {image_BCHW.dtype} {tuple(image_BCHW.shape)}: must be uint8 "
            f"{(count, *shape)}, channels first"
        )
    return image_BCHW


def check_slots(slots: Array, occupied: int, device: torch.device) -> Tensor:
    """Return distinct occupied slots, int64."""
    chosen = check_integers("slots", slots, device)
    if len(chosen) == 0 or isinstance(slots, Checked):
        return chosen
    ordered = chosen.sort().values
    twice = (ordered[1:] == ordered[:-1]).any() if len(chosen) > 1 else ordered[0] != ordered[0]
    least, most, repeated = to_host(torch.stack([ordered[0], ordered[-1], twice.long()])).tolist()
    if not 0 <= least <= most < occupied:
        raise ValueError(
            f"slots span {least} to {most}: must lie in [0, {occupied}), the occupied slots"
        )
    if repeated:
        raise ValueError("slots hold a slot twice: name each slot once")
    return chosen


def check_weights(weights: Array, occupied: int) -> Tensor:
    """Return the weights of the occupied slots, divided by the largest; float64 on the CPU."""
    weight_k = as_tensor("weights", weights, torch.device("cpu")).to(torch.float64)
    if weight_k.shape != (occupied,):
        raise ValueError(
            f"weights have shape {tuple(weight_k.shape)}: must be [{occupied}], one of each "
            "occupied slot"
        )
    if not bool((weight_k.isfinite() & (weight_k >= 0)).all()) or not bool(weight_k.any()):
        raise ValueError("weights must be finite, at least 0, and not all 0")
    return weight_k / weight_k.max()  # so that their sum is finite, too


def check_payload(
    payload: Mapping[str, Array] | None, columns: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """Return the newcomers' entries of all further columns, on the columns' device."""
    given = _by_name(payload)
    if set(given) != set(columns):
        raise ValueError(
            f"payload has {sorted(given)}, and this memory keeps {sorted(columns)}: pass one "
            "tensor of each"
        )
    found = {}
    for name, column in columns.items():
        found[name] = as_tensor(f"payload {name!r}", given[name], column.device)
        expected = (count, *column.shape[1:])
        if found[name].shape != expected or found[name].dtype != column.dtype:
            raise ValueError(
                f"payload {name!r} is {found[name].dtype} {tuple(found[name].shape)}: must be "
                f"{column.dtype} {expected}"
            )
    return found


def check_examples(payload: Mapping[str, Tensor] | None) -> None:
    """Check the examples of further columns."""
    for name, example in _by_name(payload).items():
        if not isinstance(name, str):
            raise ValueError(
                f"payload has a column {name!r}: a name must be text, such as '{name}'"
            )
        if not isinstance(example, Tensor):
            raise ValueError(
                f"payload {name!r} is {reprlib.repr(example)}: must be a tensor with the shape and "
                "dtype of one slot's entry"
            )
        as_tensor(f"payload {name!r}", example, torch.device("cpu"))


def _by_name(payload: Any) -> Mapping[str, Any]:
    if payload is None:
        return {}
    if not isinstance(payload, Mapping):
        raise ValueError(
            f"payload is {reprlib.repr(payload)}: must be a dict of tensors by name, such as "
            '{"action": torch.zeros(4)}'
        )
    return payload


def check_way(how: str, ways: Sequence[str], name: str = "how") -> None:
    """Check the name of a way to draw."""
    if how not in ways:
        raise ValueError(f"{name} is {how!r}: choose one of {', '.join(ways)}")


def check_image_shape(shape: Image | None) -> Image | None:
    """Return (C, H, W), each at least 1, or None for no images."""
    if shape is None:
        return None
    sides = list(shape) if isinstance(shape, Sequence) else []
    if len(sides) != 3:
        raise ValueError(f"image_shape is {shape!r}: must be (C, H, W), channels first, or None")
    channels, height, width = (check_count("a side of image_shape", side, 1) for side in sides)
    return channels, height, width
