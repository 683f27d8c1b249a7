"""Tests of policies from other packages, and of the calls that every policy receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load, save
from table import table

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import POLICIES, Feedback, Policy, policy
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import unit_rows

OUTSIDE = '''
"""A policy from outside."""

from stream_ssl.memory.eviction import Oldest


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


def test_policy_builds_policies_by_name_and_from_other_packages(outside: str) -> None:
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
        (
            "newest",
            {},
            r"'newest': must be one of \['duel', .*'reservoir'\], or 'module",
        ),
        (":Mine", {}, "must be one of"),
        ("no_such_module:Mine", {}, "cannot be imported .*no_such_module"),
        ("policies_from_outside:Yours", {}, "cannot be imported .*Yours"),
        (
            "policies_from_outside:Alien",
            {},
            "must be a subclass of stream_ssl.memory.eviction.Policy",
        ),
        (
            "stream_ssl.memory.eviction:policy",
            {},
            "must be a subclass of stream_ssl.memory.eviction.Policy",
        ),
        ("oldest", {"pace": 3}, r"'oldest' with arguments \['pace'\].*give those of .*Oldest"),
    ],
)
def test_policy_rejects_wrong_names_and_arguments(
    outside: str, path: str, arguments: dict[str, Any], message: str
) -> None:
    del outside  # the fixture puts the module on the path
    with pytest.raises(ValueError, match=message):
        policy(path, **arguments)


def parse(*options: str) -> Any:
    """Parse options in the same way as the memory section of the learner's configuration."""
    parser = ArgumentParser()
    skip = {"dim", "image_shape", "device", "dtype"}
    parser.add_class_arguments(WorkingMemory, "memory", skip=skip, instantiate=False)
    settings = parser.parse_args(["--memory.capacity=16", *options])
    return parser.instantiate(settings).memory.eviction


def test_a_configuration_names_policies_by_class_path(outside: str) -> None:
    mine = parse("--memory.eviction", f"{outside}.Mine", "--memory.eviction.pace", "5")
    assert (type(mine).__name__, mine.pace) == ("Mine", 5)


@table("name", sorted(POLICIES))
def test_every_batch_ends_with_an_update_of_the_policy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = WorkingMemory(5, 3, POLICIES[name]())
    z_ND = unit_rows(np.random.default_rng(0), "uniform", 40, 3)
    heard: list[Feedback] = []
    monkeypatch.setattr(memory.eviction, "update", heard.append)
    for part in torch.arange(40).split(8):
        memory.add(part, z_ND[part])
    assert [feedback.added for feedback in heard] == [8, 16, 24, 32, 40]
    assert all(f.inserted + f.refused == 8 for f in heard)
    assert sum(f.inserted - f.evicted for f in heard) == 5
