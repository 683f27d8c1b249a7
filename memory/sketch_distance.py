"""The difference of two sketches at their worst place, for pictures that show the same image.

`distance` compares their patterns as they are, moved or mirrored. `zoomed_distance` also finds the
part of one picture that the other one shows, because a picture that was cropped shows the rest
larger. sketch_colours.py compares the colours.

Shapes: N pairs, M = 2 N, D numbers of a sketch, S = SIDE, P = S * S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Final

import torch
from torch import Tensor

from stream_ssl.memory.sketches import SIDE, pattern

ALIKE: Final = 0.12
"""Pictures nearer than this are near-duplicates; docs/duplicates.md gives the reasons."""

SHIFT: Final = 2
"""The largest shift of one sketch in each direction, in pixels."""

WINDOW: Final = 8
"""The side of the square within which a difference is measured, in pixels."""

ZOOMED: Final = 1.4
"""A distance after zooming counts as this many times as large.

Zooming makes different clothes more alike, too. Without the factor, twice as many were dropped."""

LEAST_PART: Final = 0.75
"""The least part of a picture's height or width that a cropped copy shows."""

STEPS: Final = 4
"""The number of steps in which the shown part is found."""

MOST_CONTRAST: Final = 2.0
"""The contrast of an enlarged part is raised at most by this factor."""

DAMPING: Final = 10.0
"""Added to the squares of the slopes, so that a picture without slopes is not zoomed."""


def at_a_time(device: torch.device) -> int:
    """Return the number of pairs or slots to compute at a time, which limits the memory."""
    return 512 if device.type == "cpu" else 4096  # more do not fit a CPU's cache


