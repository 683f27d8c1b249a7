"""Tests of near-duplicate detection, on photographs of scikit-learn and against loops.

Shapes: B pictures, S = 32.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from photographs import TILE, jpeg, photograph_tiles, tensor
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.simulated_gpu import SimulatedGpu
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.eviction import Oldest, Random
from stream_ssl.memory.near_duplicates import (
    ALONE,
    APART,
    LIMIT,
    NEIGHBOURS,
    REACH,
    UNCLEAR,
    NearDuplicates,
    are_near_duplicates,
    look_closely,
)
from stream_ssl.memory.sketch_colours import recoloured
from stream_ssl.memory.sketch_distance import (
    ALIKE,
    DAMPING,
    LEAST_PART,
    MOST_CONTRAST,
    SHIFT,
    STEPS,
    WINDOW,
    ZOOMED,
    distance,
    zoomed_distance,
)
from stream_ssl.memory.sketches import (
    KEY_SIDE,
    SIDE,
    colours,
    key,
    pattern,
    sketch,
    sketch_and_frame,
    sketch_inside,
)

RNG = np.random.default_rng(0)
BEGIN = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Start each test with the same random numbers, whichever tests ran before."""
    RNG.bit_generator.state = BEGIN


@pytest.fixture(scope="module")
def tiles() -> NDArray[np.uint8]:
    return photograph_tiles()


