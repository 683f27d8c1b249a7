"""Tests of the working memory against a dict of rows, with rows that are encoded again and cast.

Shapes: B newcomers, D embedding, K slots, R slots refreshed, b images encoded at a time, C H W
image.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_stream import equal
from table import table
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Features, Thumbnail
from stream_ssl.memory.eviction import POLICIES, Duel, MinimumRedundancy, MostDuplicated, Policy
from stream_ssl.memory.scores import Score, Threshold, VonMisesFisher
from tests.naive import unit_rows

SHAPE = (2, 3, 3)
MAKERS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "most-duplicated, sharp": lambda: MostDuplicated(VonMisesFisher(0.1)),
}
COLUMNS = ("ids", "embeddings", "labels", "hashes", "images", "born", "encoded", "multiplicity")


def images(rng: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8))


class AgainstDict(RuleBasedStateMachine):
    """After any sequence of operations, each slot holds the same as a dict of rows."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), capacity=st.integers(1, 9))
    def build(self, policy: str, capacity: int) -> None:
        self.memory = WorkingMemory(capacity, 3, POLICIES[policy](), SHAPE)
        self.rows: dict[int, dict[str, Tensor]] = {}
        self.rng = np.random.default_rng(capacity)
        self.added = 0

    @rule(count=st.integers(0, 25), first=st.integers(0, 5))
    def add(self, count: int, first: int) -> None:
        rows = {
            "ids": torch.arange(first, first + count),  # so ids recur
            "embeddings": unit_rows(self.rng, "duplicates", count, 3),
            "images": images(self.rng, count),
            "labels": torch.from_numpy(self.rng.integers(-1, 4, count)),
            "hashes": torch.from_numpy(self.rng.integers(0, 4, count)),
        }
        admission = self.memory.add(*rows.values())
        for turn, slot in enumerate(admission.slots.tolist()):
            if slot >= 0:
                self.rows[slot] = {name: column[turn] for name, column in rows.items()}
                self.rows[slot]["born"] = torch.tensor(self.added + turn)
                self.rows[slot]["encoded"] = torch.tensor(self.added + turn)
                self.rows[slot]["multiplicity"] = torch.tensor(1)
        self.added += count

    @rule(count=st.integers(0, 4))
    def refresh(self, count: int) -> None:
        slots = self.memory.stalest(count)
        encoded = [int(row["encoded"]) for row in self.rows.values()]
        assert sorted(encoded)[:count] == self.memory.encoded[slots].tolist()
        z_RD = unit_rows(self.rng, "uniform", len(slots), 3)
        before_RD = self.memory.embeddings[slots].clone()
        drift_R = self.memory.refresh(slots, z_RD)
        assert torch.allclose(drift_R, (before_RD * z_RD).sum(dim=1).double(), atol=1e-6)
        for slot, z_D in zip(slots.tolist(), z_RD, strict=True):
            self.rows[slot]["embeddings"] = z_D
            self.rows[slot]["encoded"] = torch.tensor(self.added)

    @rule()
    def save_and_load(self) -> None:
        state, policy = self.memory.state_dict(), type(self.memory.eviction)()
        self.memory = WorkingMemory(self.memory.capacity, 3, policy, SHAPE)
        self.memory.load_state_dict(state)

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert self.memory.check_valid() == (True, "")
        assert len(self.memory) == len(self.rows) == min(self.added, self.memory.capacity)
        for slot, row in self.rows.items():
            for name in COLUMNS:
                assert torch.equal(getattr(self.memory, name)[slot], row[name]), name


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(max_examples=30, stateful_step_count=12, derandomize=True)


class Encoder(torch.nn.Module):
    """A linear map of the pixels, which records how many images it gets at a time."""

    def __init__(self, seed: int, good: int = 1000) -> None:
        super().__init__()
        weight = np.random.default_rng(seed).normal(size=(18, 5))
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.batches: list[int] = []
        self.good = good  # batches until it fails

    def forward(self, image_bCHW: Tensor) -> Tensor:
        assert image_bCHW.dtype == torch.uint8
        self.batches.append(len(image_bCHW))
        pixel_bP = image_bCHW.flatten(1).to(torch.float64) - 127
        # One row at a time, so that the number of rows does not change the rounding.
        z_bD = torch.stack([(pixel_P[:, None] * self.weight).sum(dim=0) for pixel_P in pixel_bP])
        return torch.nn.functional.normalize(z_bD, dim=1) * (len(self.batches) <= self.good)


