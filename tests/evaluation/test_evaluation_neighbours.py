"""Neighbours' votes and retrieval against their naive twins, and against known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluation_naive as naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import table

from stream_ssl.evaluation import knn_accuracy, knn_classify, neighbours, retrieval


def data(seed: int, queries: int = 9, references: int = 20) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(queries, 4, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (queries,), generator=generator),
        torch.randn(references, 4, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (references,), generator=generator),
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000), k=st.integers(1, 20), temperature=st.sampled_from([0.01, 0.07, 1])
)
def test_votes_equal_the_naive_twin(seed: int, k: int, temperature: float) -> None:
    query, _, reference, label = data(seed)
    expected = [
        naive.vote(row, reference.tolist(), label.tolist(), k, temperature)
        for row in query.tolist()
    ]
    assert knn_classify(query, reference, label, k, temperature).tolist() == expected


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), k=st.integers(2, 8), among_themselves=st.booleans())
def test_retrieval_equals_the_naive_twin(seed: int, k: int, among_themselves: bool) -> None:
    query, truth, reference, label = data(seed)
    if among_themselves:
        found = retrieval(query, truth, ks=(1, k))
        sought: Any = None
        label = truth
    else:
        found = retrieval(query, truth, reference, label, ks=(1, k))
        sought = reference.tolist()
    for asked in (1, k):
        assert found[asked] == pytest.approx(
            naive.retrieved(query.tolist(), truth.tolist(), sought, label.tolist(), asked)
        )


def test_float32_through_faiss_agrees_with_float64() -> None:
    query, truth, reference, label = data(3, queries=60, references=400)
    wide = knn_classify(query, reference, label, k=20)
    narrow = knn_classify(query.float(), reference.float(), label, k=20)
    assert (wide == narrow).double().mean() > 0.95
    assert retrieval(query, truth, ks=(5,)) == pytest.approx(
        retrieval(query.float(), truth, ks=(5,)), abs=0.02
    )


def test_votes_on_bfloat16_equal_votes_on_float32() -> None:
    query, _, reference, label = (
        part.bfloat16() if part.is_floating_point() else part
        for part in data(5, queries=40, references=300)
    )
    wide = knn_classify(query.float(), reference.float(), label, k=5)
    assert torch.equal(knn_classify(query, reference, label, k=5), wide)


def test_votes_in_parts_equal_votes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, _, reference, label = data(4)
    whole = knn_classify(query, reference, label, k=7)
    monkeypatch.setattr(neighbours, "VOTES", 8)
    assert torch.equal(knn_classify(query, reference, label, k=7), whole)


def test_one_search_gives_the_same_answers_as_several() -> None:
    query, truth, reference, label = data(7)
    near = neighbours.Neighbours(query, reference, label, k=12)
    for k in (1, 5, 12):
        assert torch.equal(near.vote(k), knn_classify(query, reference, label, k))
    assert near.retrieval(truth, (1, 12)) == retrieval(query, truth, reference, label, (1, 12))
    with pytest.raises(ValueError, match="k is 13"):
        near.vote(13)


def test_votes_work_with_labels_above_2_to_the_40() -> None:
    query, _, reference, label = data(8)
    far = 2**40 + 7 * label
    assert torch.equal(
        knn_classify(query, reference, far, 5), 2**40 + 7 * knn_classify(query, reference, label, 5)
    )


def test_arrays_lists_and_tensors_give_the_same_results() -> None:
    query, truth, reference, label = data(5)
    arrays = [part.numpy() for part in (query, truth, reference, label)]
    assert knn_accuracy(*arrays, k=5) == knn_accuracy(query, truth, reference, label, k=5)
    assert retrieval(*arrays, ks=(2,)) == retrieval(query, truth, reference, label, ks=(2,))
    lists = [part.tolist() for part in data(5)]
    assert knn_accuracy(*lists, k=5) == knn_accuracy(*arrays, k=5)


def test_memory_mapped_and_reversed_arrays_give_the_same_accuracy(tmp_path: Path) -> None:
    """Such arrays are read-only, and may have negative strides."""
    query, truth, reference, label = (part.numpy() for part in data(5))
    np.save(tmp_path / "rows.npy", reference)
    np.save(tmp_path / "labels.npy", label)
    rows, labels = (np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in ("rows", "labels"))
    expected = knn_accuracy(query, truth, reference, label, k=5)
    assert knn_accuracy(query, truth, rows, labels, k=5) == expected
    assert knn_accuracy(query, truth, rows[::-1], labels[::-1], k=5) == expected


def test_pure_clusters_are_classified_without_an_error() -> None:
    label = np.repeat(np.arange(5), 30)
    rows = np.eye(5)[label]
    result = knn_accuracy(7 * rows, label, rows, label, k=20)
    assert result.accuracy == result.balanced == 1
    assert result.error == 0
    assert retrieval(rows, label, ks=(1, 10)) == {1: 1.0, 10: 1.0}


def test_retrieval_by_random_features_is_as_good_as_chance() -> None:
    """Random features over 10 classes: top-1 in a tenth, top-10 in 1 - 0.9^10."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(3000, 16, generator=generator)
    label = torch.randint(0, 10, (3000,), generator=generator)
    found = retrieval(rows, label, ks=(1, 10))
    assert found[1] == pytest.approx(0.1, abs=0.025)
    assert found[10] == pytest.approx(1 - 0.9**10, abs=0.04)


