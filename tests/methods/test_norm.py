"""Tests of BatchNorm: as torch's except for a single value, and with a choice of statistics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from table import table
from torch import Tensor, nn

from stream_ssl.methods.norm import (
    BatchNorm1d,
    BatchNorm2d,
    accept_single_values,
    forget_statistics,
    normalising_by,
)

SHAPES = {
    "1d": (5, 3),
    "2d": (5, 3, 4, 4),
    "2d of one pixel": (5, 3, 1, 1),
    "2d of one": (1, 3, 2, 2),
}


def pair(dims: str) -> tuple[nn.Module, nn.Module]:
    ours, theirs = (BatchNorm1d, nn.BatchNorm1d) if dims == "1d" else (BatchNorm2d, nn.BatchNorm2d)
    return ours(3), theirs(3)


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


@table("training", [True, False])
@table("name", sorted(SHAPES))
def test_batchnorm_equals_that_of_torch_on_more_than_one_value(name: str, training: bool) -> None:
    ours, theirs = pair(name[:2])
    for seed in range(2):
        value = values(SHAPES[name], seed)
        assert torch.equal(ours(value), theirs(value))
        ours.train(training), theirs.train(training)
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=["1d", "2d"])
def test_a_single_value_is_normalised_by_the_averages(shape: tuple[int, ...]) -> None:
    ours, theirs = pair(f"{len(shape) // 2}d")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        theirs(values(shape))
    nn.init.normal_(ours.weight)
    nn.init.normal_(ours.bias)
    ours(values((8, *shape[1:])))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    value = values(shape).requires_grad_()
    training = ours.train()(value)
    training.sum().backward()
    assert torch.isfinite(value.grad).all()
    torch.testing.assert_close(training, ours.eval()(value))
    assert all(torch.equal(before[name], kept) for name, kept in ours.state_dict().items())


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=["1d", "2d"])
def test_a_single_value_without_averages_gives_the_bias(shape: tuple[int, ...]) -> None:
    ours, _ = pair(f"{len(shape) // 2}d")
    nn.init.normal_(ours.bias)
    forget_statistics(ours)
    for mode in (True, False):
        value = values(shape).requires_grad_()
        out = ours.train(mode)(value)
        assert torch.equal(out.flatten(), ours.bias)
        out.sum().backward()
        assert not value.grad.any()


class Rectified(nn.BatchNorm2d):
    """A BatchNorm that applies an activation, too, as timm's layers do."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value).relu()


@table("forgets", [True, False])
@table("how", ["batch", "average", None])
def test_layers_with_an_activation_accept_a_single_value(how: Any, forgets: bool) -> None:
    ours, theirs = nn.Sequential(BatchNorm2d(3), nn.ReLU()), nn.Sequential(Rectified(3))
    for network in (ours, theirs):
        accept_single_values(network)
        network(values((8, 3, 2, 2)))
        nn.init.uniform_(network[0].weight, generator=torch.Generator().manual_seed(0))
        nn.init.normal_(network[0].bias, generator=torch.Generator().manual_seed(1))
        if forgets:
            forget_statistics(network)
    for mode in (True, False):
        for shape in ((1, 3, 1, 1), (4, 3, 1, 1), (1, 3, 2, 2)):
            found = []
            for network in (ours.train(mode), theirs.train(mode)):
                with nullcontext() if how is None else normalising_by(how, network):
                    found.append(network(values(shape)))
                assert network[0].training == mode
            torch.testing.assert_close(*found)
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_normalising_by_chooses_the_statistics_within_a_block() -> None:
    module = nn.Sequential(nn.Linear(3, 3), BatchNorm1d(3), nn.Dropout(0.0))
    module(values((6, 3), 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    value = values((6, 3))
    with torch.no_grad():
        hidden = module[0](value)
    averaged = (hidden - module[1].running_mean) / (module[1].running_var + 1e-5).sqrt()
    by_batch = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    for mode in (True, False):
        module.train(mode)
        for how, expected in (("batch", by_batch), ("average", averaged)):
            with normalising_by(how, module):
                torch.testing.assert_close(module(value), expected)
        assert module[1].training == mode
        assert module[1].track_running_stats
    assert all(torch.equal(before[name], kept) for name, kept in module.state_dict().items())
