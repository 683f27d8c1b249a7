"""Each shipped configuration builds a learner that takes a step, alone and under presets."""

from __future__ import annotations

import threading
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import yaml
from harness import TINY
from jsonargparse import Namespace
from table import table

from stream_ssl.batch import START, Batch
from stream_ssl.config import build, options, restart
from stream_ssl.encoder.efficientnet_lite import EfficientNetLite0
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.views import Chances
from stream_ssl.memory.descriptors import Weighted
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.methods import METHODS

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "deploy" / "configs"
PRESETS = sorted((CONFIGS / "presets").glob("*.yaml"))
SETTINGS = ("paper", "today")
MEMORIES = ("duel",)
PRETRAINED = ("pretrained-start", "pretrained-descriptor")
KINDS = [file.stem for file in PRESETS if file.stem not in (*SETTINGS, *MEMORIES, *PRETRAINED)]
CONTRASTIVE = [kind for kind in KINDS if kind not in ("byol", "simsiam")]
PAIRS = list(zip(KINDS, cycle(("laptop", "gpu")), strict=False))
SETTINGS_OF = list(zip(CONTRASTIVE, cycle(SETTINGS), strict=False))
BATCH = 8
# Sizes that a test can afford. They do not decide whether the parts fit each other.
SMALL = (
    *("--encoder.width", "4", "--encoder.depths", "[1,1,0,0]", "--encoder.block", "basic"),
    *("--batches.batch_size", str(BATCH), "--memory.capacity", "32", "--decoder.size", "16"),
    *("--learner.device", "cpu", "--learner.threads", "1"),
)


class Noise:
    """Batches of random images."""

    def __init__(self, settings: Namespace) -> None:
        self.shape = (BATCH, settings.decoder.size, settings.decoder.size)
        self.channels, self.number = settings.decoder.channels, 0

    def next(self, timeout: float) -> Batch:
        self.number += 1
        draw = np.random.default_rng(self.number)
        ids = np.arange(BATCH, dtype=np.int64) + BATCH * self.number
        image_BHWC = draw.integers(0, 256, (*self.shape, self.channels), dtype=np.uint8)
        return Batch(ids, ids, ids % 3, image_BHWC.transpose(0, 3, 1, 2))

    def lag(self) -> float:
        return 0.0


def preset(name: str) -> Path:
    return CONFIGS / "presets" / f"{name}.yaml"


def settings_of(*files: Path, extra: tuple[str, ...] = ()) -> Namespace:
    parser = options.learner_parser()
    arguments = [str(files[0])]
    for file in files[1:]:
        arguments += ["--config", str(file)]
    options.read(options.receiver_parser(), [*arguments, *extra])  # which leaves them unread
    settings: Namespace = parser.instantiate(options.read(parser, [*arguments, *extra]))
    return settings


def learner_of(*files: Path) -> Learner:
    settings = settings_of(*files, extra=SMALL)
    return build.learner(settings, Noise(settings), START)


def steps(learner: Learner, count: int) -> list[StepRecord]:
    records = islice(learner.run(threading.Event()), count)
    return [record for record in records if isinstance(record, StepRecord)]


@table(
    "file",
    [*CONFIGS.glob("*.yaml"), ROOT / "stream_ssl" / "demo" / "demo.yaml"],
    ids=lambda file: file.stem,
)
def test_a_learner_of_each_shipped_configuration_takes_steps(file: Path) -> None:
    records = steps(learner_of(file), 2)
    assert [record.skipped for record in records] == [None, None]


@table(("name", "base"), PAIRS)
def test_a_preset_of_each_method_takes_steps_over_a_configuration(name: str, base: str) -> None:
    file = preset(name)
    learner = learner_of(CONFIGS / f"{base}.yaml", file)
    wanted = yaml.safe_load(file.read_text())["method"]["class_path"]
    assert type(learner.method) is METHODS[wanted]
    assert [record.skipped for record in steps(learner, 2)] == [None, None]


@table(("name", "how"), SETTINGS_OF)
def test_presets_of_settings_apply_to_every_contrastive_method(name: str, how: str) -> None:
    learner = learner_of(CONFIGS / "laptop.yaml", preset(name), preset(how))
    assert learner.method.loss.temperature == {"paper": 0.7, "today": 0.5}[how]
    assert [record.skipped for record in steps(learner, 1)] == [None]


@table("base", ["laptop", "gpu"])
def test_the_default_memory_counts_on_features_under_another_method(base: str) -> None:
    learner = learner_of(CONFIGS / f"{base}.yaml", preset("simclr"))
    assert isinstance(learner.memory.descriptor, Weighted)
    assert learner.memory.descriptor.needs_features
    assert learner.memory.eviction.score == VonMisesFisher(0.1)
    assert [record.skipped for record in steps(learner, 6)] == [None] * 6
    assert learner.memory.check_valid() == (True, "")


@table(
    ("base", "names"),
    [
        ("laptop", ["pretrained-start"]),
        ("gpu", ["pretrained-start", "pretrained-descriptor"]),
        ("laptop", ["simclr", "pretrained-descriptor"]),
    ],
)
def test_presets_of_pretrained_weights_take_a_step_over_a_configuration(
    base: str, names: list[str]
) -> None:
    files = CONFIGS / f"{base}.yaml", *map(preset, names)
    settings = settings_of(*files, extra=(*SMALL, "--learner.precision", "float32"))
    learner = build.learner(settings, Noise(settings), START)
    assert [record.skipped for record in steps(learner, 1)] == [None]
    if "pretrained-start" in names:
        assert isinstance(learner.method.encoder.module, EfficientNetLite0)
    if "pretrained-descriptor" in names:
        assert learner.memory.descriptors.shape == (8, 1280)


def test_the_preset_paper_has_the_settings_of_the_paper() -> None:
    settings = settings_of(CONFIGS / "laptop.yaml", preset("d-simclr"), preset("paper"))
    views = build.views(settings)
    assert (views.crop, views.chances) == (None, Chances(0.5, 0.8, 0.2))
    assert (settings.projector.hidden, settings.projector.dim) == (0, 256)
    assert (settings.batches.batch_size, settings.memory.capacity) == (256, 512)
    assert settings.loss.temperature == 0.7


def test_every_method_has_a_preset() -> None:
    shipped = {yaml.safe_load(preset(kind).read_text())["method"]["class_path"] for kind in KINDS}
    assert shipped == set(METHODS)


def test_the_command_line_can_name_a_method_and_a_loss() -> None:
    laptop = str(CONFIGS / "laptop.yaml")
    said = (
        "--method",
        "SimCLR",
        "--method.views",
        "4",
        "--loss",
        "Debiased",
        "--loss.prior",
        "0.2",
    )
    options.read(options.receiver_parser(), [laptop, *said])  # which leaves them unread
    method = build.method(settings_of(Path(laptop), extra=said))
    assert (type(method).__name__, method.views) == ("SimCLR", 4)
    assert (type(method.loss).__name__, method.loss.prior) == ("Debiased", 0.2)


@pytest.mark.parametrize("name", ["moco-v2", "simclr"])
def test_a_run_without_a_stored_method_continues_with_moco(name: str) -> None:
    parser = options.learner_parser()
    old = TINY | {"method": {"momentum": 0.9, "views": 3}}
    new = TINY | {"method": yaml.safe_load(preset(name).read_text())["method"]}
    for stored in (old, restart.merge(new, old).config):
        settings = parser.instantiate(parser.parse_object(stored))
        method = build.method(settings)
        assert (type(method).__name__, method.momentum, method.views) == ("MoCo", 0.9, 3)
