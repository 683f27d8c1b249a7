"""`--from`: a new run begins with the weights and, if it fits, the memory of another run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BATCH, TINY, Processes, processes, stop, until
from table import table

from stream_ssl.app.commands import check
from stream_ssl.batch import START, Origin
from stream_ssl.config import build, options
from stream_ssl.daemon.warm_start import warm_start
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.origins import packed
from stream_ssl.trained.encoder import find


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 10 steps, whose memory of 64 is full."""
    folder = tmp_path_factory.mktemp("old") / "run"
    with processes(folder) as run:
        train(run, 10 * BATCH)
    return folder


def train(run: Processes, samples: int, *arguments: str) -> None:
    receiver = run.role("receiver")
    learner = run.start("learner", str(run.config), *arguments)
    assert run.produce(samples).wait(90) == 0, run.log("robot")
    until(lambda: run.metric("checkpoint_step") >= samples // BATCH, lambda: run.log("learner"))
    assert (stop(learner), stop(receiver)) == (0, 0), run.log("learner")


def begun(folder: Path, old: Path, **settings: Any) -> Learner:
    """Return a learner that `--from` has begun."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(TINY | settings | {"run": str(folder / "new")}))
    parser = options.learner_parser()
    read = parser.instantiate(options.read(parser, [str(file), "--from", str(old)]))
    learner = build.learner(read, build.EmptyStream(), START)
    warm_start(read, learner)
    return learner


def test_origins_do_not_name_files_of_the_old_run(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = begun(tmp_path, old).memory.ids.tolist()
    origin = Origin("robot", "patrol", "7", 1.0, "00" * 16)
    rows = packed((number, *origin.row()) for number in ids)
    monkeypatch.setattr("stream_ssl.daemon.warm_start.origins_of", lambda _: {"rows": rows})
    learner = begun(tmp_path, old)
    assert {one and one.id for one in learner.origins.of(ids)} == {"7"}
    assert learner.origins.originals() == set()


@table("capacity", [40, 64, 100])
def test_a_warm_start_keeps_the_weights_while_the_memory_may_change_its_size(
    tmp_path: Path, old: Path, capacity: int
) -> None:
    from safetensors.torch import load_file

    learner = begun(tmp_path, old, memory={"capacity": capacity, "shares": 0.5})
    saved = load_file(find(old) / "model.safetensors")
    own = learner.method.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in saved.items())
    held = load_file(find(old) / "memory.safetensors")
    memory = learner.memory
    assert len(memory) == min(64, capacity)
    assert memory.check_valid() == (True, "")
    columns = ("columns.ids", "columns.embeddings", "columns.images")
    rows = {int(row[0]): row for row in zip(*(held[name] for name in columns), strict=True)}
    images = memory.images
    assert images is not None
    for number, z, image in zip(memory.ids.tolist(), memory.embeddings, images, strict=True):
        assert torch.equal(rows[number][1], z)
        assert torch.equal(rows[number][2], image)
    assert set(memory.producers) == {"robot"}
    assert memory.holdings()["robot"].guaranteed == capacity // 2
    assert (learner.step, learner.samples, learner.offset) == (0, 0, START)


def test_a_projector_of_another_size_gets_new_weights_and_an_empty_memory(
    tmp_path: Path, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = begun(tmp_path, old, projector={"dim": 8})
    assert len(learner.memory) == 0
    assert "projector starts with new weights" in caplog.text
    assert "the memory starts empty: its embeddings were made by other weights" in caplog.text


def test_another_method_begins_with_the_same_encoder(tmp_path: Path, old: Path) -> None:
    simclr = begun(tmp_path, old, method={"class_path": "simclr"})
    assert len(simclr.memory) == 64
    from safetensors.torch import load_file

    saved = load_file(find(old) / "model.safetensors")
    for name, tensor in simclr.method.encoder.state_dict().items():
        assert torch.equal(tensor, saved[f"encoder.{name}"])


@pytest.mark.parametrize(
    ("settings", "place", "message"),
    [
        ({"encoder": {"width": 8, "depths": [1, 1, 0, 0]}}, None, "the encoder in .* does not fit"),
        ({"vectors": {"dim": 12}}, None, "or vectors.dim and vectors.widths for vectors"),
        ({}, "nowhere", "no checkpoint at nowhere"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(
    tmp_path: Path, old: Path, settings: dict[str, Any], place: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begun(tmp_path, old if place is None else Path(place), **settings)


def test_a_warm_start_describes_the_slots_by_the_features_of_its_encoder(
    tmp_path: Path, old: Path
) -> None:
    features = {"class_path": "stream_ssl.memory.descriptors.Features"}
    learner = begun(tmp_path, old, memory={"capacity": 64, "descriptor": features})
    memory = learner.memory
    assert len(memory) == 64
    assert memory.check_valid() == (True, "")
    assert memory.images is not None
    _, features_kF = learner.method.encode_newcomers(learner.views.plain(memory.images))
    expected_kF = torch.nn.functional.normalize(features_kF, dim=1)
    torch.testing.assert_close(memory.descriptors.float(), expected_kF, atol=2e-3, rtol=0)


def test_a_run_begins_from_another_run_and_restarts_from_its_own_checkpoint(
    tmp_path: Path, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with processes(tmp_path / "new", TINY | {"memory": {"capacity": 80}}) as run:
        caplog.set_level(logging.INFO)
        assert check.main([str(run.config), "--from", str(old)]) == 0
        assert "offered 64 samples of its memory; 64 of 80 slots are filled" in caplog.text
        train(run, 5 * BATCH, "--from", str(old))
        assert f"beginning a new run from {find(old)}" in run.log("learner")
        assert "64 of 80 slots are filled" in run.log("learner")
        assert find(run.folder).name == "step-000000005"
        train(run, 10 * BATCH, "--from", str(old))
        assert "has no effect: this run has begun" in run.log("learner")
        assert find(run.folder).name == "step-000000010"
