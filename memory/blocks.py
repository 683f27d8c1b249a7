"""How many similarities to hold at a time where any number will do."""

from __future__ import annotations

import torch

CACHED_ELEMENTS = 1 << 20
"""On a CPU: as many as its cache holds, where they are read as fast as they were multiplied."""

LARGE_ELEMENTS = 1 << 26
"""On a GPU: enough that launching a kernel takes no time beside running it."""


def columns_at_a_time(rows: int, device: torch.device) -> int:
    """Columns of a block of so many rows, at least 1."""
    elements = CACHED_ELEMENTS if device.type == "cpu" else LARGE_ELEMENTS
    return max(1, elements // max(1, rows))
