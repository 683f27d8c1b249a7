"""Probes beside a learner: they export metrics, and do not change what the learner learns."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import BATCH, TINY, processes, stop, until
from PIL import Image

from stream_ssl.app.commands import check
from stream_ssl.batch import START, Batch, Offset
from stream_ssl.config import build, options
from stream_ssl.learning.records import StepRecord
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.prequential import Prequential

HELD_OUT: dict[str, Any] = {
    "every": 2,
    "k": 5,
    "references_per_class": 10,
    "queries_per_class": 5,
    "source": {
        "class_path": "stream_ssl.producers.sources.Synthetic",
        "init_args": {"count": 400, "size": 16, "channels": 1, "seed": 4},
    },
}


class Repeated:
    """Batch n is a function of n."""

    def __init__(self) -> None:
        self.number = 0

    def next(self, timeout: float) -> Batch:
        rng = np.random.default_rng(self.number)
        self.number += 1
        ids = np.arange(BATCH, dtype=np.int64) + BATCH * self.number
        return Batch(
            images_BCHW=rng.integers(0, 256, (BATCH, 1, 16, 16), dtype=np.uint8),
            ids_B=ids,
            hashes_B=ids,
            labels_B=rng.integers(0, 3, BATCH),
            received_B=np.zeros(BATCH),
            offset=Offset(self.number, 0),
            rejected={},
        )

    def lag(self) -> float:
        return 0.0


def learned(folder: Path, probed: bool, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return all tensors that a checkpoint would hold after some steps."""
    file = folder / "config.yaml"  # JSON is YAML
    observe = {"observe": {"held_out": HELD_OUT}} if probed else {}
    learner_settings = {"learner": {"threads": 1, "device": device}}
    file.write_text(json.dumps(TINY | learner_settings | observe))
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, [str(file)]))
    learner = build.learner(settings, Repeated(), START)
    held_out, prequential = build.held_out(settings, learner), Prequential()
    findings = []
    for record in itertools.islice(learner.run(threading.Event()), 7):
        assert isinstance(record, StepRecord)
        if probed and held_out is not None:
            findings.append(held_out.consume(record))
            prequential.consume(record)
    if probed:
        assert sum(finding is not None for finding in findings) == 3
        assert prequential.take_new() == 6 * BATCH
    return {
        f"{part}.{name}": tensor.cpu().clone()
        for part, tensors in learner.capture().tensors.items()
        for name, tensor in tensors.items()
    }


def test_a_learner_with_probes_has_the_same_state_bit_by_bit(tmp_path: Path) -> None:
    plain, probed = (learned(tmp_path, probed) for probed in (False, True))
    assert plain.keys() == probed.keys()
    different = [name for name in plain if not torch.equal(plain[name], probed[name])]
    assert different == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_probes_run_on_the_gpu_of_the_learner(tmp_path: Path) -> None:
    assert learned(tmp_path, probed=True, device="cuda")


def test_a_learner_exports_the_metrics_of_both_probes(tmp_path: Path) -> None:
    seldom = HELD_OUT | {"every": 5}
    with processes(tmp_path / "run", TINY | {"observe": {"held_out": seldom}}) as run:
        run.role("receiver")
        learner = run.role("learner")
        run.produce(12 * BATCH)
        until(
            lambda: run.metric("held_out_step") >= 10 and run.metric("prequential_samples_total"),
            lambda: run.log("learner") + run.log("robot"),
        )
        assert 0 < run.metric("held_out_accuracy") <= 1
        assert run.metric("held_out_probe_seconds") > 0
        first = run.metric("held_out_first_accuracy")
        assert json.loads((run.folder / "held_out.json").read_text())["accuracy"] == first
        assert 0 <= run.metric('prequential_accuracy{classifier="knn"}') <= 1
        assert "accuracy on the held-out set: kNN" in run.log("learner")
        assert stop(learner) == 0
        run.role("learner")
        until(lambda: run.metric("held_out_first_accuracy") == first, lambda: run.log("learner"))
        # The process has an accuracy before its first step.
        until(lambda: run.metric("held_out_step") >= 10, lambda: run.log("learner"))
        assert run.metric("steps_total") <= 0


def test_a_held_out_set_that_cannot_be_probed_stops_the_learner(tmp_path: Path) -> None:
    with processes(
        tmp_path / "run", TINY | {"observe": {"held_out": HELD_OUT | {"k": 999}}}
    ) as run:
        learner = run.start("learner", str(run.config))
        assert learner.wait(90) == 2
        assert "fewer than k = 999" in run.log("learner")


def probe_of(folder: Path, held_out: object, *arguments: str) -> HeldOutProbe:
    file = folder / "config.yaml"
    file.write_text(json.dumps(TINY | {"observe": {"held_out": held_out}}))
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, [str(file), *arguments]))
    probe = build.held_out(settings, build.learner(settings, Repeated(), START))
    assert probe is not None
    return probe


def folders_of_classes(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for label, number in itertools.product("ab", range(300)):
        (root / label).mkdir(parents=True, exist_ok=True)
        image_HWC = rng.integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(image_HWC).save(root / label / f"{number}.png")
    return root


def test_a_held_out_folder_of_classes_can_be_given_by_its_short_form(tmp_path: Path) -> None:
    """The short form works in the configuration and on the command line."""
    root = folders_of_classes(tmp_path / "images")
    folder = {"class_path": "stream_ssl.producers.sources.ImageFolder"}
    long = {"source": folder | {"init_args": {"root": str(root), "shuffle": False}}}
    found = [
        probe_of(tmp_path, long),
        probe_of(tmp_path, f"images:{root}"),
        probe_of(tmp_path, None, "--observe.held_out", f"images:{root}"),
    ]
    first, *others = [one.queries for one in found]
    assert first[1].bincount().tolist() == [100, 100]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_the_test_images_of_cifar_are_held_out(tmp_path: Path) -> None:
    record = np.zeros((600, 1 + 3072), np.uint8)
    record[:, 0] = np.arange(600) % 2
    record[:, 1:] = 7
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(bytes(3073))
    (tmp_path / "test_batch.bin").write_bytes(record.tobytes())
    probe = probe_of(tmp_path, f"cifar:{tmp_path}")
    assert set(probe.queries[0].unique().tolist()) == {7}


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("photos/", "'photos/' must begin with one of"),
        ("images:nowhere", "nowhere"),
        ("images", "observe.held_out: 'images' names no place; write NAME:PLACE"),
        ("synthetic", "'synthetic' names no place"),
    ],
)
def test_an_invalid_held_out_set_is_refused(
    spec: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(TINY | {"observe": {"held_out": spec}, "run": str(tmp_path / "r")}))
    assert check.main([str(file)]) == 2
    assert told in caplog.text
