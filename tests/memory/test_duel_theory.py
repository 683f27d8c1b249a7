"""The theory of the DUEL paper, on vertices of a simplex ETF and on random rows.

A simplex ETF has unit rows with a cosine of -1 / (C - 1) between any two of them (Definition 1,
whose -1 / C is a slip).

Shapes: C classes, D dimensions, K slots, N negatives.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.losses import InfoNCE
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher

SCORES = [Linear(), Quadratic(), Gaussian(1.0), VonMisesFisher(0.1)]
KIND = {"ids": repr}


def simplex(classes: int) -> Tensor:
    """Return the vertices of a simplex ETF, float64 [C, C]."""
    vertex_CC = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return normalize(vertex_CC, dim=1)


def collisions_of_each(row_NKD: Tensor, score: Score) -> Tensor:
    """Return, for each of N sets of rows, the sum of all duplicate counts, by eq. 5."""
    own = torch.eye(row_NKD.shape[1], dtype=torch.bool)
    return score(row_NKD.double() @ row_NKD.double().mT).masked_fill_(own, 0).sum((1, 2))


def collisions(row_KD: Tensor, score: Score) -> float:
    """Return the sum of all duplicate counts, by eq. 5."""
    return float(collisions_of_each(row_KD[None], score))


def by_class(counts: list[int]) -> Tensor:
    """Return the class of each sample: `counts[c]` samples of class c."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def test_vertices_have_the_cosine_of_a_simplex_etf() -> None:
    cosine_CC = simplex(5) @ simplex(5).T
    apart = ~torch.eye(5, dtype=torch.bool)
    assert cosine_CC.diagonal().tolist() == pytest.approx([1.0] * 5)
    assert cosine_CC[apart].tolist() == pytest.approx([-1 / 4] * 20)


@pytest.mark.parametrize("own", [0, 3])
def test_observation_1_the_gradient_has_a_term_of_the_dominant_class(own: int) -> None:
    """Eq. 11 and 16: at the simplex ETF, dL/dz = a z + b z_max with b = P- (n_max - n_min) / t.

    P- is the softmax share of one negative of another class.
    """
    counts, t, z_CD = [27, 3, 3, 3, 3], 0.5, simplex(5)
    anchor_1D = z_CD[own][None].clone().requires_grad_()
    negative_ND = z_CD[by_class(counts)]
    InfoNCE(t)(anchor_1D, z_CD[own][None, None], negative_ND).loss.backward()
    assert anchor_1D.grad is not None
    e_N = (negative_ND @ z_CD[own] / t).exp()
    other = math.exp(-1 / 4 / t) / float(e_N.sum() + math.exp(1 / t))
    basis_D2 = torch.stack([z_CD[own], z_CD[0]], dim=1)
    found = torch.linalg.lstsq(basis_D2, anchor_1D.grad[0]).solution
    assert torch.allclose(basis_D2 @ found, anchor_1D.grad[0], atol=1e-9)
    if own:  # the anchor's own term is negative: it stays. z_max pushes it away.
        assert float(found[1]) == pytest.approx(other * (27 - 3) / t)
    else:  # the dominant class stays where it is: the gradient is parallel to it
        parallel = normalize(anchor_1D.grad, dim=1) @ z_CD[0]
        assert abs(float(parallel)) == pytest.approx(1.0)


def test_observation_1_without_bias_the_gradient_is_parallel_to_the_anchor() -> None:
    z_CD = simplex(5)
    for own in range(5):
        anchor_1D = z_CD[own][None].clone().requires_grad_()
        loss = InfoNCE(0.5)(anchor_1D, z_CD[own][None, None], z_CD[by_class([7] * 5)]).loss
        loss.backward()
        assert anchor_1D.grad is not None
        parallel = normalize(anchor_1D.grad, dim=1) @ z_CD[own]
        assert abs(float(parallel)) == pytest.approx(1.0)


