"""An export or a checkpoint from elsewhere runs no code of its author's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluation_run import write_run
from table import table

import stream_ssl
from stream_ssl.durable import seal
from stream_ssl.encoder.network import ResNet
from stream_ssl.learning.checkpoint_layout import STATE
from stream_ssl.trained.encoder import fresh_encoder, stored_settings

TIMM = {"class_path": "timm.create_model", "init_args": {"model_name": "resnet18"}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (checkpoint,) = write_run(tmp_path_factory.mktemp("trust") / "run")
    found: dict[str, Any] = json.loads((checkpoint / STATE).read_text())["config"]
    return found


def changed(config: dict[str, Any], option: str, value: Any) -> dict[str, Any]:
    section, _, name = option.partition(".")
    return config | {section: config[section] | {name: value} if name else value}


def spec(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


@table("option", ["encoder.model", "views.transform", "decoder.subclass", "loss", "method"])
@table("form", ["class_path", "bare"])
def test_a_module_of_the_working_folder_is_not_imported(
    option: str,
    form: str,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    value = spec("planted.Net") if form == "class_path" else "planted.Net"
    with pytest.raises(ValueError, match=r"names planted\.Net.*trust_code=True \(--trust-code\)"):
        stored_settings(changed(config, option, value))
    assert not (tmp_path / "ran").exists()
    assert "planted" not in sys.modules


@table(
    ("option", "value"),
    [
        ("encoder.model", "torch.hub.load"),
        ("encoder.model", spec("torch.load", f="weights.pt")),
        ("encoder.model", spec("torch.jit.ScriptModule")),
        ("encoder.model", spec("torch.nn.init.normal_")),
        ("encoder.model", spec("stream_ssl.daemon.supervisor.subprocess.Popen", args=["true"])),
        ("encoder.model", spec("stream_ssl.producers._spool.os.system", command="true")),
        ("views.transform", spec("torchvision.transforms.v2.Lambda", lambd="os.system")),
        ("views.transform",
         spec("torchvision.transforms.v2.Compose", transforms=[spec("os.system")])),
        ("encoder.model", {**TIMM, "dict_kwargs": {"checkpoint_path": "weights.pt"}}),
        ("encoder.model", {**TIMM, "dict_kwargs": {"pretrained_cfg": {"file": "weights.pt"}}}),
        ("encoder.model", spec("timm.create_model", model_name="local-dir:weights")),
        ("views.transform", spec("torchvision.transforms.RandomErasing",
                                 value=spec("torchvision.models.list_models"))),
    ],
)  # fmt: skip
def test_a_stored_class_that_is_not_known_needs_trust_code(
    option: str, value: Any, config: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="trust_code=True"):
        stored_settings(changed(config, option, value))


def test_an_argument_without_an_annotation_starts_no_process(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """`value` has no annotation, so jsonargparse makes an object of each class that it names."""
    log = tmp_path / "log"
    started = spec("stream_ssl.demo.children.DemoProcess", name="a", command=["true"], log=str(log))
    value = spec("torchvision.transforms.RandomErasing", value=started)
    with pytest.raises(ValueError, match="trust_code=True"):
        stored_settings(changed(config, "views.transform", value))
    assert not log.exists()


@table(
    ("option", "value"),
    [
        ("encoder.model", "torchvision.models.resnet18"),
        ("encoder.model", spec("torchvision.models.resnet.ResNet", layers=[1, 1, 1, 1],
                               block="torchvision.models.resnet.BasicBlock")),
        ("encoder.model", spec("torch.nn.Flatten")),
        ("views.transform", spec("torchvision.transforms.v2.RandomHorizontalFlip", p=0.3)),
        ("loss", spec("stream_ssl.losses.Debiased", prior=spec(
            "stream_ssl.losses.Ramp", last=0.1, steps=10))),
        ("decoder.subclass", "stream_ssl.feed.decode.Decoder"),
    ],
)  # fmt: skip
def test_known_classes_are_loaded_without_trust_code(
    option: str, value: Any, config: dict[str, Any]
) -> None:
    assert stored_settings(changed(config, option, value))[option] is not None


def test_a_file_from_elsewhere_starts_no_download(config: dict[str, Any]) -> None:
    pretrained = spec("torchvision.models.resnet18", weights="IMAGENET1K_V1")
    settings = stored_settings(changed(config, "encoder.model", pretrained))
    assert settings.encoder.model.init_args.weights is None


def test_a_warning_says_that_random_weights_replace_downloaded_weights(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for asked, told in (({"weights": None}, 0), ({"weights": "IMAGENET1K_V1"}, 1)):
        model = spec("torchvision.models.resnet18", **asked)
        size = config | {"decoder": config["decoder"] | {"channels": 3}}
        fresh_encoder(changed(size, "encoder.model", model))
        assert caplog.text.count("has random weights instead") == told


def test_a_network_of_absurd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 4096 channels"):
        ResNet(depths=(10**9, 1, 0, 0))


def test_an_export_with_an_unknown_class_needs_trust_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class that encoder.json names lies in the export's own folder, and in the working one."""
    from stream_ssl.trained import export

    (checkpoint,) = write_run(tmp_path / "run")
    folder = tmp_path / "encoder"
    export.export_encoder(checkpoint, folder, "features", onnx=False)
    (folder / "planted.py").write_text("raise SystemExit('ran')")
    described = json.loads((folder / "encoder.json").read_text())
    described["encoder"]["model"] = {"class_path": "planted.Net"}
    (folder / "encoder.json").write_text(json.dumps(described))
    (folder / "manifest.json").unlink()
    seal(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ValueError, match=r"names planted\.Net"):
        stream_ssl.load_encoder(folder)
    with pytest.raises(SystemExit, match="ran"):
        stream_ssl.load_encoder(folder, trust_code=True)
