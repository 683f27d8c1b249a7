"""Checks of a memory that ranks hold together, against one process that holds it alone.

Shapes: B newcomers of all ranks, D embedding, N samples, C H W image.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from rank_group import together
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.memory.duel import exact
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy, Redundant
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.scores import Gaussian, Linear, Score, Threshold, VonMisesFisher
from stream_ssl.memory.shards import resharded
from tests.naive import IncrementalDuel, unit_rows

SLOTS, DIM, SIDE = 48, 6, 4
BATCHES = (21, 0, 40, 1, 60, 7)
PRODUCERS = ("robot", "robot", None, "yard", "films")
FEW = replace(exact.ON_CPU, candidates=8)  # of all ranks, so that other slots may decide


class Case(NamedTuple):
    score: Score
    compete: bool
    stream: str


CASES = (
    Case(Linear(), False, "clustered"),
    Case(Linear(), True, "duplicates"),
    Case(VonMisesFisher(0.1), False, "duplicates"),
    Case(VonMisesFisher(0.1), True, "clustered"),
    Case(Threshold(), True, "duplicates"),
    Case(Gaussian(), False, "clustered"),
)


def stream_of(seed: int) -> str:
    return ("clustered", "duplicates")[seed // 100 % 2]


def rows_of(stream: str, seed: int) -> Tensor:
    """Return unit rows, float64 [N, DIM]."""
    return unit_rows(np.random.default_rng(seed), stream, sum(BATCHES), DIM)


def fed(memory: WorkingMemory, z_ND: Tensor, image_NCHW: Tensor | None = None) -> dict[str, Any]:
    """Add each batch, divided among the ranks. Return what happened to all samples."""
    group, start = memory.group, 0
    told: dict[str, list[int]] = {"evicted": [], "ages": [], "refused": [], "duplicates": []}
    for count in BATCHES:
        # The last rank gets the most samples, the first may get none.
        ends = [start + count * rank // group.size**2 for rank in range(group.size)]
        ends = [*ends, start + count]
        own = slice(ends[group.rank], ends[group.rank + 1])
        images = None if image_NCHW is None else image_NCHW[own]
        ids = torch.arange(own.start, own.stop)
        producers = [PRODUCERS[number * number % 11 % 5] for number in ids.tolist()]
        admission = memory.add(
            ids, z_ND[own], images, labels=ids % 5, hashes=ids + 1, producers=producers
        )
        for name in told:
            told[name] += getattr(admission, name).tolist()
        start += count
    return {
        **told,
        "ids": memory.ids.tolist(),
        "producers": memory.producers,
        "counts": memory.counts().tolist(),
        "valid": memory.check_valid(),
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all ranks as one process would return them, evictions by age."""
    told: dict[str, Any] = {"valid": [part["valid"] for part in parts]}
    for name in ("ids", "counts", "producers"):
        told[name] = [None] * sum(len(part[name]) for part in parts)
        for rank, part in enumerate(parts):
            told[name][rank :: len(parts)] = part[name]
    left = [pair for part in parts for pair in zip(part["ages"], part["evicted"], strict=True)]
    told["left"] = sorted((age + number, number) for age, number in left)
    for name in ("refused", "duplicates"):
        told[name] = sorted(number for part in parts for number in part[name])
    return told


def judge(case: Case, z_ND: Tensor, found: dict[str, Any]) -> None:
    """Check that every eviction had the largest count within rounding, else AssertionError."""
    twin, held = IncrementalDuel(case.score, z_ND[:SLOTS], case.compete), list(range(SLOTS))
    left, refused = dict(found["left"]), set(found["refused"])
    assert len(left) == len(found["left"])
    for newcomer, x_D in enumerate(z_ND[SLOTS:], SLOTS):
        slot = -1
        if newcomer not in refused:
            slot = held.index(left.pop(newcomer))
            held[slot] = newcomer
        assert twin.regret(slot, x_D) <= 1e-9
        twin.step(x_D, slot)
    assert not left
    assert found["ids"] == held
    np.testing.assert_allclose(found["counts"], twin.counts_anew(), atol=1e-9 * SLOTS)


def check_evictions(ranks: int, seed: int = 0) -> None:
    """Check every policy that ranks share, every score and both algorithms."""
    cases = CASES if seed == 0 else [case._replace(stream=stream_of(seed)) for case in CASES]
    streams = [rows_of(case.stream, seed + number) for number, case in enumerate(cases)]
    queue_ND = rows_of("clustered", seed + 7)

    def memories(group: RankGroup) -> list[dict[str, Any]]:
        made = [MostDuplicated(case.score, case.compete) for case in cases]
        policies: list[tuple[Policy, Tensor]] = [*zip(made, streams, strict=True)]
        policies.append((Oldest(), queue_ND))
        policies.append((Redundant(VonMisesFisher(0.1), 1.0), queue_ND))
        return [fed(alike(group, policy), z_ND) for policy, z_ND in policies]

    with mock.patch.object(exact, "ON_CPU", FEW):
        by_rank, alone = together(ranks, memories), memories(SINGLE_PROCESS)
    for case, z_ND, parts, one in zip(
        [*cases, None, None],
        [*streams, queue_ND, queue_ND],
        zip(*by_rank, strict=True),
        alone,
        strict=True,
    ):
        found = joined([*parts])
        assert found["valid"] == [[True, ""]] * ranks, (case, found["valid"])
        if case is not None:
            judge(case, z_ND, found)
        ties = case is not None and (case.stream == "duplicates" or type(case.score) is Threshold)
        if not ties:
            expected = joined([one])
            for name in ("left", "refused", "ids"):
                assert found[name] == expected[name], (case, name)


