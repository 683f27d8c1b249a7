"""Settings to objects, for the learner. The order of the sections is that of a sample's life."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from safetensors.torch import load_file
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import Policy
from stream_ssl.app import config
from stream_ssl.batch import START, Offset
from stream_ssl.ingest.batches import Batches
from stream_ssl.ingest.decode import Decoder
from stream_ssl.ingest.journal import JournalReader
from stream_ssl.ingest.quarantine import Quarantine
from stream_ssl.learning import randomness
from stream_ssl.learning.checks import check_batch, check_labels
from stream_ssl.learning.encoder import ResNet
from stream_ssl.learning.learner import Learner, Stream
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.projector import Projector
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method
from stream_ssl.observe.held_out import HeldOutProbe
from stream_ssl.observe.prequential import Prequential
from stream_ssl.observe.shadow import Shadow, Shown

Of = Literal["features", "embeddings"]


class CheckpointEncoder:
    """A checkpoint's encoder, in evaluation mode.

    Args:
        method: its network.
        views: its augmentation.
        of: "features", those of the backbone; or "embeddings", the unit rows behind the projector
            that the memory holds.
        device: where it runs.
    """

    def __init__(self, method: Method, views: Views, of: Of, device: str) -> None:
        self._method, self._views = method.to(device).eval(), views.to(device)
        self._of, self._device = of, torch.device(device)

    def features(self, image_BCHW: Tensor) -> Tensor:
        """Features [B, F] of uint8 images as they are."""
        return self._encode(self._views.plain(image_BCHW.to(self._device)))

    def view(self, image_BCHW: Tensor) -> Tensor:
        """Features [B, F] of an augmented view of each, by the run's own augmentation."""
        view_BCHW: Tensor = self._views(image_BCHW.to(self._device))
        return self._encode(view_BCHW)

    @torch.no_grad()
    def _encode(self, view_BCHW: Tensor) -> Tensor:
        if self._of == "features":
            return self._method.features(view_BCHW)
        return self._method.encode_keys(view_BCHW)


def method(settings: Namespace) -> Method:
    """The method with weights drawn from `learner.seed`.

    `settings` has been through `parser.instantiate`, as for all functions here.
    """
    randomness.seed_everything(settings.learner.seed)
    encoder = ResNet(channels=settings.decoder.channels, **settings.encoder)
    projector = Projector(encoder.dim, **settings.projector)
    module, _, name = settings.method.class_path.rpartition(".")
    chosen: type[Method] = getattr(importlib.import_module(module), name)
    return chosen(encoder, projector, settings.loss, **settings.method.init_args)


def views(settings: Namespace) -> Views:
    """The augmentation."""
    return Views(settings.decoder.size, settings.decoder.channels, **settings.views)


def memory(settings: Namespace, dim: int) -> WorkingMemory:
    """The working memory, with the images it was made from."""
    return WorkingMemory(
        dim=dim,
        image_shape=image_shape(settings),
        device=settings.learner.device,
        **settings.memory,
    )


def image_shape(settings: Namespace) -> tuple[int, int, int]:
    """(C, H, W) of the images that the learner sees."""
    return settings.decoder.channels, settings.decoder.size, settings.decoder.size


def shadows(settings: Namespace, dim: int) -> list[Shadow]:
    """Memories of the same size under other policies; without images.

    They count duplicates on the working memory's descriptor, and by its score where their policy
    has none of its own: counts by different ones do not compare.
    """
    working, descriptor = settings.memory.eviction, settings.memory.descriptor
    if descriptor is not None and descriptor.needs_images:
        descriptor = Shown(descriptor, image_shape(settings))

    def beside(policy: Policy) -> WorkingMemory:
        if working is not None and "score" not in vars(policy):
            policy.score = working.score
        return WorkingMemory(
            settings.memory.capacity,
            dim,
            eviction=policy,
            device=settings.learner.device,
            seed=settings.memory.seed,
            descriptor=descriptor,
        )

    return [Shadow(name, beside(policy)) for name, policy in settings.shadows.items()]


def batches(settings: Namespace, reader: JournalReader, start: Offset) -> Batches:
    """The journal's samples as batches."""
    return Batches(
        reader,
        Decoder(**settings.decoder),
        Quarantine(settings.run / "quarantine", **settings.quarantine),
        start=start,
        **settings.batches,
    )


def learner(settings: Namespace, stream: Stream, start: Offset) -> Learner:
    """A learner that has seen nothing yet.

    Raises:
        ValueError: the sections do not go together.
    """
    network = method(settings)
    working = memory(settings, network.dim)
    pace = Pace(**settings.pace)
    check_labels(network, settings.classes > 0)
    check_batch(network, working, pace, settings.learner.anchors, settings.batches.batch_size)
    return Learner(
        network,
        working,
        views(settings),
        stream,
        optimiser=OptimiserSettings(**settings.optimiser),
        schedule=settings.schedule,
        pace=pace,
        offset=start,
        **settings.learner,
    )


def prequential(settings: Namespace) -> Prequential:
    """The probe on whatever labels the stream carries."""
    return Prequential(**settings.observe.prequential)


def held_out(settings: Namespace, learner: Learner) -> HeldOutProbe | None:
    """The probe on a held-out set, if one is given; reads it."""
    if settings.observe.held_out is None:
        return None

    def features(image_BCHW: Tensor) -> Tensor:
        plain_BCHW = learner.views.plain(image_BCHW.to(learner.device))
        return learner.method.features(plain_BCHW)

    return HeldOutProbe(settings.observe.held_out, Decoder(**settings.decoder), features)


class EmptyStream:
    """A stream that never has a batch."""

    def next(self, timeout: float) -> None:
        """Nothing."""

    def lag(self) -> float:
        """None behind."""
        return 0.0


def dry_run(settings: Namespace) -> None:
    """Build what a run would build that touches neither disk nor socket.

    The memory's images then lie in memory: its file may be another run's, which holds a lock on it.

    Raises:
        ValueError: the settings cannot work.
    """
    settings = settings.clone()
    settings.memory.image_file = None
    Decoder(**settings.decoder)
    network = learner(settings, EmptyStream(), START).method
    shadows(settings, network.dim)
    prequential(settings)


def load_encoder(checkpoint: Path, of: Of = "features", device: str = "cpu") -> CheckpointEncoder:
    """The trained encoder of a checkpoint folder."""
    settings = _stored_settings(json.loads((checkpoint / "state.json").read_text())["config"])
    network = method(settings)
    network.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return CheckpointEncoder(network, views(settings), of, device)


def fresh_encoder(
    stored: Mapping[str, Any], of: Of = "features", device: str = "cpu"
) -> CheckpointEncoder:
    """The encoder as it was before its first update, by a checkpoint's configuration."""
    settings = _stored_settings(stored)
    return CheckpointEncoder(method(settings), views(settings), of, device)


def _stored_settings(stored: Mapping[str, Any]) -> Namespace:
    parser: ArgumentParser = config.learner_parser()
    # Who watched the run does not matter to its encoder, and their files may be gone by now.
    kept = {section: values for section, values in stored.items() if section != "observe"}
    settings: Namespace = parser.instantiate(parser.parse_object(kept))
    return settings
