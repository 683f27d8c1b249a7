"""Encoders, views and decoders by class path; weights to begin with; frozen stages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from batches_naive import FakeReader
from evaluation_run import SETTINGS, write_run
from safetensors.torch import load_file, save_file
from table import table
from torch import Tensor, nn

import stream_ssl
from stream_ssl.app import cli
from stream_ssl.app.commands import check
from stream_ssl.batch import START, Batch
from stream_ssl.config import build, options
from stream_ssl.encoder.network import Model, load_weights
from stream_ssl.feed.decode import Decoder, Pixels
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.process.failures import USAGE
from stream_ssl.trained.encoder import stored_settings
from stream_ssl.wire import Sample

RESNET18 = {"class_path": "torchvision.models.resnet18"}
STAGES = ["conv1", "bn1", "layer1", "layer2"]


class Fussy(nn.Module):
    """A network whose constructor raises an error of its own kind, as timm's builders do."""

    def __init__(self, name: str = "tiny") -> None:
        raise RuntimeError(f"Unknown model ({name})")


class Small(nn.Module):
    """A user's own network, with a dropout and a name that ours uses, too."""

    def __init__(self, width: int = 6, dim: str = "own", flat: bool = True) -> None:
        super().__init__()
        self.dim, self.flat = dim, flat
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.5))
        self.top = nn.Conv2d(width, 5, 3)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BFHW: Tensor = self.top(self.stem(image_BCHW).relu())
        return feature_BFHW.mean((2, 3)) if self.flat else feature_BFHW


class TwoHeads(Small):
    """A network with an auxiliary output in training, as torchvision's GoogLeNet."""

    def forward(self, image_BCHW: Tensor) -> Any:
        feature_BF = super().forward(image_BCHW)
        return (feature_BF, feature_BF) if self.training else feature_BF


class Stateful(Small):
    """A network whose state is no tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": 1}


class Holder(Small):
    """A network that cannot be copied, because it holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Converted(Small):
    """A network whose features have another type."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.result = getattr(torch, dtype)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return super().forward(image_BCHW).to(self.result)


class Versioned(Small):
    """A network that loads only states with its version, as torchvision's MNASNet."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *more: Any) -> None:
        if local.get("version") != 2:
            raise ValueError(f"version should be 2 instead of {local.get('version')}")
        super()._load_from_state_dict(state, prefix, local, *more)


class Tied(Small):
    """A network that uses one layer twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.top = nn.Conv2d(6, 6, 3)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.second(self.top(self.stem(image_BCHW))).mean((2, 3))


def create(model_name: str, **more: Any) -> nn.Module:
    """Create a network as timm's `create_model`, whose signature lacks most arguments."""
    network: nn.Module = {"small": Small}[model_name](**more)
    return network


class Darker(nn.Module):
    """A transform that multiplies each image by its own factor."""

    def __init__(self, least: float = 0.5, side: int | None = None) -> None:
        super().__init__()
        self.least, self.side = least, side

    def forward(self, image_BCHW: Tensor) -> Tensor:
        factor_B111 = torch.empty(len(image_BCHW), 1, 1, 1).uniform_(self.least, 1)
        return (image_BCHW * factor_B111)[..., : self.side]


class Negative(Decoder):
    """A decoder that inverts the brightness of its images."""

    def __init__(self, size: int, channels: Any, max_pixels: int, top: int = 255) -> None:
        super().__init__(size, channels, max_pixels)
        self.top = top

    def decode(self, sample: Sample) -> Pixels:
        return self.top - super().decode(sample)


