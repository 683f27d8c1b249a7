"""From a path that a user names to an encoder that evaluation can ask.

Shapes: B samples, C channels, H height, W width, F features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stream_ssl.app import build
from stream_ssl.learning.checkpoint import FORMAT, LATEST, STATE
from stream_ssl.learning.folders import damage

Of = Literal["features", "embeddings"]


class CheckpointEncoder:
    """A checkpoint's encoder, in evaluation mode.

    Args:
        encoder: of `build.load_encoder` or `build.fresh_encoder`.
        of: "features", those of the backbone; or "embeddings", the unit rows behind the projector
            that the memory holds.
        device: where it runs.
    """

    def __init__(self, encoder: build.Encoder, of: Of, device: str) -> None:
        self._method = encoder.method.to(device).eval()
        self._views = encoder.views.to(device)
        self._of, self._device = of, torch.device(device)

    def features(self, image_BCHW: Tensor) -> Tensor:
        """Features [B, F] of uint8 images as they are."""
        return self._encode(self._views.plain(image_BCHW.to(self._device)))

    def view(self, image_BCHW: Tensor) -> Tensor:
        """Features [B, F] of an augmented view of each, by the run's own augmentation."""
        view_BCHW: Tensor = self._views(image_BCHW.to(self._device))
        return self._encode(view_BCHW)

    def _encode(self, view_BCHW: Tensor) -> Tensor:
        if self._of == "features":
            return self._method.features(view_BCHW)
        return self._method.encode_keys(view_BCHW)


def find(path: Path) -> Path:
    """The checkpoint folder that a path names: itself, or the newest of a run's folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or written by a newer version.
    """
    candidates = [path, path / LATEST, path / "checkpoints" / LATEST]
    found = next((place for place in candidates if (place / STATE).is_file()), None)
    if found is None:
        told = "is no folder" if not path.is_dir() else f"holds neither {STATE} nor {LATEST}"
        raise FileNotFoundError(
            f"no checkpoint at {path}: it {told}. Name a run's folder (the one with checkpoints/ "
            "in it) once its first checkpoint is written, or a checkpoint's own (step-...)"
        )
    found = found.resolve()
    if (reason := damage(found)) is not None:
        raise ValueError(f"checkpoint {found} is damaged ({reason}); name the one before")
    version = facts(found)["version"]
    if version > FORMAT:
        raise ValueError(
            f"checkpoint {found} has format {version}, this program reads up to {FORMAT}: upgrade "
            "stream-ssl"
        )
    return found


def facts(checkpoint: Path) -> Mapping[str, Any]:
    """What a checkpoint says of itself: step, samples, created, config."""
    stored: Mapping[str, Any] = json.loads((checkpoint / STATE).read_text())
    return stored


def trained(checkpoint: Path, of: Of, device: str) -> CheckpointEncoder:
    """The encoder that a checkpoint holds."""
    return CheckpointEncoder(build.load_encoder(checkpoint), of, device)


def untrained(checkpoint: Path, of: Of, device: str) -> CheckpointEncoder:
    """The same as it was before its first update."""
    return CheckpointEncoder(build.fresh_encoder(facts(checkpoint)["config"]), of, device)


def check_device(device: str) -> None:
    """Refuses a device that this machine lacks.

    Raises:
        ValueError: it does.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used ({reason}); try --device cpu") from None