def distance(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """Return the difference of each pair of sketches at its worst place, [N].

    The difference is a root mean square within a window, in units of a picture's contrast. It is 0
    for equal pictures, and about 1.4 for pictures that are unrelated at some place. The other
    picture is mirrored if that makes it more similar. Pictures that are not ALIKE without a shift
    are compared at all shifts by up to SHIFT pixels, and the smallest value counts.
    """
    return _in_parts(_distance, one_ND, other_ND)


def zoomed_distance(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """Return the distance of each pair after one picture was enlarged, times ZOOMED, [N].

    Each picture in turn is enlarged until it shows the same part as the other, and the smaller
    distance counts. As in `distance`, the other picture is mirrored if that makes it more similar.
    """
    return _in_parts(_zoomed_distance, one_ND, other_ND)


def _in_parts(
    compare: Callable[[Tensor, Tensor], Tensor], one_ND: Tensor, other_ND: Tensor
) -> Tensor:
    """Return the results for the patterns of all pairs, [N], computed `at_a_time`."""
    if not len(one_ND):
        return one_ND.new_zeros(0)
    step = at_a_time(one_ND.device)
    pairs = zip(torch.split(one_ND, step), torch.split(other_ND, step), strict=True)
    return torch.cat([compare(pattern(one), pattern(other)) for one, other in pairs])


def _distance(one_NSS: Tensor, other_NSS: Tensor) -> Tensor:
    one_SSN, other_SSN = _softened(one_NSS), _softened(_turned(other_NSS, one_NSS))
    inner = slice(SHIFT, SIDE - SHIFT)
    least_N = _worst(one_SSN[inner, inner], other_SSN[inner, inner])
    if one_NSS.device.type != "cpu":  # all pairs and shifts in one kernel, without a wait
        moved_iiN = _shifts(other_SSN)
        every_N = _worst(one_SSN[inner, inner], moved_iiN).amin(dim=(0, 1))
        return torch.where(least_N >= ALIKE, every_N, least_N)
    far = (least_N >= ALIKE).nonzero()[:, 0]
    if len(far):
        middle_iiN, moved_iiN = one_SSN[inner, inner, far], _shifts(other_SSN[..., far])
        each = [_worst(middle_iiN, one_iiN) for row in moved_iiN for one_iiN in row]
        least_N[far] = reduce(torch.minimum, each)
    return least_N


def _zoomed_distance(one_NSS: Tensor, other_NSS: Tensor) -> Tensor:
    other_NSS = _turned(other_NSS, one_NSS)
    part_MSS, whole_MSS = torch.cat([one_NSS, other_NSS]), torch.cat([other_NSS, one_NSS])
    seen_MSS = _seen(whole_MSS, *_shown_part(part_MSS, whole_MSS))
    seen_MSS -= seen_MSS.mean(dim=(1, 2), keepdim=True)
    both_2MSS = torch.stack([part_MSS, seen_MSS])
    own, theirs = both_2MSS.square().mean(dim=(2, 3), keepdim=True).sqrt_()
    contrast = own / theirs.clamp(min=1e-6)
    # A part has at most 1 / LEAST_PART of its picture's contrast: a black picture is no part.
    both_2MSS[1] *= contrast.clamp(LEAST_PART, MOST_CONTRAST)
    inner = slice(SHIFT, SIDE - SHIFT)
    part_iiM, seen_iiM = _softened(both_2MSS.flatten(0, 1))[inner, inner].chunk(2, dim=2)
    return ZOOMED * _worst(part_iiM, seen_iiM).view(2, -1).amin(dim=0)


def _shown_part(part_MSS: Tensor, whole_MSS: Tensor) -> tuple[Tensor, Tensor]:
    """Return which part of each whole picture the other picture shows.

    Found by Gauss-Newton steps on the squared difference, with the slopes of the picture that shows
    the part, which stay the same (Baker and Matthews, Lucas-Kanade 20 Years On, IJCV 2004, section
    3.2: the inverse compositional algorithm).

    Returns:
        The share of height and width that is shown, from LEAST_PART to 1, and where its middle is
        in the whole picture, from -1 to 1. Both are [2, M].
    """
    count, slope_2SS = len(part_MSS), _slopes(part_MSS.device)
    slope_M2SS = slope_2SS @ part_MSS[:, None], part_MSS[:, None] @ slope_2SS.mT
    slope_M4P = torch.cat(slope_M2SS, dim=1).flatten(2)  # by height, down, width, across
    damping_44 = _damping(part_MSS.device)
    square_M44 = torch.baddbmm(damping_44, slope_M4P, slope_M4P.mT)
    step_M4P = torch.linalg.inv_ex(square_M44).inverse @ slope_M4P
    share_2M = part_MSS.new_ones(2, count)
    middle_2M = part_MSS.new_zeros(2, count)
    for _ in range(STEPS):
        off_MSS = _seen(whole_MSS, share_2M, middle_2M) - part_MSS
        step_M41 = step_M4P @ off_MSS.flatten(1)[..., None]
        larger_2M, moved_2M = step_M41.view(count, 2, 2).permute(2, 1, 0)
        middle_2M = torch.addcmul(middle_2M, share_2M, moved_2M, value=-1)
        share_2M = torch.addcmul(share_2M, share_2M, larger_2M, value=-1).clamp_(LEAST_PART, 1)
    room_2M = 1 - share_2M
    return share_2M, middle_2M.clamp_(-room_2M, room_2M)


def _seen(whole_MSS: Tensor, share_2M: Tensor, middle_2M: Tensor) -> Tensor:
    """Return a part of each picture, enlarged to the whole by linear interpolation, [M, S, S]."""
    place_S = _places(whole_MSS.device)
    at_2MS = torch.addcmul(middle_2M[..., None], share_2M[..., None], place_S)
    away_2MSS = (at_2MS[..., None] - place_S).abs_()
    weight_2MSS: Tensor = torch.rsub(away_2MSS, 1, alpha=SIDE / 2).clamp_(min=0)
    return weight_2MSS[0] @ whole_MSS @ weight_2MSS[1].mT


@cache
def _places(device: torch.device) -> Tensor:
    """Return the middles of a sketch's pixels, from -1 to 1, [S]."""
    return (torch.arange(SIDE, dtype=torch.float32, device=device) + 0.5) * (2 / SIDE) - 1


@cache
def _slopes(device: torch.device) -> Tensor:
    """Return the matrices of the slopes of a column's share and of its middle, [2, S, S]."""
    slope_SS = torch.zeros(SIDE, SIDE, dtype=torch.float32, device=device)
    inner_s = torch.arange(1, SIDE - 1, device=device)
    slope_SS[inner_s, inner_s + 1], slope_SS[inner_s, inner_s - 1] = SIDE / 4, -SIDE / 4
    return torch.stack([_places(device)[:, None] * slope_SS, slope_SS])


@cache
def _damping(device: torch.device) -> Tensor:
    return DAMPING * torch.eye(4, dtype=torch.float32, device=device)


def _turned(other_NSS: Tensor, one_NSS: Tensor) -> Tensor:
    """Return the other pictures, mirrored where that makes them more similar to the first."""
    mirrored_NSS = other_NSS.flip(2)
    alike_N, mirrored_N = ((one_NSS * it).sum(dim=(1, 2)) for it in (other_NSS, mirrored_NSS))
    turned_N = (mirrored_N > alike_N)[:, None, None]
    return torch.where(turned_N, mirrored_NSS, other_NSS)


def _shifts(other_SSN: Tensor) -> Tensor:
    """Return the inner parts of sketches at all shifts, as a view [down, right, i, i, N]."""
    inner = SIDE - 2 * SHIFT
    return other_SSN.unfold(0, inner, 1).unfold(1, inner, 1).movedim(2, -1)


def _worst(middle_iiN: Tensor, moved_iiN: Tensor) -> Tensor:
    """Return the difference of each pair at its worst place, [N], for all leading dimensions."""
    window_wwN = _windows((middle_iiN - moved_iiN).square_())
    return window_wwN.flatten(-3, -2).amax(dim=-2).sqrt() / WINDOW


def _windows(value_iiN: Tensor) -> Tensor:
    """Return the sum of each window. Neighbouring windows overlap by half.

    There may be any leading dimensions.

    Tensors are added one by one, because torch's sum over a middle dimension takes four times as
    long.
    """
    half = WINDOW // 2
    row_tiN = reduce(torch.add, [value_iiN[..., at::half, :, :] for at in range(half)])
    tile_ttN = reduce(torch.add, [row_tiN[..., at::half, :] for at in range(half)])
    row_wtN = tile_ttN[..., :-1, :, :] + tile_ttN[..., 1:, :, :]
    return row_wtN[..., :-1, :] + row_wtN[..., 1:, :]


def _softened(sketch_NSS: Tensor) -> Tensor:
    """Return means of 2 x 2 pixels, [S, S, N], which reduce the effect of half-pixel shifts.

    Pairs are the last dimension, so that every step reads contiguous memory.
    """
    one_SSN = sketch_NSS.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    two_SSN = torch.empty_like(one_SSN)
    torch.add(one_SSN[:-1], one_SSN[1:], out=two_SSN[:-1])
    torch.add(one_SSN[-1], one_SSN[-1], out=two_SSN[-1])
    four_SSN = one_SSN  # reuses its memory
    torch.add(two_SSN[:, :-1], two_SSN[:, 1:], out=four_SSN[:, :-1])
    torch.add(two_SSN[:, -1], two_SSN[:, -1], out=four_SSN[:, -1])
    return four_SSN.div_(4)
