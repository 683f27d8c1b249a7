"""Contrastive losses on negatives from the batch, the memory, or both."""

from __future__ import annotations

from stream_ssl.losses.base import Loss, LossOutput, Mix
from stream_ssl.losses.infonce import InfoNCE

# One line per loss; the contract tests run over this table.
LOSSES: dict[str, type[Loss]] = {
    "infonce": InfoNCE,
}

__all__ = ["LOSSES", "InfoNCE", "Loss", "LossOutput", "Mix"]
