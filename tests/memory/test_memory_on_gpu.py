"""Tests of the memory on a simulated GPU: it decides as on the CPU and mixes no devices.

The host waits for the device twice per block of newcomers, never once per newcomer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch.nn.functional import normalize

from benchmarks.simulated_gpu import GPU, SimulatedGpu
from benchmarks.unit_rows import UnitVectors
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Descriptor, Embedding, Thumbnail, Weighted
from stream_ssl.memory.duel import exact
from stream_ssl.memory.eviction import (
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import Linear, Quadratic, VonMisesFisher

CAPACITY, DIM, BATCH, SHAPE = 300, 16, 100, (3, 8, 8)

POLICIES: dict[str, Callable[[], Policy]] = {
    "linear": lambda: MostDuplicated(Linear()),
    "linear, compete": lambda: MostDuplicated(Linear(), compete=True),
    "sharp": lambda: MostDuplicated(VonMisesFisher(0.1)),
    "quadratic, compete": lambda: MostDuplicated(Quadratic(), compete=True),
    "redundant": lambda: Redundant(VonMisesFisher(0.1), 1.0),
    "minred": MinimumRedundancy,
    "queue": Oldest,
    "reservoir": Reservoir,
}
DESCRIPTORS: dict[str, Callable[[], Descriptor]] = {
    "embedding": Embedding,
    "thumbnail": lambda: Thumbnail(side=4),
    "both": lambda: Weighted([Embedding(), Thumbnail(side=4)]),
}


@pytest.fixture(autouse=True)
def same_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose on the CPU as on a GPU, so that counts that differ by rounding tie the same way."""
    monkeypatch.setattr(exact, "ON_CPU", exact.ON_GPU)


def fed(device: str, policy: Policy, descriptor: Descriptor, batches: int) -> list[list[int]]:
    """Return the evicted ids by batch, while rows are refreshed and drawn as a learner does."""
    draw = torch.Generator().manual_seed(0)
    memory = WorkingMemory(
        CAPACITY, DIM, policy, SHAPE, device, duplicates=Duplicates(0.999), descriptor=descriptor
    )
    evicted = []
    for start in range(0, batches * BATCH, BATCH):
        z_BD = normalize(torch.randn(BATCH, DIM, generator=draw), dim=1)
        image_BCHW = torch.randint(256, (BATCH, *SHAPE), dtype=torch.uint8, generator=draw)
        z_BD, image_BCHW = (t.to(device, non_blocking=True) for t in (z_BD, image_BCHW))
        admission = memory.add(torch.arange(start, start + BATCH), z_BD, images=image_BCHW)
        evicted.append(admission.evicted.tolist())
        stale = memory.stalest(9)
        memory.refresh(stale, normalize(memory.embeddings[stale] + 0.1, dim=1))
        memory.collisions(z_BD, images=image_BCHW if descriptor.needs_images else None)
        memory.prior(z_BD)
        memory.negatives(20)
        memory.negatives(5, how="hardest", anchors=z_BD, each=True)
        memory.sample(10)
    return evicted


# Every policy, and every descriptor with both engines of counts.
PAIRS = {
    *zip(POLICIES, cycle(DESCRIPTORS), strict=False),
    *((policy, descriptor) for policy in ("linear", "sharp") for descriptor in DESCRIPTORS),
}


@pytest.mark.parametrize(("policy", "descriptor"), sorted(PAIRS))
def test_a_gpu_evicts_as_the_cpu_and_every_wait_is_declared(policy: str, descriptor: str) -> None:
    make, describe = POLICIES[policy], DESCRIPTORS[descriptor]
    expected = fed("cpu", make(), describe(), batches=6)
    with SimulatedGpu() as gpu:
        assert fed("cuda:0", make(), describe(), batches=6) == expected
        assert not gpu.count("memory/", declared=False)
        if not isinstance(make(), MinimumRedundancy):  # this policy keeps its lists on the host
            assert not gpu.count("memory/", kind="upload")


@pytest.mark.parametrize("name", ["linear", "sharp", "quadratic, compete"])
def test_the_host_reads_from_the_device_at_most_twice_per_block(name: str) -> None:
    """An engine reads twice per block, before and after the simulation on the host.

    Checks and bookkeeping read a fixed number of times per batch.
    """
    with SimulatedGpu() as gpu:
        policy = POLICIES[name]()
        blocks, choose = 0, policy.choose

        def counted(rows):  # type: ignore[no-untyped-def]
            nonlocal blocks
            blocks += 1
            return choose(rows)

        policy.choose = counted  # type: ignore[method-assign]
        fed("cuda:0", policy, Embedding(), batches=6)
        assert 0 < blocks < 3 * BATCH / 4
        assert gpu.count("memory/duel/").total() <= 2 * blocks
        assert gpu.count("memory/admission.py").total() <= blocks + 2 * 6 * 2
        assert gpu.count("memory/checks.py").total() <= 6 * 6