def test_a_query_among_many_copies_never_finds_itself() -> None:
    rows = torch.ones(9, 3)
    alone = torch.arange(9)  # each of a class of its own: only oneself would be a hit
    assert retrieval(rows, alone, ks=(1, 4)) == {1: 0.0, 4: 0.0}


def test_the_error_of_an_accuracy_is_the_standard_error_of_a_proportion() -> None:
    rows, label = torch.eye(2), torch.tensor([0, 1])
    result = knn_accuracy(rows[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]), rows, label, k=1)
    assert (result.accuracy, result.per_class) == (0.75, {0: 0.5, 1: 1.0})
    assert result.error == pytest.approx((0.75 * 0.25 / 4) ** 0.5)


@table(
    ("change", "message"),
    [
        ({"k": 0}, "at least 1 neighbour"),
        ({"k": 4}, "3 references: ask for fewer neighbours, or pass more"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"query_QF": torch.ones(2, 3)}, "with the same F"),
        ({"query_QF": torch.ones(0, 2)}, "must be .N, F., with"),
        ({"query_QF": "rows"}, "queries are 'rows': must be a tensor or an array"),
        ({"query_QF": torch.ones(2, 2, dtype=torch.uint8)}, "floating-point"),
        ({"label_N": torch.tensor([0, 1])}, "whole numbers .3., one for each row"),
        ({"label_N": torch.tensor([0.0, 1.0, 1.0])}, "whole numbers .3., one for each row"),
        ({"label_N": torch.tensor([0, -1, 1])}, "leave such rows out"),
        ({"reference_NF": torch.full((3, 2), torch.nan)}, "diverged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_knn_classify_rejects_wrong_arguments(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "query_QF": torch.ones(2, 2),
        "reference_NF": torch.ones(3, 2),
        "label_N": torch.tensor([0, 1, 1]),
        "k": 2,
    }
    with pytest.raises(ValueError, match=message):
        knn_classify(**{**right, **change})


@table(
    ("arguments", "message"),
    [
        ({"ks": ()}, "at least one k"),
        ({"ks": (3,)}, "2 references"),
        ({"ks": (0, 1)}, "at least 1 neighbour"),
        ({"reference_NF": torch.ones(4, 2)}, "belong together"),
    ],
    ids=["none", "many", "zero", "unlabelled"],
)
def test_retrieval_rejects_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval(torch.ones(3, 2), torch.tensor([0, 1, 1]), **arguments)
