"""Tests of the encoder and the projector."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from table import table
from torch import nn

from stream_ssl.encoder.network import Model, Projector, ResNet


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("depths", "block", "twin"),
    [
        ((2, 2, 2, 2), "basic", torchvision.models.resnet18),
        ((3, 4, 6, 3), "bottleneck", torchvision.models.resnet50),
    ],
)
def test_a_resnet_of_full_width_has_torchvision_s_parameters(depths, block, twin) -> None:
    ours = ResNet(64, depths, stem="imagenet", block=block)
    theirs = twin()
    theirs.fc = nn.Identity()
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    assert shapes == {name: value.shape for name, value in theirs.state_dict().items()}


@table("block", ["basic", "bottleneck"])
def test_torchvision_s_weights_give_torchvision_s_features(block: str) -> None:
    ours = ResNet(64, (1, 2, 1, 1), stem="imagenet", block=block)
    library = torchvision.models.resnet
    twin = {"basic": library.BasicBlock, "bottleneck": library.Bottleneck}[block]
    theirs = library.ResNet(twin, [1, 2, 1, 1])
    theirs.fc = nn.Identity()
    ours.load_state_dict(theirs.state_dict())
    image_BCHW = torch.rand(3, 3, 48, 40)
    torch.testing.assert_close(ours(image_BCHW), theirs(image_BCHW), atol=1e-4, rtol=1e-4)


@table(
    ("width", "depths", "dim"),
    [(16, (1, 1, 1, 1), 128), (8, (1, 1, 0, 0), 16), (5, (1, 0, 0, 2), 40)],
)
def test_width_scales_every_stage(width: int, depths: tuple[int, ...], dim: int) -> None:
    encoder = ResNet(width, depths, channels=1).eval()
    assert encoder.dim == dim
    assert encoder(torch.zeros(2, 1, 28, 28)).shape == (2, dim)


def test_the_cifar_stem_keeps_the_resolution() -> None:
    encoder = ResNet(4, (1, 0, 0, 0), channels=3)
    features = encoder.layer1(encoder.maxpool(encoder.conv1(torch.zeros(1, 3, 20, 20))))
    assert features.shape == (1, 4, 20, 20)


def test_a_narrow_network_has_few_parameters() -> None:
    assert count(ResNet(16, (1, 1, 1, 1), channels=1)) < count(ResNet(64)) / 30


@pytest.mark.parametrize("hidden", [0, 32])
def test_a_projector_has_the_shape_and_the_parameters_of_its_layers(hidden: int) -> None:
    projector = Projector(10, 6, hidden)
    assert projector.dim == 6
    assert projector(torch.zeros(3, 10)).shape == (3, 6)
    assert count(projector) == (10 * 32 + 32 + 32 * 6 + 6 if hidden else 66)


def test_the_encoder_and_the_projector_reject_wrong_settings() -> None:
    with pytest.raises(ValueError, match="width is 0"):
        ResNet(0)
    with pytest.raises(ValueError, match=r"depths is \(1, 1\)"):
        ResNet(8, (1, 1))
    with pytest.raises(ValueError, match=r"depths is \(0, 1, 1, 1\)"):
        ResNet(8, (0, 1, 1, 1))
    with pytest.raises(ValueError, match="channels is 0"):
        ResNet(8, channels=0)
    with pytest.raises(ValueError, match="stem is 'big'"):
        ResNet(8, stem="big")
    with pytest.raises(ValueError, match="block is 'wide'"):
        ResNet(8, block="wide")
    with pytest.raises(ValueError, match="features=0"):
        Projector(0)
    with pytest.raises(ValueError, match=r"dim=1, .* dim at least 2.* has no gradient"):
        Projector(8, 1)


@table(
    ("hidden", "batchnorm", "norms"),
    [(0, "none", 0), (8, "none", 0), (8, "hidden", 1), (8, "all", 2), (0, "all", 1)],
)
def test_a_projector_normalises_the_layers_of_its_option(
    hidden: int, batchnorm: str, norms: int
) -> None:
    torch.manual_seed(0)
    projector = Projector(6, 4, hidden, batchnorm)
    found = [layer for layer in projector.modules() if isinstance(layer, nn.BatchNorm1d)]
    assert len(found) == norms
    z_BD = projector(torch.randn(16, 6))
    assert z_BD.shape == (16, 4)
    if batchnorm == "all":
        torch.testing.assert_close(z_BD.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
        assert not found[-1].affine


def test_a_projector_without_hidden_layer_cannot_normalise_it() -> None:
    with pytest.raises(ValueError, match="hidden is 0: give its size"):
        Projector(6, 4, 0, "hidden")
    with pytest.raises(ValueError, match="batchnorm is 'some'"):
        Projector(6, 4, 8, "some")


def test_an_encoder_trains_on_one_image_that_shrinks_to_a_pixel() -> None:
    torch.manual_seed(0)
    encoder = ResNet(4, (1, 1, 1, 1), channels=1).train()
    feature_BF = encoder(torch.randn(1, 1, 8, 8))
    assert torch.isfinite(feature_BF).all()
    assert all(torch.isfinite(value).all() for value in encoder.state_dict().values())


@table(
    ("width", "channels", "own"),
    [*((width, 3, False) for width in (1, 8, 9, 10, 12, 15)), (4, 1, False), (4, 1, True)],
)
def test_narrow_networks_are_contiguous(width: int, channels: int, own: bool) -> None:
    """With channels last, oneDNN corrupts the heap for fewer than 16 channels."""
    encoder: nn.Module = ResNet(width=width, depths=(1, 1, 0, 0), channels=channels)
    if own:
        convolution = nn.Conv2d(channels, width, 3)
        pooled = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        encoder = Model(pooled, (channels, 8, 8))
    strides = []
    for layer in encoder.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous()
            layer.register_forward_hook(lambda _, given, out: strides.extend([*given, out]))
    encoder(torch.rand(2, 8, 8, channels).permute(0, 3, 1, 2))  # in the layout of a decoder
    assert strides
    for image_BCHW in strides:
        _, depth, high, wide = image_BCHW.shape
        assert image_BCHW.stride() == (depth * high * wide, high * wide, wide, 1)


def test_wide_networks_have_channels_last() -> None:
    weights = [layer.weight for layer in ResNet(width=16).modules() if isinstance(layer, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_only_one_module_chooses_the_memory_layout() -> None:
    root = Path(__file__).parents[2]
    folders = ("stream_ssl", "memory", "producers", "benchmarks")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    named = [path.name for path in files if "channels_last" in path.read_text()]
    assert named == ["network.py"], "take network.layout_for, which knows the safe widths"
