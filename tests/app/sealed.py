"""Checkpoints that are whole by their hashes, without a learner that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stream_ssl.durable import seal, write_json
from stream_ssl.learning.checkpoint_layout import FOLDER, FORMAT, PARTS, file_of, folder_of


def sealed_checkpoint(run: Path, step: int, stored: dict[str, Any], version: int = FORMAT) -> Path:
    """A checkpoint that is whole, by its hashes, with this configuration."""
    folder = folder_of(run / FOLDER, step)
    folder.mkdir(parents=True)
    for name in PARTS:
        save_file({"x": torch.zeros(1)}, folder / file_of(name))
    facts = {"version": version, "step": step, "created": 0.0, "config": stored}
    write_json(folder / "state.json", {**facts, "offset": {"record": 1, "sample": 0}})
    seal(folder)
    return folder
