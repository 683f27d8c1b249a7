"""A small run's checkpoints, made without a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from stream_ssl.batch import START, Origin
from stream_ssl.config import build, options
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.origins import Origins
from stream_ssl.memory import WorkingMemory

SETTINGS: dict[str, Any] = {
    "decoder": {"size": 12, "channels": 1},
    "batches": {"batch_size": 8},
    "encoder": {"width": 4, "depths": [1, 1, 0, 0]},
    "projector": {"dim": 6},
    "memory": {"capacity": 16},
    "learner": {"threads": 1},
}

FEATURES = 8  # of the encoder of these settings


def write_run(folder: Path, stages: int = 1, held: int = 0, **changes: Any) -> list[Path]:
    """A run's folder; the checkpoints in it, the weights of each a little further off, the memory
    of each offered `held` samples, of which every other has a label."""
    folder.mkdir(parents=True)
    file = folder / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps(SETTINGS | changes | {"run": str(folder)}))
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    stored = options.resolved(parser, settings)
    learner = build.learner(parser.instantiate(settings), build.EmptyStream(), START)
    checkpointer = Checkpointer(folder / "checkpoints", keep=stages)
    generator = torch.Generator().manual_seed(0)
    if held:
        fill(learner.memory, held, generator, learner.origins)
    paths = []
    for stage in range(stages):
        learner.step = learner.samples = 10 * (stage + 1)
        learner.divergence.restored(learner.step)
        with torch.no_grad():
            for weight in learner.method.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        if held and learner.memory.descriptor.needs_features:

            def features_of(images_bCHW: torch.Tensor) -> torch.Tensor:
                return learner.method.encode_newcomers(learner.views.plain(images_bCHW))[1]

            learner.memory.describe_again(features_of)
        paths.append(checkpointer.save(learner, stored).path)
    return paths


def fill(
    memory: WorkingMemory, count: int, generator: torch.Generator, origins: Origins | None = None
) -> None:
    assert memory.image_shape is not None
    z_BD = torch.nn.functional.normalize(torch.randn(count, memory.dim, generator=generator), dim=1)
    images = torch.randint(0, 256, (count, *memory.image_shape), generator=generator)
    ids, labels = 2**62 + torch.arange(count), torch.arange(count) % 4
    labels[1::2] = -1
    features = torch.randn(count, FEATURES, generator=generator)
    admission = memory.add(ids, z_BD, images.to(torch.uint8), labels, ids // 3, features=features)
    if origins is not None:  # of every other sample
        known = [
            Origin("robot", "left", f"frame-{n}", n / 4) if n % 2 else None for n in range(count)
        ]
        origins.follow(ids.tolist(), known, admission)
