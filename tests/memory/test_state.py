"""Tests of states: saved and loaded bit-equal, from other versions, damaged, and in files.

Shapes: D embedding, k occupied slots, N samples, C H W image.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from memory_stream import SHAPE, equal, offer, stream
from table import table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stream_ssl.memory as package
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Embedding, Thumbnail
from stream_ssl.memory.duel.approximate import ApproximateCounts
from stream_ssl.memory.eviction import POLICIES, MostDuplicated, Oldest, Policy
from stream_ssl.memory.scores import Gaussian, Linear, Score, VonMisesFisher
from stream_ssl.memory.state import VERSION, decode, encode


@table("action", [None, "count", "merge"])
@table("name", sorted(POLICIES))
def test_a_loaded_memory_continues_bit_equal(name: str, action: Any, tmp_path: Path) -> None:
    rule = None if action is None else Duplicates(0.97, action)
    memory = WorkingMemory(25, 6, POLICIES[name](), SHAPE, seed=3, duplicates=rule)
    start = 0
    for end in (10, 60, 130):
        offer(memory, start, end)
        package.save(memory, tmp_path / "held")
        loaded = package.load(tmp_path / "held", POLICIES[name](), seed=8, duplicates=rule)
        twice = WorkingMemory(25, 6, POLICIES[name](), SHAPE, duplicates=rule)
        twice.load_state_dict(loaded.state_dict())
        for each in (loaded, twice):
            assert equal(each.state_dict(), memory.state_dict())
        assert loaded.check_valid() == (True, "")
        assert loaded.stats() == memory.stats()
        for each in (memory, loaded):
            offer(each, end, end + 15)
        assert equal(loaded.state_dict(), memory.state_dict())
        memory, start = loaded, end + 15


def most(**options: Any) -> Policy:
    return MostDuplicated(VonMisesFisher(0.1), **options)


Build = Callable[[], WorkingMemory]


def of(policy: Callable[[], Policy] = most, **options: Any) -> Build:
    return lambda: WorkingMemory(8, 6, policy(), SHAPE, **options)


@table(
    ("one", "two", "message"),
    [
        (of(), of(MostDuplicated), r"under score VonMisesFisher\(kappa=0.1\), this memory has"),
        (of(), of(lambda: most(compete=True)), "under compete False, this memory has compete True"),
        (of(), of(Oldest), "under eviction policy most-duplicated, this memory has .*oldest"),
        (of(), of(descriptor=Thumbnail(2)), r"descriptor Embedding\(\), .*Thumbnail\(side=2\): bu"),
    ],
    ids=range(4),
)
def test_a_state_of_another_memory_is_refused_and_changes_nothing(
    one: Build, two: Build, message: str
) -> None:
    saved, other = one(), two()
    offer(saved, 0, 20)
    offer(other, 0, 30)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert equal(other.state_dict(), before)
    again = one()
    again.load_state_dict(saved.state_dict())
    assert equal(again.state_dict(), saved.state_dict())


def test_a_state_loads_under_another_rule_for_near_duplicates() -> None:
    saved, other = of(duplicates=Duplicates(0.98))(), of(duplicates=Duplicates(0.5, "refuse"))()
    offer(saved, 0, 20)
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other.ids, saved.ids)
    assert other.duplicates == Duplicates(0.5, "refuse")
    again = of(duplicates=Duplicates(0.5, "refuse"))()
    again.load_state_dict(other.state_dict())
    assert equal(again.state_dict(), other.state_dict())


class Nameless(Score):
    """A score from another package, whose repr contains an address."""

    slope = 0.5

    def apply_(self, cosine: Tensor) -> Tensor:
        return cosine.add_(1.0).mul_(0.5)


def test_a_score_without_a_repr_is_known_by_its_class() -> None:
    memory = of(lambda: MostDuplicated(Nameless()))()
    of(lambda: MostDuplicated(Nameless()))().load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="under score Nameless, this memory has score Linear"):
        of(MostDuplicated)().load_state_dict(memory.state_dict())


def test_an_integer_and_a_float_of_one_value_are_the_same_option() -> None:
    for one, other in (
        (VonMisesFisher(1), VonMisesFisher(1.0)),
        (Gaussian(np.float64(2)), Gaussian(2)),
    ):
        state = WorkingMemory(8, 6, MostDuplicated(one), duplicates=Duplicates(1)).state_dict()
        again = WorkingMemory(8, 6, MostDuplicated(other), duplicates=Duplicates(1.0))
        again.load_state_dict(state)


# States that other versions wrote.


def test_a_state_of_an_earlier_version_is_loaded() -> None:
    memory = WorkingMemory(8, 6, image_shape=SHAPE)
    memory.add(*stream(20))
    old = memory.state_dict()
    old["counters"][0] = 2
    del old["columns.draws"], old["columns.drawn_epoch"]
    loaded = WorkingMemory(8, 6, image_shape=SHAPE, descriptor=Embedding())
    loaded.load_state_dict(old)
    assert equal(loaded.state_dict(), memory.state_dict())
    assert loaded.check_valid() == (True, "")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, f"no memory state of version 2 to {VERSION}"),
        (VERSION + 1, f"version {VERSION + 1}, .* reads up to {VERSION}: go on with the newer"),
    ],
)
def test_states_of_unknown_versions_are_refused(version: int, message: str) -> None:
    memory = WorkingMemory(4, 3)
    state = memory.state_dict()
    state["counters"][0] = version
    with pytest.raises(ValueError, match=message):
        memory.load_state_dict(state)


FORMS: dict[str, dict[str, list[int]]] = {
    "": {
        "counters": [7],
        "drift": [2],
        "seed": [],
        "strata.centres": [3, 6],
        "strata.numbers": [5],
    },
    "duel": {"counts": [25], "next": [4]},
    "minimum-redundancy": {"cosines": [25, 16], "floors": [25], "slots": [25, 16]},
    "most-duplicated": {
        "sum": [6],
        "since": [1],
        "search.bound": [0],
        "search.norms": [2],
        "search.numbers": [5],
        "search.pool": [0],
    },
    "oldest": {"head": [1]},
    "random": {"generator": [5056]},
    "redundant": {"chance.drawn": [0], "chance.generator": [5056], "counts": [25], "next": [4]},
    "reservoir": {"generator": [5056], "seen": [1]},
}
"""The shapes of version 4, of the memory ("") and of each policy."""


@table("name", sorted(POLICIES))
def test_the_form_of_a_state_changes_only_with_its_version(name: str) -> None:
    """An older program names the version that it cannot read, and fails obscurely without it."""
    memory = WorkingMemory(25, 6, POLICIES[name](), SHAPE, seed=3)
    offer(memory, 0, 60)
    shapes = {entry: list(value.shape) for entry, value in memory.state_dict().items()}
    own = {one.removeprefix("eviction."): shapes[one] for one in shapes if one[:9] == "eviction."}
    found = (VERSION, own, {one: shapes[one] for one in FORMS[""]})
    remedy = "if a program of before cannot read the new form, raise VERSION; then update FORMS"
    assert found == (4, FORMS[name], FORMS[""]), remedy


def test_counts_of_another_version_are_refused_with_the_remedy() -> None:
    memory = WorkingMemory(8, 4, MostDuplicated(VonMisesFisher(0.1)))
    state = memory.state_dict() | {"eviction.reach": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"another version of the eviction policy .*--from OLD_RUN"
    ):
        memory.load_state_dict(state)


@table("index", ["exact", "ivf", "auto"])
def test_approximate_linear_counts_of_an_older_state_are_counted_exactly(index: Any) -> None:
    inner = MostDuplicated()
    inner.index = "ivf"  # older versions allowed this
    before = WorkingMemory(200, 6, inner, SHAPE)
    offer(before, 0, 260)
    memory = WorkingMemory(200, 6, MostDuplicated(index=index), SHAPE)
    memory.load_state_dict(before.state_dict())
    assert isinstance(inner._counts, ApproximateCounts)
    assert torch.equal(memory.ids, before.ids)
    exact_k = Linear().counts(memory.descriptors)
    assert torch.allclose(memory.counts(), exact_k)
    offer(memory, 260, 300)
    assert memory.check_valid() == (True, "")


def test_entries_that_an_older_state_lacks_are_not_compared() -> None:
    """An older version stored neither descriptors nor the state of a search."""
    for policy in (MostDuplicated, most):
        memory = WorkingMemory(25, 6, policy())
        memory.add(*stream(60)[:2])
        state = memory.state_dict()
        told = {name: decode(state)[name] for name in ("eviction policy", "score", "image_shape")}
        state = {name: v for name, v in state.items() if "search." not in name}
        loaded = WorkingMemory(25, 6, policy(), descriptor=Embedding(), duplicates=Duplicates())
        loaded.load_state_dict(state | {"description": encode(told)})
        assert torch.equal(loaded.counts(), memory.counts())
        assert torch.equal(loaded.descriptors, memory.embeddings)
        assert loaded.check_valid() == (True, "")
        thumbnails = WorkingMemory(25, 6, policy(), SHAPE, descriptor=Thumbnail(2))
        with pytest.raises(ValueError, match="the state has columns"):
            thumbnails.load_state_dict(state | {"description": encode(told)})


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
    "seed": lambda state: {"seed": torch.tensor([1, 2])},
    "drift": lambda state: {"drift": state["drift"][:1]},
    "names": lambda state: {"producer_names": state["generator"]},
    "names of another type": lambda state: {"producer_names": encode([1])},
    "cells": lambda state: {"strata.numbers": torch.zeros(2)},
    "counts": lambda state: {"eviction.counts": torch.zeros(9)},
    "policy": lambda state: {"eviction.next": torch.zeros(0)},
    "description": lambda state: {"description": state["generator"]},
    "description of another type": lambda state: {"description": encode([1])},
}


@table(("score", "name"), [(Gaussian(), "eviction.counts"), (Linear(), "eviction.sum")])
def test_check_valid_finds_a_count_that_is_not_a_number(score: Score, name: str) -> None:
    memory = WorkingMemory(25, 6, MostDuplicated(score), SHAPE)
    offer(memory, 0, 60)
    state = memory.state_dict()
    state[name][3] = torch.nan
    memory.load_state_dict(state)
    assert not memory.check_valid()[0]


@table("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    saved, memory = of()(), of()()
    offer(saved, 0, 60)
    offer(memory, 60, 70)
    before, state = memory.state_dict(), saved.state_dict()
    with pytest.raises(ValueError, match=r"the state is damaged: .*; load an earlier one"):
        memory.load_state_dict(state | damage(state))
    assert equal(memory.state_dict(), before)
    assert memory.check_valid() == (True, "")


@table("offered", [0, 60])
def test_no_two_tensors_of_a_state_share_an_address(offered: int) -> None:
    """Accelerate saves only one of the tensors at an address, even of tensors without elements."""
    memory = of()()
    if offered:
        offer(memory, 0, offered)
    state = memory.state_dict()
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    other = of()()
    offer(other, 0, 60)
    other.load_state_dict(state)
    assert equal(other.state_dict(), state)
    assert other.check_valid() == (True, "")


def test_the_error_about_a_state_of_numpy_arrays_says_to_pass_tensors() -> None:
    saved, memory = of()(), of()()
    offer(saved, 0, 60)
    state: dict[str, Any] = {name: value.numpy() for name, value in saved.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"is an array of NumPy: pass tensors, .* torch.from_numpy"
    ):
        memory.load_state_dict(state)
    memory.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    assert equal(memory.state_dict(), saved.state_dict())


@table("lack", ["CUDA out of memory.", "DefaultCPUAllocator: can't allocate memory: you tried"])
def test_a_lack_of_memory_while_loading_is_not_reported_as_damage(
    lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, memory = of()(), of()()
    offer(saved, 0, 60)
    offer(memory, 60, 70)
    before, state, whole = memory.state_dict(), saved.state_dict(), memory.eviction.load

    def load(counts: dict[str, Tensor]) -> None:
        monkeypatch.setattr(memory.eviction, "load", whole)
        raise RuntimeError(lack)

    monkeypatch.setattr(memory.eviction, "load", load)
    with pytest.raises(RuntimeError, match=lack):
        memory.load_state_dict(state)
    assert equal(memory.state_dict(), before)
    memory.load_state_dict(state)
    assert equal(memory.state_dict(), state)


class Copies(TorchDispatchMode):
    """Records the numbers of elements of all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_loading_into_a_full_memory_copies_no_images() -> None:
    """A run that reloads after a divergence may have no room for a second copy of the images."""
    saved, memory = (WorkingMemory(8, 6, most(), (3, 16, 16)) for _ in range(2))
    for number, each in enumerate((saved, memory)):
        images = torch.full((8, 3, 16, 16), number, dtype=torch.uint8)
        each.add(torch.arange(8), torch.eye(6)[torch.arange(8) % 6], images=images)
    state = saved.state_dict()
    with Copies() as copies:
        memory.load_state_dict(state)
    assert 0 < max(copies.sizes) < state["columns.images"].numel()
    assert equal(memory.state_dict(), state)