def own(cls: type, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{__name__}.{cls.__name__}", "init_args": arguments}


class Some:
    """A stream of random images."""

    def __init__(self, channels: int, size: int) -> None:
        self._shape, self._draw = (8, channels, size, size), torch.Generator().manual_seed(0)
        self._next = 0

    def next(self, timeout: float) -> Batch[Any]:
        self._next += 8
        image_BCHW = torch.randint(0, 256, self._shape, generator=self._draw).to(torch.uint8)
        ids_B, time_B = np.arange(self._next - 8, self._next), np.zeros(8)
        label_B = np.full(8, -1)
        return Batch(ids_B, ids_B + 1, label_B, image_BCHW.numpy(), time_B)

    def lag(self) -> float:
        return 0.0


def settings_of(folder: Path, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return the settings as `build` takes them, and as a checkpoint stores them."""
    file = folder / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps(SETTINGS | changes | {"run": str(folder / "run")}))
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    return parser.instantiate(settings), options.resolved(parser, settings)


def trained(settings: Any, steps: int) -> Any:
    """Return a learner after this number of updates."""
    channels, size = settings.decoder.channels, settings.decoder.size
    learner = build.learner(settings, Some(channels, size), START)
    records = learner.run(threading.Event())
    while learner.step < steps:
        next(records)
    records.close()
    return learner


def test_a_function_receives_arguments_that_its_signature_does_not_name(tmp_path: Path) -> None:
    named = {"class_path": f"{__name__}.create", "init_args": {"model_name": "small"}}
    model = {**named, "dict_kwargs": {"width": 7}}
    (checkpoint,) = write_run(tmp_path / "run", encoder={"model": model})
    weights = load_file(checkpoint / "model.safetensors")
    weight = next(w for name, w in weights.items() if name.endswith("encoder.module.stem.0.weight"))
    assert weight.shape[0] == 7
    assert stream_ssl.load_encoder(checkpoint, trust_code=True).dim == 5


def plain_resnet18() -> nn.Module:
    torch.manual_seed(3)
    network = torchvision.models.resnet18()
    for layer in network.modules():  # as of a network that has seen something
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.1, 0.1)
    return network


def test_a_pretrained_resnet18_with_frozen_stages_learns_resumes_and_is_exported(
    tmp_path: Path,
) -> None:
    theirs = plain_resnet18()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    theirs.fc = nn.Identity()
    parts: dict[str, Any] = {
        "decoder": {"size": 32, "channels": 3},
        "encoder": {
            "model": "torchvision.models.resnet18",
            "head": "fc",
            "weights": str(tmp_path / "weights.safetensors"),
            "frozen": STAGES,
        },
    }
    settings, stored = settings_of(tmp_path, **parts)
    image_BCHW = torch.randint(0, 256, (4, 3, 32, 32)).to(torch.uint8)
    view_BCHW = build.views(settings).plain(image_BCHW)
    begun = build.method(settings)
    assert torch.equal(begun.features(view_BCHW), theirs.eval()(view_BCHW))

    learner = trained(settings, 3)
    found, first = learner.method.encoder.module.state_dict(), theirs.state_dict()
    held = {name for name in found if torch.equal(found[name], first[name])}
    assert held == {name for name in found if name.split(".")[0] in STAGES}
    still = {name.split(".")[0] for name, m in learner.method.encoder.module.named_modules()
             if not m.training}  # fmt: skip
    assert still == set(STAGES)
    assert all(p.requires_grad for p in learner.method.trained)
    # The key encoder's frozen stages use the averages, too.
    assert learner.method.key_encoder.module.layer1[0].bn1.running_mean is not None
    assert learner.method.key_encoder.module.layer4[0].bn1.running_mean is None

    Checkpointer(tmp_path / "run" / "checkpoints").save(learner, stored)
    (tmp_path / "weights.safetensors").unlink()  # a run that has begun needs it no more
    expected_BF = learner.method.features(view_BCHW)
    saved = Checkpointer(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None
    settings, _ = settings_of(tmp_path, **parts)
    settings.encoder.weights = None
    again = build.learner(settings, build.EmptyStream(), START)
    saved.restore(again)
    assert torch.equal(again.method.features(view_BCHW), expected_BF)
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "run")(image_BCHW), expected_BF)
    assert cli.main(["export", str(tmp_path / "run"), "--encoder", str(tmp_path / "out")]) == 0
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "out")(image_BCHW), expected_BF)

    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    (answer_BF,) = session.run(None, {"images": image_BCHW.numpy()})
    assert np.abs(answer_BF - expected_BF.numpy()).max() <= 1e-4 * expected_BF.abs().max()

    # Another run can load the exported weights.
    weights = {"weights": str(tmp_path / "out" / "encoder.safetensors"), "head": "fc"}
    settings, _ = settings_of(
        tmp_path,
        decoder={"size": 32, "channels": 3},
        encoder={"model": "torchvision.models.resnet18", **weights},
    )
    assert torch.equal(build.method(settings).features(view_BCHW), expected_BF)


def test_a_run_and_its_export_use_a_network_transform_and_decoder_of_a_user(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "encoder": {"model": own(Small, width=4), "frozen": ["stem"]},
        "views": {"transform": own(Darker, least=0.2)},
        "decoder": {"size": 12, "channels": 1, "subclass": own(Negative, top=200)},
    }
    (checkpoint,) = write_run(tmp_path / "run", **parts)
    settings, _ = settings_of(tmp_path, **parts)
    learner = trained(settings, 2)
    stem = learner.method.encoder.module.stem
    assert not stem[2].training
    before = {
        n: t.clone() for n, t in build.method(settings).encoder.module.stem.state_dict().items()
    }
    assert all(torch.equal(t, before[n]) for n, t in stem.state_dict().items())
    assert learner.method.encoder.dim == 5

    words = ["export", str(tmp_path / "run"), "--encoder", str(tmp_path / "out")]
    assert cli.main(words) == USAGE
    assert cli.main([*words, "--trust-code"]) == 0
    image_HW = np.arange(144, dtype=np.uint8).reshape(12, 12)
    for place in (tmp_path / "run", checkpoint, tmp_path / "out"):
        with pytest.raises(ValueError, match=r"test_own_models\..*trust_code=True"):
            stream_ssl.load_encoder(place)
        encoder = stream_ssl.load_encoder(place, trust_code=True)
        image_CHW = encoder.preprocess(image_HW)
        assert torch.equal(image_CHW[0], torch.from_numpy(200 - image_HW))
        assert encoder(image_CHW[None]).shape == (1, 5)
    bright_BCHW = torch.full((64, 1, 12, 12), 255, dtype=torch.uint8)
    view_BCHW = encoder.views(bright_BCHW)
    assert view_BCHW.std((1, 2, 3)).max() < 1e-5
    assert -1.3 < float(view_BCHW.min()) < -0.5  # (0.2 - 0.5) / 0.25 = -1.2
    assert (view_BCHW.flatten(1)[:, 0].std() > 0.3).item()
    weights = load_file(tmp_path / "out" / "encoder.safetensors")
    assert "backbone.module.stem.0.weight" in weights


SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}
SWIN |= {"patch_size": [4, 4], "window_size": [4, 4], "num_classes": 5}
VIT = {"image_size": 32, "patch_size": 16, "num_layers": 1, "num_heads": 2}
VIT |= {"hidden_dim": 16, "mlp_dim": 16, "num_classes": 5}


@table(
    ("name", "arguments"),
    [
        ("SwinTransformer", SWIN),
        ("SwinTransformer", {**SWIN, "norm_layer": "torch.nn.LayerNorm"}),
        ("shufflenet_v2_x0_5", {"num_classes": 5}),
        ("VisionTransformer", VIT),
    ],
    ids=range(4),
)
def test_a_network_keeps_its_defaults_that_are_classes_or_functions(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    spec = {"class_path": f"torchvision.models.{name}", "init_args": arguments}
    parts = {"decoder": {"size": 32, "channels": 3}, "encoder": {"model": spec}}
    settings, stored = settings_of(tmp_path, **parts)
    assert build.backbone(settings).dim == 5
    assert build.backbone(stored_settings(stored)).dim == 5


def test_a_network_that_needs_its_version_resumes_and_is_exported(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"encoder": {"model": own(Versioned)}}
    (checkpoint,) = write_run(tmp_path / "run", **parts)
    settings, _ = settings_of(tmp_path, **parts)
    again = build.learner(settings, build.EmptyStream(), START)
    saved = Checkpointer(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None
    saved.restore(again)
    words = ["export", str(checkpoint), "--encoder", str(tmp_path / "out"), "--no-onnx"]
    assert cli.main([*words, "--trust-code"]) == 0
    image_BCHW = torch.randint(0, 256, (4, 1, 12, 12)).to(torch.uint8)
    expected_BF = again.method.features(build.views(settings).plain(image_BCHW))
    for place in (checkpoint, tmp_path / "out"):
        found_BF = stream_ssl.load_encoder(place, trust_code=True)(image_BCHW)
        assert torch.equal(found_BF, expected_BF)
    load_weights(build.backbone(settings), tmp_path / "out" / "encoder.safetensors")


def test_a_network_with_two_names_for_one_layer_is_exported(tmp_path: Path) -> None:
    write_run(tmp_path / "run", encoder={"model": own(Tied)})
    words = ["export", str(tmp_path / "run"), "--encoder", str(tmp_path / "out"), "--no-onnx"]
    assert cli.main([*words, "--trust-code"]) == 0
    image_BCHW = torch.randint(0, 256, (4, 1, 12, 12)).to(torch.uint8)
    expected_BF, found_BF = (
        stream_ssl.load_encoder(tmp_path / name, trust_code=True)(image_BCHW)
        for name in ("run", "out")
    )
    assert torch.equal(found_BF, expected_BF)


class Locked(Decoder):
    """A user's decoder that cannot be pickled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lock = threading.Lock()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_decoder_of_a_user_must_be_picklable_for_a_gpu(device: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"learner": {"device": device}, "decoder": {"size": 12}}
    settings, _ = settings_of(tmp_path, **parts)
    assert build.decodes_in_processes(settings) == (device == "cuda")
    assert build.decoder(settings).shape_HWC == (12, 12, 3)
    parts["decoder"]["subclass"] = own(Locked)
    settings, _ = settings_of(tmp_path, **parts)
    assert build.decoder(settings).shape_HWC == (12, 12, 3), "it evaluates and exports"
    reader = FakeReader()
    if device == "cpu":
        build.batches(settings, reader, START).close()  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=r"subclass: Locked cannot be copied .*Keep .*locks"):
        build.batches(settings, reader, START)  # type: ignore[arg-type]


def without(**tensors: Tensor | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(plain_resnet18().state_dict())
    found.update({n.replace("__", "."): t for n, t in tensors.items() if t is not None})
    for name in [n.replace("__", ".") for n, t in tensors.items() if t is None]:
        del found[name]
    return found


RESNET = {"model": RESNET18, "head": "fc"}


@table(
    ("network", "says"),
    [
        (Stateful, "its state _extra_state is a dict, and a checkpoint holds only tensors"),
        (Holder, "encoder.model Holder cannot be copied: .*; a network must hold no open files"),
        (lambda: Converted("int64"), "encoder.model Converted gives torch.int64: features are"),
    ],
    ids=range(3),
)
def test_a_network_that_would_fail_later_is_refused_at_its_construction(
    network: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Model(network(), (1, 8, 8))


@table("dtype", ["float64", "bfloat16"])
def test_features_of_another_type_become_float32(dtype: str) -> None:
    features = Model(Converted(dtype), (1, 8, 8)).eval()(torch.rand(3, 1, 8, 8))
    assert (features.dtype, features.shape) == (torch.float32, (3, 5))


@table(
    ("encoder", "says"),
    [
        ({"model": "torchvision.models.no_such"}, "no_such"),
        ({"model": "json.loads"}, "not correspond to a subclass of Module"),
        ({"model": {**RESNET18, "init_args": {"widht": 2}}}, "'widht' is not accepted"),
        ({"model": "torchvision.models.wide_resnet50_2"},
         "encoder.model: The parameter 'width_per_group' expected value 128 but got 64"),
        ({"model": own(Fussy, name="resnet81")},
         "test_own_models.Fussy cannot be made (RuntimeError: Unknown model (resnet81)); change"),
        ({"model": own(Small)}, "encoder.model Small takes no images of (3, 12, 12)"),
        ({"model": own(Small, flat=False)}, "takes no images"),
        ({**RESNET, "head": "top"}, "encoder.head 'top': ResNet has no such part; it has conv1"),
        ({"head": "fc"}, "which is null"),
        ({**RESNET, "frozen": ["layer9"]}, "encoder.frozen 'layer9': ResNet has no such part"),
        ({"frozen": ["layer9"]}, "encoder.frozen 'layer9'"),
        ({**RESNET, "weights": "gone.safetensors"}, "cannot be read"),
        ({**RESNET, "weights": {"fc__bias": None, "bn1__bias": None}}, "bn1.bias is absent there"),
        ({**RESNET, "weights": {"conv1__weight": torch.zeros(64, 1, 7, 7)}},
         "conv1.weight is (64, 1, 7, 7) there and (64, 3, 7, 7) in the encoder"),
        ({**RESNET, "weights": {"bn1__bias": torch.full((64,), torch.nan)}},
         "the weights bn1.bias are not finite, because their training has diverged"),
        ({"width": 8, "weights": {}}, "there and (8, 3, 3, 3) in the encoder"),
    ],
)  # fmt: skip
def test_check_refuses_options_of_the_encoder_that_do_not_fit(
    encoder: dict[str, Any],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = encoder.get("weights")
    if isinstance(weights, dict):
        save_file(without(**weights), tmp_path / "weights.safetensors")
        encoder = {**encoder, "weights": str(tmp_path / "weights.safetensors")}
    file = tmp_path / "config.yaml"
    changes = {"decoder": {"size": 12, "channels": 3}, "encoder": encoder, "run": str(tmp_path)}
    file.write_text(json.dumps(SETTINGS | changes))
    with suppress(SystemExit):  # the parser's own way
        assert check.main([str(file)]) == USAGE
    assert says in " ".join((capsys.readouterr().err + caplog.text).split())


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_of_torch_save_are_refused_with_the_way_to_convert_them(
    zipped: bool, tmp_path: Path
) -> None:
    file = tmp_path / "weights.pth"
    torch.save(  # noqa: TID251 - as users save their weights
        without(), file, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(ValueError, match=r"cannot be read as safetensors: .* convert it once"):
        load_weights(plain_resnet18(), file)


def prefixed(*prefixes: str) -> dict[str, torch.Tensor]:
    return {begin + name: one.clone() for begin in prefixes for name, one in without().items()}


@table("prefix", ["module.", "_orig_mod.", "model.", "encoder_q."])
def test_weights_of_a_wrapped_network_lose_its_prefix(prefix: str, tmp_path: Path) -> None:
    """DistributedDataParallel, torch.compile and training libraries write such names."""
    file, network = tmp_path / "weights.safetensors", plain_resnet18()
    save_file(prefixed(prefix) | {"optimiser.step": torch.ones(1)}, file)
    load_weights(network, file)
    for name, weight in without().items():
        assert torch.equal(network.state_dict()[name], weight)


def test_several_networks_in_one_file_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(prefixed("encoder_k.", "encoder_q."), file)
    with pytest.raises(ValueError, match=r"begin with encoder_k\., encoder_q\.: give a file"):
        load_weights(plain_resnet18(), file)
    for dtype in (torch.int8, torch.float8_e4m3fn):  # their scales are lost without an error
        save_file({name: one.to(dtype) for name, one in without().items()}, file)
        with pytest.raises(ValueError, match=r"conv1\.weight is torch\.\w+, which is quantised"):
            load_weights(plain_resnet18(), file)


@table(
    ("section", "says"),
    [
        ({"encoder": {"model": own(Small, flat=False)}}, "features are one row an image"),
        ({"encoder": {"model": own(TwoHeads)}}, "gives tuple of 2 images in training"),
        ({"views": {"transform": own(Darker, side=5)}}, "a view has the shape of its image"),
        ({"views": {"transform": "torch.nn.Flatten"}}, "a view has the shape of its image"),
        ({"views": {"transform": {"class_path": "torch.nn.Linear",
                                  "init_args": {"in_features": 3, "out_features": 3}}}},
         "views.transform Linear takes no images"),
        ({"encoder": {"model": own(Small), "frozen": ["stem", "top"]},
          "projector": {"dim": 6}}, ""),
    ],
)  # fmt: skip
def test_build_tries_the_shapes_of_networks_and_views(
    section: dict[str, Any], says: str, tmp_path: Path
) -> None:
    settings, _ = settings_of(tmp_path, **section)
    if not says:  # all frozen: the projector alone learns
        assert build.learner(settings, build.EmptyStream(), START)
        return
    with pytest.raises(ValueError, match=says):
        build.learner(settings, build.EmptyStream(), START)
