"""What must hold of a memory after every operation.

Shapes: k occupied slots, D embedding.
"""

from __future__ import annotations

import torch

from memory.checks import NORM_TOLERANCE
from memory.columns import Columns
from memory.eviction.base import Policy


def check(columns: Columns, added: int, policy: Policy) -> tuple[bool, str]:
    """Recount everything that can be recounted.

    Args:
        columns: the memory's.
        added: samples offered so far; nothing can be born or encoded later.
        policy: its own numbers are compared with the rows.

    Returns:
        (True, "") or (False, what is wrong, naming the first slot).
    """
    if not 0 <= columns.occupied <= columns.capacity:
        return False, f"{columns.occupied} slots are occupied of {columns.capacity}"
    k = columns.occupied
    norm_k = torch.linalg.vector_norm(columns.z_kD, dim=1)
    rules = (
        (~torch.isfinite(norm_k), "its embedding is not finite"),
        (~((norm_k - 1).abs() <= NORM_TOLERANCE), "its embedding is not of unit norm"),
        (columns.born[:k] < 0, "it was born before the first sample"),
        (columns.born[:k] >= added, f"it was born after the last of {added} samples"),
        (columns.encoded[:k] < columns.born[:k], "it was encoded before it was born"),
        (columns.encoded[:k] > added, f"it was encoded after the last of {added} samples"),
        (columns.multiplicity[:k] < 1, "it stands for less than itself"),
    )
    for broken_k, what in rules:
        if bool(broken_k.any()):
            return False, f"slot {int(broken_k.nonzero()[0, 0])}: {what}"
    if len(torch.unique(columns.born[:k])) != k:
        return False, "two slots were born at the same sample: a row was copied"
    if columns.images is not None:
        ok, reason = columns.images.check(k)
        if not ok:
            return ok, reason
    return policy.check()
