"""A policy that learns, and policies from outside.

Shapes: D embedding, K slots.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load, save
from table import table

from memory import WorkingMemory
from memory.eviction import POLICIES, Feedback, KappaBandit, MostDuplicated, Policy, policy
from memory.eviction.bandit import NOT_YET, Arms
from memory.scores import VonMisesFisher
from memory.stats import effective_rank
from tests.naive import unit_rows


def pull(arms: Arms, rewards: list[float], steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        arm = arms.choose()
        arms.reward(arm, rewards[arm])
        chosen.append(arm)
    return chosen


def test_the_best_arm_is_found_and_found_again_when_it_changes() -> None:
    arms = Arms(4, 0.1, 0.95, torch.Generator().manual_seed(1))
    first = pull(arms, [0.1, 0.2, 0.9, 0.3], 400)
    assert first[:4] == [0, 1, 2, 3]
    assert 0.85 < first[4:].count(2) / 396 < 1
    then = pull(arms, [0.1, 0.95, -0.5, 0.3], 400)
    assert then[200:].count(1) / 200 > 0.8


def test_without_exploring_the_mean_decides_and_the_lowest_of_equals() -> None:
    arms = Arms(3, 0.0, 0.5, torch.Generator().manual_seed(1))
    assert pull(arms, [0.5, 0.5, 0.5], 6) == [0, 1, 2, 0, 0, 0]
    sums, weights = [0.0] * 3, [0.0] * 3
    for arm in (0, 1, 2, 0, 0, 0):
        sums, weights = [s / 2 for s in sums], [w / 2 for w in weights]
        sums[arm], weights[arm] = sums[arm] + 0.5, weights[arm] + 1
    assert arms.sum_A.tolist() == sums
    assert arms.weight_A.tolist() == weights


def test_choices_are_drawn_uniformly_when_only_exploring() -> None:
    arms = Arms(5, 1.0, 1.0, torch.Generator().manual_seed(2))
    chosen = torch.bincount(torch.tensor(pull(arms, [0.0] * 5, 10_005)[5:]), minlength=5)
    assert float(((chosen - 2000) ** 2 / 2000).sum()) < 4 + 4.5 * 8**0.5


def test_the_bandit_is_most_duplicated_with_the_arm_of_the_moment() -> None:
    """Replayed by hand: rewards, arms, and every eviction by a policy of the arm's own."""
    z_ND = unit_rows(np.random.default_rng(3), "clustered", 900, 6)
    kappas = (0.05, 0.2, 1.0)
    bandit = KappaBandit(kappas, interval=3, explore=0.3)
    memory, twin = (
        WorkingMemory(40, 6, bandit, seed=5),
        WorkingMemory(40, 6, MostDuplicated(VonMisesFisher(kappas[0]))),
    )
    arms, arm = Arms(3, 0.3, 0.95, torch.Generator().manual_seed(6)), 0
    before, batches, seen = None, 0, set()
    for part in torch.arange(900).split(20):
        evicted = memory.add(part, z_ND[part]).evicted.tolist()
        assert twin.add(part, z_ND[part]).evicted.tolist() == evicted
        assert memory.check_valid() == (True, "")
        if len(memory) < 40:
            continue
        now = effective_rank(memory.embeddings)
        before, batches = (now, 0) if before is None else (before, batches + 1)
        if batches == 3:
            arms.reward(arm, now - before)
            before, batches, arm = now, 0, arms.choose()
            rows = twin.state_dict()
            twin = WorkingMemory(40, 6, MostDuplicated(VonMisesFisher(kappas[arm])))
            twin.add(rows["columns.ids"], rows["columns.embeddings"])
        assert torch.allclose(memory.counts(), twin.counts(), atol=1e-9)
        assert bandit.kappa == kappas[arm]
        assert memory.eviction.score == VonMisesFisher(kappas[arm])
        seen.add(arm)
    assert seen == {0, 1, 2}
    assert torch.equal(bandit.arms.sum_A, arms.sum_A)


