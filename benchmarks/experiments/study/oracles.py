"""Policies with knowledge that no memory has: the class or the original image of a sample."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.experiments.study.streams import STRIDE
from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.eviction import Policy


class Balanced(Policy):
    """A policy that evicts, for each newcomer, the oldest sample of the largest group."""

    by_group = False
    """Whether the lowest group wins a tie between groups; otherwise the oldest sample wins."""

    @abstractmethod
    def groups(self, of: Columns | Rows) -> NDArray[np.int64]:
        """Return the group of each sample."""

    def choose(self, rows: Rows) -> Tensor:
        group_K = self.groups(self.columns).copy()
        born_K = self.columns.born.numpy().copy()
        plan = []
        for group, born in zip(self.groups(rows).tolist(), rows.born.tolist(), strict=True):
            _, kind_K, sizes = np.unique(group_K, return_inverse=True, return_counts=True)
            order_K = kind_K if self.by_group else np.zeros_like(kind_K)
            slot = np.lexsort((born_K, order_K, -sizes[kind_K]))[0]
            group_K[slot], born_K[slot] = group, born
            plan.append(int(slot))
        return torch.tensor(plan)


class ImageBalanced(Balanced):
    """Balances the original images of frames, by their ids."""

    name = "image-balanced"

    def groups(self, of: Columns | Rows) -> NDArray[np.int64]:
        return (of.ids % STRIDE).numpy()


class ClassBalanced(Balanced):
    """Balances the classes, by their labels. Samples without a label (-1) form a class.

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=ClassBalanced())
    >>> z, labels = torch.eye(2)[[0, 0, 0, 0]], torch.tensor([4, 7, 7, 4])
    >>> memory.add(torch.arange(4), z, labels=labels).evicted.tolist()
    [1]
    """

    name = "class-balanced"
    by_group = True

    def groups(self, of: Columns | Rows) -> NDArray[np.int64]:
        return of.labels.numpy()
