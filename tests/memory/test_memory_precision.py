"""A memory counts in the precision of its rows, whatever the training around it has switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from memory import WorkingMemory
from memory.eviction import MinimumRedundancy, MostDuplicated, Policy, linear
from memory.scores import VonMisesFisher
from tests.naive import unit_rows

CAPACITY, DIM = 300, 16
POLICIES: dict[str, Callable[[], Policy]] = {
    "linear": MostDuplicated,
    "sharp": lambda: MostDuplicated(VonMisesFisher(0.1)),
    "minred": MinimumRedundancy,
}


@contextmanager
def reduced_products() -> Iterator[None]:
    """What people set for a GPU; on some processors it also makes products in bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"  # as it was found
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def outcome(policy: Policy) -> tuple[list[int], bool, list[float]]:
    rng = np.random.default_rng(0)
    memory = WorkingMemory(CAPACITY, DIM, policy)
    memory.add(torch.arange(CAPACITY), unit_rows(rng, "clustered", CAPACITY, DIM).float())
    evicted = []
    for batch in range(4):
        z_BD = unit_rows(rng, "clustered", 50, DIM).float()
        evicted += memory.add(torch.arange(50) + 1000 + 50 * batch, z_BD).evicted.tolist()
        memory.refresh(torch.arange(40), unit_rows(rng, "clustered", 40, DIM).float())
    hardest = memory.negatives(9, how="hardest", anchors=memory.embeddings[:5])
    return evicted + hardest.ids_N.tolist(), memory.check_valid()[0], memory.counts().tolist()


@pytest.mark.parametrize("around", [autocast, reduced_products])
@pytest.mark.parametrize("name", POLICIES)
def test_what_training_computes_in_reaches_no_count(
    name: str, around: Callable[[], Iterator[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "POOL_ROWS", 40)  # products with the whole column are needed too
    monkeypatch.setattr(linear, "SHORTLIST_ROWS", 20)
    plain = outcome(POLICIES[name]())
    with around():
        reduced = outcome(POLICIES[name]())
    assert plain == reduced
    assert plain[1]
