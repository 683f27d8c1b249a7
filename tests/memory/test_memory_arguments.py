"""Arguments that no memory can take: each error names the value, the rule and the remedy.

Shapes: B anchors, D embedding, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memory import Duplicates, WorkingMemory
from memory.clusters import kmeans
from memory.eviction import Hybrid, KappaBandit, MostDuplicated, Oldest, policy
from memory.eviction.group import ALONE
from memory.index import CellIndex
from memory.nearest import nearest, within
from memory.scores import Gaussian, VonMisesFisher
from memory.sharded import ShardedMemory
from tests.naive import unit_rows

NAN = torch.tensor([[1.0, 0, 0], [float("nan"), 0, 0]])


def filled(**options: Any) -> WorkingMemory:
    memory = WorkingMemory(6, 3, **options)
    memory.add(torch.arange(6), unit_rows(np.random.default_rng(0), "uniform", 6, 3).float())
    return memory


def raises(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 2.5}, r"capacity is 2.5: must be a whole number \(int\)"),
        ({"capacity": True}, r"capacity is True: must be a whole number \(int\)"),
        ({"capacity": "8"}, "capacity is '8': must be a whole number"),
        ({"dim": -1}, "capacity 4 and dim -1: both must be at least 1"),
        ({"eviction": "oldest"}, r"eviction is 'oldest': .*memory.eviction.policy\('oldest'\)"),
        ({"eviction": Oldest}, r"eviction is <class .*Oldest'>: .*build it with Oldest\(\)"),
        ({"eviction": 3}, r"eviction is 3: must be an instance .* such as MostDuplicated\(\)"),
        ({"duplicates": 0.98}, r"duplicates is 0.98: .*such as Duplicates\(threshold=0.98\)"),
        ({"image_shape": (3, 8)}, r"image_shape is \(3, 8\): must be \(C, H, W\)"),
        ({"image_shape": 8}, r"image_shape is 8: must be \(C, H, W\)"),
        ({"image_shape": (3, 0, 8)}, "a side of image_shape is 0: must be at least 1"),
        ({"images_on": "disk"}, "images_on is 'disk'"),
    ],
    ids=range(12),
)
def test_the_memory(options: dict[str, Any], message: str) -> None:
    raises(lambda: WorkingMemory(**{"capacity": 4, "dim": 3, **options}), message)


def test_whole_numbers_of_numpy_and_lists_for_shapes_are_fine() -> None:
    memory = WorkingMemory(np.int64(4), np.int32(3), image_shape=[1, 2, 2])  # type: ignore[arg-type]
    memory.add(np.arange(2), np.eye(3)[:2], np.zeros((2, 1, 2, 2), np.uint8))
    assert len(memory.negatives(np.int64(1))) == 1  # type: ignore[arg-type]
    assert memory.stalest(1).tolist() == [0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MostDuplicated(VonMisesFisher), "score is <class .*must be an instance"),  # type: ignore[arg-type]
        (lambda: MostDuplicated("vmf"), "score is 'vmf': must be an instance"),  # type: ignore[arg-type]
        (
            lambda: ShardedMemory(4, 3, VonMisesFisher, group=ALONE),  # type: ignore[arg-type]
            r"score is <class .*build it with VonMisesFisher\(\)",
        ),
        (lambda: ShardedMemory(2.5, 3, group=ALONE), "capacity is 2.5"),  # type: ignore[arg-type]
        (lambda: Hybrid("oldest"), r"policy is 'oldest': .*policy\('oldest'\)"),  # type: ignore[arg-type]
        (lambda: Hybrid(Oldest), r"policy is <class .*build it with Oldest\(\)"),  # type: ignore[arg-type]
        (lambda: Hybrid(front=2.5), "front is 2.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: Hybrid(front=-1), "front is -1: must be at least 0 slots"),
        (lambda: Hybrid(age_cap=0), "age_cap is 0: must be at least 1 sample"),
        (lambda: Hybrid(age_cap=9.5), "age_cap is 9.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: KappaBandit(0.1), "kappas are 0.1: must be distinct numbers"),  # type: ignore[arg-type]
        (lambda: KappaBandit(("0.1",)), "kappa is '0.1'"),  # type: ignore[arg-type]
        (lambda: KappaBandit(interval=2.5), "interval is 2.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: KappaBandit(explore="all"), "explore is 'all'"),  # type: ignore[arg-type]
        (lambda: Duplicates("0.98"), "threshold is '0.98': must be a finite number"),  # type: ignore[arg-type]
        (lambda: Duplicates(float("nan")), "threshold is nan"),
        (lambda: policy(Oldest), "eviction policy <class .*must be a name"),  # type: ignore[arg-type]
        (lambda: filled(eviction=(one := Hybrid(), WorkingMemory(3, 3, one))[0]), "serves another"),
    ],
    ids=range(18),
)
def test_policies_and_what_they_are_built_with(build: Callable[[], Any], message: str) -> None:
    raises(build, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "foo"}, "how is 'foo': choose one of uniform, hardest, stratified"),
        ({"how": "hardest"}, "pass anchors="),
        ({"how": "hardest", "anchors": torch.eye(3)}, r"'hardest' chooses .* how many with n="),
        ({"how": "stratified"}, "'stratified' chooses among the slots"),
        ({"n": 2.5}, r"n is 2.5: must be a whole number \(int\)"),
        ({"n": "3"}, "n is '3'"),
        ({"n": 2, "each": True}, "each=True with how='uniform'"),
        ({"n": 2, "how": "stratified", "cells": 1.5}, "cells is 1.5"),
        ({"n": 2, "how": "hardest", "anchors": NAN}, "anchor row 1 is not finite"),
        ({"n": 2, "how": "hardest", "anchors": torch.eye(4)}, r"anchors have shape .*\[B, 3\]"),
        ({"n": 2, "how": "hardest", "anchors": torch.eye(3), "ids_B": 3}, "ids_B have shape"),
    ],
    ids=range(11),
)
def test_negatives(arguments: dict[str, Any], message: str) -> None:
    raises(lambda: filled().negatives(**arguments), message)
    raises(lambda: WorkingMemory(6, 3).negatives(**arguments), message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.sample(2.5), "n is 2.5"),
        (lambda m: m.sample(-1), "n is -1: must be at least 0"),
        (lambda m: m.sample(None), "n is None"),
        (lambda m: m.stalest(-1), "n is -1: must be at least 0"),
        (lambda m: m.stalest(1.5), "n is 1.5"),
        (lambda m: m.mask(3), r"ids_B have shape \(\): must be one-dimensional"),
        (lambda m: m.mask([3, 4], [1]), r"hashes_B have shape \(1,\): must be \[2\]"),
        (lambda m: m.collisions(NAN), "anchor row 1 is not finite"),
        (lambda m: m.collisions(torch.eye(4)), r"anchors have shape \(4, 4\): must be \[B, 3\]"),
        (lambda m: m.collisions(torch.ones(2, 3)), "anchor row 0 has norm 1.73"),
        (lambda m: m.collisions(None), "anchors are None: must be a tensor or an array"),
        (lambda m: m.refresh(3, torch.eye(3)[0]), r"slots have shape \(\): .*such as \[3\]"),
        (lambda m: m.refresh([[3]], torch.eye(3)[:1]), r"slots have shape \(1, 1\)"),
        (lambda m: m.refresh([0.5], torch.eye(3)[:1]), "slots are torch.float32: must be int"),
        (lambda m: m.refresh([True], torch.eye(3)[:1]), "slots are torch.bool"),
        (lambda m: m.refresh("first", torch.eye(3)[:1]), "slots are 'first': must be a tensor"),
        (lambda m: m.refresh(None, torch.eye(3)[:1]), "slots are None"),
        (lambda m: m.refresh([[0], [1, 2]], torch.eye(3)[:2]), r"slots are \[\[0\], \[1, 2\]\]"),
        (lambda m: m.add([7], torch.eye(3)[:1], torch.zeros(1, 3, 2, 2)), "leave images= out"),
        (lambda m: m.add(None, torch.eye(3)), "ids are None"),
        (lambda m: m.add([object()], torch.eye(3)[:1]), "ids are .*<object obj"),
        (lambda m: m.add([7], None), "embeddings are None"),
        (lambda m: m.effective_cells(0), "cells is 0"),
        (lambda m: m.effective_cells(2.5), "cells is 2.5"),
    ],
    ids=range(24),
)
def test_operations_change_nothing(call: Callable[[WorkingMemory], Any], message: str) -> None:
    memory = filled()
    before = memory.state_dict()
    raises(lambda: call(memory), message)
    after = memory.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def indexed() -> CellIndex:
    index = CellIndex(torch.eye(3), cells=2)
    index.train(torch.arange(3))
    return index


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nearest(NAN, torch.eye(3), 1), "query row 1 is not finite: leave it out"),
        (lambda: nearest(torch.eye(3), torch.eye(3), 1.5), "k is 1.5"),  # type: ignore[arg-type]
        (lambda: nearest(torch.eye(3)[0], torch.eye(3), 1), r"must be \[B, D\] and \[K, D\]"),
        (lambda: nearest(torch.eye(4), torch.eye(3), 1), r"queries are \(4, 4\) .*rows \(3, 3\)"),
        (lambda: nearest(torch.eye(3).double(), torch.eye(3), 1), "of one dtype and device"),
        (lambda: nearest(np.eye(3), torch.eye(3), 1), "queries are ndarray, rows Tensor"),  # type: ignore[arg-type]
        (lambda: nearest(torch.eye(3), torch.eye(3)[:0], 1), "rows searched is 0"),
        (lambda: within(NAN, torch.eye(3), 0.5), "query row 1 is not finite"),
        (lambda: within(torch.eye(3), torch.eye(3), float("nan")), "cosine is nan"),
        (lambda: within(torch.eye(3), torch.eye(3), "0.5"), "cosine is '0.5'"),  # type: ignore[arg-type]
        (lambda: CellIndex(torch.eye(3), 2.5), "cells is 2.5"),  # type: ignore[arg-type]
        (lambda: CellIndex(torch.eye(3), 2, probe=0), "probe is 0"),
        (lambda: indexed().search(NAN, 1), "query row 1 is not finite"),
        (lambda: indexed().search(torch.eye(4), 1), r"must be \[B, D\]"),
        (lambda: indexed().search(torch.eye(3), 0), "k is 0"),
        (lambda: indexed().within(torch.eye(3).double(), 0.5), "of one dtype"),
        (lambda: kmeans(torch.eye(3), 2.5, 0), "cells is 2.5"),  # type: ignore[arg-type]
        (lambda: kmeans(torch.eye(3)[:0], 2, 0), "number of rows is 0"),
    ],
    ids=range(18),
)
def test_searches(call: Callable[[], Any], message: str) -> None:
    raises(call, message)


def test_arrays_are_taken_however_they_lie() -> None:
    rng = np.random.default_rng(0)
    z_ND = rng.standard_normal((60, 2))
    z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
    layouts = [z_ND, np.asfortranarray(z_ND), z_ND[::-1].copy()[::-1], np.tile(z_ND, 2)[:, :2]]
    evicted = []
    for z in layouts:
        memory = WorkingMemory(20, 2, MostDuplicated())
        evicted.append(memory.add(np.arange(60), z).evicted.tolist())
    assert all(ids == evicted[0] for ids in evicted)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (VonMisesFisher(1), VonMisesFisher(1.0)),
        (Gaussian(np.float64(0.5)), Gaussian(0.5)),  # type: ignore[arg-type]
        (Duplicates(1), Duplicates(1.0)),
        (Hybrid(Oldest(), age_cap=np.int64(9)), Hybrid(Oldest(), age_cap=9)),  # type: ignore[arg-type]
    ],
    ids=range(4),
)
def test_a_number_is_the_same_however_it_is_written(one: Any, other: Any) -> None:
    def of(option: Any) -> WorkingMemory:
        if isinstance(option, Duplicates):
            return WorkingMemory(4, 2, duplicates=option)
        policy = option if isinstance(option, Hybrid) else MostDuplicated(option)
        return WorkingMemory(4, 2, policy)

    memory = of(one)
    memory.add(torch.arange(2), torch.eye(2))
    of(other).load_state_dict(memory.state_dict())


def test_a_seed_and_a_form_are_told_from_nonsense() -> None:
    raises(lambda: WorkingMemory(4, 2, seed=1.5), "seed is 1.5")  # type: ignore[arg-type]
    raises(lambda: MostDuplicated(compete="no"), "compete is 'no'")  # type: ignore[arg-type]
    raises(lambda: VonMisesFisher(10**400), "must be a finite number")