def filled(capacity: int = 20, count: int = 50, **options: Any) -> WorkingMemory:
    memory = WorkingMemory(capacity, 5, image_shape=SHAPE, dtype=torch.float64, **options)
    rng = np.random.default_rng(count)
    labels, image_BCHW = torch.arange(count) % 3, images(rng, count)
    memory.add(torch.arange(count), unit_rows(rng, "clustered", count, 5), image_BCHW, labels)
    return memory


@table("name", sorted(MAKERS))
def test_reencode_encodes_all_slots_and_updates_the_policy_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, heard = filled(eviction=MAKERS[name]()), []
    on_update = memory.eviction.on_update

    def spy(slots: Tensor, before_RA: Tensor) -> None:
        heard.append(len(slots))
        on_update(slots, before_RA)

    monkeypatch.setattr(memory.eviction, "on_update", spy)
    encoder, before_KD = Encoder(0), memory.embeddings.clone()
    drift_K = memory.reencode(encoder, batch=6)
    assert (encoder.batches, heard) == ([6, 6, 6, 2], [20])
    expected_KD = encoder(memory.images).detach()
    assert torch.equal(memory.embeddings, expected_KD)
    assert torch.equal(memory.negatives().z_ND, expected_KD)
    assert not memory.embeddings.requires_grad
    assert torch.allclose(drift_K, (before_KD * expected_KD).sum(dim=1))
    assert memory.encoded.tolist() == [50] * 20
    assert memory.check_valid() == (True, "")
    stats = memory.stats()
    assert stats.drift_mean == pytest.approx(float(drift_K.mean()))
    assert stats.drift_min == pytest.approx(float(drift_K.min()))
    assert (stats.stale_p50, stats.stale_max) == (0, 0)


@table("batch", [1, 3, 256])
def test_reencode_gives_the_same_result_for_every_batch_size(batch: int) -> None:
    by_hand, memory, encoder = filled(), filled(), Encoder(1)
    slots = memory.stalest(7)
    drift_R = memory.reencode(encoder, slots, batch)
    assert (sum(encoder.batches), max(encoder.batches)) == (7, min(batch, 7))
    assert torch.equal(drift_R, by_hand.refresh(slots, encoder(by_hand.images_of(slots))))
    assert equal(memory.state_dict(), by_hand.state_dict())


@table(
    ("encode", "options", "message"),
    [
        (lambda image: torch.eye(5)[:1], {}, "encode gave 1 rows for 4 images: must be one each"),
        (lambda image: torch.eye(6)[: len(image)], {}, r"must be \[B, 5\]"),
        (Encoder(0, good=1), {}, "row 0 has norm 0: must be 1 within"),
        (Encoder(0), {"slots": [3, 20]}, r"slots span 3 to 20: must lie in \[0, 20\)"),
        (Encoder(0), {"batch": 0}, "batch is 0: must be at least 1"),
    ],
    ids=range(5),
)
def test_a_failed_reencode_does_not_change_the_memory(
    encode: Any, options: Any, message: str
) -> None:
    memory = filled()
    before = memory.state_dict()
    with pytest.raises(ValueError, match=message):
        memory.reencode(encode, **{"batch": 4, **options})
    assert equal(memory.state_dict(), before)


def test_reencode_needs_a_memory_with_images() -> None:
    assert len(WorkingMemory(4, 5, image_shape=SHAPE).reencode(Encoder(0))) == 0
    plain = WorkingMemory(4, 5)
    plain.add([1], torch.eye(5)[:1])
    with pytest.raises(ValueError, match="keeps no images: give it image_shape"):
        plain.reencode(Encoder(0))


