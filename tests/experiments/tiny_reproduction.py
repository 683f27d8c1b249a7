"""A reproduction so small that its runs take a second: data, preset, and made-up results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.data import LabelledData, LabelledImages
from benchmarks.experiments.papers.arms import Experiment, PaperArm, PaperRun, above
from benchmarks.experiments.papers.presets import Preset
from benchmarks.experiments.papers.work import Reproduction

CLASSES = 10
TINY = Preset(
    samples={"": 24},
    batch={"": 8},
    capacity=48,
    raw_capacity=16,
    dim=8,
    references=8,
    seeds=2,
)
MADE = {"day": "2026-01-02", "machine": "Abacus, 2 cores"}


def images(each: int, seed: int = 0) -> LabelledImages:
    draw = np.random.default_rng(seed)
    label_N = draw.permutation(np.repeat(np.arange(CLASSES), each))
    return LabelledImages(draw.integers(0, 256, (len(label_N), 32, 32, 3), dtype=np.uint8), label_N)


DATA = LabelledData(images(10), images(4, seed=1), CLASSES)


def write_cifar(folder: Path) -> Path:
    """DATA in CIFAR-10's binary form."""
    for name, part in (("data_batch_1.bin", DATA.train), ("test_batch.bin", DATA.test)):
        planes = part.image_NHWC.transpose(0, 3, 1, 2).reshape(len(part), -1)
        records = np.concatenate([part.label_N[:, None].astype(np.uint8), planes], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return folder


EXPERIMENT = Experiment(
    name="duel",  # a name that presets know
    title="Two arms",
    says="Two arms.",
    arms=[
        PaperArm("base", "x1", key=True),
        PaperArm("better", "x1", memory="linear", against="base", key=True),
        PaperArm("base", "x2", bias=2),
    ],
    columns=["x1", "x2"],
    claims=[
        above(("better", "x1"), ("base", "x1"), "better is above base", "paper"),
        above(("base", "x1"), ("base", "x2"), "bias costs", "paper"),
        above(("better", "x1"), ("base", "x1"), "better is flatter", "ours", "entropy"),
    ],
    measures=("linear", "entropy"),
    paper={"linear": {("base", "x1"): 50.0, ("better", "x1"): 53.5}},
    curves=("linear", "entropy"),
    traces=("entropy",),
)


def reproduction(folder: Path, data: str | None = "set", **settings: Any) -> Reproduction:
    """EXPERIMENT at TINY, with other settings."""
    preset = replace(TINY, seeds=3, repeat_all=True, **settings)
    return Reproduction(EXPERIMENT, "tiny", preset, folder, data)


def results(
    folder: Path, linear: dict[tuple[str, str, int], float], data: str = "set", **more: Any
) -> Reproduction:
    """Store runs of EXPERIMENT whose linear accuracy by row, column and seed is given."""
    found = reproduction(folder, data)
    arms = {arm.cell: arm for arm in EXPERIMENT.arms}
    for (row, column, seed), accuracy in linear.items():
        numbers = {
            "linear": accuracy,
            "queries": more.get("queries", 10_000),
            "entropy": more.get("entropy", {}).get(row, 0.5),
            "trace.entropy": [[1, 0.4], [2, 0.5]],
        }
        found.results.add(PaperRun(arms[row, column], seed), numbers, MADE)
    return found
