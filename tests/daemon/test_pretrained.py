"""Runs that begin with pretrained weights, or count duplicates on them, from config to export."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_run import SETTINGS
from jsonargparse import Namespace
from test_own_models import Some

import stream_ssl
from stream_ssl.app import cli
from stream_ssl.batch import START
from stream_ssl.config import build, options
from stream_ssl.daemon import learn
from stream_ssl.encoder import efficientnet_lite
from stream_ssl.encoder.efficientnet_lite import EfficientNetLite0
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.learner import Learner
from stream_ssl.trained.encoder import facts, find, fresh_encoder

PRESETS = Path(__file__).parents[2] / "deploy" / "configs" / "presets"
START_PRESET, DESCRIPTOR_PRESET = (
    str(PRESETS / f"pretrained-{name}.yaml") for name in ("start", "descriptor")
)


def parsed(folder: Path, *presets: str) -> tuple[Any, Namespace]:
    file = folder / "config.yaml"  # JSON is YAML
    http = {"learner": "127.0.0.1:0"}
    file.write_text(json.dumps(SETTINGS | {"run": str(folder / "run"), "http": http}))
    parser = options.learner_parser()
    words = [word for preset in presets for word in ("--config", preset)]
    return parser, options.read(
        parser, [str(file), *words, "--decoder.size", "32", "--decoder.channels", "3"]
    )


def trained(settings: Namespace, steps: int) -> Learner:
    learner = build.learner(settings, Some(3, 32), START)
    records = learner.run(threading.Event())
    while learner.step < steps:
        next(records)
    records.close()
    return learner


def begun(folder: Path, *presets: str) -> tuple[Learner, Checkpointer]:
    """Return a learner after two updates, and its checkpointer."""
    parser, settings = parsed(folder, *presets)
    learner = trained(parser.instantiate(settings), 2)
    checkpointer = Checkpointer(folder / "run" / "checkpoints")
    checkpointer.save(learner, options.resolved(parser, settings))
    return learner, checkpointer


def test_a_run_from_pretrained_weights_goes_on_and_is_exported_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = begun(tmp_path, START_PRESET)
    image_BCHW = torch.randint(0, 256, (4, 3, 32, 32)).to(torch.uint8)
    expected_BF = learner.method.features(learner.views.plain(image_BCHW))
    theirs, ours = EfficientNetLite0(pretrained=True), learner.method.encoder.module
    kept = {n: torch.equal(v, ours.state_dict()[n]) for n, v in theirs.state_dict().items()}
    # Convolutions are trained. BatchNorm keeps averages, scales and shifts.
    assert {n for n, same in kept.items() if not same} == {
        n for n in kept if n.endswith(".0.weight")
    }
    first = fresh_encoder(facts(find(tmp_path / "run"))["config"])
    plain_BCHW = (image_BCHW / 255 - 0.498) / 0.502
    with torch.no_grad():
        begun_BF = theirs.eval()(plain_BCHW)
    torch.testing.assert_close(first(image_BCHW), begun_BF)
    assert not torch.equal(begun_BF, expected_BF)

    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package")
    parser, settings = parsed(tmp_path, START_PRESET)
    with pytest.raises(ValueError, match="not installed"):
        build.method(parser.instantiate(settings))
    words = ["--config", str(tmp_path / "config.yaml"), "--config", START_PRESET]
    size = ["--decoder.size", "32", "--decoder.channels", "3"]
    assert cli.main(["check", *words, *size]) == 0  # a restart accepts the same
    with ExitStack() as stack:
        again = learn.Process(parser, settings, stack).learner
        assert torch.equal(again.method.features(again.views.plain(image_BCHW)), expected_BF)
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "run")(image_BCHW), expected_BF)
    words = ["export", str(tmp_path / "run"), "--encoder", str(tmp_path / "out"), "--no-onnx"]
    assert cli.main(words) == 0
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "out")(image_BCHW), expected_BF)


def test_a_memory_with_a_pretrained_descriptor_continues_only_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, checkpointer = begun(tmp_path, DESCRIPTOR_PRESET)
    saved = checkpointer.newest()
    assert saved is not None
    parser, settings = parsed(tmp_path, DESCRIPTOR_PRESET)
    again = build.learner(parser.instantiate(settings), build.EmptyStream(), START)
    saved.restore(again)
    assert torch.equal(again.memory.descriptors, learner.memory.descriptors)
    again.memory.check_valid()

    encoder = settings.memory.descriptor.init_args.encoder
    encoder.init_args.pretrained = False
    other = build.learner(parser.instantiate(settings), build.EmptyStream(), START)
    with pytest.raises(ValueError, match=r"descriptor.*Frozen\(EfficientNetLite0, weights="):
        saved.restore(other)

    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package")
    assert stream_ssl.load_encoder(tmp_path / "run").dim == learner.method.encoder.dim
    assert cli.main(["export", str(tmp_path / "run"), "--memory", str(tmp_path / "held")]) == 0


def test_check_names_the_extra_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package")
    for preset in (START_PRESET, DESCRIPTOR_PRESET):
        parsed(tmp_path, preset)
        words = ["--config", str(tmp_path / "config.yaml"), "--config", preset]
        assert cli.main(["check", *words, "--decoder.channels", "3"]) == 2
        assert "pip install 'stream-ssl[pretrained]'" in caplog.text
        caplog.clear()