def test_a_memory_that_moves_to_a_gpu_evicts_as_before() -> None:
    with SimulatedGpu() as gpu:
        memories = [WorkingMemory(20, 4, MostDuplicated(VonMisesFisher(0.1))) for _ in range(2)]
        draw = torch.Generator().manual_seed(0)
        for turn in range(4):
            z_BD = normalize(torch.randn(12, 4, generator=draw), dim=1)
            found = [memory.add(torch.arange(12) + 12 * turn, z_BD) for memory in memories]
            assert found[0].evicted.tolist() == found[1].evicted.tolist()
            with torch.inference_mode():  # its tensors cannot be changed later
                memories[1].to("cuda:0")
        assert memories[1].device.type == "cuda"
        assert memories[1].check_valid() == (True, "")
        state = {name: value.cpu() for name, value in memories[1].state_dict().items()}
        memories[0].load_state_dict(state)
        assert memories[0].check_valid() == (True, "")
    assert gpu.waits


def shared(device: str, policy: Policy) -> list[list[int]]:
    """Return the evicted ids by batch, while a producer holds exactly its guarantee."""
    draw = torch.Generator().manual_seed(1)
    memory = WorkingMemory(CAPACITY, DIM, policy, device=device, shares=0.9)
    evicted = []
    for start in range(0, 8 * BATCH, BATCH):
        z_BD = normalize(torch.randn(BATCH, DIM, generator=draw), dim=1)
        names = ["yard" if number % 3 else "robot" for number in range(BATCH)]
        yard = torch.tensor([name == "yard" for name in names])
        z_BD[yard] = normalize(1 + 0.2 * z_BD[yard], dim=1)
        z_BD = z_BD.to(device, non_blocking=True)
        admission = memory.add(torch.arange(start, start + BATCH), z_BD, producers=names)
        evicted.append(admission.evicted.tolist())
    return evicted


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_shares_on_a_gpu_give_the_same_evictions_as_on_the_cpu(name: str) -> None:
    with SimulatedGpu():
        there = shared("cuda:0", POLICIES[name]())
    assert there == shared("cpu", POLICIES[name]())


def test_the_simulated_gpu_counts_the_kernels_and_waits_of_a_block() -> None:
    with SimulatedGpu() as gpu:
        value_B = torch.ones(3, device=GPU)
        with gpu.spending() as spent:
            assert float((value_B.view(3, 1) + 1).sum()) == 6
    assert spent.kernels.total() == 3  # the addition, the sum and the copy to the host
    assert spent.waits.total() == 1


SHARP = VonMisesFisher(0.1)
BUDGETS: dict[str, tuple[Callable[[], Policy], int, int]] = {
    "exact": (lambda: MostDuplicated(SHARP), 200, 7),
    "exact, compete": (lambda: MostDuplicated(SHARP, compete=True), 200, 7),
    "linear": (MostDuplicated, 450, 11),
    "redundant": (Redundant, 200, 8),
    "minred": (MinimumRedundancy, 450, 120),
    "queue": (Oldest, 50, 4),
    "reservoir": (Reservoir, 50, 4),
}
"""The kernels and the waits that `add` may spend on a batch of 512 newcomers, by policy.

Approximate counts have no budget, because they launch kernels per cell whenever they draw a pool.
"""


@pytest.mark.parametrize("shares", [None, 0.5], ids=["", "shares"])
@pytest.mark.parametrize("name", list(BUDGETS))
def test_a_batch_stays_within_its_budget_of_kernels_and_waits(
    name: str, shares: float | None
) -> None:
    """A loop over newcomers on the device would launch at least 512 kernels."""
    make, kernels, waits = BUDGETS[name]
    stream, capacity, batch = UnitVectors("clustered"), 1024, 512
    with SimulatedGpu() as gpu:
        memory = WorkingMemory(capacity, 128, make(), device="cuda:0", shares=shares)
        spent = []
        for size in (capacity, *3 * [batch]):
            names = None if shares is None else ["robot", "yard"] * (size // 2)
            z_BD = torch.from_numpy(stream.draw(size)).to("cuda:0")
            with gpu.spending() as once:
                memory.add(torch.arange(size), z_BD, producers=names)
            spent.append(once)
    settled = spent[2:]
    assert max(once.kernels.total() for once in settled) <= kernels
    assert max(once.waits.total() for once in settled) <= waits
