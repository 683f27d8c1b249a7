"""Tests that near-duplicates do not fill the memory, whatever the encoder does with them.

The robot is parked: nine of ten images are frames of 16 scenes. An encoder that is trained to
distinguish them hides that they are duplicates. Therefore counting on its embeddings keeps them.

Shapes: B frames, D embedding, S scenes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Descriptor, Embedding, Thumbnail, Weighted
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.producers.shaping import Parked
from stream_ssl.producers.sources import Synthetic

SLOTS, SCENES, DIM, BATCH, SIZE = 512, 16, 128, 256, 32
DISTINCT = SLOTS * 3 // 2

Encoder = Callable[[Tensor, torch.Generator], Tensor]


class Frames(NamedTuple):
    image_NCHW: Tensor
    scene_N: Tensor  # -1: an image that occurs once


@pytest.fixture(scope="module")
def frames() -> Frames:
    """Return frames that include 1.5 K distinct images, each with a pattern of its own."""
    images, scenes, distinct = [], [], 0
    source = Synthetic(size=SIZE, classes=1000)
    for sample, _ in Parked(source, share=0.9, scenes=SCENES).samples():
        images.append(np.frombuffer(sample.data, np.uint8).reshape(sample.shape))
        scenes.append((sample.meta or {}).get("scene", -1))
        distinct += scenes[-1] < 0
        if distinct == DISTINCT:
            break
    image_NHWC = torch.from_numpy(np.stack(images))
    return Frames(image_NHWC.permute(0, 3, 1, 2), torch.tensor(scenes))


def hiding(scene_B: Tensor, draw: torch.Generator) -> Tensor:
    """Embed each frame at random, so that no two look alike."""
    return normalize(torch.randn(len(scene_B), DIM, generator=draw), dim=1)


def collapsed(scene_B: Tensor, draw: torch.Generator) -> Tensor:
    """Embed all frames as one point."""
    return torch.eye(DIM)[torch.zeros(len(scene_B), dtype=torch.int64)]


def inverted(scene_B: Tensor, draw: torch.Generator) -> Tensor:
    """Embed near-duplicates far from each other, and distinct images as one point."""
    return torch.where(scene_B[:, None] < 0, collapsed(scene_B, draw), hiding(scene_B, draw))


def near_duplicates(frames: Frames, descriptor: Descriptor, encode: Encoder) -> tuple[float, int]:
    """Return the share of slots with an already held scene, and the number of distinct images."""
    memory = WorkingMemory(
        SLOTS,
        DIM,
        MostDuplicated(VonMisesFisher(0.1)),
        image_shape=(3, SIZE, SIZE),
        descriptor=descriptor,
    )
    draw = torch.Generator().manual_seed(0)
    for ids in torch.arange(len(frames.scene_N)).split(BATCH):
        memory.add(ids, encode(frames.scene_N[ids], draw), frames.image_NCHW[ids])
    held_S = torch.bincount(frames.scene_N[memory.ids] + 1, minlength=SCENES + 1)[1:]
    copies = int((held_S - 1).clamp(min=0).sum())
    return copies / SLOTS, SLOTS - copies


def test_the_stream_of_a_parked_robot_is_mostly_near_duplicates(frames: Frames) -> None:
    parked = frames.scene_N >= 0
    assert int((~parked).sum()) == DISTINCT
    assert 0.85 < float(parked.float().mean()) < 0.95
    assert set(frames.scene_N.tolist()) == set(range(-1, SCENES))


@pytest.mark.parametrize("encode", [hiding, collapsed, inverted])
def test_thumbnails_let_no_encoder_fill_the_memory_with_near_duplicates(
    frames: Frames, encode: Encoder
) -> None:
    share, distinct = near_duplicates(frames, Thumbnail(side=8), encode)
    assert share < 0.02
    assert distinct > 0.98 * SLOTS


@pytest.mark.parametrize("encode", [hiding, inverted])
def test_embeddings_let_an_encoder_fill_the_memory_with_near_duplicates(
    frames: Frames, encode: Encoder
) -> None:
    share, _ = near_duplicates(frames, Embedding(), encode)
    assert share > 0.8


@pytest.mark.parametrize("encode", [hiding, collapsed])
def test_thumbnails_beside_embeddings_keep_most_near_duplicates_out(
    frames: Frames, encode: Encoder
) -> None:
    share, _ = near_duplicates(frames, Weighted([Embedding(), Thumbnail(side=8)]), encode)
    assert share < 0.05