def test_an_arm_holds_until_as_many_joined_as_there_are_slots() -> None:
    z_ND = unit_rows(np.random.default_rng(3), "clustered", 1000, 6)
    bandit = KappaBandit((0.05, 0.2, 1.0), interval=2, explore=1.0)
    memory = WorkingMemory(40, 6, bandit, seed=5)
    joined, choices = 0, []
    for part in torch.arange(1000).split(9):
        began, pulled = bandit._before, bandit.arms.weight_A.clone()
        inserted = memory.add(part, z_ND[part]).inserted
        joined += inserted if began != NOT_YET else 0
        if not torch.equal(bandit.arms.weight_A, pulled):
            choices.append(joined)
            joined = 0
        loaded = WorkingMemory(40, 6, twin := KappaBandit((0.05, 0.2, 1.0), 2, 1.0))
        loaded.load_state_dict(memory.state_dict())
        assert twin._joined == bandit._joined == joined
    assert choices == [45] * 21  # the first five batches of nine that make 40


def test_a_bandit_may_count_approximately() -> None:
    z_ND = unit_rows(np.random.default_rng(3), "clustered", 900, 6)
    memory = WorkingMemory(40, 6, KappaBandit((0.05, 0.2), 1, explore=1.0, index="ivf"), seed=5)
    for part in torch.arange(900).split(20):
        memory.add(part, z_ND[part])
        assert memory.check_valid() == (True, "")
    loaded = WorkingMemory(40, 6, KappaBandit((0.05, 0.2), 1, explore=1.0, index="ivf"))
    loaded.load_state_dict(memory.state_dict())
    assert torch.equal(loaded.counts(), memory.counts())
    with pytest.raises(ValueError, match="index is 'fast'"):
        KappaBandit(index="fast")  # type: ignore[arg-type]


def test_a_saved_bandit_goes_on_with_its_arms() -> None:
    z_ND = unit_rows(np.random.default_rng(4), "clustered", 800, 6)

    def make() -> WorkingMemory:
        return WorkingMemory(30, 6, KappaBandit((0.05, 0.1, 0.3), interval=2), seed=2)

    memory = make()
    for part in torch.arange(800).split(16):
        memory.add(part, z_ND[part])
        state = memory.state_dict()
        loaded = make()
        loaded.load_state_dict(load(save(state)))
        again = loaded.state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)
        memory = loaded
    other = WorkingMemory(30, 6, KappaBandit((0.05, 0.1), interval=2))
    with pytest.raises(ValueError, match=r"under kappas \[0.05, 0.1, 0.3\], this memory has"):
        other.load_state_dict(memory.state_dict())


@table(
    ("options", "message"),
    [
        ({"kappas": ()}, "one at least"),
        ({"kappas": (0.1, 0.1)}, "must be distinct"),
        ({"kappas": (0.1, -1.0)}, "kappa is -1"),
        ({"interval": 0}, "interval is 0"),
        ({"explore": 1.5}, "explore is 1.5"),
        ({"discount": 0.0}, "discount is 0"),
    ],
)
def test_the_bandit_is_built_rightly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KappaBandit(**options)


