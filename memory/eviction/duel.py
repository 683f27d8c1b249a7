"""DUEL's rule with the score that this project recommends."""

from __future__ import annotations

from stream_ssl.memory.eviction.most_duplicated import Index, MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher


class Duel(MostDuplicated):
    """For each newcomer, evict the sample with the largest expected number of duplicates.

    This is `MostDuplicated` (DUEL, Definition 3 and Algorithm 2) with a von Mises-Fisher score, and
    the default of the daemon. docs/study.md compares it with other policies.

    Args:
        kappa: the width of the score, above 0, see `VonMisesFisher`. With a larger width, samples
            that are less alike count as duplicates too (docs/duplicates.md compares widths).
        index: see `MostDuplicated`.

    Raises:
        ValueError: `kappa` is not positive, or the index is unknown.

    >>> import torch
    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=Duel())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 1]]).evicted.tolist()
    []
    >>> memory.add(torch.tensor([3]), torch.eye(2)[[0]]).evicted.tolist()
    [1]
    """

    name = "duel"

    def __init__(self, kappa: float = 0.1, index: Index = "exact") -> None:
        super().__init__(VonMisesFisher(kappa), index=index)
