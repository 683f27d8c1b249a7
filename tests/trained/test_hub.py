"""Exports for Hugging Face: transformers loads them without stream_ssl, with the same features."""

from __future__ import annotations

import json
import math
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_run import write_run
from forked import Forked, run_script
from safetensors.torch import load_file, save_file
from table import table
from torchvision.models.resnet import Bottleneck, ResNet

import stream_ssl
from stream_ssl.app.commands import export
from stream_ssl.encoder.network import Model
from stream_ssl.evaluation.neighbours import knn_accuracy
from stream_ssl.feed.decode import Decoder
from stream_ssl.learning.saved import memory_of
from stream_ssl.learning.views import Views
from stream_ssl.memory.state import part, upgraded
from stream_ssl.trained.encoder import Encoder, facts
from stream_ssl.trained.hub import shape_of
from stream_ssl.trained.model_card import MemoryAccuracy, accuracy_on_memory, card

RUNS: dict[str, dict[str, Any]] = {
    "own": {"memory": {"capacity": 128}},
    "native": {
        "decoder": {"size": 32, "channels": 3},
        "views": {"mean": [0.4, 0.5, 0.6]},
        "encoder": {"width": 4, "depths": [1, 2, 1, 1], "stem": "imagenet", "block": "bottleneck"},
    },
    "torchvision": {
        "decoder": {"size": 32, "channels": 3, "fit": "letterbox"},
        "encoder": {"model": "torchvision.models.resnet18", "head": "fc"},
    },
}
LOAD = """
import sys
import warnings

warnings.simplefilter("default")
sys.path = [one for one in sys.path if one not in ("", source)]
for name in [name for name in sys.modules if name.partition(".")[0] == "stream_ssl"]:
    del sys.modules[name]
sys.modules["stream_ssl"] = None  # an import of it fails
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel

for folder in folders:
    model, told = AutoModel.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    pixels = load_file(folder + "/../pixels.safetensors")["pixels"]
    features = model.eval()(pixels).pooler_output.flatten(1).detach()
    save_file({"features": features.contiguous()}, folder + "/../features.safetensors")
if len(folders) > 1:
    import numpy as np

    grey = np.full((40, 60, 3), 51, np.uint8)
    made = AutoImageProcessor.from_pretrained(folders[1])(grey, return_tensors="pt")
    assert made["pixel_values"].shape == (1, 3, 32, 32), made["pixel_values"].shape
    print(made["pixel_values"][0, :, 0, 0].tolist())
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    for name, changes in RUNS.items():
        write_run(folder / name / "run", held=100 if name == "own" else 0, **changes)
        assert export.main([str(folder / name / "run"), "--hub", str(folder / name / "hub")]) == 0
    return {name: folder / name for name in RUNS}


def images(encoder: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (5, encoder.channels, encoder.size, encoder.size)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


@pytest.mark.timeout(300)
def test_transformers_gives_the_features_of_load_encoder(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    expected = {}
    for name, folder in runs.items():
        encoder = stream_ssl.load_encoder(folder / "run")
        image_BCHW = images(encoder)
        pixels = encoder.views.plain(image_BCHW).contiguous()
        save_file({"pixels": pixels}, folder / "pixels.safetensors")
        expected[name] = encoder(image_BCHW)
    source = str(Path(stream_ssl.__file__).parents[1])
    script, output = tmp_path / "load.py", tmp_path / "output"
    folders = [str(one / "hub") for one in runs.values()]
    script.write_text(f"source, folders = {source!r}, {folders!r}\n{LOAD}")
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    process = Forked(run_script, script, home, output=output)
    try:
        assert process.wait(200) == 0, output.read_text()
    finally:
        process.kill()
    for name, folder in runs.items():
        found_BF = load_file(folder / "features.safetensors")["features"]
        torch.testing.assert_close(found_BF, expected[name], rtol=1e-4, atol=1e-5)
    # Grey of level 0.2, with the run's mean and std.
    told = json.loads(output.read_text().splitlines()[-1])
    assert told == pytest.approx([(0.2 - m) / 0.25 for m in (0.4, 0.5, 0.6)])


def test_an_export_contains_code_only_for_a_network_that_transformers_lacks(
    runs: dict[str, Path],
) -> None:
    files = {
        name: {one.name for one in (folder / "hub").iterdir()} for name, folder in runs.items()
    }
    always = {"README.md", "config.json", "manifest.json", "model.safetensors"}
    preprocessor = "preprocessor_config.json"
    assert files["own"] == always | {"modeling_stream_ssl.py", preprocessor}
    assert files["native"] == always | {preprocessor}
    assert files["torchvision"] == always


def test_the_model_card_states_stream_updates_and_accuracy(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (runs["own"] / "hub" / "README.md").read_text()
    assert "| samples read from the stream | 10 |" in text
    assert "| steps, the last one that changed the weights | 10, 10 |" in text
    assert "- `robot/left`: 50 of the memory's samples" in text
    encoder = stream_ssl.load_encoder(runs["own"] / "run")
    (checkpoint,) = (runs["own"] / "run" / "checkpoints").glob("step-*")
    columns = part(upgraded(memory_of(checkpoint)), "columns")
    accuracy, labelled, classes, majority = accuracy_on_memory(encoder, columns)
    assert (labelled, classes) == (50, 2)
    row_K = (columns["labels"] >= 0).nonzero().flatten()
    row_K = row_K[torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    feature_KF, label_K = encoder(columns["images"][row_K]), columns["labels"][row_K]
    parts = feature_KF[:25], label_K[:25], feature_KF[25:], label_K[25:]
    assert accuracy == knn_accuracy(*parts, 20).accuracy
    assert f"{accuracy:.1%} of 25 labelled pictures were recognised among 2 classes" in text
    assert majority == max(label_K[:25].bincount().tolist()) / 25
    assert f"Guessing the most frequent class would recognise {majority:.1%}." in text
    assert 'ImageOps.exif_transpose(image).convert("L")' in text
    colour = (runs["native"] / "hub" / "README.md").read_text()
    assert 'ImageOps.exif_transpose(image).convert("RGB")' in colour
    other = (runs["torchvision"] / "hub" / "README.md").read_text()
    assert "Not measured, because too few samples of the stream have labels." in other
    assert "fill the square with grey" in other
    assert "trust_remote_code" not in other


def test_names_from_producers_are_no_markdown_of_the_model_card(runs: dict[str, Path]) -> None:
    encoder = stream_ssl.load_encoder(runs["own"] / "run")
    (checkpoint,) = (runs["own"] / "run" / "checkpoints").glob("step-*")
    named = Counter({"robot/left\n# `Title` [here](https://example.org)": 3})
    unknown = MemoryAccuracy(None, 0, 0, math.nan)
    text = card(facts(checkpoint), encoder, named, unknown, True)
    line = "- `robot/left?# ?Title? [here](https://example.org)`: 3 of the memory's samples"
    assert line in text.splitlines()


def test_the_accuracy_on_the_memory_takes_no_room_for_large_labels(runs: dict[str, Path]) -> None:
    encoder = stream_ssl.load_encoder(runs["own"] / "run")
    (checkpoint,) = (runs["own"] / "run" / "checkpoints").glob("step-*")
    columns = part(upgraded(memory_of(checkpoint)), "columns")
    small, label_K = accuracy_on_memory(encoder, columns), columns["labels"]
    columns["labels"] = torch.where(label_K < 0, -1, 2**31 - 1 - label_K)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limit[1]))
    try:
        assert accuracy_on_memory(encoder, columns) == small
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def test_the_hub_export_refuses_networks_other_than_resnets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"model": "torchvision.models.mobilenet_v2", "head": "classifier"}
    write_run(tmp_path / "run", decoder={"size": 32, "channels": 3}, encoder=model)
    assert export.main([str(tmp_path / "run"), "--hub", str(tmp_path / "hub")]) == 2
    assert "--hub writes ResNets, and this run's encoder is a MobileNetV2: use" in caplog.text
    assert not (tmp_path / "hub").exists()


def test_a_resnet_with_its_head_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"model": "torchvision.models.resnet18"}
    write_run(tmp_path / "run", decoder={"size": 32, "channels": 3}, encoder=model)
    assert export.main([str(tmp_path / "run"), "--hub", str(tmp_path / "hub")]) == 2
    assert "this run's ResNet gives other features" in caplog.text


@table(
    ("arguments", "same"),
    [
        ({}, True),
        ({"width_per_group": 128}, False),
        ({"replace_stride_with_dilation": [False, True, True]}, False),
    ],
    ids=["plain", "wider", "dilated"],
)
def test_resnets_of_other_features_are_refused(arguments: dict[str, Any], same: bool) -> None:
    network = ResNet(Bottleneck, [1, 1, 1, 1], **arguments)
    model = Model(network, (3, 32, 32), "fc")
    encoder = Encoder(model.eval(), None, Views(32), Decoder(32))
    if same:
        assert shape_of(encoder)["depths"] == [1, 1, 1, 1]
        return
    with pytest.raises(ValueError, match="this run's ResNet gives other features"):
        shape_of(encoder)


def test_an_export_is_replaced_and_files_of_others_are_kept(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [str(runs["own"] / "run"), "--hub", str(tmp_path / "hub")]
    assert export.main(arguments) == 0
    first = (tmp_path / "hub" / "model.safetensors").read_bytes()
    assert export.main(arguments) == 0
    assert (tmp_path / "hub" / "model.safetensors").read_bytes() == first
    (tmp_path / "hub" / "notes.txt").write_text("mine")
    assert export.main(arguments) == 2
    assert "contains notes.txt, which no export has written" in caplog.text


def test_shape_of_returns_the_settings_of_the_network(runs: dict[str, Path]) -> None:
    found = shape_of(stream_ssl.load_encoder(runs["native"] / "run"))
    assert found == RUNS["native"]["encoder"] | {"channels": 3}
