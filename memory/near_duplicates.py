"""Whether two pictures are the same one, apart from what cameras and encoders do to it.

A cosine of thumbnails cannot tell: two shirts on white have a larger one than two frames of a
moving robot. So the thumbnail only finds candidates, and each candidate is then looked at closely:
how much do the two pictures differ at the worst place? A copy differs nowhere. A person who walks
through a fixed camera's picture differs in one place, and so do two shirts.

Shapes: B pictures, N pairs, k held pictures, S = SIDE.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, pad

from memory.checks import check_number
from memory.compute import columns_at_a_time, in_full_precision, to_host

if TYPE_CHECKING:
    from memory.memory import WorkingMemory

SIDE: Final = 32
"""Pixels of a sketch in each direction."""

LIMIT: Final = 0.25
"""Pictures are near-duplicates below this distance; docs/duplicates.md says why."""

FLAT: Final = 8.0
"""Grey levels of 255: the least contrast that is set to 1, so that the noise of a dark or covered
camera is no content."""

SHIFT: Final = 2
"""The comparison moves one sketch by up to so many pixels in each direction."""

WINDOW: Final = 8
"""Pixels of the square within which a difference is measured."""

KEY_SIDE: Final = 8
NEIGHBOURS: Final = 4
"""Candidates of one picture that are looked at closely."""

REACH: Final = 0.6
"""Largest distance of two keys, as a root mean square, for which the pictures are candidates."""

_SMOOTH = 9  # pixels of the square whose mean is halved

_GREY = (0.299, 0.587, 0.114)
_PAIRS_AT_A_TIME = 512  # more take longer each on a CPU: they do not fit its cache


def sketch(image_BCHW: Tensor) -> Tensor:
    """Return what is compared of each picture: grey, S x S, with its contrast set to 1.

    Half of what a picture shows at large is taken off, so that details count: clothes on white
    have nearly all of their contrast in their outline.

    Args:
        image_BCHW: uint8, with 1 or 3 channels, or any other number, whose mean is taken.

    Returns:
        float32 [B, S, S], on the same device.
    """
    channels = image_BCHW.shape[1]
    weight_C = torch.tensor(_GREY if channels == 3 else [1 / channels] * channels)
    pixel_BCHW = image_BCHW.to(torch.float32)
    if tuple(image_BCHW.shape[2:]) != (SIDE, SIDE):
        pixel_BCHW = adaptive_avg_pool2d(pixel_BCHW, SIDE)
    grey_B1SS = (pixel_BCHW * weight_C.to(pixel_BCHW.device)[:, None, None]).sum(1, keepdim=True)
    around_B1SS = avg_pool2d(
        grey_B1SS, _SMOOTH, stride=1, padding=_SMOOTH // 2, count_include_pad=False
    )
    detail_B1SS = grey_B1SS - around_B1SS / 2
    detail_B1SS = detail_B1SS - detail_B1SS.mean(dim=(2, 3), keepdim=True)
    contrast_B111 = detail_B1SS.square().mean(dim=(2, 3), keepdim=True).sqrt()
    return (detail_B1SS / contrast_B111.clamp(min=FLAT))[:, 0]


def key(sketch_BSS: Tensor) -> Tensor:
    """Return the rows that candidates are found by: sketches of 8 x 8, float32 [B, 64].

    Their distance divided by 8 is a root mean square, as `distance` is.
    """
    return adaptive_avg_pool2d(sketch_BSS[:, None], KEY_SIDE).flatten(1)


def distance(one_NSS: Tensor, other_NSS: Tensor) -> Tensor:
    """Return how much each pair of sketches differs at its worst place, [N].

    It is a root mean square within a window, in units of a picture's contrast: 0 for equal
    pictures, about 1.4 for pictures that have nothing to do with each other at some place. The
    pictures are moved against each other by up to SHIFT pixels, and the smallest value counts.
    """
    if not len(one_NSS):
        return one_NSS.new_zeros(0)
    pairs = zip(
        torch.split(one_NSS, _PAIRS_AT_A_TIME),
        torch.split(other_NSS, _PAIRS_AT_A_TIME),
        strict=True,
    )
    return torch.cat([_distance(one, other) for one, other in pairs])


def _distance(one_NSS: Tensor, other_NSS: Tensor) -> Tensor:
    one_SSN, other_SSN = _softened(one_NSS), _softened(other_NSS)
    inner = SIDE - 2 * SHIFT
    middle_iiN = one_SSN[SHIFT : SHIFT + inner, SHIFT : SHIFT + inner]
    least_N = torch.full_like(middle_iiN[0, 0], torch.inf)
    for down in range(2 * SHIFT + 1):
        for right in range(2 * SHIFT + 1):
            moved_iiN = other_SSN[down : down + inner, right : right + inner]
            window_wwN = _windows((middle_iiN - moved_iiN).square_())
            least_N = torch.minimum(least_N, window_wwN.flatten(0, 1).amax(dim=0))
    return least_N.sqrt() / WINDOW


def _windows(value_iiN: Tensor) -> Tensor:
    """Return sums over windows that overlap by half, from sums over tiles of half their side.

    Tensors are added one by one: torch's sum over a middle dimension takes four times as long.
    """
    half = WINDOW // 2
    row_tiN = reduce(torch.add, [value_iiN[start::half] for start in range(half)])
    tile_ttN = reduce(torch.add, [row_tiN[:, start::half] for start in range(half)])
    row_wtN = tile_ttN[:-1] + tile_ttN[1:]
    return row_wtN[:, :-1] + row_wtN[:, 1:]


def _softened(sketch_NSS: Tensor) -> Tensor:
    """Return means of 2 x 2 pixels [S, S, N], which make a shift by half a pixel count less.

    Pairs come last, so that every step runs along contiguous memory.
    """
    wider_NSS = pad(sketch_NSS[:, None], (0, 1, 0, 1), mode="replicate")
    return avg_pool2d(wider_NSS, 2, stride=1)[:, 0].permute(1, 2, 0).contiguous()


def candidates(key_BA: Tensor, held_kA: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each key the nearest held ones, NEIGHBOURS at most, the nearest first.

    Returns:
        int64 [B, n], rows of `held_kA`; and bool [B, n], whether each of them is within reach.
    """
    count, n = len(key_BA), min(NEIGHBOURS, len(held_kA))
    least_Bn = key_BA.new_zeros(count, 0)
    row_Bn = torch.zeros(count, 0, dtype=torch.int64, device=key_BA.device)
    step = max(NEIGHBOURS, columns_at_a_time(count, key_BA.device))
    for start in range(0, len(held_kA), step):
        part_bA = held_kA[start : start + step]
        square_Bb = part_bA.square().sum(dim=1) - 2 * key_BA @ part_bA.T
        found = torch.topk(square_Bb, min(n, len(part_bA)), dim=1, largest=False)
        least_Bn = torch.cat([least_Bn, found.values], dim=1)
        row_Bn = torch.cat([row_Bn, start + found.indices], dim=1)
    best = torch.topk(least_Bn, n, dim=1, largest=False)
    square_Bn = best.values + key_BA.square().sum(dim=1, keepdim=True)
    return row_Bn.gather(1, best.indices), square_Bn <= REACH**2 * KEY_SIDE**2


