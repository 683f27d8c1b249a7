"""`--from`: begin a new run with the weights of an old one and, if it fits, its memory.

Shapes: k occupied slots, B of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace

from stream_ssl.learning.learner import Learner
from stream_ssl.learning.saved import memory_of, model_of, origins_of
from stream_ssl.learning.vectors import Vectors
from stream_ssl.memory.shares import ProducerNames
from stream_ssl.memory.state import part, producer_names, upgraded
from stream_ssl.methods import Method
from stream_ssl.methods.momentum import Momentum, move_towards
from stream_ssl.process.failures import Misconfigured
from stream_ssl.tensor_file import as_state
from stream_ssl.trained.encoder import facts, find
from stream_ssl.trained.export import images_of

log = logging.getLogger("stream_ssl.learner")

SLOTS = 256
"""Slots that are offered to the new memory in one call."""


def check_alone(ranks: int) -> None:
    """Raise Misconfigured unless one process begins the run."""
    if ranks > 1:
        raise Misconfigured(
            "--from begins a run in one process: start it with one process, and "
            f"continue with {ranks} ranks from its first checkpoint"
        )


def warm_start(settings: Namespace, learner: Learner) -> None:
    """Load the checkpoint at `settings["from"]` into a learner that has read no samples.

    The optimiser, the schedule and the counters start from the beginning.

    Raises:
        ValueError: no whole checkpoint exists, or its encoder has other shapes.
    """
    place = Path(settings["from"])
    try:
        checkpoint = find(place)
    except OSError as error:
        raise ValueError(f"--from {place}: {error}") from error
    log.info("beginning a new run from %s", checkpoint)
    left_out = take_weights(learner.method, checkpoint)
    for name in left_out:
        log.warning(
            "--from %s: %s starts with new weights, because its shapes or the method differ",
            place,
            name,
        )
    taken, reason = 0, "its embeddings were made by other weights"
    if not any(name.startswith(("projector", "key_projector")) for name in left_out):
        taken, reason = take_memory(learner, checkpoint)
    if reason:
        log.warning("--from %s: the memory starts empty: %s", place, reason)
    else:
        held, capacity = len(learner.memory), learner.memory.capacity
        log.info(
            "offered %d samples of its memory; %d of %d slots are filled", taken, held, capacity
        )


def take_weights(method: Method, checkpoint: Path) -> list[str]:
    """Load the weights that fit by name and shape. Return the parts that are not fully loaded.

    Raises:
        ValueError: the encoder's weights do not fit.
    """
    saved, own = model_of(checkpoint), method.state_dict()
    fitting = {n: t for n, t in saved.items() if n in own and own[n].shape == t.shape}
    missing = sorted(set(own) - set(fitting))
    misfit = [name for name in missing if name.startswith("encoder.")]
    if misfit:
        there = tuple(saved[misfit[0]].shape) if misfit[0] in saved else "absent"
        raise ValueError(
            f"the encoder in {checkpoint} does not fit: {misfit[0]} has shape {there} "
            f"there and {tuple(own[misfit[0]].shape)} here; use the old run's `encoder` "
            "section and decoder.channels, or vectors.dim and vectors.widths for vectors"
        )
    method.load_state_dict(as_state(fitting, method), strict=False)
    if isinstance(method, Momentum) and any(name.startswith("key_") for name in missing):
        # The old run had no key encoder: it begins as a copy of the encoder, as in every new run.
        move_towards(method.encoder, method.key_encoder, 1.0)
        move_towards(method.projector, method.key_projector, 1.0)
        missing = [name for name in missing if not name.startswith("key_")]
    return sorted({name.partition(".")[0] for name in missing})


def take_memory(learner: Learner, checkpoint: Path) -> tuple[int, str]:
    """Offer the old memory's samples to the new one, oldest first, as the stream once did.

    A larger memory keeps all samples. For a smaller memory the policy chooses.

    Returns:
        How many samples were offered, and a reason if none were.
    """
    memory, config = learner.memory, facts(checkpoint)["config"]
    state = upgraded(memory_of(checkpoint))
    columns, names = part(state, "columns"), ProducerNames(producer_names(state))
    shape = kept_shape(config)
    if columns["embeddings"].shape[1] != memory.dim:
        return 0, f"embeddings of {columns['embeddings'].shape[1]}, here {memory.dim} (projector)"
    if shape != memory.image_shape:
        return 0, f"samples of shape {shape}, here {memory.image_shape} (decoder, vectors)"
    if "images" not in columns:
        return 0, "images in a file (memory.image_file), which is no longer supported"
    offered = 0
    try:
        slots_k = np.argsort(columns["born"].numpy())  # all values of `born` differ
        for start in range(0, len(slots_k), SLOTS):
            slots_B = slots_k[start : start + SLOTS]
            images = images_of(columns, slots_B)
            own: dict[str, Any] = {
                name: columns[name][slots_B] for name in ("ids", "labels", "hashes")
            }
            z_BD = columns["embeddings"][slots_B]
            producers = [names.of(key) for key in columns["producers"][slots_B].tolist()]
            if memory.descriptor.needs_features:
                view_BCHW = learner.views.plain(torch.from_numpy(images).to(learner.device))
                own["features"] = learner.method.encode_newcomers(view_BCHW)[1]
            memory.add(z=z_BD, images=images, producers=producers, **own)
            offered += len(slots_B)
    finally:
        learner.origins.load(origins_of(checkpoint), memory.ids.tolist())
        learner.origins.forget_originals()
    return offered, ""


def kept_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (C, H, W) of the images, or bytes of vectors, in the memory of such a run."""
    vectors, decoder = Vectors(**(config.get("vectors") or {})), config["decoder"]
    if vectors.dim is not None:
        return vectors.shape
    return decoder["channels"], decoder["size"], decoder["size"]
