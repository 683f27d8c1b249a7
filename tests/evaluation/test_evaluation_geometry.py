"""Similarity, alignment, uniformity and rank: naive twins and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import evaluation_naive as naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import table

from stream_ssl.evaluation import (
    alignment,
    class_similarity,
    geometry,
    pair_similarities,
    rank_me,
    uniformity,
)


def rows(seed: int, count: int = 12, dim: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 4))
def test_class_similarity_equals_the_naive_twin(seed: int, classes: int) -> None:
    z, label = rows(seed), torch.arange(12) % classes
    found = class_similarity(z, label)
    assert (found.intra, found.inter) == pytest.approx(
        naive.similarity(z.tolist(), label.tolist()), abs=1e-12
    )


def test_opposite_and_orthogonal_classes_have_known_similarities() -> None:
    z = np.array([[1.0, 0], [2, 0], [-1, 0], [-3, 0]])
    found = class_similarity(z, np.array([0, 0, 1, 1]))
    assert (found.intra, found.inter) == (1, -1)
    found = class_similarity(np.eye(3)[[0, 0, 1, 2]], np.array([0, 0, 1, 2]))
    assert (found.intra, found.inter, found.per_class) == (1, 0, {0: 1.0})


def test_drawn_pairs_have_the_means_of_all_pairs() -> None:
    z, label = rows(1, 400, 8), torch.arange(400) % 4
    z += 2 * torch.nn.functional.one_hot(label, 8)
    whole = class_similarity(z, label)
    intra_P, inter_P = pair_similarities(z, label, pairs=20_000)
    for found_P, mean in ((intra_P, whole.intra), (inter_P, whole.inter)):
        assert len(found_P) > 14_000
        assert abs(float(found_P.mean()) - mean) < 5 * float(found_P.std()) / len(found_P) ** 0.5
    assert torch.equal(intra_P, pair_similarities(z, label, pairs=20_000)[0])


def test_pairs_drawn_within_a_class_share_the_class_and_other_pairs_do_not() -> None:
    label = torch.tensor([5, 2, 5, 9, 2])
    z = torch.eye(3)[torch.tensor([0, 1, 0, 2, 1])]
    intra_P, inter_P = pair_similarities(z, label, pairs=500)
    assert torch.equal(intra_P, torch.ones_like(intra_P))
    assert torch.equal(inter_P, torch.zeros_like(inter_P))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.5, 1.0, 2.0]))
def test_alignment_equals_the_naive_twin(seed: int, alpha: float) -> None:
    x, y = rows(seed), rows(seed + 1)
    expected = naive.alignment(x.tolist(), y.tolist(), alpha)
    assert alignment(x, y, alpha) == pytest.approx(expected, rel=1e-12)


def test_equal_and_opposite_views_have_known_alignments() -> None:
    x = rows(2)
    assert alignment(x, 3 * x) == pytest.approx(0, abs=1e-15)
    assert alignment(x, -x) == pytest.approx(4)
    assert alignment(x, -x, alpha=1) == pytest.approx(2)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), t=st.sampled_from([0.5, 2.0, 10.0]), block=st.integers(1, 99))
def test_uniformity_equals_the_naive_twin(seed: int, t: float, block: int) -> None:
    z = rows(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "BLOCK", block)
        found = uniformity(z, t)
    assert found == pytest.approx(naive.uniformity(z.tolist(), t), rel=1e-9, abs=1e-12)


def test_a_point_a_pair_and_a_circle_have_known_uniformities() -> None:
    assert uniformity(torch.ones(6, 3)) == pytest.approx(0, abs=1e-6)
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)
    # On the circle, |x - y|^2 = 2 - 2 cos: the mean is exp(-2 t) I_0(2 t).
    angle = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    circle = torch.stack([(2 * math.pi * angle).cos(), (2 * math.pi * angle).sin()], dim=1)
    expected = -4 + math.log(float(torch.special.i0(torch.tensor(4.0))))
    assert uniformity(circle) == pytest.approx(expected, abs=0.02)


def test_rank_me_equals_the_closed_form_for_known_spectra() -> None:
    assert rank_me(torch.eye(7)) == pytest.approx(7)
    assert rank_me(torch.ones(50, 9)) == pytest.approx(1)
    assert rank_me(torch.zeros(4, 3)) == 0
    # Shares 3/4 and 1/4 of the singular values' sum.
    expected = math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert rank_me(np.diag([3.0, 1.0])) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(30, 6), (6, 30)], ids=["tall", "wide"])
def test_rank_me_equals_a_computation_from_singular_values(shape: tuple[int, int]) -> None:
    x = rows(3, *shape)
    share = torch.linalg.svdvals(x) / torch.linalg.svdvals(x).sum()
    assert rank_me(x) == pytest.approx(math.exp(float(-(share * share.log()).sum())))
    assert rank_me(x.float()) == pytest.approx(rank_me(x), rel=1e-5)


@table(
    ("ask", "message"),
    [
        (lambda: class_similarity(torch.eye(2), torch.tensor([3, 3])), "all rows are of class 3"),
        (lambda: class_similarity(torch.eye(2), torch.tensor([0, 1])), "no class has two rows"),
        (lambda: alignment(torch.eye(2), torch.eye(3)), "the same"),
        (lambda: alignment(torch.eye(2), torch.eye(2), 0), "alpha is 0"),
        (lambda: uniformity(torch.ones(1, 2)), "at least 2"),
        (lambda: uniformity(torch.eye(2), t=-1), "t is -1"),
        (lambda: rank_me(torch.ones(3)), "must be .N, F."),
    ],
    ids=["class", "pairs", "views", "alpha", "one", "t", "shape"],
)
def test_geometry_measures_reject_wrong_arguments(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
