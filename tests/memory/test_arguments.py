"""Tests of arguments that no memory accepts: errors name the value, the rule and the remedy.

A rejected call changes nothing. The arguments of `add` are tested with the rules, those of
descriptors and states in their own files.

Shapes: B anchors, D embedding, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from memory_stream import equal
from table import table

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Oldest, policy
from stream_ssl.memory.process_group import ProcessGroup
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import unit_rows

NAN = torch.tensor([[1.0, 0, 0], [float("nan"), 0, 0]])
Z = torch.eye(3)


def filled(**options: Any) -> WorkingMemory:
    memory = WorkingMemory(6, 3, **options)
    memory.add(torch.arange(6), unit_rows(np.random.default_rng(0), "uniform", 6, 3).float())
    return memory


def raises(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@table(
    ("options", "message"),
    [
        ({"capacity": 2.5}, r"capacity is 2.5: must be a whole number \(int\)"),
        ({"capacity": True}, r"capacity is True: must be a whole number \(int\)"),
        ({"capacity": "8"}, "capacity is '8': must be a whole number"),
        ({"dim": -1}, "dim -1: both must be at least 1"),
        ({"eviction": "oldest"}, r"eviction is 'oldest': .*memory.eviction.policy\('oldest'\)"),
        ({"eviction": Oldest}, r"eviction is <class .*Oldest'>: .*build it with Oldest\(\)"),
        ({"eviction": 3}, r"eviction is 3: must be an instance .* such as MostDuplicated\(\)"),
        ({"duplicates": 0.98}, r"duplicates is 0.98: .*such as Duplicates\(threshold=0.98\)"),
        ({"image_shape": (3, 8)}, r"image_shape is \(3, 8\): must be \(C, H, W\)"),
        ({"image_shape": 8}, r"image_shape is 8: must be \(C, H, W\)"),
        ({"image_shape": (3, 0, 8)}, "a side of image_shape is 0: must be at least 1"),
        ({"image_shape": (3, 8, 8), "images_on": "disk"}, "images_on is 'disk': choose \"device\""),
        ({"images_on": "disk"}, "images_on is 'disk': choose \"device\""),
        ({"dtype": torch.float16}, "dtype torch.float16: must be torch.float32, torch.float64 or"),
        ({"measured_by": VonMisesFisher}, r"Score; build it with VonMisesFisher\(\)"),
        ({"seed": 1.5}, "seed is 1.5: must be a whole number"),
        ({"seed": 2**70}, f"seed is {2**70}: must lie within .* of 0; take a smaller one"),
        (
            {"device": "nonsense"},
            'device is \'nonsense\': torch cannot .*; choose "cpu", or "cuda"',
        ),
        (
            {"device": "cuda:99"},
            r"device is 'cuda:99': torch cannot place tensors there \(.*choose",
        ),
        ({"payload": [Z]}, r"payload is \[tensor.*: must be a dict of tensors by name"),
        ({"payload": {"x": Z.to_sparse()}}, "payload 'x' are torch.sparse_coo: must be dense"),
    ],
    ids=range(21),
)
def test_the_memory_rejects_wrong_arguments(options: dict[str, Any], message: str) -> None:
    raises(lambda: WorkingMemory(**{"capacity": 4, "dim": 3, **options}), message)


def test_the_memory_accepts_integers_of_numpy_and_lists_as_shapes() -> None:
    memory = WorkingMemory(np.int64(4), np.int32(3), image_shape=[1, 2, 2], seed=2**60)
    memory.add(np.arange(2), np.eye(3)[:2], np.zeros((2, 1, 2, 2), np.uint8))
    assert len(memory.negatives(np.int64(1))) == 1
    assert memory.stalest(1).tolist() == [0]
    memory.add(np.array([2**63 - 1], np.uint64), np.eye(3)[:1], np.zeros((1, 1, 2, 2), np.uint8))
    assert memory.ids.tolist() == [0, 1, 2**63 - 1]


@table(
    ("build", "message"),
    [
        (lambda: MostDuplicated(VonMisesFisher), r"score is <class .*with VonMisesFisher\(\)"),
        (
            lambda: MostDuplicated("vmf"),
            r"score is 'vmf': must be an instance .*such as Linear\(\)",
        ),
        (lambda: MostDuplicated(compete="no"), "compete is 'no': must be True or False"),
        (
            lambda: MostDuplicated(index="hnsw"),
            'index is .hnsw.: choose "exact", "ivf" or "auto"',
        ),
        (
            lambda: MostDuplicated(VonMisesFisher),
            r"score is <class .*build it with VonMisesFisher\(\)",
        ),
        (ProcessGroup, "no process group: call torch.distributed.init_process_group first"),
        (lambda: Duplicates("0.98"), "threshold is '0.98': must be a finite number"),
        (lambda: Duplicates(1.01), "threshold is 1.01: a cosine above -1 and at most 1"),
        (lambda: Duplicates(action="drop"), "action is 'drop': choose"),
        (lambda: policy(Oldest), "eviction policy <class .*must be a name"),
        (lambda: filled(eviction=(one := Oldest(), WorkingMemory(3, 3, one))[0]), "serves another"),
    ],
    ids=range(11),
)
def test_policies_and_their_parts_reject_wrong_arguments(
    build: Callable[[], Any], message: str
) -> None:
    raises(build, message)


@table(
    ("arguments", "message"),
    [
        ({"how": "foo"}, "how is 'foo': choose one of uniform, hardest, stratified"),
        ({"how": "hardest"}, "pass anchors="),
        ({"how": "hardest", "anchors": Z}, r"'hardest' chooses .* how many with n="),
        ({"how": "stratified"}, "'stratified' chooses among the slots"),
        ({"n": -1}, "n is -1: must be at least 0"),
        ({"n": 2.5}, r"n is 2.5: must be a whole number \(int\)"),
        ({"n": 2, "each": True}, "each=True with how='uniform'"),
        ({"n": 2, "how": "stratified", "cells": 0}, "cells is 0: must be at least 1"),
        ({"n": 2, "how": "hardest", "anchors": NAN}, "anchor row 1 is not finite"),
        ({"n": 2, "how": "hardest", "anchors": torch.eye(4)}, r"anchors have shape .*\[B, 3\]"),
        ({"n": 2, "how": "hardest", "anchors": Z, "ids_B": 3}, "ids_B have shape"),
        ({"n": 2, "how": "hardest", "anchors": Z, "ids_B": [1]}, r"ids_B .* must be \[3\]"),
        ({"n": 2, "how": "hardest", "anchors": Z, "hashes_B": [1] * 3}, "hashes_B without ids_B"),
    ],
    ids=range(13),
)
def test_negatives_rejects_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    raises(lambda: filled().negatives(**arguments), message)
    raises(lambda: WorkingMemory(6, 3).negatives(**arguments), message)


@table(
    ("call", "message"),
    [
        (lambda m: m.sample(2.5), "n is 2.5"),
        (lambda m: m.sample(-1), "n is -1: must be at least 0"),
        (lambda m: m.sample(2, how="count"), "how is 'count': choose one of uniform, inverse-cou"),
        (
            lambda m: WorkingMemory(4, 4).sample(2),
            "from an empty memory: add samples first",
        ),
        (lambda m: m.stalest(-1), "n is -1: must be at least 0"),
        (lambda m: m.nearest(Z, 0), "k is 0: must be at least 1"),
        (lambda m: m.nearest(Z, 1, "ids"), "by is 'ids': choose one of embeddings, descriptors"),
        (lambda m: m.nearest(torch.eye(4), 1), r"rows have shape \(4, 4\): must be \[B, 3\]"),
        (lambda m: m.nearest(NAN, 1), "row 1 is not finite"),
        (lambda m: WorkingMemory(4, 3).nearest(Z, 1), "search an empty memory: add samples first"),
        (lambda m: m.negatives().mask(3, None), r"ids_B have shape \(\): must be one-dimensional"),
        (lambda m: m.negatives().mask([3, 4], [1]), r"hashes_B have shape \(1,\): must be \[2\]"),
        (lambda m: m.collisions(NAN), "anchor row 1 is not finite: leave such samples out"),
        (lambda m: m.collisions(torch.eye(4)), r"anchors have shape \(4, 4\): must be \[B, 3\]"),
        (lambda m: m.prior(torch.ones(2, 3)), "anchor row 0 has norm 1.73.*divide it by its norm"),
        (lambda m: m.collisions(None), "anchors are None: must be a tensor or an array"),
        (lambda m: m.refresh(3, Z[0]), r"slots have shape \(\): .*such as \[3\]"),
        (lambda m: m.refresh([0.5], Z[:1]), "slots are torch.float32: must be int"),
        (lambda m: m.refresh([True], Z[:1]), "slots are torch.bool"),
        (lambda m: m.refresh("first", Z[:1]), "slots are 'first': must be a tensor"),
        (lambda m: m.refresh([[0], [1, 2]], Z[:2]), r"slots are \[\[0\], \[1, 2\]\]"),
        (lambda m: m.add([7], Z[:1], torch.zeros(1, 3, 2, 2)), "leave images= out"),
        (lambda m: m.add(None, Z), "ids are None"),
        (lambda m: m.add([object()], Z[:1]), "ids are .*<object obj"),
        (lambda m: m.add(["a"], Z[:1]), r"ids are \['a'\]: must be .* a list of int64"),
        (lambda m: m.add([2**63], Z[:1]), r"ids are \[9.*8\]: must be .* a list of int64"),
        (lambda m: m.add([7], None), "embeddings are None"),
        (lambda m: m.effective_cells(0), "cells is 0"),
        (
            lambda m: m.add([7], Z[:1].to_sparse()),
            r"embeddings are torch\.sparse_coo: must be dense; convert them by to_dense\(\)",
        ),
        (
            lambda m: m.add(np.array([3, 2**64 - 1], np.uint64), Z[:2]),
            r"ids hold 18446744073709551615: must be below 2\*\*63 \(int64\); drop a bit",
        ),
        (
            lambda m: m.add([7], Z[:1], hashes=torch.tensor([2**63], dtype=torch.uint64)),
            "hashes hold 9223372036854775808: must be below",
        ),
        (lambda m: m.add([7], Z[:1], payload=[Z[:1]]), r"payload is \[tensor.*: must be a dict"),
        (
            lambda m: torch.func.grad(lambda z: m.add([7], z.detach()) and z.sum())(Z[:1]),
            r"embeddings are within a transform of torch\.func.* \(has_aux=True\)",
        ),
    ],
    ids=range(33),
)
def test_rejected_operations_do_not_change_the_memory(
    call: Callable[[WorkingMemory], Any], message: str
) -> None:
    memory = filled()
    before = memory.state_dict()
    raises(lambda: call(memory), message)
    assert equal(memory.state_dict(), before)


def test_arrays_of_any_layout_give_the_same_evictions() -> None:
    z_ND = unit_rows(np.random.default_rng(0), "uniform", 60, 2).numpy()
    frozen = z_ND.copy()
    frozen.flags.writeable = False
    layouts = [z_ND, np.asfortranarray(z_ND), z_ND[::-1].copy()[::-1], np.tile(z_ND, 2)[:, :2]]
    evicted = [
        WorkingMemory(20, 2, MostDuplicated()).add(np.arange(60), z).evicted.tolist()
        for z in (
            *layouts,
            frozen,
            z_ND.astype(z_ND.dtype.newbyteorder()),
            torch.from_numpy(z_ND).requires_grad_(),
        )
    ]
    assert all(ids == evicted[0] for ids in evicted)