class NearDuplicates:
    """Finds the samples of a batch that are near-duplicates of what a memory holds.

    Args:
        memory: it keeps images.
        limit: a distance, above 0.

    Raises:
        ValueError: the memory keeps no pictures, or the limit lies outside its range.
    """

    def __init__(self, memory: WorkingMemory, limit: float = LIMIT) -> None:
        shape = memory.image_shape
        if shape is None or min(shape[1:]) < KEY_SIDE:
            raise ValueError(
                f"near-duplicates are found among pictures, and this memory keeps {shape}: give "
                f"it images of at least {KEY_SIDE} x {KEY_SIDE} pixels, or a cosine as threshold"
            )
        if not check_number("limit", limit) > 0:
            raise ValueError(f"limit is {limit}: a distance must be above 0")
        self._memory, self.limit = memory, limit
        self._ids_K = torch.full((memory.capacity,), -1, dtype=torch.int64)
        self._key_KA = torch.zeros(memory.capacity, KEY_SIDE**2)  # of the sample with that id

    @property
    def device(self) -> torch.device:
        """Return the memory's device."""
        return self._memory.device

    @in_full_precision
    def let_in(self, image_BCHW: Tensor, beside_WCHW: Tensor) -> NDArray[np.bool_]:
        """Return which samples are no near-duplicates, in turn, bool [B of all ranks].

        The test compares a sample with all slots, with the pictures beside them, and with the
        earlier samples of the batch that it let in. On several ranks it takes the slots, the
        pictures beside them and the batches of all ranks together, in order of rank.

        Args:
            image_BCHW: uint8, of this rank.
            beside_WCHW: uint8, other pictures of this rank that count as held.
        """
        group = self._memory.group
        (sketch_BSS,) = group.all_gather(sketch(image_BCHW).flatten(1))
        sketch_BSS = sketch_BSS.view(-1, SIDE, SIDE)
        least_B = torch.minimum(
            self._to_slots(sketch_BSS), _nearest(sketch_BSS, sketch(beside_WCHW))
        )
        least_B = -group.all_reduce_max(-least_B)
        new_B = to_host(least_B >= self.limit).numpy()
        return self._in_turn(sketch_BSS, new_B)

    def _to_slots(self, sketch_BSS: Tensor) -> Tensor:
        """Return the distance of each sketch to the nearest slot [B]; infinite where none is."""
        ids_k, k = self._memory.ids, len(self._memory)
        self._ids_K, self._key_KA = self._ids_K.to(self.device), self._key_KA.to(self.device)
        changed = (ids_k != self._ids_K[:k]).nonzero()[:, 0]
        for slots in torch.split(changed, _PAIRS_AT_A_TIME):
            self._key_KA[slots] = key(self._sketch_of(slots))
        self._ids_K[:k] = ids_k
        row_Bn, near_Bn = candidates(key(sketch_BSS), self._key_KA[:k])
        turn_N, place_N = near_Bn.nonzero(as_tuple=True)
        found = [
            distance(sketch_BSS[turns], self._sketch_of(row_Bn[turns, places]))
            for turns, places in zip(
                torch.split(turn_N, _PAIRS_AT_A_TIME),
                torch.split(place_N, _PAIRS_AT_A_TIME),
                strict=True,
            )
        ]
        return _least(torch.cat(found), turn_N, len(sketch_BSS))

    def _sketch_of(self, slots: Tensor) -> Tensor:
        images = self._memory.images
        assert images is not None  # as the constructor saw to
        return sketch(images[slots.to(images.device)].to(self.device))

    def _in_turn(self, sketch_BSS: Tensor, new_B: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Compare each new sample with the nearest of the earlier ones that were let in.

        Those depend on the answer, so it is found in rounds. Each round takes the answer of the
        round before as given. A sample's answer is right once those of all earlier samples are,
        so the rounds end with the answer of a loop over the samples.
        """
        turns = torch.from_numpy(new_B.nonzero()[0]).to(sketch_BSS.device)
        sketch_NSS, count = sketch_BSS[turns], len(turns)
        key_NA = key(sketch_NSS)
        square_NN = torch.cdist(key_NA, key_NA).square()
        square_NN.masked_fill_(~torch.ones_like(square_NN).tril(-1).bool(), torch.inf)
        square_NN.masked_fill_(square_NN > REACH**2 * KEY_SIDE**2, torch.inf)
        known: dict[tuple[int, int], bool] = {}  # whether two are near-duplicates
        in_N = np.ones(count, dtype=bool)
        while True:
            of_those_NN = square_NN.masked_fill(~torch.from_numpy(in_N).to(turns.device), torch.inf)
            best = torch.topk(of_those_NN, min(NEIGHBOURS, count), dim=1, largest=False)
            pairs = [
                [other for other, square in zip(row, squares, strict=True) if math.isfinite(square)]
                for row, squares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            missing = [
                (turn, other)
                for turn, others in enumerate(pairs)
                for other in others
                if (turn, other) not in known
            ]
            if missing:
                one_N, other_N = torch.tensor(missing, device=turns.device).T
                alike = distance(sketch_NSS[one_N], sketch_NSS[other_N]) < self.limit
                known.update(zip(missing, alike.tolist(), strict=True))
            was_N, in_N = in_N, np.ones(count, dtype=bool)
            for turn, others in enumerate(pairs):
                in_N[turn] = not any(in_N[other] and known[turn, other] for other in others)
            if np.array_equal(was_N, in_N):
                let_in_B = new_B.copy()
                let_in_B[new_B] = in_N
                return let_in_B


def _nearest(sketch_BSS: Tensor, other_WSS: Tensor) -> Tensor:
    """Return the distance of each sketch to the nearest other [B]; infinite without a candidate."""
    row_Bn, near_Bn = candidates(key(sketch_BSS), key(other_WSS))
    turn_N, place_N = near_Bn.nonzero(as_tuple=True)
    far_N = distance(sketch_BSS[turn_N], other_WSS[row_Bn[turn_N, place_N]])
    return _least(far_N, turn_N, len(sketch_BSS))


def _least(value_N: Tensor, turn_N: Tensor, count: int) -> Tensor:
    least_B = torch.full((count,), torch.inf, device=value_N.device)
    return least_B.scatter_reduce_(0, turn_N, value_N, "amin")
