"""States: bit-equal there and back, of older versions, and in files.

Shapes: D embedding, k occupied slots, N samples, C H W image.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from memory_stream import SHAPE, offer, stream
from torch import Tensor

import memory as package
from memory import Duplicates, WorkingMemory
from memory.eviction import (
    POLICIES,
    Feedback,
    Hybrid,
    KappaBandit,
    MostDuplicated,
    Oldest,
    Policy,
)
from memory.scores import Score, VonMisesFisher
from memory.state import VERSION, decode, encode


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("action", [None, "count", "merge"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_memory_goes_on_bit_equal(name: str, action: Any, tmp_path: Path) -> None:
    rule = None if action is None else Duplicates(0.97, action)
    memory = WorkingMemory(25, 6, POLICIES[name](), SHAPE, seed=3, duplicates=rule)
    start = 0
    for end in (10, 60, 130):
        offer(memory, start, end)
        state = memory.state_dict()
        package.save(memory, tmp_path / "held")
        loaded = package.load(tmp_path / "held", POLICIES[name](), seed=8, duplicates=rule)
        assert_equal(loaded.state_dict(), state)
        twice = WorkingMemory(25, 6, POLICIES[name](), SHAPE, duplicates=rule)
        twice.load_state_dict(loaded.state_dict())
        assert_equal(twice.state_dict(), state)
        assert loaded.check_valid() == (True, "")
        assert loaded.stats() == memory.stats()
        for each in (memory, loaded):
            offer(each, end, end + 15)
        assert_equal(loaded.state_dict(), memory.state_dict())
        memory, start = loaded, end + 15


def test_a_state_of_version_1_is_read() -> None:
    memory = WorkingMemory(8, 6, image_shape=SHAPE)
    ids, z_ND, image_NCHW = stream(20)
    memory.add(ids, z_ND, image_NCHW)
    old = {
        name: value
        for name, value in memory.state_dict().items()
        if name in ("counters", "generator")
        or (name.startswith(("columns.", "eviction.")) and name != "columns.multiplicity")
    }
    old["counters"] = torch.tensor([1, 8, 20, 12, 0])
    loaded = WorkingMemory(8, 6, image_shape=SHAPE)
    loaded.load_state_dict(old)
    assert_equal(loaded.state_dict(), memory.state_dict())
    assert loaded.check_valid() == (True, "")


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_other_versions_are_refused(version: int) -> None:
    memory = WorkingMemory(4, 3)
    state = memory.state_dict()
    state["counters"][0] = version
    with pytest.raises(ValueError, match=f"no memory state of version 1 to {VERSION}"):
        memory.load_state_dict(state)


def test_a_state_of_another_score_is_refused_and_changes_nothing() -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6, MostDuplicated(VonMisesFisher(0.2)))
    memory.add(ids, z_ND)
    before = memory.state_dict()
    other = WorkingMemory(8, 6, MostDuplicated(VonMisesFisher(0.1)))
    other.add(ids[:9], z_ND[:9])
    with pytest.raises(ValueError, match=r"score VonMisesFisher\(kappa=0.1\), this memory has"):
        memory.load_state_dict(other.state_dict())
    assert_equal(memory.state_dict(), before)


def most(**options: Any) -> Policy:
    return MostDuplicated(VonMisesFisher(0.1), **options)


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (most, lambda: most(compete=True), "under compete False, this memory has compete True"),
        (most, lambda: most(index="ivf"), "under index exact, this memory has index ivf"),
        (
            lambda: Hybrid(most(), age_cap=50),
            lambda: Hybrid(most(), age_cap=60),
            "under age_cap 50, this memory has age_cap 60",
        ),
        (lambda: Hybrid(front=2), lambda: Hybrid(front=3), "under front 2, this memory has front"),
        (lambda: Hybrid(front=2), lambda: Hybrid(age_cap=9), "under age_cap None, .* age_cap 9"),
        (
            lambda: Hybrid(most(), front=2),
            lambda: Hybrid(Hybrid(most()), front=2),
            "under inner eviction policy most-duplicated, this memory has .* hybrid",
        ),
        (
            lambda: Hybrid(most(), front=2),
            lambda: Hybrid(most(compete=True), front=2),
            "under inner compete False",
        ),
        (
            lambda: KappaBandit((0.1, 0.2)),
            lambda: KappaBandit((0.1, 0.3)),
            r"under kappas \[0.1, 0.2\], this memory has kappas \[0.1, 0.3\]: build it with",
        ),
        (KappaBandit, lambda: KappaBandit(interval=9), "under interval 32, this memory has inter"),
    ],
    ids=range(9),
)
def test_a_state_of_other_options_is_refused_and_changes_nothing(
    one: Callable[[], Policy], two: Callable[[], Policy], message: str
) -> None:
    ids, z_ND, _ = stream(30)
    saved, other = WorkingMemory(8, 6, one()), WorkingMemory(8, 6, two())
    for memory in (saved, other):
        memory.add(ids[:20], z_ND[:20])
    other.add(ids[20:], z_ND[20:])
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert_equal(other.state_dict(), before)
    again = WorkingMemory(8, 6, one())
    again.load_state_dict(saved.state_dict())
    assert_equal(again.state_dict(), saved.state_dict())


@pytest.mark.parametrize(
    "rule", [None, Duplicates(0.9), Duplicates(0.98, "merge")], ids=["none", "0.9", "merge"]
)
def test_a_state_under_another_test_for_duplicates_is_refused(rule: Duplicates | None) -> None:
    state = WorkingMemory(8, 6, duplicates=Duplicates(0.98)).state_dict()
    with pytest.raises(
        ValueError, match=r"duplicates Duplicates\(threshold=0.98, action='count'\)"
    ):
        WorkingMemory(8, 6, duplicates=rule).load_state_dict(state)


def test_what_an_earlier_writer_did_not_say_is_not_compared() -> None:
    """States of version 2 once told of the policy, the score and the images alone."""
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6, most(compete=True), duplicates=Duplicates(0.98))
    memory.add(ids, z_ND)
    state = memory.state_dict()
    told = {name: decode(state)[name] for name in ("eviction policy", "score", "image_shape")}
    loaded = WorkingMemory(8, 6, most())
    loaded.load_state_dict(state | {"description": encode(told)})
    assert torch.equal(loaded.counts(), memory.counts())


class Nameless(Score):
    """A score from outside, whose repr would name an address."""

    slope = 0.5

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.add_(1.0).mul_(0.5)


def test_a_score_without_a_repr_is_known_by_its_class() -> None:
    memory = WorkingMemory(8, 6, MostDuplicated(Nameless()))
    WorkingMemory(8, 6, MostDuplicated(Nameless())).load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="under score Nameless, this memory has score Linear"):
        WorkingMemory(8, 6).load_state_dict(memory.state_dict())


class Learning(Oldest):
    """A policy that moves its own score, and remembers where it was."""

    name = "learning"

    def __init__(self) -> None:
        self.score: Score = VonMisesFisher(0.1)

    def update(self, feedback: Feedback) -> None:
        self.heard = feedback
        self.score = VonMisesFisher(0.1 + feedback.added / 1000)

    def state(self) -> dict[str, Tensor]:
        kappa = getattr(self.score, "kappa", 0.0)
        return super().state() | {"kappa": torch.tensor([kappa], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.score = VonMisesFisher(float(state["kappa"]))


def test_a_policy_hears_of_every_batch_and_may_move_its_score() -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6, policy := Learning(), duplicates=Duplicates(0.999, "refuse"))
    memory.add(ids[:12], z_ND[:12])
    again = memory.add(ids[10:14], z_ND[[10, 11, 12, 13]])
    assert policy.heard == Feedback(
        inserted=again.inserted,
        evicted=len(again.evicted),
        refused=len(again.refused),
        added=16,
    )
    assert again.refused.tolist() == [10, 11]
    loaded = WorkingMemory(8, 6, Learning(), duplicates=Duplicates(0.999, "refuse"))
    loaded.load_state_dict(memory.state_dict())
    assert loaded.eviction.score == VonMisesFisher(0.1 + 16 / 1000)
    assert torch.equal(loaded.counts(), memory.counts())


def test_a_failed_save_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, z_ND, _ = stream(30)
    memory = WorkingMemory(8, 6)
    memory.add(ids[:9], z_ND[:9])
    package.save(memory, tmp_path / "held")
    before = memory.state_dict()
    memory.add(ids[9:], z_ND[9:])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        package.save(memory, tmp_path / "held")
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    assert_equal(package.load(tmp_path / "held").state_dict(), before)


def test_a_file_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a memory")
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "other")
    for name in ("text", "other"):
        with pytest.raises(ValueError, match="holds no memory that was saved here"):
            package.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        package.load(tmp_path / "nothing")


def test_the_error_without_safetensors_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.save(WorkingMemory(2, 2), tmp_path / "held")
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.load(tmp_path / "held")


def sharp() -> WorkingMemory:
    return WorkingMemory(25, 6, MostDuplicated(VonMisesFisher(0.1)), SHAPE)


DAMAGE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "rows missing": lambda state: {"columns.labels": state["columns.labels"][:-1]},
    "too many": lambda state: {
        name: torch.cat([state[name], state[name]]) for name in state if name.startswith("columns.")
    },
    "counters cut": lambda state: {"counters": state["counters"][:3]},
    "counters wrong": lambda state: {"counters": state["counters"] + 1 * (torch.arange(7) == 3)},
    "not finite": lambda state: {"columns.embeddings": state["columns.embeddings"] * torch.nan},
    "not unit": lambda state: {"columns.embeddings": 2 * state["columns.embeddings"]},
    "generator": lambda state: {"generator": state["generator"][:7]},
    "drift": lambda state: {"drift": state["drift"][:1]},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    saved, memory = sharp(), sharp()
    offer(saved, 0, 60)
    offer(memory, 60, 70)
    before, state = memory.state_dict(), saved.state_dict()
    with pytest.raises(ValueError, match="the state is damaged: "):
        memory.load_state_dict(state | damage(state))
    assert_equal(memory.state_dict(), before)
    memory.load_state_dict(state)
    assert_equal(memory.state_dict(), state)


def test_an_entry_that_earlier_writers_kept_is_passed_over() -> None:
    saved, loaded = sharp(), sharp()
    offer(saved, 0, 60)
    loaded.load_state_dict(saved.state_dict() | {"eviction.reach": torch.tensor([64])})
    assert_equal(loaded.state_dict(), saved.state_dict())
