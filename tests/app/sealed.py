"""Checkpoints with valid hashes, made without a learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import TINY
from safetensors.torch import save_file

from stream_ssl.durable import seal, write_json
from stream_ssl.learning.checkpoint_layout import FOLDER, FORMAT, PARTS, file_of, folder_of
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Embedding, Features, Weighted
from stream_ssl.memory.eviction import Duel

FEATURES = 8  # the harness's encoder has two stages, and each doubles the width


def sealed_checkpoint(
    run: Path,
    step: int,
    stored: dict[str, Any],
    version: int = FORMAT,
    memory: WorkingMemory | None = None,
) -> Path:
    """Write a checkpoint with valid hashes and this configuration, and return its folder.

    By default, its memory is the empty memory of the harness's settings.
    """
    if memory is None:
        size, channels = TINY["decoder"]["size"], TINY["decoder"]["channels"]
        shape = channels, size, size
        memory = WorkingMemory(
            TINY["memory"]["capacity"],
            TINY["projector"]["dim"],
            Duel(),
            shape,
            descriptor=Weighted([Embedding(), Features(dims=FEATURES)]),
        )
    folder = folder_of(run / FOLDER, step)
    folder.mkdir(parents=True)
    for name in PARTS:
        state = memory.state_dict() if name == "memory" else {"x": torch.zeros(1)}
        save_file(state, folder / file_of(name))
    facts = {"version": version, "step": step, "samples": 0, "created": 0.0, "config": stored}
    write_json(folder / "state.json", {**facts, "offset": {"record": 1, "sample": 0}})
    seal(folder)
    return folder