def test_columns_of_another_type_are_refused() -> None:
    saved, memory = of()(), of()()
    offer(saved, 0, 60)
    state = saved.state_dict()
    for name in ("ids", "born", "images", "embeddings"):
        column = state[f"columns.{name}"].half()
        with pytest.raises(ValueError, match=f"{name} .* torch.float16 .* dtypes that"):
            memory.load_state_dict(state | {f"columns.{name}": column})


# Files.


def test_a_failed_save_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = WorkingMemory(8, 6, image_shape=SHAPE)
    offer(memory, 0, 9)
    package.save(memory, tmp_path / "held")
    before = memory.state_dict()
    offer(memory, 9, 30)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        package.save(memory, tmp_path / "held")
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    assert equal(package.load(tmp_path / "held").state_dict(), before)


def test_two_saves_at_once_leave_one_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a process, and containers on one volume, have the same process id."""
    memory, flush, begun = WorkingMemory(8, 6, image_shape=SHAPE), os.fsync, []
    offer(memory, 0, 9)

    def meanwhile(handle: int) -> None:
        if not begun:
            begun.append(handle)
            package.save(memory, tmp_path / "held")
        flush(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    package.save(memory, tmp_path / "held")
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    assert equal(package.load(tmp_path / "held").state_dict(), memory.state_dict())


def test_load_rejects_files_without_a_memory_and_save_rejects_bad_paths(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a memory")
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"text holds no memory: it is no file of .*give one of save\(\)"
    ):
        package.load(tmp_path / "text")
    with pytest.raises(ValueError, match="other holds no memory, but tensors such as x: give a"):
        package.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        package.load(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(ValueError, match=r"holds no memory: it is no regular file; give one"):
            package.load(tmp_path / name)
    memory = WorkingMemory(2, 2)
    for shape in (7, [3], {"a": 1}):
        described = {"description": encode(decode(memory.state_dict()) | {"image_shape": shape})}
        safetensors.torch.save_file(memory.state_dict() | described, tmp_path / "shape")
        with pytest.raises(ValueError, match="shape holds no memory, but tensors such as"):
            package.load(tmp_path / "shape")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*a/b; make it first \(mkdir"):
        package.save(WorkingMemory(2, 2), tmp_path / "a" / "b" / "held")
    for name in ("pipe", ""):
        with pytest.raises(ValueError, match=r"cannot be saved to .*: it is no file; give another"):
            package.save(memory, tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()


def test_a_memory_is_saved_in_a_folder_whose_name_is_not_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for path in (Path("held"), Path.cwd() / "held"):
        package.save(WorkingMemory(4, 2), path)
        assert package.load(path).capacity == 4
        path.unlink()


def test_save_keeps_a_link_to_the_file_of_a_memory(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("held")
    for _ in range(2):  # the file is absent, and then replaced
        package.save(WorkingMemory(2, 2), tmp_path / "latest")
        assert (tmp_path / "latest").is_symlink()
        assert package.load(tmp_path / "held").capacity == 2


def test_the_error_without_safetensors_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.save(WorkingMemory(2, 2), tmp_path / "held")
    with pytest.raises(ImportError, match="pip install safetensors"):
        package.load(tmp_path / "held")
