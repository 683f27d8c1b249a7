"""Numbers of balance against closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from observe_records import step
from table import table

from stream_ssl.memory.stats import effective_rank, spectral_rank
from stream_ssl.observe.balance import MOST_CLASSES, Balance, class_counts, entropy

NONE = torch.tensor([-1])


def moment(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """sum_i w_i z_i z_i^T."""
    dim = len(rows[0])
    return [
        [sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) for j in range(dim)]
        for i in range(dim)
    ]


def clusters(shares: list[int], dim: int, seed: int = 0) -> torch.Tensor:
    """Return rows in orthonormal directions: `shares[n]` rows in direction n."""
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))).Q
    return torch.cat([basis[[index]].repeat(count, 1) for index, count in enumerate(shares)])


@table("count", [1, 2, 7, 16])
def test_the_effective_rank_counts_orthonormal_clusters(count: int) -> None:
    balance = Balance()
    balance.update(clusters([5] * count, 16), torch.full((5 * count,), -1))
    assert balance.effective_rank == pytest.approx(count, rel=1e-5)


def test_unequal_clusters_give_the_exponential_of_their_entropy() -> None:
    shares = [27, 1, 1, 1]
    balance = Balance()
    balance.update(clusters(shares, 8), torch.full((30,), -1))
    assert balance.effective_rank == pytest.approx(math.exp(entropy(shares)), rel=1e-5)


def test_the_ranks_of_the_stream_and_of_the_memory_agree() -> None:
    rows = torch.nn.functional.normalize(
        torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), dim=1
    )
    assert spectral_rank(rows.T @ rows) == pytest.approx(effective_rank(rows), rel=1e-5)


def test_samples_lose_half_of_their_weight_in_one_half_life() -> None:
    """One cluster for long, then another for one half-life: both weigh the same."""
    first, second = clusters([1, 1], 4)
    balance = Balance(half_life=40)
    for batch in [first.repeat(20, 1)] * 100 + [second.repeat(20, 1)] * 2:
        balance.update(batch, torch.full((20,), -1))
    # The weights of the last batches differ by the decay between them.
    late = 1 + 0.5**0.5
    early = 0.5 / (1 - 0.5**0.5)
    assert balance.effective_rank == pytest.approx(math.exp(entropy([early, late])), rel=1e-4)


def test_the_rank_equals_the_rank_of_a_weighted_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [
        torch.nn.functional.normalize(torch.randn(3, 4, generator=generator), dim=1)
        for _ in range(5)
    ]
    balance = Balance(half_life=6)
    for batch in batches:
        balance.update(batch, torch.full((3,), -1))
    weights = [0.5 ** ((4 - index) * 3 / 6) for index in range(5) for _ in range(3)]
    expected = moment(torch.cat(batches).tolist(), weights)
    assert balance.effective_rank == pytest.approx(spectral_rank(torch.tensor(expected)), rel=1e-5)


def test_balance_counts_new_and_recent_labels() -> None:
    balance = Balance(half_life=4)
    rows = torch.eye(4)
    balance.update(rows, torch.tensor([0, 0, 1, -1]))
    assert balance.take_new() == {0: 2, 1: 1}
    assert balance.class_entropy == pytest.approx(entropy([2, 1]))
    balance.update(rows, torch.tensor([2, 2, 2, 2]))
    assert balance.take_new() == {2: 4}
    assert balance.take_new() == {}
    assert balance.recent == pytest.approx({0: 1.0, 1: 0.5, 2: 4.0})


def test_labels_that_never_come_again_use_a_bounded_memory() -> None:
    balance, rows = Balance(half_life=4000), torch.eye(4).repeat(2000, 1)
    for batch in range(3):
        balance.update(rows, torch.arange(8000) + 8000 * batch)
        assert len(balance.recent) <= MOST_CLASSES + 1
        assert sum(balance.take_new().values()) == 8000
    for _ in range(20):
        balance.update(rows, torch.zeros(8000, dtype=torch.int64))
    assert set(balance.recent) == {0}, "old labels make room"


def test_an_empty_balance_has_no_rank_and_unlabelled_samples_have_no_entropy() -> None:
    balance = Balance()
    assert balance.effective_rank is None
    assert balance.class_entropy == 0
    balance.update(torch.eye(3), torch.full((3,), -1))
    assert balance.class_entropy == 0
    assert balance.take_new() == {}


def test_only_fresh_batches_count() -> None:
    balance = Balance()
    labels = torch.tensor([0, 1, 2, 0])
    balance.consume(step(labels_B=labels, replay=True, admission=None))
    balance.consume(step(keys_BD=torch.full((4, 3), math.nan), labels_B=labels, admission=None))
    assert balance.take_new() == {}
    balance.consume(step(labels_B=labels))
    assert balance.take_new() == {0: 2, 1: 1, 2: 1}
    assert balance.effective_rank == pytest.approx(math.exp(entropy([2, 1, 1])), rel=1e-5)


def test_a_rank_needs_finite_numbers() -> None:
    with pytest.raises(ValueError, match="not finite"):
        spectral_rank(torch.full((2, 2), math.nan))
    assert spectral_rank(torch.zeros(2, 2)) == 0


def test_class_counts_skip_unlabelled_samples_and_entropy_is_exact() -> None:
    assert class_counts(torch.tensor([3, -1, 3, 0])) == {3: 2, 0: 1}
    assert entropy([]) == 0
    assert entropy([5]) == 0
    assert entropy([2, 2, 2, 0]) == pytest.approx(math.log(3))