def test_images_on_the_host_are_copied_when_read() -> None:
    memory, other = filled(seed=2), filled(seed=2, images_on="host")
    draws = [each.sample(9) for each in (memory, other)]
    assert torch.equal(draws[0].slots, draws[1].slots)
    assert torch.equal(draws[0].images, draws[1].images)
    read_RCHW = other.images_of(torch.tensor([4, 0, 9]))
    assert torch.equal(read_RCHW, memory.images_of([4, 0, 9]))
    before_RCHW = read_RCHW.clone()
    other.add(
        torch.arange(60), memory.embeddings.repeat(3, 1), images(np.random.default_rng(1), 60)
    )
    assert torch.equal(read_RCHW, before_RCHW)


@table("name", sorted(MAKERS))
def test_a_first_float64_batch_widens_all_rows_and_counts(name: str) -> None:
    memory = WorkingMemory(10, 5, MAKERS[name](), SHAPE, seed=4)
    rng = np.random.default_rng(0)
    image_NCHW, z_ND, ids = images(rng, 30), unit_rows(rng, "clustered", 30, 5), torch.arange(30)
    memory.add(ids[:15], z_ND[:15].to(torch.float32), image_NCHW[:15], ids[:15] % 3)
    memory.negatives(4, how="stratified", cells=3)
    state, held = memory.state_dict(), memory.ids.clone()
    memory.add(ids[:0], z_ND[:0], image_NCHW[:0])
    assert memory.dtype == torch.float32  # NumPy's empty arrays are float64
    assert torch.equal(memory.ids, held)
    wide = WorkingMemory(10, 5, MAKERS[name](), SHAPE, dtype=torch.float64)
    wide.load_state_dict(state)
    for each in (memory, wide):
        each.add(ids[14:15], z_ND[14:15], image_NCHW[14:15], ids[14:15] % 3)
        assert each.dtype == torch.float64
        # Counts are float64 now, and check_valid compares them with float64 counts.
        assert each.check_valid() == (True, "")
        each.add(ids[15:], z_ND[15:], image_NCHW[15:], ids[15:] % 3)
        each.negatives(4, how="stratified", cells=3)
        assert each.check_valid() == (True, "")
    assert torch.equal(memory.ids, wide.ids)
    loaded = WorkingMemory(10, 5, MAKERS[name](), SHAPE)
    loaded.load_state_dict(memory.state_dict())
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded.counts(), memory.counts())
    narrow = WorkingMemory(10, 5, MAKERS[name](), SHAPE, dtype=torch.float32)
    narrow.load_state_dict(memory.state_dict())
    assert narrow.dtype == torch.float32
    assert narrow.check_valid() == (True, "")


def test_a_memory_keeps_the_dtype_of_its_constructor() -> None:
    fixed = WorkingMemory(4, 3, dtype=torch.float32)
    fixed.add([2], torch.eye(3, dtype=torch.float64)[1:2])
    assert fixed.dtype == torch.float32
    wide = WorkingMemory(4, 3, dtype=torch.float64)
    wide.add([2], torch.eye(3)[1:2])
    assert wide.dtype == torch.float64


# The precision of training must not change any count.


@contextmanager
def reduced_products() -> Iterator[None]:
    """Set the reduced precision that users set for a GPU. Some CPUs also apply it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"  # the setting is unchanged
    finally:
        torch.set_float32_matmul_precision(before)


def interrupted(name: str) -> int:
    """Interrupt a memory by Ctrl-C at many moments, and check it after each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    z_BD = unit_rows(np.random.default_rng(0), "uniform", 64, 8)
    for delay in np.linspace(0.0005, 0.01, 15):
        memory = WorkingMemory(256, 8, POLICIES[name]())
        begun = threading.Event()

        def interrupt(begun: threading.Event = begun, delay: float = delay) -> None:
            begun.wait()
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at any moment
            begun.set()
            while True:
                memory.add(torch.arange(64), z_BD)
                memory.refresh(torch.arange(9), z_BD[:9])
        thread.join()
        assert memory.check_valid() == (True, "")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return 0


