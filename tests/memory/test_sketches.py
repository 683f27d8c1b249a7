"""Tests of sketches and keys: of frames, of mirror images and of dark noise.

Shapes: B pictures, S = 32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from photographs import TILE, jpeg, photograph_tiles, tensor
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks.simulated_gpu import SimulatedGpu
from stream_ssl.memory import sketches
from stream_ssl.memory.near_duplicates import LIMIT
from stream_ssl.memory.sketch_distance import ALIKE, distance
from stream_ssl.memory.sketches import (
    KEY_SIDE,
    SIDE,
    inside,
    key,
    pattern,
    sketch,
    sketch_and_frame,
    sketch_inside,
)

RNG = np.random.default_rng(0)
WHITE, BLACK = 255, 0


@pytest.fixture(scope="module")
def tiles() -> NDArray[np.uint8]:
    return photograph_tiles()


def greys(image_BHWC: NDArray[np.uint8]) -> Tensor:
    return tensor(image_BHWC).float().mean(dim=1)


def framed(
    image_HWC: NDArray[np.uint8], high: float, wide: float, level: int, side: int = TILE
) -> NDArray[np.uint8]:
    """Return the picture in a frame that takes these shares of its new height and width."""
    inner = round(TILE / (1 - 2 * high)), round(TILE / (1 - 2 * wide))
    top, left = (inner[0] - TILE) // 2, (inner[1] - TILE) // 2
    around = ((top, inner[0] - TILE - top), (left, inner[1] - TILE - left), (0, 0))
    whole = np.pad(image_HWC, around, constant_values=level)
    return np.asarray(Image.fromarray(whole).resize((side, side), Image.Resampling.BOX))


@pytest.mark.parametrize("side", [32, 48, 96])
@pytest.mark.parametrize("level", [WHITE, BLACK])
@pytest.mark.parametrize("share", [0.04, 0.08, 0.15])
def test_the_sketch_inside_a_frame_is_near_the_sketch_of_the_picture(
    share: float, level: int, side: int, tiles: NDArray[np.uint8]
) -> None:
    copies = np.stack([jpeg(framed(tile, share, share, level, side)) for tile in tiles])
    far_B = distance(sketch_inside(tensor(copies)), sketch(tensor(tiles)))
    assert (far_B < LIMIT).float().mean() > 0.75, far_B
    whole_B = distance(sketch(tensor(copies)), sketch(tensor(tiles)))
    assert (whole_B < LIMIT).float().mean() < 0.35  # a frame hides what it holds


def test_a_cropped_frame_leaves_the_middle_of_the_picture(tiles: NDArray[np.uint8]) -> None:
    """A frame around a wide picture that was cropped to a square has two sides."""
    bars = tiles.copy()
    bars[:, :12], bars[:, -12:] = BLACK, BLACK
    start_2B, length_B = inside(greys(bars))
    found = (length_B - 72).abs() < 1.5
    assert found.float().mean() > 0.8
    assert (start_2B[:, found] - 12).abs().max() < 1.5
    far_B = distance(sketch_inside(tensor(bars)), sketch(tensor(tiles[:, 12:-12, 12:-12])))
    assert (far_B < ALIKE).float().mean() > 0.7


def test_photographs_and_digits_on_white_have_no_frame(tiles: NDArray[np.uint8]) -> None:
    assert (inside(greys(tiles))[1] == TILE).float().mean() > 0.97
    digits = np.kron(load_digits().images[:500], np.ones((4, 4))) * 15
    on_white = torch.from_numpy(np.pad(digits, ((0, 0), (4, 4), (4, 4)))).float()
    assert (inside(255 - on_white)[1] == 40).float().mean() > 0.95


@pytest.mark.parametrize("level", [WHITE, BLACK])
def test_pictures_of_one_colour_have_no_frame(level: int) -> None:
    plain_BPP = torch.full((1, TILE, TILE), float(level))
    start_2B, length_B = inside(plain_BPP)
    assert (start_2B == 0).all()
    assert (length_B == TILE).all()
    assert sketch(plain_BPP[:, None].to(torch.uint8)).abs().max() < 1e-4


@pytest.mark.parametrize("side", [8, 28, 32, 96])
def test_the_inside_of_frames_equals_that_of_a_loop(side: int, tiles: NDArray[np.uint8]) -> None:
    pictures = [framed(tile, *RNG.uniform(0, 0.25, 2), WHITE, side) for tile in tiles]
    pictures += [np.full((side, side, 3), WHITE, np.uint8), *noise(side)]
    grey_BPP = greys(np.stack(pictures))
    start_2B, length_B = inside(grey_BPP)
    by_loop = [inside_by_loop(one.double().numpy()) for one in grey_BPP]
    assert np.allclose(torch.cat([start_2B, length_B[None]]).T, by_loop, atol=1e-3)
    assert 0.1 < (length_B < side).float().mean() < 0.95


def noise(side: int) -> list[NDArray[np.uint8]]:
    return list(RNG.integers(0, 256, (10, side, side, 3), dtype=np.uint8))


def inside_by_loop(image_PP: NDArray[np.float64]) -> tuple[float, float, float]:
    side = len(image_PP)

    def width(lines: NDArray[np.float64]) -> float:
        lines = lines[:, int(side * sketches.DEEPEST) : side - int(side * sketches.DEEPEST)]
        if np.ptp(lines[0]) > sketches._RANGE:
            return 0
        for end in range(1, int(side * sketches.DEEPEST) + 1):
            apart = np.abs(lines[end] - lines[0])
            if apart.mean() > sketches.FLAT:
                after = np.abs(lines[end + 1] - lines[0])
                if (after > sketches._EDGE).mean() < sketches._ALONG - 1e-6:
                    return 0
                return end + 1 - min(1.0, float(apart.mean() / after.mean()))
        return 0

    start, inner = [], []
    for lines in (image_PP, image_PP.T):
        first, last = width(lines), width(lines[::-1])
        if not (first and last):
            first = last = 0
        start.append(first)
        inner.append(side - first - last)
    length = min(inner)
    return (
        start[0] + (inner[0] - length) / 2,
        start[1] + (inner[1] - length) / 2,
        length,
    )


@pytest.mark.parametrize("shape", [(32, 32), (96, 96), (28, 28), (60, 96), (96, 41), (8, 9)])
def test_a_cpu_and_a_gpu_find_the_same_frames(
    shape: tuple[int, int], tiles: NDArray[np.uint8]
) -> None:
    """A CPU only examines pictures with plain outermost lines. A GPU examines all pictures."""
    pictures = [framed(tile, *RNG.uniform(0, 0.2, 2), WHITE) for tile in tiles[::2]]
    small = [Image.fromarray(one).resize(shape[::-1]) for one in [*pictures, *tiles[::2]]]
    image_BCHW = tensor(np.stack([np.asarray(one) for one in small]))
    whole_BSS, framed_B = sketch_and_frame(image_BCHW)
    with SimulatedGpu():
        assert sketch_and_frame(image_BCHW.to("cuda:0"))[1].tolist() == framed_B.tolist()
    assert framed_B.any()
    # Without a frame, both sketches are the same.
    inside_BSS = sketch_inside(image_BCHW[~framed_B])
    assert torch.allclose(whole_BSS[~framed_B], inside_BSS, atol=1e-3)
    assert torch.equal(whole_BSS, sketch(image_BCHW))


@pytest.mark.parametrize("size", [8, 28, 32, 300])
def test_parts_of_an_interval_are_weighed_by_their_overlap(size: int) -> None:
    start, length, count = size * 0.11, size * 0.73, 5
    part_CP = sketches._parts(torch.tensor(start), torch.tensor(length), count, size)
    for part in range(count):
        low, high = start + length / count * part, start + length / count * (part + 1)
        share_P = [max(0.0, min(high, at + 1) - max(low, at)) for at in range(size)]
        assert np.allclose(part_CP[part], np.array(share_P) / (high - low), atol=1e-4)


@pytest.mark.parametrize("size", [8, 32, 300])
def test_no_weight_of_a_sketch_lies_between_0_and_1e_25(size: int) -> None:
    weight_SH = sketches._blurred_squeezed(size, torch.device("cpu"))
    assert not ((weight_SH > 0) & (weight_SH < 1e-25)).any()
    assert torch.allclose(weight_SH.sum(dim=1), torch.ones(SIDE))


def test_keys_are_no_farther_apart_than_pictures_and_mirror_images(
    tiles: NDArray[np.uint8],
) -> None:
    sketch_BD, mirrored_BD = sketch(tensor(tiles)), sketch(tensor(tiles).flip(3))
    assert torch.allclose(key(sketch_BD), key(mirrored_BD), atol=1e-5)
    small_BA = torch.nn.functional.adaptive_avg_pool2d(pattern(sketch_BD)[:, None], KEY_SIDE)
    turned_BA = small_BA.flip(3).flatten(1)
    least_BB = torch.minimum(
        torch.cdist(small_BA.flatten(1), small_BA.flatten(1)),
        torch.cdist(small_BA.flatten(1), turned_BA),
    )
    far_BB = torch.cdist(key(sketch_BD), key(sketch_BD))
    assert (far_BB <= least_BB + 0.01).all()
    assert far_BB.mean() > 0.7 * least_BB.mean()  # and not much nearer


@pytest.mark.parametrize("size", [16, 32, 96])
def test_pictures_of_dark_noise_are_near_duplicates(size: int) -> None:
    dark = torch.from_numpy(RNG.integers(0, 6, (40, 3, size, size), dtype=np.uint8))
    sketch_BD = sketch(dark)
    assert (distance(sketch_BD[:20], sketch_BD[20:]) < LIMIT).all()