def check_many_evictions(ranks: int) -> None:
    """Check 210 streams in the same way, 30 for each policy, score and algorithm."""
    for number in range(30):
        check_evictions(ranks, 100 * number)


def alike(group: RankGroup, policy: Policy, **options: Any) -> WorkingMemory:
    return WorkingMemory(SLOTS, DIM, policy, dtype=torch.float64, group=group, **options)


def check_shares(ranks: int) -> None:
    """Producers keep their shares as in one process. A resharded state keeps them too."""
    z_ND = rows_of("clustered", 8)

    def made() -> list[Policy]:
        sharp = VonMisesFisher(0.1)
        counted = [MostDuplicated(), MostDuplicated(sharp), MostDuplicated(sharp, compete=True)]
        return [*counted, Oldest(), Redundant(sharp, 1.0)]

    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)

        def work(group: RankGroup) -> list[dict[str, Any]]:
            memories = [alike(group, policy, shares={"yard": 3.0}) for policy in made()]
            found = [fed(memory, z_ND) for memory in memories]
            save_file(memories[0].state_dict(), folder / f"{group.rank}-of-{group.size}")
            return found

        with mock.patch.object(exact, "ON_CPU", FEW):
            by_rank, alone = together(ranks, work), work(SINGLE_PROCESS)
        states = [load_file(folder / f"{rank}-of-{ranks}") for rank in range(ranks)]
        again = alike(SINGLE_PROCESS, MostDuplicated(), shares={"yard": 3.0})
        again.load_state_dict(resharded(states, 0, 1))
    for number, one in enumerate(alone):
        found = joined([part[number] for part in by_rank])
        expected = joined([one])
        assert found["valid"] == [[True, ""]] * ranks, found["valid"]
        for name in ("left", "refused", "ids", "producers"):
            assert found[name] == expected[name], (number, name)
        assert one["producers"].count("yard") >= SLOTS * 3 // 10, number
    assert again.producers == alone[0]["producers"]


def check_queue(ranks: int) -> None:
    """Check a queue, which keeps no counts.

    tau+ covers all slots. The reported collisions cover the shard that was counted.
    """
    z_ND = rows_of("clustered", 5)

    def work(group: RankGroup) -> dict[str, Any]:
        memory = alike(group, Oldest())
        fed(memory, z_ND)
        mean = (memory.counts() / (len(memory) - 1)).mean()
        assert abs(memory.stats().expected_collisions - float(mean)) < 1e-12
        return {"ids": memory.ids.tolist(), "prior": memory.prior(z_ND[:9]).tolist()}

    by_rank, alone = together(ranks, work), work(SINGLE_PROCESS)
    assert sorted(n for found in by_rank for n in found["ids"]) == sorted(alone["ids"])
    for found in by_rank:
        assert np.allclose(found["prior"], alone["prior"], rtol=1e-12)


