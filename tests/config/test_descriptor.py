"""The descriptor that counts duplicates, from a config file to a run that continues."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from config_files import config_file
from jsonargparse import Namespace
from table import table

from stream_ssl.app.commands import check
from stream_ssl.batch import START
from stream_ssl.config import build, options, restart
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Embedding, Thumbnail, Weighted
from stream_ssl.memory.scores import VonMisesFisher

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
DEMO = Path(options.__file__).parents[1] / "demo" / "demo.yaml"
DEFAULT = "Weighted([Embedding(), Features(dims={})], weights=[0.5, 0.5])"
TWO = {
    "class_path": "stream_ssl.memory.descriptors.Weighted",
    "init_args": {
        "weights": [3, 1],
        "parts": [
            {"class_path": "stream_ssl.memory.descriptors.Thumbnail", "init_args": {"side": 4}},
            {"class_path": "stream_ssl.memory.descriptors.Embedding"},
        ],
    },
}


def file_of(folder: Path, **memory: Any) -> str:
    return config_file(folder, memory={"capacity": 64, **memory})


def parsed(file: str | Path, *arguments: str) -> Namespace:
    return options.read(options.learner_parser(), [str(file), *arguments])


def resolved(settings: Namespace) -> dict[str, Any]:
    return options.resolved(options.learner_parser(), settings)


def built(settings: Namespace) -> Namespace:
    return options.learner_parser().instantiate(settings)


def memory_of(settings: Namespace) -> WorkingMemory:
    instances = built(settings)
    build.method(instances)  # which gives Features the size of its rows
    return build.memory(instances, dim=16)


def test_the_default_descriptor_has_embeddings_and_features_and_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = parsed(file_of(tmp_path))
    default = DEFAULT.format(build.method(built(settings)).encoder.dim)
    assert resolved(settings)["memory"]["descriptor"] == options.DESCRIPTOR
    assert repr(memory_of(settings).descriptor) == default
    assert WorkingMemory(4, 4).descriptor.__class__ is Embedding
    with pytest.raises(SystemExit):
        options.learner_parser().parse_args(["--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["memory"]["descriptor"] == options.DESCRIPTOR
    assert check.main([str(file_of(tmp_path))]) == 0
    assert f"duplicates   counted on {default}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["Thumbnail", "--memory.descriptor.side", "4"], "Thumbnail(side=4)"),
        (["stream_ssl.memory.descriptors.Embedding"], "Embedding()"),
        (["null"], "Embedding()"),
        (["Features", "--memory.descriptor.dims", "8"], "Features(dims=8)"),
        ([json.dumps(TWO)], "Weighted([Thumbnail(side=4), Embedding()], weights=[0.75, 0.25])"),
    ],
    ids=["short", "path", "null", "features", "parts"],
)
def test_the_command_line_can_name_another_descriptor(
    arguments: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, said = file_of(tmp_path), ["--memory.descriptor", *arguments]
    options.read(options.receiver_parser(), [str(file), *said])  # which leaves them unread
    memory = memory_of(parsed(file, *said))
    assert repr(memory.descriptor) == found
    assert check.main([str(file), *said]) == 0
    assert f"duplicates   counted on {found}" in capsys.readouterr().out


def test_features_take_their_size_from_the_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"stream_ssl.memory.descriptors.{name}" for name in ("Embedding", "Features")]
    both = {"class_path": "Weighted", "init_args": {"parts": [{"class_path": p} for p in paths]}}
    for named, beside in (("Features", 0), (json.dumps(both), 16)):
        file, said = file_of(tmp_path), ["--memory.descriptor", named]
        assert check.main([str(file), *said]) == 0
        settings = built(parsed(file, *said))
        dim = build.method(settings).encoder.dim
        shown = capsys.readouterr().out
        assert "duplicates   counted on " in shown
        assert f"Features(dims={dim})" in shown
        assert build.memory(settings, dim=16).descriptors.shape[1] == beside + dim


def test_a_config_file_can_name_another_descriptor(tmp_path: Path) -> None:
    descriptor = memory_of(parsed(file_of(tmp_path, descriptor=TWO))).descriptor
    assert isinstance(descriptor, Weighted)
    assert repr(descriptor) == "Weighted([Thumbnail(side=4), Embedding()], weights=[0.75, 0.25])"
    assert descriptor.dim(16, (1, 16, 16)) == 16 + 16


@table(
    ("preset", "found"),
    [(None, DEFAULT.format(128)), ("d-moco", "Embedding()"), ("simclr", DEFAULT.format(128))],
)
def test_a_preset_of_a_paper_has_the_descriptor_of_the_paper(
    preset: str | None, found: str
) -> None:
    more = [] if preset is None else ["--config", str(CONFIGS / "presets" / f"{preset}.yaml")]
    settings = parsed(CONFIGS / "laptop.yaml", *more)
    assert repr(memory_of(settings).descriptor) == found


@table("name", ["laptop.yaml", "gpu.yaml", "demo"])
def test_shipped_configurations_have_the_defaults(name: str) -> None:
    file = DEMO if name == "demo" else CONFIGS / name
    found = resolved(parsed(file, "--run", "runs/one"))
    memory = found["memory"]
    assert memory["descriptor"] == options.DESCRIPTOR
    assert memory["eviction"] == options.EVICTION
    assert memory["shares"] == options.SHARES == 0.5
    assert options.LEARNER.items() <= found["learner"].items()


def going_on(file: Path, stored: dict[str, Any], *arguments: str) -> Namespace:
    """Return the settings of a run that resumes with this stored configuration."""
    parser = options.learner_parser()
    settings = options.read(parser, [str(file), *arguments])
    return restart.resume(parser, settings, stored)


def test_a_run_continues_with_its_stored_descriptor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path)
    began = parsed(file, "--memory.descriptor", "Embedding")
    learner = build.learner(built(began), build.EmptyStream(), START)
    z_BD = torch.nn.functional.normalize(torch.randn(70, learner.memory.dim), dim=1)
    images = torch.zeros(70, *learner.memory.image_shape, dtype=torch.uint8)
    learner.memory.add(torch.arange(70), z_BD, images)
    settings = going_on(file, resolved(began), "--memory.descriptor", "Thumbnail")
    again = build.learner(built(settings), build.EmptyStream(), START)
    assert isinstance(again.memory.descriptor, Embedding)
    again.restore(learner.capture())
    assert torch.equal(again.memory.descriptors, learner.memory.embeddings)
    assert "from its beginning: memory.descriptor" in caplog.text
    # Its next checkpoint says so: from then on the choice is the run's own.
    assert resolved(settings)["memory"]["descriptor"]["class_path"].endswith("Embedding")


@pytest.mark.parametrize("said", ["null", "Embedding", "Thumbnail"])
def test_a_run_keeps_the_descriptor_that_it_began_with(said: str, tmp_path: Path) -> None:
    file = file_of(tmp_path)
    stored = resolved(parsed(file, "--memory.descriptor", said))
    for now in ([], ["--memory.descriptor", "Thumbnail", "--memory.descriptor.side", "3"]):
        memory = memory_of(going_on(file, stored, *now))
        assert repr(memory.descriptor) == (
            "Thumbnail(side=8)" if said == "Thumbnail" else "Embedding()"
        )


def test_a_memory_refuses_the_state_of_another_descriptor(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    state = memory_of(parsed(file, "--memory.descriptor", "Thumbnail")).state_dict()
    with pytest.raises(ValueError, match="descriptor"):
        memory_of(parsed(file)).load_state_dict(state)


def test_shadows_use_the_descriptor_of_the_working_memory(tmp_path: Path) -> None:
    file = file_of(tmp_path, eviction=sharp())
    extra = {"queue": {"class_path": "stream_ssl.memory.eviction.Oldest"}, "same": sharp()}
    thumbnail = ("--memory.descriptor", "Thumbnail")
    settings = built(parsed(file, *thumbnail, "--shadows", json.dumps(extra)))
    working, shadows = build.memory(settings, dim=16), build.shadows(settings, dim=16)
    draw = torch.Generator().manual_seed(0)
    for start in range(0, 120, 20):
        ids_B = torch.arange(start, start + 20)
        keys_BD = torch.nn.functional.normalize(torch.randn(20, 16, generator=draw), dim=1)
        image_BCHW = torch.randint(0, 256, (20, 1, 16, 16), generator=draw).to(torch.uint8)
        record = SimpleNamespace(
            admission=working.add(ids_B, keys_BD, image_BCHW),
            ids_B=ids_B,
            keys_BD=keys_BD,
            images_BCHW=image_BCHW,
            features_BF=None,
            labels_B=None,
            hashes_B=None,
        )
        for shadow in shadows:
            shadow.consume(record)
    queue, same = (shadow.memory for shadow in shadows)
    assert torch.equal(same.ids, working.ids)
    assert torch.equal(same.descriptors, working.descriptors)
    assert queue.images is None
    newest = image_BCHW  # the last of the queue
    thumbnails = Thumbnail(side=8)(keys_BD, newest)
    held = queue.descriptors[torch.isin(queue.ids, ids_B)]
    torch.testing.assert_close(held, thumbnails[queue.ids[torch.isin(queue.ids, ids_B)] - 100])
    score = VonMisesFisher(0.1)
    expected = score.counts(queue.descriptors.double()).mean() / 63
    assert queue.stats().expected_collisions == pytest.approx(float(expected), rel=1e-4)


def sharp() -> dict[str, Any]:
    score = {"class_path": "stream_ssl.memory.scores.VonMisesFisher", "init_args": {"kappa": 0.1}}
    return {
        "class_path": "stream_ssl.memory.eviction.MostDuplicated",
        "init_args": {"score": score},
    }
