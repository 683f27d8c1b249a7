"""Tests of the comparison by colours: against a loop, on copies and on pictures of one pattern.

Shapes: B, N pictures or pairs, S = 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from photographs import TILE, jpeg, photograph_tiles, tensor
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import Oldest
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.sketch_colours import COLOURLESS, FADED, RECOLOURED, recoloured
from stream_ssl.memory.sketches import SIDE, colours, sketch, sketch_inside

RNG = np.random.default_rng(0)

Change = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


@pytest.fixture(scope="module")
def tiles() -> NDArray[np.uint8]:
    return photograph_tiles()


def sketch_of_colours(colour_N288: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.pad(colour_N288.reshape(-1, 128), ((0, 0), (SIDE**2, 0))))


def test_pairs_differ_as_in_a_loop() -> None:
    for scale in (2.0, 15.0, 40.0, 80.0):
        one_N288 = RNG.normal(0, scale, (40, 2, 8, 8))
        other_N288 = one_N288 + RNG.normal(0, 25, (40, 2, 8, 8))
        other_N288[20:] = other_N288[20:, :, :, ::-1]
        other_N288[0] = 0.0
        expected = [differ_by_loop(a, b) for a, b in zip(one_N288, other_N288, strict=True)]
        found_N = recoloured(sketch_of_colours(one_N288), sketch_of_colours(other_N288))
        assert found_N.tolist() == expected
        assert any(expected) == (scale > 10)
        assert not all(expected)


def differ_by_loop(one_288: NDArray[Any], other_288: NDArray[Any]) -> bool:
    def most(colour_288: NDArray[Any]) -> float:
        return max(math.hypot(*colour_288[:, y, x]) for y in range(8) for x in range(8))

    def found(cell_2: NDArray[Any], among_288: NDArray[Any], y: int, x: int) -> bool:
        allowed = RECOLOURED + FADED * math.hypot(*cell_2)
        around = [(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        return any(math.dist(cell_2, among_288[:, b, a]) <= allowed for b, a in around)

    def all_found(one_288: NDArray[Any], other_288: NDArray[Any]) -> bool:
        inner = [(y, x) for y in range(1, 7) for x in range(1, 7)]
        return all(found(one_288[:, y, x], other_288, y, x) for y, x in inner) and all(
            found(other_288[:, y, x], one_288, y, x) for y, x in inner
        )

    if min(most(one_288), most(other_288)) < COLOURLESS:
        return False
    return not (all_found(one_288, other_288) or all_found(one_288, other_288[:, :, ::-1]))


def means_by_loop(image_HWC: NDArray[np.uint8]) -> NDArray[np.float64]:
    found_288 = np.empty((2, 8, 8))
    high, wide = (size // 8 for size in image_HWC.shape[:2])
    for y in range(8):
        for x in range(8):
            cell = image_HWC[y * high : (y + 1) * high, x * wide : (x + 1) * wide]
            red, green, blue = cell.reshape(-1, 3).mean(axis=0)
            found_288[:, y, x] = red - green, (red + green) / 2 - blue
    return found_288


def test_colours_of_small_pictures_are_the_means_of_their_cells() -> None:
    image_HWC = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    found_288 = colours(sketch(tensor(image_HWC[None])))[0]
    assert found_288.flatten().tolist() == pytest.approx(
        means_by_loop(image_HWC).ravel().tolist(), abs=1e-3
    )


@pytest.mark.parametrize("shape", [(8, 8), (96, 96), (64, 96), (224, 224)])
def test_colours_are_near_the_means_of_cells(shape: tuple[int, int]) -> None:
    """Stripes of one to eight pixels, whose mean is grey, have no colour."""
    pixel = np.indices(shape)
    for period in range(2, 9):
        stripe_HW = pixel[0] % period < period / 2 if period % 2 else pixel[1] % period < period / 2
        image_HWC = np.where(stripe_HW[..., None], (200, 40, 40), (40, 200, 200)).astype(np.uint8)
        found_288 = colours(sketch(tensor(image_HWC[None])))[0].numpy()
        if min(shape) >= 8 * period:
            apart = np.abs(found_288 - means_by_loop(image_HWC))
            assert np.quantile(apart, 0.9) < 0.5 * 160
            assert apart.mean() < 0.25 * 160


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_pictures_of_other_channels_have_no_colours(channels: int) -> None:
    sketch_BD = sketch(torch.randint(0, 256, (5, channels, 32, 32), dtype=torch.uint8))
    assert (colours(sketch_BD) == 0).all()
    assert not recoloured(sketch_BD, sketch_BD.flip(0)).any()


def test_the_colours_inside_a_frame_are_those_of_the_picture(tiles: NDArray[np.uint8]) -> None:
    framed = np.stack([np.pad(tile, ((8, 8), (8, 8), (0, 0))) for tile in tiles])
    framed_BCHW, picture_BCHW = tensor(framed), tensor(tiles)
    apart_B = (colours(sketch_inside(framed_BCHW)) - colours(sketch(picture_BCHW))).abs()
    assert (apart_B.amax(dim=(1, 2, 3)) < 20).float().mean() > 0.75


CHANGES: dict[str, Change] = {
    "jpeg": jpeg,
    "brighter": lambda it: np.clip(it * 1.2, 0, 255).astype(np.uint8),
    "darker": lambda it: (it * 0.8).astype(np.uint8),
    "grey": lambda it: np.asarray(Image.fromarray(it).convert("L").convert("RGB")),
    "mirrored": lambda it: it[:, ::-1].copy(),
    "noised": lambda it: np.clip(it + RNG.normal(0, 10, it.shape), 0, 255).astype(np.uint8),
    "moved": lambda it: np.roll(it, (3, -6), (0, 1)),
    "cropped": lambda it: np.asarray(Image.fromarray(it[8:-8, 8:-8]).resize((TILE, TILE))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_of_photographs_keep_their_colours(change: str, tiles: NDArray[np.uint8]) -> None:
    copies = np.stack([CHANGES[change](tile) for tile in tiles])
    assert recoloured(sketch(tensor(tiles)), sketch(tensor(copies))).float().mean() < 0.05


def flag(*stripes: str) -> NDArray[np.uint8]:
    image = Image.new("RGB", (96, 96))
    for number, colour in enumerate(stripes):
        ImageDraw.Draw(image).rectangle((0, 32 * number, 95, 32 * number + 31), fill=colour)
    return np.asarray(image)


def test_flags_that_differ_only_in_colour_are_all_admitted() -> None:
    """Their grey levels are in the same order, so their patterns are alike."""
    flags = [
        flag("darkred", "white", "darkblue"),
        flag("darkgreen", "white", "darkred"),
        flag("darkgreen", "white", "darkblue"),
        flag("purple", "yellow", "purple"),
    ]
    memory = WorkingMemory(16, 2, Oldest(), (3, TILE, TILE))
    door = NearDuplicates(memory)
    batch = tensor(np.stack(flags + [jpeg(one) for one in flags]))
    admitted_B = door.admitted(batch, batch[:0])
    assert admitted_B.tolist() == [True] * 4 + [False] * 4
    memory.add(torch.arange(4), normalize(torch.ones(4, 2), dim=1), batch[:4])
    assert door.admitted(batch[4:], batch[:0]).tolist() == [False] * 4
    assert not door.of_slots(torch.arange(4)).any()
