"""Tests of what the memory rejects, what its self-check finds, and which imports it needs.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from table import table
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.columns import Rows
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy, Reservoir
from stream_ssl.memory.scores import Linear, Score, VonMisesFisher
from tests.naive import unit_rows


def filled(capacity: int = 8, count: int = 8, dim: int = 4, **options: Any) -> WorkingMemory:
    memory = WorkingMemory(capacity, dim, **options)
    z_ND = unit_rows(np.random.default_rng(count), "uniform", count, dim)
    memory.add(torch.arange(count) + 100, z_ND, hashes=torch.arange(count) % 3)
    return memory


Z = torch.eye(4)[:2]
IMAGES = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)


@table(
    ("inputs", "message"),
    [
        ({"z": torch.eye(4)[:2] * float("nan")}, "row 0 is not finite"),
        ({"z": torch.tensor([[1.0, 0, 0, 0], [float("inf"), 0, 0, 0]])}, "row 1 is not finite"),
        ({"z": torch.tensor([[1.0, 0, 0, 0], [0.9, 0, 0, 0]])}, "row 1 has norm 0.9"),
        ({"z": torch.eye(3)[:2]}, r"shape \(2, 3\): must be \[B, 4\]"),
        ({"z": torch.eye(4)[0]}, r"must be \[B, 4\]"),
        ({"z": torch.eye(4, dtype=torch.int64)[:2]}, "must be floating point"),
        ({"ids": torch.arange(3)}, r"ids have shape \(3,\): must be \[2\]"),
        ({"ids": torch.rand(2)}, "ids are torch.float32: must be integers"),
        ({"labels": torch.zeros(2, 1, dtype=torch.int64)}, "labels have shape"),
        ({"hashes": torch.zeros(1, dtype=torch.int64)}, "hashes have shape"),
        ({"images": None}, "pass images="),
        ({"images": IMAGES.float()}, "must be uint8"),
        ({"images": IMAGES.permute(0, 2, 3, 1)}, "channels first"),
    ],
)
def test_a_rejected_batch_does_not_change_the_memory(inputs: dict[str, Any], message: str) -> None:
    memory = WorkingMemory(4, 4, image_shape=(3, 2, 2))
    memory.add([5, 6], Z, IMAGES)
    before = memory.state_dict()
    with pytest.raises(ValueError, match=message):
        memory.add(**{"ids": [1, 2], "z": Z, "images": IMAGES, **inputs})
    after = memory.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@table(
    ("slots", "z", "message"),
    [
        ([0, 0], Z, "a slot twice"),
        ([0, 2], Z, r"must lie in \[0, 2\)"),
        ([-1, 1], Z, r"must lie in \[0, 2\)"),
        ([0], Z, "1 slots but 2 embeddings"),
        ([0, 1], Z * 2, "row 0 has norm 2"),
    ],
)
def test_refresh_rejects_wrong_slots_and_rows(slots: list[int], z: Tensor, message: str) -> None:
    memory = WorkingMemory(4, 4)
    memory.add([5, 6], Z)
    with pytest.raises(ValueError, match=message):
        memory.refresh(slots, z)


@table(
    ("options", "message"),
    [
        ({"capacity": 0}, "at least 1"),
        ({"dim": 0}, "at least 1"),
        ({"dtype": torch.float16}, "must be torch.float32"),
    ],
)
def test_the_memory_rejects_wrong_sizes_and_a_wrong_dtype(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WorkingMemory(**{"capacity": 3, "dim": 2, **options})


class Failing(Policy):
    """A policy that takes slot 0, and fails once in the middle of a batch."""

    name = "failing"

    def __init__(self, wrong: Any) -> None:
        self.wrong = [torch.tensor([0]), wrong]  # no super().__init__(): a policy has none

    def choose(self, rows: Rows) -> Tensor:
        plan: Tensor = self.wrong.pop(0) if self.wrong else torch.zeros(len(rows)).long()
        return plan


BAD_PLANS = {
    "beyond the slots": (torch.tensor([1, 8]), "chose slots from 1 to 8"),
    "below -1": (torch.tensor([-2]), "chose slots from -2 to -2"),
    "floats": (torch.zeros(2), r"chose torch.float32 \(2,\)"),
    "a matrix": (torch.zeros(2, 1, dtype=torch.int64), r"chose torch.int64 \(2, 1\)"),
    "a list": ([0, 1], r"chose \[0, 1\]"),
    "nothing": (None, "chose None"),
    "nobody": (torch.zeros(0, dtype=torch.int64), "chose 0 slots for 4 newcomers"),
    "too many": (torch.zeros(5, dtype=torch.int64), "chose 5 slots for 4 newcomers"),
}


@table("bad", BAD_PLANS)
def test_a_memory_stays_usable_after_a_policy_returns_a_bad_plan(bad: str) -> None:
    """Eight samples fill the slots, the next one joins, and the plan for the last four is bad."""
    wrong, message = BAD_PLANS[bad]
    policy: Policy = Failing(wrong)
    capacity = 8
    memory = WorkingMemory(capacity, 4, policy)
    z_ND = unit_rows(np.random.default_rng(0), "uniform", 40, 4)
    with pytest.raises(ValueError, match=f"^failing {message}"):
        memory.add(torch.arange(capacity + 5), z_ND[: capacity + 5])
    assert memory.check_valid() == (True, "")
    stats = memory.stats()
    assert len(memory) == capacity
    assert (stats.added, stats.evicted, stats.refused) == (capacity + 5, 1, 4)
    assert sorted(memory.ids.tolist()) == [*range(1, capacity + 1)]
    later = memory.add(torch.arange(20, 26), z_ND[20:26])
    assert memory.check_valid() == (True, "")
    assert (len(later.evicted), len(memory), memory.stats().added) == (6, capacity, capacity + 11)


@table(
    ("other", "message"),
    [
        ({"capacity": 7}, "of capacity 8, this memory of 7"),
        ({"dim": 5}, r"embeddings in the state are .* \(4,\), .* \(5,\): build"),
        ({"image_shape": (1, 2, 2)}, "build it with the state's image_shape and payload"),
        ({"eviction": Reservoir()}, "has .* reservoir: build the memory with the state's evict"),
        ({"eviction": MostDuplicated(VonMisesFisher(0.1))}, r"score Linear\(\), this memory has"),
    ],
)
def test_a_state_of_another_memory_is_refused(other: dict[str, Any], message: str) -> None:
    state = filled().state_dict()
    with pytest.raises(ValueError, match=message):
        WorkingMemory(**{"capacity": 8, "dim": 4, **other}).load_state_dict(state)
    with pytest.raises(ValueError, match="no memory state"):
        filled().load_state_dict({})


def plant_nan(memory: WorkingMemory) -> None:
    memory.embeddings[2, 1] = float("nan")


def plant_long(memory: WorkingMemory) -> None:
    memory.embeddings[3] *= 1.1


def plant_swap(memory: WorkingMemory) -> None:
    memory.embeddings[5] = -memory.embeddings[5]


def plant_future(memory: WorkingMemory) -> None:
    memory.born[4] = 1000


def plant_copy(memory: WorkingMemory) -> None:
    memory.born[4] = memory.born[5]
    memory.encoded[4] = memory.encoded[5]


def plant_encoded(memory: WorkingMemory) -> None:
    memory.encoded[1] = memory.born[1] - 1


def plant_nobody(memory: WorkingMemory) -> None:
    memory.multiplicity[6] = 0


@table("score", [Linear(), VonMisesFisher(0.1)], ids=repr)
@table(
    ("plant", "message"),
    [
        (plant_nan, "slot 2: its embedding is not finite"),
        (plant_long, "slot 3: its embedding is not of unit norm"),
        (plant_swap, r"sum of the rows is off|its count is"),
        (plant_future, "slot 4: it was born after"),
        (plant_copy, "born at the same sample"),
        (plant_encoded, "slot 1: it was encoded before"),
        (plant_nobody, "slot 6: its multiplicity is below 1"),
    ],
)
def test_check_valid_finds_every_planted_fault(plant: Any, message: str, score: Score) -> None:
    memory = filled(8, 30, eviction=MostDuplicated(score))
    assert memory.check_valid() == (True, "")
    plant(memory)
    ok, reason = memory.check_valid()
    assert not ok
    assert re.search(message, reason), reason


def test_check_valid_finds_a_wrong_queue_head_and_a_wrong_reservoir_count() -> None:
    queue = filled(4, 9, eviction=Oldest())
    queue.born[:] = queue.encoded[:] = queue.born.flip(0)
    assert "queue head" in queue.check_valid()[1]
    state = filled(4, 9, eviction=Reservoir()).state_dict()
    state["eviction.seen"] = torch.tensor([2])
    reservoir = filled(4, 9, eviction=Reservoir())
    reservoir.load_state_dict(state)
    assert "fewer than it holds" in reservoir.check_valid()[1]


def test_the_memory_works_with_torch_and_numpy_alone() -> None:
    program = """
import sys
blocked = {"faiss", "zmq", "msgpack", "torchvision", "river", "lmdb", "safetensors",
           "prometheus_client", "starlette", "uvicorn", "rich", "PIL", "scipy",
           *(f"stream_ssl.{room}" for room in ("wire", "feed", "learning", "observe", "app"))}
for name in blocked:
    sys.modules[name] = None
import torch
import stream_ssl.memory as memory, stream_ssl.memory.eviction, stream_ssl.memory.index
z = torch.nn.functional.normalize(torch.randn(9, 4), dim=1)
held = memory.WorkingMemory(4, 4)
held.add(range(9), z)
assert held.check_valid() == (True, "")
print("worked")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "worked"