@pytest.mark.parametrize("name", ["duel", "oldest", "minimum-redundancy"])
def test_an_interrupt_leaves_a_valid_memory(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert Forked(interrupted, name, output=log).wait(120) == 0, log.read_text()


def interrupted_description() -> int:
    """Interrupt a memory by Ctrl-C after its descriptors have changed and before it counts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    rng = np.random.default_rng(0)
    z_BD, image_BCHW = unit_rows(rng, "uniform", 64, 8), images(rng, 64)
    memory = WorkingMemory(64, 8, Duel(), SHAPE, descriptor=Features(4))
    feature_BF = image_BCHW.flatten(1).float()
    memory.add(torch.arange(64), z_BD, images=image_BCHW, features=feature_BF)
    count_again = memory.eviction.on_update

    def interrupt(slots: Tensor, before_RA: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        count_again(slots, before_RA)

    memory.eviction.on_update = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        memory.describe_again(lambda image_bCHW: image_bCHW.flatten(1).float().square())
    assert memory.check_valid() == (True, "")
    return 0


def test_an_interrupt_while_slots_are_described_again_leaves_a_valid_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert Forked(interrupted_description, output=log).wait(120) == 0, log.read_text()


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@table("around", [autocast, reduced_products])
@table(
    "policy", [MostDuplicated, MAKERS["most-duplicated, sharp"], MinimumRedundancy], ids=range(3)
)
def test_a_memory_computes_in_full_precision(
    policy: Callable[[], Policy],
    around: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Products with the whole column are tested too.
    monkeypatch.setattr("stream_ssl.memory.duel.linear.POOL_ROWS", 40)

    def outcome() -> tuple[list[int], list[float]]:
        rng = np.random.default_rng(0)
        memory, evicted = WorkingMemory(300, 16, policy()), []
        for _ in range(10):
            z_BD = unit_rows(rng, "clustered", 50, 16).float()
            evicted += memory.add(torch.arange(50), z_BD).evicted.tolist()
            memory.refresh(torch.arange(40), unit_rows(rng, "clustered", 40, 16).float())
        drawn = memory.negatives(9, how="hardest", anchors=memory.embeddings[:5])
        assert memory.check_valid() == (True, "")
        return evicted + drawn.ids_N.tolist(), memory.counts().tolist()

    plain = outcome()
    with around():
        assert outcome() == plain


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 and later")
def test_a_memory_keeps_inherited_precision_settings_of_torch() -> None:
    before, memory = torch.backends.fp32_precision, WorkingMemory(3, 2)
    try:
        torch.backends.fp32_precision = "tf32"
        memory.add([0], torch.eye(2)[:1])
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        memory.add([1], torch.eye(2)[:1])
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.fp32_precision = before


@table("score", [VonMisesFisher(1e-8), Threshold(1.0, 1e-9)])
def test_check_valid_tolerates_only_rounding_under_sharp_scores(score: Score) -> None:
    memory = WorkingMemory(900, 8, MostDuplicated(score))
    row_ND = unit_rows(np.random.default_rng(4), "uniform", 60, 8)
    for part in torch.arange(1800).split(300):
        memory.add(part, row_ND[part % 60])
        assert memory.check_valid() == (True, "")
    memory.eviction._counts.count_K[7] += 1.0  # type: ignore[attr-defined]
    assert not memory.check_valid()[0]


SIZED = [
    (
        WorkingMemory(64, 4, image_shape=SHAPE),
        ("capacity", "capacity_of_all", "dim", "image_shape"),
    ),
    (WorkingMemory(64, 4)._columns, ("capacity", "dim", "capacity_of_all")),
    (WorkingMemory(64, 4, image_shape=SHAPE)._columns.images, ("shape",)),
    (Thumbnail(side=4), ("side",)),
]


def test_sizes_cannot_be_assigned() -> None:
    for sized, names in SIZED:
        for name in names:
            before = getattr(sized, name)
            with pytest.raises(AttributeError):
                setattr(sized, name, 128)
            assert getattr(sized, name) == before


def test_the_error_about_an_assigned_capacity_names_the_remedy() -> None:
    memory = WorkingMemory(64, 4)
    with pytest.raises(AttributeError, match="WorkingMemory is 64 for good"):
        memory.capacity = 128
    assert memory.capacity == 64
    again = copy.deepcopy(memory)
    assert (again.capacity, again.dim) == (64, 4)
