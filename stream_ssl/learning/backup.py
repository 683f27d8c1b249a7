"""Copies of tensors, from which an update is undone or measured."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Backup:
    """Copies of tensors, to undo changes. One kernel per dtype saves or restores them.

    Args:
        live: the tensors to save, which must stay the same objects.
    """

    def __init__(self, live: Iterable[Tensor]) -> None:
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in live:
            by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._pairs = [(same, [torch.empty_like(one) for one in same]) for same in by_type.values()]

    @torch.no_grad()
    def save(self) -> None:
        """Save the present values."""
        for live, kept in self._pairs:
            torch._foreach_copy_(kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to the saved values."""
        for live, kept in self._pairs:
            torch._foreach_copy_(live, kept)

    @torch.no_grad()
    def change(self) -> Tensor:
        """Return the norm of the change since `save` over the norm at `save`, 0-dimensional.

        The saved values become the differences, so `restore` is not possible afterwards.
        """
        kept = [one for _, tensors in self._pairs for one in tensors]
        before = torch.nn.utils.get_total_norm(kept)
        for live, tensors in self._pairs:
            torch._foreach_sub_(tensors, live)
        return torch.nn.utils.get_total_norm(kept) / before