OUTSIDE = '''
"""A policy from outside."""

from memory.eviction import Oldest


class Mine(Oldest):
    """Mine.

    Args:
        pace: of it.
    """

    name = "mine"

    def __init__(self, pace: int = 3) -> None:
        self.pace = pace


class Nameless(Oldest):
    """One that is not called anything, and whose constructor asks nobody's."""

    def __init__(self) -> None:
        self.pace = 1


class Alien:
    """No policy."""
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "policies_from_outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    return "policies_from_outside"


def test_a_policy_comes_by_name_or_from_outside(outside: str) -> None:
    assert {name: type(policy(name)) for name in POLICIES} == POLICIES
    sharp = policy("most-duplicated", score=VonMisesFisher(0.3))
    assert sharp.score == VonMisesFisher(0.3)
    mine: Any = policy(f"{outside}:Mine", pace=7)
    assert isinstance(mine, Policy)
    assert mine.pace == 7
    memory = WorkingMemory(3, 2, mine)
    assert memory.add(torch.arange(5), torch.eye(2)[[0] * 5]).evicted.tolist() == [0, 1]


def test_a_policy_without_a_name_is_called_after_its_class(outside: str) -> None:
    make = lambda: WorkingMemory(3, 2, policy(f"{outside}:Nameless"))  # noqa: E731
    memory, z = make(), torch.eye(2)[[0] * 9]
    memory.add(torch.arange(5), z[:5])
    assert memory.eviction.name == "Nameless"
    loaded = make()
    loaded.load_state_dict(load(save(memory.state_dict())))
    for each in (memory, loaded):
        assert each.add(torch.arange(5, 9), z[5:]).evicted.tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"eviction policy Nameless, this memory has .* oldest"):
        WorkingMemory(3, 2, policy("oldest")).load_state_dict(memory.state_dict())


@table(
    ("path", "arguments", "message"),
    [
        ("newest", {}, r"'newest': must be one of \['hybrid', .*'reservoir'\], or 'module"),
        (":Mine", {}, "must be one of"),
        ("no_such_module:Mine", {}, "cannot be imported .*no_such_module"),
        ("policies_from_outside:Yours", {}, "cannot be imported .*Yours"),
        ("policies_from_outside:Alien", {}, "must be a subclass of memory.eviction.Policy"),
        ("memory.eviction:policy", {}, "must be a subclass of memory.eviction.Policy"),
        ("oldest", {"pace": 3}, r"'oldest' with arguments \['pace'\].*give those of .*Oldest"),
    ],
)
def test_the_error_names_what_is_wrong(
    outside: str, path: str, arguments: dict[str, Any], message: str
) -> None:
    del outside  # on the path
    with pytest.raises(ValueError, match=message):
        policy(path, **arguments)


def parse(*options: str) -> Any:
    """As the learner's configuration reads its memory section."""
    parser = ArgumentParser()
    skip = {"dim", "image_shape", "device", "dtype"}
    parser.add_class_arguments(WorkingMemory, "memory", skip=skip, instantiate=False)
    settings = parser.parse_args(["--memory.capacity=16", *options])
    return parser.instantiate(settings).memory.eviction


def test_a_configuration_names_policies_by_class_path(outside: str) -> None:
    mine = parse("--memory.eviction", f"{outside}.Mine", "--memory.eviction.pace", "5")
    assert (type(mine).__name__, mine.pace) == ("Mine", 5)
    nested = parse(
        "--memory.eviction=memory.eviction.Hybrid",
        "--memory.eviction.age_cap=50",
        "--memory.eviction.policy=memory.eviction.Reservoir",
    )
    memory = WorkingMemory(20, 3, nested)
    memory.add(torch.arange(90), unit_rows(np.random.default_rng(0), "uniform", 90, 3))
    assert int((89 - memory.born).max()) <= 50
    arms = parse("--memory.eviction=memory.eviction.KappaBandit", "--memory.eviction.interval=9")
    assert isinstance(arms, KappaBandit)


@table("name", sorted(POLICIES))
def test_every_batch_ends_with_an_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = WorkingMemory(5, 3, POLICIES[name]())
    z_ND = unit_rows(np.random.default_rng(0), "uniform", 40, 3)
    heard: list[Feedback] = []
    monkeypatch.setattr(memory.eviction, "update", heard.append)
    for part in torch.arange(40).split(8):
        memory.add(part, z_ND[part])
    assert [feedback.added for feedback in heard] == [8, 16, 24, 32, 40]
    assert all(f.inserted + f.refused == 8 for f in heard)
    assert sum(f.inserted - f.evicted for f in heard) == 5