def check_images(ranks: int) -> None:
    """Check images, near-duplicates, draws and states of a shared memory.

    Images, labels and hashes stay with their samples. Near-duplicates are found on all ranks. Draws
    come from the rank's own shard. A state resumes bit-equal, and can be divided among other ranks.
    """
    rng = np.random.default_rng(3)
    image_NCHW = torch.from_numpy(rng.integers(0, 256, (sum(BATCHES), 1, SIDE, SIDE), np.uint8))
    image_NCHW[70:90] = image_NCHW[10:30]  # near-duplicates of samples on other ranks
    z_ND = rows_of("clustered", 11)

    def build(group: RankGroup) -> WorkingMemory:
        return alike(
            group,
            MostDuplicated(VonMisesFisher(0.1)),
            image_shape=(1, SIDE, SIDE),
            descriptor=Thumbnail(2),
            duplicates=Duplicates(0.9999, "refuse"),
        )

    def work(group: RankGroup) -> dict[str, Any]:
        memory = build(group)
        found = fed(memory, z_ND, image_NCHW)
        assert memory.images is not None
        assert torch.equal(memory.images, image_NCHW[memory.ids])
        assert torch.equal(memory.labels, memory.ids % 5)
        assert torch.equal(memory.hashes, memory.ids + 1)
        assert torch.equal(memory.embeddings, z_ND[memory.ids])
        draw = memory.sample(5, how="epochs")
        assert torch.equal(draw.ids, memory.ids[draw.slots])
        again = build(group)
        again.load_state_dict(memory.state_dict())
        assert again.sample(5).slots.tolist() == memory.sample(5).slots.tolist()
        for one in (memory, again):  # both continue alike
            one.add(torch.arange(900, 907), z_ND[20:27], image_NCHW[20:27])
        for name, value in memory.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name
        assert memory.stats().occupancy == SLOTS // group.size
        save_file(memory.state_dict(), folder / f"{group.rank}-of-{group.size}")
        return found

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        by_rank, alone = together(ranks, work), work(SINGLE_PROCESS)
        states = [load_file(folder / f"{rank}-of-{ranks}") for rank in range(ranks)]
    whole = build(SINGLE_PROCESS)
    whole.load_state_dict(resharded(states[::-1], 0, 1))
    assert whole.check_valid() == (True, "")
    assert torch.equal(
        whole.images, image_NCHW[torch.where(whole.ids < 900, whole.ids, whole.ids - 880)]
    )
    for rank, state in enumerate(states):
        dealt = resharded([whole.state_dict()], rank, ranks)
        for name in (name for name in state if name.startswith("columns.")):
            assert torch.equal(dealt[name], state[name]), (rank, name)
    assert alone["duplicates"], "the stream has copies"
    expected, found = joined([alone]), joined(by_rank)
    for name in ("left", "refused", "duplicates", "ids"):
        assert found[name] == expected[name], name


def check_frames(ranks: int) -> None:
    """Framed and noisy pictures are near-duplicates of pictures that other ranks hold."""
    rng, side = np.random.default_rng(5), 32
    coarse = torch.from_numpy(rng.integers(0, 200, (sum(BATCHES), 1, 8, 8), np.uint8))
    plain = functional.interpolate(coarse.float(), side, mode="bilinear").byte().numpy()
    for number in range(61, sum(BATCHES), 3):  # 4 pixels of white around an earlier picture
        inner = functional.interpolate(
            torch.from_numpy(plain[None, number - 45]).float(), side - 8, mode="area"
        )
        plain[number] = np.pad(inner[0].byte(), ((0, 0), (4, 4), (4, 4)), constant_values=255)
    for number in range(18, 61, 3):  # a scene with something else in a corner
        plain[number] = plain[number - 10]
        plain[number, :, :10, :10] = plain[number - 9, :, :10, :10]
    for number in range(62, sum(BATCHES), 3):  # so noisy that the next candidate decides
        noisy = plain[number - 45] + rng.normal(0, 30, plain[number].shape)
        plain[number] = noisy.clip(0, 255).astype(np.uint8)
    image_NCHW, z_ND = torch.from_numpy(plain), rows_of("clustered", 13)

    def work(group: RankGroup) -> list[list[Any]]:
        memory = alike(group, Oldest(), image_shape=(1, side, side))
        door, told = NearDuplicates(memory), []
        for ids in torch.arange(sum(BATCHES)).split(20):
            parts = torch.tensor_split(ids, group.size)
            own = parts[group.rank]
            admitted_B = door.admitted(image_NCHW[own], image_NCHW[:0])
            told.append(admitted_B.tolist())
            own = own[
                torch.from_numpy(np.split(admitted_B, np.cumsum([*map(len, parts)]))[group.rank])
            ]
            memory.add(own, z_ND[own], image_NCHW[own])
        return told

    alone = work(SINGLE_PROCESS)
    admitted_N = np.concatenate(alone)
    assert (~admitted_N[61::3]).sum() > 8
    assert (~admitted_N[62::3]).sum() > 8
    assert all(told == alone for told in together(ranks, work))


def check_types(ranks: int) -> None:
    """A rank without newcomers may pass rows of another type, such as NumPy's empty array."""

    def work(group: RankGroup) -> list[str]:
        found, first = [], group.rank == 0
        memory = WorkingMemory(SLOTS, DIM, Oldest(), group=group)
        row_BD = torch.eye(DIM)[:3]
        for own, empty in ((row_BD, np.zeros((0, DIM))), (row_BD.double(), torch.zeros(0, DIM))):
            memory.add(torch.arange(3 * first), own if first else empty)
            found.append(str(memory.dtype))
        other = WorkingMemory(SLOTS, DIM, Oldest(), group=group)
        try:
            other.add(torch.arange(3), row_BD if first else row_BD.double())
        except ValueError as error:
            found.append(str(error))
        other.add(torch.arange(3), row_BD)
        assert memory.check_valid()[0]
        assert other.check_valid()[0]
        return [*found, str(other.dtype)]

    for found in together(ranks, work):
        narrow, wide, message, after = found
        assert (narrow, wide, after) == ("torch.float32", "torch.float64", "torch.float32"), found
        assert "have 4, 8" in message
        assert "bytes: give embeddings of one type" in message
