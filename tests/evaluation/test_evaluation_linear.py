"""Tests of linear probes: the minimum, the settings of the papers, seeds and errors."""

from __future__ import annotations

from typing import Any

import evaluation_naive as naive
import pytest
import torch
from table import table

from stream_ssl.evaluation import CONVEX, DEBIASED, DUEL, LinearProbe, LinearSettings, linear_probe


def blobs(seed: int, count: int = 300, spread: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 3
    centre = torch.tensor([[2.0, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]])
    return centre[label] + spread * torch.randn(count, 4, generator=generator), label


def test_the_probes_have_the_settings_of_the_papers() -> None:
    """DUEL, appendix; debiased contrastive, appendix B."""
    duel = (DUEL.optimiser, DUEL.epochs, DUEL.learning_rate, DUEL.momentum, DUEL.weight_decay)
    assert duel == ("sgd", 100, 0.01, 0.9, 1e-6)
    assert (DEBIASED.optimiser, DEBIASED.learning_rate) == ("adam", 1e-3)
    assert DEBIASED.weight_decay == 1e-6


@table("settings", [DUEL, DEBIASED, CONVEX], ids=["duel", "debiased", "convex"])
def test_each_probe_separates_separable_classes(settings: LinearSettings) -> None:
    (x, label), (query, truth) = blobs(0, spread=0.2), blobs(1, spread=0.2)
    result = linear_probe(10 * x, label, 10 * query, truth, settings)
    assert result.accuracy == 1
    assert result.per_class == {0: 1.0, 1: 1.0, 2: 1.0}


def test_sgd_and_lbfgs_reach_the_same_minimum_of_the_naive_loss() -> None:
    """Without weight decay, both end at the same loss. The naive twin computes the loss."""
    x, label = blobs(2, spread=1.2)  # they overlap, so there is a minimum
    x = x.double()
    losses = []
    for settings in (
        LinearSettings("lbfgs", epochs=200, weight_decay=0),
        LinearSettings("sgd", epochs=300, learning_rate=0.5, batch_size=300, weight_decay=0),
    ):
        layer = LinearProbe(x, label, settings)._layer
        losses.append(
            naive.softmax_loss(
                layer.weight.tolist(), layer.bias.tolist(), x.tolist(), label.tolist()
            )
        )
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0] < 0.6


def test_a_probe_has_equal_weights_only_for_equal_seeds() -> None:
    x, label = blobs(3)
    weights = [
        LinearProbe(x, label, LinearSettings(epochs=2, batch_size=32, seed=seed))._layer.weight
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_probe_leaves_the_global_generator_and_the_gradient_mode_unchanged() -> None:
    x, label = blobs(4)
    before = torch.get_rng_state()
    with torch.no_grad():
        result = linear_probe(x, label, x, label, LinearSettings(epochs=20, learning_rate=0.3))
        assert not torch.is_grad_enabled()
    assert result.accuracy > 0.9
    LinearProbe(x, label, CONVEX)
    assert torch.equal(torch.get_rng_state(), before)


def test_class_numbers_may_have_gaps() -> None:
    x, label = blobs(5, spread=0.2)
    probe = LinearProbe(x, label * 7 + 3, LinearSettings(epochs=30, learning_rate=0.3))
    assert probe.predict(x).unique().tolist() == [3, 10, 17]
    result = linear_probe(x[label < 2], label[label < 2], x, label, CONVEX)
    assert result.per_class[2] == 0  # a class that no reference has


def test_the_scale_of_a_feature_does_not_change_the_accuracy() -> None:
    (x, label), (query, truth) = blobs(6), blobs(7)
    scale = torch.tensor([1.0, 1e4, 1e-3, 1])
    first, second = (
        linear_probe(x * factor, label, query * factor, truth, CONVEX)
        for factor in (torch.ones(4), scale)
    )
    assert first.accuracy == second.accuracy > 0.9


def test_each_epoch_is_reported() -> None:
    told: list[tuple[int, int]] = []
    LinearProbe(*blobs(8), LinearSettings(epochs=4), lambda *counts: told.append(counts))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@table(
    ("arguments", "message"),
    [
        ({"optimiser": "lamb"}, '"sgd", "adam" or "lbfgs"'),
        ({"epochs": 0}, "epochs 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"learning_rate": 0.0}, "learning_rate 0.0"),
        ({"momentum": 1.0}, "momentum 1.0"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_linear_settings_reject_wrong_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearSettings(**arguments)


def test_a_probe_rejects_references_of_one_class_and_queries_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"all references are of class 4.*at least two"):
        LinearProbe(torch.eye(3), torch.tensor([4, 4, 4]))
    with pytest.raises(ValueError, match="with the same F"):
        LinearProbe(torch.eye(3), torch.tensor([0, 1, 2])).predict(torch.eye(2))