def optimised(counts: list[int]) -> Tensor:
    """Return unit rows of the classes that minimise the loss over samples with these counts."""
    class_N = by_class(counts)
    generator = torch.Generator().manual_seed(0)
    row_CD = torch.randn(len(counts), len(counts), generator=generator, dtype=torch.float64)
    row_CD.requires_grad_()
    optimiser = torch.optim.LBFGS([row_CD], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        z_ND = normalize(row_CD, dim=1)[class_N]
        loss = InfoNCE(0.5)(z_ND, z_ND[:, None], z_ND).loss
        loss.backward()
        return loss

    optimiser.step(closure)
    return normalize(row_CD.detach(), dim=1)


def test_observation_1_representations_leave_the_simplex_only_under_bias() -> None:
    """Figure 1: the other classes come closer to each other, opposite to the dominant one."""
    balanced_CD, biased_CD = optimised([8, 8, 8, 8]), optimised([108, 4, 4, 4])
    apart = ~torch.eye(4, dtype=torch.bool)
    cosine_CC = balanced_CD @ balanced_CD.T
    assert cosine_CC[apart].tolist() == pytest.approx([-1 / 3] * 12, abs=1e-3)
    cosine_CC = biased_CD @ biased_CD.T
    assert (cosine_CC[0, 1:] < -1 / 3 - 0.1).all()
    assert (cosine_CC[1:, 1:][~torch.eye(3, dtype=torch.bool)] > -1 / 3 + 0.1).all()


@given(
    rows=st.integers(0, 2**31),
    spread=st.sampled_from([0.05, 0.5, 2.0]),
    score=st.sampled_from(SCORES),
)
def test_algorithm_1_never_raises_the_sum_of_collisions(
    rows: int, spread: float, score: Score
) -> None:
    """For any rows: the K-subset that remains has the smallest sum of all K-subsets."""
    generator = torch.Generator().manual_seed(rows)
    centre_D = torch.randn(4, generator=generator)
    row_ND = normalize(centre_D + spread * torch.randn(24, 4, generator=generator), dim=1)
    memory = WorkingMemory(8, 4, MostDuplicated(score, compete=True))
    memory.add(torch.arange(8), row_ND[:8])
    for number in range(8, 24):
        before_KD = memory.embeddings.clone()
        memory.add(torch.tensor([number]), row_ND[number][None])
        pool_KD = torch.cat([before_KD, row_ND[number][None]])
        rests = [torch.cat([pool_KD[:out], pool_KD[out + 1 :]]) for out in range(9)]
        least = float(collisions_of_each(torch.stack(rests), score).min())
        found = collisions(memory.embeddings, score)
        assert found == pytest.approx(least, abs=1e-4)
        assert found <= collisions(before_KD, score) + 1e-4


@pytest.mark.parametrize("score", SCORES, **KIND)
def test_theorem_1_holds_on_a_simplex_except_in_ties(score: Score) -> None:
    """The naive rule raises the sum only if the newcomer's class ties with the largest one.

    The theorem claims that it never does. Its proof takes the counts before the replacement: if
    another class as large as the newcomer's loses a sample, the newcomer meets one duplicate more
    than the evicted sample had.
    """
    classes, capacity = 5, 20
    vertex_CD = simplex(classes).float()
    memory = WorkingMemory(capacity, classes, MostDuplicated(score))
    generator = torch.Generator().manual_seed(0)
    stream_N = torch.multinomial(torch.tensor([9.0, 1, 1, 1, 1]), 400, True, generator=generator)
    rises = Counter[str]()
    for number, label in enumerate(stream_N.tolist()):
        held = Counter(memory.labels.tolist())
        full, before = len(memory) == capacity, memory.embeddings.clone()
        memory.add(torch.tensor([number]), vertex_CD[label][None], labels=torch.tensor([label]))
        if not full:
            continue
        change = collisions(memory.embeddings, score) - collisions(before, score)
        tie = held[label] == max(held.values())
        if tie:
            rises["rises" if change > 1e-3 else "stays"] += 1
        else:
            assert change < 1e-3, "the theorem holds without a tie"
    assert rises["rises"] > 10, "and fails in ties"
    assert rises["stays"] > 10


@pytest.mark.parametrize("score", SCORES, **KIND)
@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.95])
def test_theorem_2_every_limit_of_the_probability_is_a_limit_of_the_cosine(
    score: Score, alpha: float
) -> None:
    """There is one cosine alpha* with h(x) >= alpha if and only if x >= alpha*."""
    x_N = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    is_above_N = score(x_N) >= alpha
    limit = float(x_N[is_above_N][0])
    assert torch.equal(is_above_N, x_N >= limit)
    assert -1 < limit < 1