def resized(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    image = Image.fromarray(image_HWC).resize((61, 61), Image.Resampling.BILINEAR)
    return np.asarray(image.resize((TILE, TILE), Image.Resampling.BILINEAR))


def noised(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.clip(image_HWC + RNG.normal(0, 8, image_HWC.shape), 0, 255).astype(np.uint8)


def grey(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(image_HWC).convert("L").convert("RGB"))


COPIES = {
    "itself": lambda image_HWC: image_HWC,
    "jpeg": jpeg,
    "resized": resized,
    "noised": noised,
    "grey": grey,
    "mirrored": lambda image_HWC: jpeg(image_HWC[:, ::-1].copy()),
    "darker": lambda image_HWC: (image_HWC * 0.8).astype(np.uint8),
    "moved": lambda image_HWC: np.roll(image_HWC, (3, -6), (0, 1)),  # 1 and 2 pixels of a sketch
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_photographs_are_near_duplicates(kind: str, tiles: NDArray[np.uint8]) -> None:
    copies = np.stack([COPIES[kind](tile) for tile in tiles])
    far_B = distance(sketch(tensor(tiles)), sketch(tensor(copies)))
    assert (far_B < LIMIT).float().mean() > 0.9, far_B


def test_small_copies_that_lost_detail_are_near_duplicates(tiles: NDArray[np.uint8]) -> None:
    """Resized copies lose contrast. The blur removes this contrast from the originals too."""
    small = [Image.fromarray(tile).resize((32, 32), Image.Resampling.BILINEAR) for tile in tiles]
    copies = [one.resize((16, 16), Image.Resampling.BILINEAR) for one in small]
    copies = [one.resize((32, 32), Image.Resampling.BILINEAR) for one in copies]
    sketch_BD, copy_BD = (
        sketch(tensor(np.stack([np.asarray(one) for one in some]))) for some in (small, copies)
    )
    assert (distance(copy_BD, sketch_BD) < LIMIT).float().mean() > 0.9


def test_different_photographs_and_digits_are_no_near_duplicates(tiles: NDArray[np.uint8]) -> None:
    digits = load_digits().images[:200].repeat(4, axis=1).repeat(4, axis=2)
    for picture_BCHW in (tensor(tiles), torch.from_numpy(digits * 15).byte()[:, None]):
        sketch_BD = sketch(picture_BCHW)
        one_N, other_N = torch.triu_indices(len(sketch_BD), len(sketch_BD), 1)
        near_N = distance(sketch_BD[one_N], sketch_BD[other_N]) < LIMIT
        assert near_N.float().mean() < 0.001


def test_a_small_figure_in_a_fixed_scene_is_mostly_no_near_duplicate(
    tiles: NDArray[np.uint8],
) -> None:
    """A figure of 6 x 14 pixels walks through pictures of 96 x 96."""
    with_somebody = tiles.copy()
    with_somebody[:, 40:54, 30:36] = (
        255 - with_somebody[:, 40:54, 30:36].mean((1, 2), np.uint8)[:, None, None]
    )
    changed_B = np.abs(with_somebody.astype(int) - tiles).max((1, 2, 3)) > 100
    far_B = distance(sketch(tensor(tiles)), sketch(tensor(with_somebody)))
    assert changed_B.sum() > 10
    far_B = far_B[torch.from_numpy(changed_B)]
    assert (far_B > 2 * ALIKE).all()  # so the distances to the scene's other frames decide
    assert (far_B > LIMIT).float().mean() > 0.85


def test_the_distance_equals_that_of_a_loop(tiles: NDArray[np.uint8]) -> None:
    one_BD, other_BD = sketch(tensor(tiles[:6])), sketch(tensor(noised(tiles[1:7])))
    pattern(other_BD)[0] = pattern(one_BD)[0].roll((1, -2), (0, 1))
    other_BD[4:] = mirrored(sketch(tensor(noised(tiles[4:6]))))
    patterns = pattern(one_BD).numpy(), pattern(other_BD).numpy()
    expected = [by_loop(a, b) for a, b in zip(*patterns, strict=True)]
    assert distance(one_BD, other_BD).tolist() == pytest.approx(expected, abs=1e-5)


def mirrored(sketch_BD: Tensor) -> Tensor:
    """Return the sketches of the mirrored pictures."""
    parts = pattern(sketch_BD).flip(2), colours(sketch_BD).flip(3)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def by_loop(one_SS: NDArray[np.float32], other_SS: NDArray[np.float32]) -> float:
    if (one_SS * other_SS[:, ::-1]).sum() > (one_SS * other_SS).sum():
        other_SS = other_SS[:, ::-1]
    unmoved, moves = at_the_worst_place(one_SS, other_SS), range(2 * SHIFT + 1)
    if unmoved < ALIKE:
        return unmoved
    return min(at_the_worst_place(one_SS, other_SS, y, x) for y in moves for x in moves)


def at_the_worst_place(
    one_SS: NDArray[Any], other_SS: NDArray[Any], down: int = SHIFT, right: int = SHIFT
) -> float:
    def soft(a: NDArray[Any], y: int, x: int) -> float:
        below, right = min(y + 1, SIDE - 1), min(x + 1, SIDE - 1)
        return (
            float(a[y, x]) + float(a[below, x]) + float(a[y, right]) + float(a[below, right])
        ) / 4

    one = np.array([[soft(one_SS, y, x) for x in range(SIDE)] for y in range(SIDE)])
    other = np.array([[soft(other_SS, y, x) for x in range(SIDE)] for y in range(SIDE)])
    inner, worst = SIDE - 2 * SHIFT, 0.0
    for top in range(0, inner - WINDOW + 1, WINDOW // 2):
        for left in range(0, inner - WINDOW + 1, WINDOW // 2):
            a = one[SHIFT + top :, SHIFT + left :][:WINDOW, :WINDOW]
            b = other[down + top :, right + left :][:WINDOW, :WINDOW]
            worst = max(worst, float(((a - b) ** 2).mean()) ** 0.5)
    return worst


def cropped(
    image_HWC: NDArray[np.uint8], rng: np.random.Generator = RNG, most: float = 0.08
) -> NDArray[np.uint8]:
    """Cut off 2 % or more at each side, up to `most`, and enlarge the rest to the old size."""
    left, top, right, bottom = (int(share * TILE) for share in rng.uniform(0.02, most, 4))
    part = Image.fromarray(image_HWC).crop((left, top, TILE - right, TILE - bottom))
    return np.asarray(part.resize((TILE, TILE), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_cropped_copy_is_a_near_duplicate_after_zooming(
    mirrored: bool, tiles: NDArray[np.uint8]
) -> None:
    rng = np.random.default_rng(0)
    crops = np.stack([cropped(tile, rng) for tile in tiles])[:, :, :: -1 if mirrored else 1]
    whole_BD, crop_BD = sketch(tensor(tiles)), sketch(tensor(crops.copy()))
    zoomed_B = zoomed_distance(crop_BD, whole_BD)
    assert (zoomed_B < LIMIT).float().mean() > 0.8
    assert (distance(crop_BD, whole_BD) < LIMIT).float().mean() < 0.5
    if not mirrored:  # it does not matter which of the two came first
        assert zoomed_distance(whole_BD, crop_BD).tolist() == pytest.approx(zoomed_B.tolist())


def test_a_memory_finds_cropped_copies_that_differ_much_before_zooming(
    tiles: NDArray[np.uint8],
) -> None:
    memory = WorkingMemory(len(tiles), 2, Oldest(), (3, TILE, TILE))
    memory.add(torch.arange(len(tiles)), torch.ones(len(tiles), 2) / 2**0.5, tensor(tiles))
    test, rng = NearDuplicates(memory), np.random.default_rng(0)
    crops = tensor(np.stack([cropped(tile, rng, 0.12) for tile in [*tiles] * 3]))
    found = [not test.admitted(crop_CHW[None], crops[:0])[0] for crop_CHW in crops]
    assert np.mean(found) > 0.68


def test_a_cropped_copy_in_the_same_batch_is_found_unless_another_picture_is_as_near(
    tiles: NDArray[np.uint8],
) -> None:
    memory = WorkingMemory(8, 2, Oldest(), (3, TILE, TILE))
    test, rng = NearDuplicates(memory), np.random.default_rng(0)
    found, found_beside_another = 0, 0
    for (number, tile), (most, side) in product(enumerate(tiles), ((0.12, 30), (0.06, 8))):
        batch = tensor(np.stack([tile, cropped(tile, rng, most)]))
        another = tile.copy()  # the same scene with something else in the middle
        middle = slice(30, 30 + side), slice(30, 30 + side)
        another[middle] = 255 - tiles[number - 1][middle]
        held = tensor(another[None])
        for beside, sketches in ((held[:0], []), (held, list(sketch(held)))):
            new = test.admitted(batch, beside).tolist()
            earlier = list(sketch(batch[:1])) if new[0] else []
            assert new[1] != is_near(far_of(batch[1], sketches, earlier))
            found += new == [True, False] and not sketches
            found_beside_another += new == [True, False] and bool(sketches)
    assert found > 0.68 * 2 * len(tiles)
    assert found_beside_another < 0.8 * found


@pytest.mark.parametrize("all_of_them", [False, True])
def test_sketches_of_held_pictures_are_read_in_small_parts(
    all_of_them: bool, tiles: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_BD, crop_BD = sketch(tensor(tiles)), sketch(tensor(np.stack([*map(cropped, tiles)])))
    row_Bn = torch.stack([torch.arange(len(tiles)), torch.zeros(len(tiles)).long()], dim=1)
    square_Bn = torch.tensor([[1.0, torch.inf]]).expand(len(tiles), -1)
    read: list[int] = []

    def sketches_of(row_N: Tensor) -> Tensor:
        read.append(len(row_N))
        return held_BD[row_N]

    asked = crop_BD, square_Bn, row_Bn, sketches_of, all_of_them, square_Bn[:, 1]
    at_once_Bn = look_closely(*asked)
    monkeypatch.setattr("stream_ssl.memory.near_duplicates.at_a_time", lambda _: 4)
    read.clear()
    assert torch.equal(look_closely(*asked), at_once_Bn)
    assert max(read) == 4


def test_different_pictures_stay_different_after_zooming(tiles: NDArray[np.uint8]) -> None:
    digits = torch.from_numpy(load_digits().images[:200].repeat(4, 1).repeat(4, 2) * 15)
    for picture_BCHW in (tensor(tiles), digits.byte()[:, None]):
        sketch_BD = sketch(picture_BCHW)
        one_N, other_N = torch.triu_indices(len(sketch_BD), len(sketch_BD), 1)
        near_N = zoomed_distance(sketch_BD[one_N], sketch_BD[other_N]) < LIMIT
        assert near_N.float().mean() < 0.001


def test_zooming_does_not_raise_the_contrast_of_a_dark_picture() -> None:
    """Its noise is not raised to the contrast of another picture."""
    dark_BD = sketch(torch.randint(0, 4, (20, 3, TILE, TILE), dtype=torch.uint8))
    flat_BD = torch.zeros_like(dark_BD)
    assert (zoomed_distance(dark_BD, dark_BD.flip(0)) < ALIKE).all()
    assert zoomed_distance(flat_BD, flat_BD).tolist() == [0] * 20


def test_zooming_brings_a_black_picture_no_nearer_to_a_dim_picture(
    tiles: NDArray[np.uint8],
) -> None:
    """The dim picture's contrast is not reduced to that of the black one."""
    dim_BCHW = tensor((tiles * 0.15).astype(np.uint8))
    dim_BD, black_BD = sketch(dim_BCHW), sketch(torch.zeros_like(dim_BCHW))
    for one_BD, other_BD in ((dim_BD, black_BD), (black_BD, dim_BD)):
        assert (zoomed_distance(one_BD, other_BD) >= distance(one_BD, other_BD)).all()
    memory = WorkingMemory(8, 2, Oldest(), (3, TILE, TILE))
    memory.add(torch.arange(1), torch.tensor([[1.0, 0.0]]), torch.zeros_like(dim_BCHW[:1]))
    far_B = distance(dim_BD, black_BD)
    test = NearDuplicates(memory)
    found = [test.admitted(one_CHW[None], dim_BCHW[:0])[0] for one_CHW in dim_BCHW]
    assert found == (far_B >= LIMIT).tolist()
    assert ((far_B >= LIMIT) & (far_B < UNCLEAR)).sum() > 10


def test_the_zoomed_distance_equals_that_of_a_loop(tiles: NDArray[np.uint8]) -> None:
    crops = np.stack([cropped(tile) for tile in tiles[:6]])
    whole_BD, crop_BD = sketch(tensor(tiles[:6])), sketch(tensor(crops))
    crop_BD[4:] = mirrored(crop_BD[4:])
    crop_BD[5] = whole_BD[0]
    patterns = pattern(crop_BD.double()).numpy(), pattern(whole_BD.double()).numpy()
    expected = [zoomed_by_loop(a, b) for a, b in zip(*patterns, strict=True)]
    assert zoomed_distance(crop_BD, whole_BD).tolist() == pytest.approx(expected, abs=1e-4)


def zoomed_by_loop(one_SS: NDArray[np.float64], other_SS: NDArray[np.float64]) -> float:
    if (one_SS * other_SS[:, ::-1]).sum() > (one_SS * other_SS).sum():
        other_SS = other_SS[:, ::-1]
    return ZOOMED * min(seen_by_loop(one_SS, other_SS), seen_by_loop(other_SS, one_SS))


def seen_by_loop(part_SS: NDArray[np.float64], whole_SS: NDArray[np.float64]) -> float:
    """Return the distance of a picture to the part of another that looks most like it."""
    places = [(number + 0.5) * 2 / SIDE - 1 for number in range(SIDE)]

    def pixel(y: float, x: float) -> float:
        total = 0.0
        for row in range(max(0, math.floor(y)), min(SIDE, math.floor(y) + 2)):
            for column in range(max(0, math.floor(x)), min(SIDE, math.floor(x) + 2)):
                weight = (1 - abs(y - row)) * (1 - abs(x - column))
                total += weight * whole_SS[row, column]
        return total

    def seen(height: float, down: float, width: float, across: float) -> NDArray[np.float64]:
        ys = [(height * place + down + 1) * SIDE / 2 - 0.5 for place in places]
        xs = [(width * place + across + 1) * SIDE / 2 - 0.5 for place in places]
        return np.array([[pixel(y, x) for x in xs] for y in ys])

    slope_PP4 = np.zeros((SIDE, SIDE, 4))
    for y in range(SIDE):
        for x in range(SIDE):
            if 0 < y < SIDE - 1:
                slope_PP4[y, x, 1] = (part_SS[y + 1, x] - part_SS[y - 1, x]) * SIDE / 4
            if 0 < x < SIDE - 1:
                slope_PP4[y, x, 3] = (part_SS[y, x + 1] - part_SS[y, x - 1]) * SIDE / 4
            slope_PP4[y, x, 0] = slope_PP4[y, x, 1] * places[y]
            slope_PP4[y, x, 2] = slope_PP4[y, x, 3] * places[x]
    slope_P4 = slope_PP4.reshape(-1, 4)
    square_44 = slope_P4.T @ slope_P4 + DAMPING * np.eye(4)
    height, down, width, across = 1.0, 0.0, 1.0, 0.0
    for _ in range(STEPS):
        off_P = (seen(height, down, width, across) - part_SS).ravel()
        step_4 = np.linalg.solve(square_44, slope_P4.T @ off_P)
        down, across = down - height * step_4[1], across - width * step_4[3]
        height, width = height * (1 - step_4[0]), width * (1 - step_4[2])
        height, width = (min(max(share, LEAST_PART), 1.0) for share in (height, width))
    down = min(max(down, height - 1), 1 - height)
    across = min(max(across, width - 1), 1 - width)
    seen_SS = seen(height, down, width, across)
    seen_SS -= seen_SS.mean()
    contrast = math.sqrt((part_SS**2).mean() / (seen_SS**2).mean())
    contrast = min(max(contrast, LEAST_PART), MOST_CONTRAST)
    return at_the_worst_place(part_SS, seen_SS * contrast)


def stream(tiles: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return noised pictures that recur, sometimes many times in a row.

    Some are in a frame, some are cropped, and some have other colours.
    """
    chosen = RNG.integers(0, len(tiles), count)
    chosen[count // 2 : count // 2 + 12] = chosen[count // 2]
    pictures = [noised(tiles[number]) for number in chosen]
    pictures[::5] = [framed(picture) for picture in pictures[::5]]
    pictures[2::5] = [cropped(picture) for picture in pictures[2::5]]
    pictures[4::5] = [picture[:, :, ::-1] for picture in pictures[4::5]]  # red is blue
    return np.stack(pictures)


def framed(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    whole = np.pad(image_HWC, ((8, 8), (8, 8), (0, 0)), constant_values=255)
    return np.asarray(Image.fromarray(whole).resize((TILE, TILE), Image.Resampling.BOX))


def far_by_loop(
    one_D: Tensor, others: list[Tensor], crops: bool = False, beside: float = math.inf
) -> list[float]:
    """Return the distances to the nearest others that are within reach.

    `beside` is the squared distance of the key to the nearest picture that is not one of them.
    """
    if not others:
        return []
    other_ND = torch.stack(others)
    square_N = (key(one_D[None]) - key(other_ND)).double().square().sum(1)
    nearest = square_N.argsort(stable=True)[:NEIGHBOURS]
    first, second = (*square_N[nearest].tolist(), math.inf)[:2]
    alone = crops and first <= ALONE * min(second, beside)
    far = []
    for n in nearest:
        if square_N[n] <= (REACH * KEY_SIDE) ** 2 or (alone and n == nearest[0]):
            far.append(float(distance(one_D[None], other_ND[n][None])[0]))
    if alone and ALIKE <= far[0] < UNCLEAR:
        far[0] = min(far[0], float(zoomed_distance(one_D[None], other_ND[nearest[:1]])[0]))
    return [
        math.inf if it < LIMIT and recoloured(one_D[None], other_ND[n][None])[0] else it
        for it, n in zip(far, nearest, strict=False)
    ]


def far_in_all(one_D: Tensor, held: list[Tensor], earlier: list[Tensor]) -> list[float]:
    """Return the distances to held pictures, and to earlier samples of the batch."""
    squares = [float((key(one_D[None]) - key(it[None])).square().sum()) for it in held]
    beside = min(squares, default=math.inf)
    far = far_by_loop(one_D, held, crops=True)
    return far + far_by_loop(one_D, earlier, crops=True, beside=beside)


def far_of(image_CHW: Tensor, held: list[Tensor], earlier: list[Tensor]) -> list[float]:
    """Return the distances of the whole picture, or of what its frame holds."""
    one_D = sketch(image_CHW[None])[0]
    far = far_in_all(one_D, held, earlier)
    alike = min(far_by_loop(one_D, held, crops=True), default=math.inf) < ALIKE
    if sketch_and_frame(image_CHW[None])[1] and not alike:
        inside = far_in_all(sketch_inside(image_CHW[None])[0], held, earlier)
        far = min(far, inside, key=lambda one: min(one, default=math.inf))
    return far


def is_near(far: list[float]) -> bool:
    first, second = (*sorted(far)[:2], math.inf, math.inf)[:2]
    return first < ALIKE or (first < LIMIT and first < APART * second)


def test_the_near_duplicate_test_admits_the_same_samples_as_a_loop(
    tiles: NDArray[np.uint8],
) -> None:
    memory = WorkingMemory(16, 2, Random(), (3, TILE, TILE))
    door, counted, only_inside, cropped = NearDuplicates(memory), 0, 0, 0
    batches = [tensor(stream(tiles, 48)) for _ in range(5)]
    for number, batch in enumerate(batches):
        beside = batch[:0] if number % 2 else batches[number - 1][:3]
        held = list(sketch(memory.images)) if len(memory) else []
        beside_sketches = list(sketch(beside))
        expected, admitted = [], []
        for image_CHW, one_D in zip(batch, sketch(batch), strict=True):
            new = not is_near(far_of(image_CHW, held + beside_sketches, admitted))
            whole = far_in_all(one_D, held + beside_sketches, admitted)
            plain = far_by_loop(one_D, admitted) + far_by_loop(one_D, held + beside_sketches)
            only_inside += not new and not is_near(whole)
            cropped += is_near(whole) and not is_near(plain)
            expected.append(new)
            admitted += [one_D] if new else []
        found = door.admitted(batch, beside)
        assert found.tolist() == expected
        # A new filter that has not seen the earlier slots decides the same, as after a restart.
        assert NearDuplicates(memory).admitted(batch, beside).tolist() == expected
        counted += len(expected) - sum(expected)
        ids = torch.arange(48) + 48 * number
        z_BD = normalize(torch.randn(48, 2), dim=1)
        new_B = torch.from_numpy(found)
        if new_B.any():
            memory.add(ids[new_B], z_BD[new_B], batch[new_B])
    assert memory.stats().evicted > 10
    assert 40 < counted < 5 * 48 - 40
    assert only_inside > 3
    assert cropped > 3


def test_slots_are_compared_with_all_other_slots_as_by_a_loop(tiles: NDArray[np.uint8]) -> None:
    memory = WorkingMemory(60, 2, Random(), (3, TILE, TILE))
    test = NearDuplicates(memory)
    for ids in torch.arange(120).split(40):
        z_BD = normalize(torch.randn(40, 2), dim=1)
        memory.add(ids, z_BD, tensor(stream(tiles, 40)))
        sketches = list(sketch(memory.images))
        expected = [
            is_near(far_by_loop(one_D, sketches[:slot] + sketches[slot + 1 :], crops=True))
            for slot, one_D in enumerate(sketches)
        ]
        assert test.of_slots(torch.arange(len(memory))).tolist() == expected
        assert test.of_slots(torch.tensor([7, 3])).tolist() == [expected[7], expected[3]]
        assert 0 < sum(expected) < len(expected)


@pytest.mark.parametrize("images_on", ["device", "host"])
def test_a_gpu_finds_the_same_near_duplicates_and_waits_once_per_batch(
    tiles: NDArray[np.uint8], images_on: Literal["device", "host"]
) -> None:
    batches = [tensor(stream(tiles, 20)) for _ in range(4)]

    def told(device: str) -> list[list[Any]]:
        shape, answers = (3, TILE, TILE), []
        memory = WorkingMemory(16, 2, Oldest(), shape, device=device, images_on=images_on)
        door = NearDuplicates(memory)
        for number, batch in enumerate(batches):
            ids, image_BCHW = torch.arange(20) + 20 * number, batch.to(device)
            beside = image_BCHW[:0] if number % 2 else batches[number - 1][:3].to(device)
            found = door.find(image_BCHW, beside, "refuse", ids)
            assert found.distance_B is not None
            answers += [found.admitted_B.tolist(), found.nearest_B.tolist()]
            answers.append(found.distance_B.tolist())
            z_BD = normalize(ids[:, None] + torch.tensor([[1.0, 2.0]]), dim=1)
            memory.add(ids, z_BD, image_BCHW)
            if number == 1:  # the slots change without a newcomer
                memory.load_state_dict(
                    {
                        n: v.flip(0) if n == "columns.images" else v
                        for n, v in memory.state_dict().items()
                    }
                )
                door.load({})
        return answers

    with SimulatedGpu() as gpu:
        there = told("cuda:0")
        apart = tensor(tiles[::40]).to("cuda:0")
        memory = WorkingMemory(8, 2, Oldest(), (3, TILE, TILE), device="cuda:0")
        door = NearDuplicates(memory)
        for _ in range(2):
            memory.add(torch.arange(len(apart)), torch.tensor([[1.0, 0.0]] * len(apart)), apart)
            before = len(gpu.waits)
            door.find(apart[:1], apart[:0], "refuse", torch.arange(1))
            assert [wait.line for wait in gpu.waits[before:]] == [
                "memory/near_duplicates.py answer"
            ]
    here = told("cpu")
    assert there[::3] == here[::3]
    assert there[1::3] == here[1::3]
    assert not all(all(row) for row in here[::3])
    for one, other in zip(there[2::3], here[2::3], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_key_of_a_newcomer_is_reused_for_its_slot(
    monkeypatch: pytest.MonkeyPatch, tiles: NDArray[np.uint8]
) -> None:
    memory, batch = WorkingMemory(24, 2, Random(), (3, TILE, TILE)), tensor(tiles[:24])
    door, z_BD, shown = NearDuplicates(memory), normalize(torch.randn(24, 2), dim=1), []
    made_by = door._sketch_of

    def noted(slots: Tensor) -> Tensor:
        shown.append(memory.ids[slots].tolist())
        return made_by(slots)

    monkeypatch.setattr(door, "_sketch_of", noted)
    admitted = torch.from_numpy(door.find(batch, batch[:0], "count", torch.arange(24)).admitted_B)
    assert admitted.all()
    unseen = torch.tensor([90, 91])  # the filter has not seen these
    for ids_B, expected in ((torch.arange(24), []), (unseen, [90, 91])):
        pictures = batch.flip(0)[: len(ids_B)] if ids_B is unseen else batch
        memory.add(ids_B, z_BD[: len(ids_B)], pictures)
        shown.clear()
        door._follow_the_slots()
        assert sorted(number for ids in shown for number in ids) == expected
        assert torch.allclose(door._index._row_KA, key(sketch(memory.images)), atol=1e-5)


def test_only_the_first_of_several_copies_in_a_batch_is_admitted(tiles: NDArray[np.uint8]) -> None:
    memory = WorkingMemory(30, 2, Random(), (3, TILE, TILE))
    row = tensor(np.stack([noised(tiles[number // 20]) for number in range(60)]))
    assert NearDuplicates(memory).admitted(row, row[:0]).nonzero()[0].tolist() == [0, 20, 40]
    assert NearDuplicates(memory).admitted(row[:0], row[:0]).tolist() == []


def test_a_near_duplicate_is_much_nearer_to_one_picture_than_to_others() -> None:
    apart = [(0.0, 0.0), (0.1, 0.1), (0.3, 0.6), (0.3, math.inf), (0.3, 0.4), (0.4, math.inf)]
    assert are_near_duplicates(torch.tensor(apart)).tolist() == [
        *(True, True, True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("action", ["count", "refuse", "merge"])
def test_a_memory_with_automatic_duplicates_decides_as_a_loop(
    action: Any, tiles: NDArray[np.uint8]
) -> None:
    memory = WorkingMemory(40, 2, Oldest(), (3, TILE, TILE), duplicates=Duplicates("auto", action))
    batches = [tensor(stream(tiles, 48)) for _ in range(3)]
    for number, batch in enumerate(batches):
        held = list(sketch(memory.images)) if len(memory) else []
        ids_held = memory.ids.tolist()
        ids = list(range(48 * number, 48 * number + 48))
        duplicates, earlier = [], []
        for at, image_CHW, one_D in zip(ids, batch, sketch(batch), strict=True):
            near = is_near(far_of(image_CHW, held, [seen for _, seen in earlier]))
            duplicates += [at] if near else []
            earlier += [] if near and action != "count" else [(at, one_D)]
        z_BD = normalize(torch.randn(48, 2), dim=1)
        before = dict(zip(ids_held, memory.multiplicity.tolist(), strict=True))
        admission = memory.add(torch.tensor(ids), z_BD, batch)
        assert admission.duplicates.tolist() == duplicates
        assert admission.refused.tolist() == ([] if action == "count" else duplicates)
        assert len(duplicates) > 10
        after = dict(zip(memory.ids.tolist(), memory.multiplicity.tolist(), strict=True))
        grown = sum(after.values()) - sum(before.get(one, 1) for one in after)
        assert grown == (0 if action != "merge" else int((admission.merged >= 0).sum()))
        assert (grown > 10) == (action == "merge")


def test_samples_with_the_same_id_are_compared_by_their_own_pictures(
    tiles: NDArray[np.uint8],
) -> None:
    memory = WorkingMemory(4, 2, Oldest(), (3, TILE, TILE), duplicates=Duplicates("auto", "refuse"))
    same_B, apart = torch.zeros(2, dtype=torch.int64), tensor(tiles[:8])
    z_BD = torch.tensor([[1.0, 0.0]] * 2)
    for picture_BCHW in apart.split(2):
        assert not len(memory.add(same_B, z_BD, picture_BCHW).refused)
    for picture_BCHW in apart[4:].split(2):
        assert len(memory.add(same_B, z_BD, picture_BCHW).refused) == 2


def test_a_memory_on_a_gpu_compares_pictures_that_the_host_keeps(tiles: NDArray[np.uint8]) -> None:
    picture_BCHW, z_BD = tensor(tiles[:4]), torch.tensor([[1.0, 0.0]] * 4)
    with SimulatedGpu():
        test = Duplicates("auto", "refuse")
        memory = WorkingMemory(
            8, 2, Oldest(), (3, TILE, TILE), "cuda:0", images_on="host", duplicates=test
        )
        for refused in ([], [4, 5, 6, 7]):
            ids_B = torch.arange(4) + memory.added
            assert memory.add(ids_B, z_BD, picture_BCHW).refused.tolist() == refused


def test_the_near_duplicate_test_refuses_memories_without_pictures() -> None:
    for shape in (None, (12, 1, 1)):
        with pytest.raises(ValueError, match="this memory keeps"):
            NearDuplicates(WorkingMemory(8, 2, Random(), shape))
    with pytest.raises(ValueError, match="this memory keeps None"):
        WorkingMemory(8, 2, duplicates=Duplicates("auto"))


def test_a_search_and_a_restored_test_do_not_change_the_saved_states(
    tiles: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses cells, which are fitted again after a number of changes."""
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 32)
    batches = [tensor(stream(tiles, 40)) for _ in range(8)]

    def states(asked: bool, restored: bool) -> list[int]:
        memory, left = WorkingMemory(60, 2, Oldest(), (3, TILE, TILE), seed=0), []
        test = NearDuplicates(memory)
        for number, batch in enumerate(batches):
            test.admitted(batch, batch[:0])
            z_BD = torch.ones(40, 2) / 2**0.5
            memory.add(torch.arange(40) + 40 * number, z_BD, batch)
            if asked:
                test.of_slots(torch.arange(4))
            state = test.state()
            left.append(int(state.get("changes_left", -1)))
            if restored:
                test = NearDuplicates(memory)
                test.load(state)
        return left

    expected = states(asked=False, restored=False)
    assert len(set(expected)) > 3, "the number of changes moves"
    assert states(asked=True, restored=False) == expected
    assert states(asked=False, restored=True) == expected


def test_a_state_that_is_saved_under_autocast_has_exact_keys(tiles: NDArray[np.uint8]) -> None:
    memory = WorkingMemory(8, 2, Oldest(), (3, TILE, TILE))
    test, picture_BCHW = NearDuplicates(memory), tensor(tiles[:8])
    memory.add(torch.arange(8), torch.tensor([[1.0, 0.0]] * 8), picture_BCHW)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        test.load({})
        test.state()
    found = test.find(picture_BCHW, picture_BCHW[:0], "count")
    assert found.nearest_B.tolist() == list(range(8))
    square_Bn, _ = test._index.nearest(key(sketch(picture_BCHW)), 1)
    assert square_Bn.max() < 1e-4


def test_a_restored_memory_continues_with_the_same_cells(
    tiles: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.memory.slot_index.CELL_ROWS", 32)
    batches = [tensor(stream(tiles, 40)) for _ in range(8)]

    def made() -> WorkingMemory:
        return WorkingMemory(
            60, 2, Oldest(), (3, TILE, TILE), duplicates=Duplicates("auto"), seed=0
        )

    def filled(memory: WorkingMemory, numbers: range) -> WorkingMemory:
        for number in numbers:
            z_BD = torch.ones(40, 2) / 2**0.5
            memory.add(torch.arange(40) + 40 * number, z_BD, batches[number])
        return memory

    whole, again = filled(made(), range(8)), made()
    again.load_state_dict(filled(made(), range(3)).state_dict())
    ours, theirs = (memory.state_dict() for memory in (whole, filled(again, range(3, 8))))
    assert "near_duplicates.centres" in ours
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
