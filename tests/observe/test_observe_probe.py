"""Nearest neighbours against the obvious way, and against cases with known answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observe_naive import knn

from stream_ssl.observe.probe import classify, probe


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 30),
    temperature=st.sampled_from([0.07, 0.5]),
)
def test_as_the_naive_twin(seed: int, k: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    reference = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 4, (20,), generator=generator)
    expected = [
        knn(row, reference.tolist(), label.tolist(), min(k, 20), temperature)
        for row in query.tolist()
    ]
    assert classify(query, reference, label, k, temperature).tolist() == expected


def test_clusters_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(3)
    centre = torch.eye(5)
    label = torch.arange(5).repeat(40)
    reference = centre[label] + 0.1 * torch.randn(200, 5, generator=generator)
    query = 7.0 * (centre + 0.1 * torch.randn(5, 5, generator=generator))  # length is no matter
    result = probe(query, torch.arange(5), reference, label, k=20)
    assert result.accuracy == 1
    assert result.per_class == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert result.queries == 5


def test_per_class_and_balanced() -> None:
    reference, label = torch.eye(2), torch.tensor([0, 1])
    query = torch.eye(2)[[0, 0, 0, 1]]
    result = probe(query, torch.tensor([0, 0, 0, 0]), reference, label, k=1)
    assert result.accuracy == 0.75
    assert result.per_class == {0: 0.75}
    result = probe(query, torch.tensor([0, 0, 1, 1]), reference, label, k=1)
    assert result.per_class == {0: 1.0, 1: 0.5}
    assert result.balanced == 0.75


def test_temperature_weighs_nearness_against_number() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]])
    label = torch.tensor([0, 1, 1])
    query = torch.tensor([[1.0, 0.0]])
    assert classify(query, reference, label, 3, temperature=0.001).tolist() == [0]
    assert classify(query, reference, label, 3, temperature=10.0).tolist() == [1]


def test_half_precision_is_widened() -> None:
    generator = torch.Generator().manual_seed(5)
    reference = torch.randn(300, 32, generator=generator).bfloat16()
    query = torch.randn(40, 32, generator=generator).bfloat16()
    label = torch.randint(0, 3, (300,), generator=generator)
    assert torch.equal(
        classify(query, reference, label, k=5), classify(query.float(), reference.float(), label, 5)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_QF": torch.ones(2, 3)}, "with the same F"),
        ({"query_QF": torch.ones(0, 2)}, "need .N, F. with"),
        ({"label_N": torch.tensor([0, 1])}, "one whole number a row"),
        ({"label_N": torch.tensor([0.0, 1.0, 1.0])}, "one whole number a row"),
        ({"label_N": torch.tensor([0, -1, 1])}, "leave such rows out"),
        ({"k": 0}, "at least 1 neighbour"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"reference_NF": torch.full((3, 2), torch.nan)}, "diverged"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    right: dict[str, object] = {
        "query_QF": torch.ones(2, 2),
        "reference_NF": torch.ones(3, 2),
        "label_N": torch.tensor([0, 1, 1]),
    }
    with pytest.raises(ValueError, match=message):
        classify(**{**right, **change})  # type: ignore[arg-type]


def test_one_label_a_query() -> None:
    with pytest.raises(ValueError, match="one label a query"):
        probe(torch.ones(2, 2), torch.tensor([0]), torch.ones(1, 2), torch.tensor([0]))
