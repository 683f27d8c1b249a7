"""Sketches for the comparison of two pictures, and the keys that find candidates.

A sketch has two parts. Its pattern is a small grey picture without what copies change: brightness
and contrast. Its colours are those of 8 x 8 cells. A second sketch of a picture leaves out the
frame of one colour that some copies have.

Shapes: A size of a key, B pictures, S = SIDE, D = S * S + 2 * 8 * 8 numbers of a sketch, P side of
a square picture, L outermost lines, M pixels in the middle of a line.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

SIDE: Final = 32
"""The side of a sketch, in pixels."""

KEY_SIDE: Final = 8
"""The side of a key's pictures, in pixels, and of a sketch's colours, in cells."""

FLAT: Final = 8.0
"""The least contrast that is set to 1, and the largest mean difference of a frame's lines.

Both are in grey levels of 255. Lower contrast is the noise of a dark or covered camera.
"""

BLUR: Final = 1.5
"""The standard deviation of the blur, in pixels of a sketch.

The blur gives originals the contrast of their resized copies.
"""

DEEPEST: Final = 0.2
"""The largest share of a picture's side that one side of a frame takes."""

_EDGE = 16.0  # least difference of a picture's pixel from its frame, in grey levels of 255
_ALONG = 0.8  # least share of such pixels on the line that is next to a frame
_RANGE = 24.0  # largest difference of two pixels on a frame's outermost line, in grey levels
_SMOOTH = 9  # side of the square whose mean is halved, in pixels
_GREY = (0.299, 0.587, 0.114)
_AGAINST = ((1.0, -1.0, 0.0), (0.5, 0.5, -1.0))  # red against green, yellow against blue


def sketch(image_BCHW: Tensor) -> Tensor:
    """Return the sketch of each picture.

    Its pattern is grey, S x S, blurred, with its contrast set to 1. Half of the mean around each
    pixel is subtracted, so that details count. Otherwise the outline has nearly all of the contrast
    of clothes on white. Its colours are the means of 8 x 8 cells, as differences of channels. A
    mean is that of 16 pixels spread over the cell.

    Args:
        image_BCHW: uint8, with any number of channels. 3 channels are colours; otherwise the mean
            of the channels is used, and all colours are 0. A picture that is not square is
            squeezed to a square.

    Returns:
        float32 [B, D], on the same device; see `pattern` and `colours`.
    """
    return _joined(_whole(_grey(image_BCHW)), image_BCHW)


def pattern(sketch_BD: Tensor) -> Tensor:
    """Return the grey pictures of sketches, [B, S, S], without a copy."""
    return sketch_BD[:, : SIDE**2].view(-1, SIDE, SIDE)


def colours(sketch_BD: Tensor) -> Tensor:
    """Return the colours of sketches, [B, 2, 8, 8], without a copy.

    The first is the red channel minus the green one, from -255 to 255. The second is the mean of
    both minus the blue one. A grey cell has 0 and 0.
    """
    return sketch_BD[:, SIDE**2 :].view(-1, len(_AGAINST), KEY_SIDE, KEY_SIDE)


def sketch_and_frame(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sketches, and which pictures have a frame, bool [B]; see `sketch`, `inside`."""
    grey_BPP = _grey(image_BCHW)
    sketch_BD = _joined(_whole(grey_BPP), image_BCHW)
    if grey_BPP.device.type != "cpu":  # the host would wait for the number of such pictures
        return sketch_BD, _Frames(grey_BPP).found_B
    framed_B = _plain(_outer_lines(grey_BPP, 1)[..., 0, :]).all(dim=0).any(dim=0)
    plain = framed_B.nonzero()[:, 0]
    if len(plain):
        framed_B[plain] = _Frames(grey_BPP[plain]).found_B
    return sketch_BD, framed_B


def sketch_inside(image_BCHW: Tensor) -> Tensor:
    """Return the sketch of each picture without its frame, like `sketch`."""
    grey_BPP = _grey(image_BCHW)
    start_2B, length_B = inside(grey_BPP)
    part_2BSP = _parts(start_2B, length_B.expand(2, -1), SIDE, grey_BPP.shape[-1])
    down_BSP, across_BSP = (_blur(grey_BPP.device) @ part_2BSP).unbind()
    pattern_BSS = _detail(down_BSP @ grey_BPP @ across_BSP.mT)
    part_3B = torch.cat([start_2B, length_B[None]]) / grey_BPP.shape[-1]
    return _joined(pattern_BSS, image_BCHW, part_3B)


def inside(grey_BPP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square inside the frame of each picture, or the whole picture if it has none.

    The square is the largest in the middle of what is inside. Two sides may have no frame, because
    a wide picture in a frame was cropped to a square. The same picture without a frame was then
    cropped to that square too.

    Args:
        grey_BPP: grey levels of 255.

    Returns:
        The first row and the first column of the square [2, B] and its side [B], in pixels. They
        are not whole numbers if a frame ends within a pixel.
    """
    width_22B = _Frames(grey_BPP).widths()
    inner_2B = grey_BPP.shape[-1] - width_22B.sum(dim=0)
    length_B = inner_2B.amin(dim=0)
    return width_22B[0] + (inner_2B - length_B) / 2, length_B


class _Frames:
    """The frames of pictures.

    A frame has two opposite sides or four. Each side begins with a line of one colour. All lines
    that are like it follow, and then a line that differs from it at most of its pixels. A line
    between both may have some of each. An object on a white background is no
    picture in a frame, because it touches few pixels of a line.
    """

    def __init__(self, grey_BPP: Tensor) -> None:
        line_22BLM = _outer_lines(grey_BPP, _deepest(grey_BPP.shape[-1]) + 2)
        outer_22B1M = line_22BLM[..., :1, :]
        apart_22BLM = (line_22BLM - outer_22B1M).abs_()
        self._apart_22BL = apart_22BLM.mean(dim=-1)
        unlike_22BL = (self._apart_22BL[..., :-1] > FLAT).to(torch.uint8)
        self._end_22B1 = unlike_22BL.argmax(dim=-1, keepdim=True)  # 0: all lines are alike
        begun_22BL = (apart_22BLM[..., 1:, :] > _EDGE).sum(dim=-1)
        begun_22B1 = begun_22BL.gather(-1, self._end_22B1)  # on the line after the end
        begins_22B1 = begun_22B1 >= _ALONG * line_22BLM.shape[-1]
        framed_22B1 = _plain(outer_22B1M) & (self._end_22B1 > 0) & begins_22B1
        self._both_2B = framed_22B1[..., 0].all(dim=0)
        self.found_B = self._both_2B.any(dim=0)

    def widths(self) -> Tensor:
        """Return the widths of the sides in pixels, [2 ends, 2 directions, B], 0 without one."""
        mixed_22B1 = self._apart_22BL.gather(-1, self._end_22B1)
        inner_22B1 = self._apart_22BL[..., 1:].gather(-1, self._end_22B1)
        width_22B1 = self._end_22B1 + 1 - (mixed_22B1 / inner_22B1).clamp(max=1)
        return torch.where(self._both_2B, width_22B1[..., 0], 0.0)


def _grey(image_BCHW: Tensor) -> Tensor:
    """Return grey levels of 255, [B, P, P]."""
    channels, high, wide = image_BCHW.shape[1:]
    weights = _GREY if channels == 3 else [1 / channels] * channels
    first_BHW, *others = image_BCHW.unbind(dim=1)
    grey_BHW = first_BHW.to(torch.float32).mul_(weights[0])
    for weight, pixel_BHW in zip(weights[1:], others, strict=True):
        grey_BHW.add_(pixel_BHW, alpha=weight)
    if high == wide:
        return grey_BHW
    side, device = min(high, wide), image_BCHW.device
    return _squeezed(high, side, device) @ grey_BHW @ _squeezed(wide, side, device).T


def _joined(pattern_BSS: Tensor, image_BCHW: Tensor, part_3B: Tensor | None = None) -> Tensor:
    """Return the sketches with these patterns, and with the colours of these pictures.

    Args:
        part_3B: the part of each picture whose colours count: its first row, its first column and
            its side, as shares of the picture's sides. None: all of it.
    """
    pattern_BF, (channels, *sides) = pattern_BSS.flatten(1), image_BCHW.shape[1:]
    if channels != len(_GREY):
        return pad(pattern_BF, (0, len(_AGAINST) * KEY_SIDE**2))
    device, pixel_B3p = image_BCHW.device, image_BCHW.flatten(2)
    if part_3B is not None or sides != [SIDE, SIDE]:
        spread_Bp = (
            _spread_over_all(*sides, device) if part_3B is None else _spread(part_3B, *sides)
        )
        pixel_B3p = pixel_B3p.gather(2, spread_Bp[:, None].expand(*pixel_B3p.shape[:2], -1))
    row_B38tS = pixel_B3p.to(torch.float32).view(-1, 3, KEY_SIDE, SIDE // KEY_SIDE, SIDE)
    cell_B388 = reduce(torch.add, row_B38tS.unbind(3)) @ _squeezed(SIDE, KEY_SIDE, device).T
    colour_B2c = _against(device) @ cell_B388.flatten(2)
    return torch.cat([pattern_BF, colour_B2c.flatten(1)], dim=1)


def _spread(part_3B: Tensor, high: int, wide: int) -> Tensor:
    """Return S x S pixels of a part of each picture, numbered by rows, int64 [B, S * S].

    Each is at a place of its own within a square of an S x S grid, so that no fine pattern of the
    picture has the period of these pixels.
    """
    row_p, column_p = _grid(part_3B.device)
    top_B1, left_B1, side_B1 = part_3B[..., None]
    row_Bp = (top_B1 + side_B1 * row_p).mul_(high).long().clamp_(0, high - 1)
    column_Bp = (left_B1 + side_B1 * column_p).mul_(wide).long().clamp_(0, wide - 1)
    place_Bp: Tensor = row_Bp.mul_(wide).add_(column_Bp)
    return place_Bp


@cache
def _grid(device: torch.device) -> Tensor:
    """Return places from 0 to 1, one in each square of a grid, [2, S * S].

    They are the same in every process.
    """
    line_S = torch.arange(SIDE, dtype=torch.float32)
    square_2p = torch.cartesian_prod(line_S, line_S).T
    within_2p = torch.rand(2, SIDE**2, generator=torch.Generator().manual_seed(0))
    return ((square_2p + within_2p) / SIDE).to(device)


@cache
def _spread_over_all(high: int, wide: int, device: torch.device) -> Tensor:
    """Return the pixels of whole pictures, [1, S * S]; see `_spread`."""
    return _spread(torch.tensor([[0.0], [0.0], [1.0]], device=device), high, wide)


@cache
def _against(device: torch.device) -> Tensor:
    """Return the weights of the channels in a cell's colours, [2, 3], divided by its rows."""
    return torch.tensor(_AGAINST, device=device) / (SIDE // KEY_SIDE)


def _detail(grey_BSS: Tensor) -> Tensor:
    """Return the differences from half of the means around pixels, with a contrast of 1."""
    local_SS = _local_mean(grey_BSS.device)
    across_BSS, down_BSS = grey_BSS @ local_SS.T, local_SS.expand(len(grey_BSS), -1, -1)
    detail_BSS = torch.baddbmm(grey_BSS, down_BSS, across_BSS, alpha=-0.5)
    detail_BSS -= detail_BSS.mean(dim=(1, 2), keepdim=True)
    contrast_B11 = detail_BSS.square().mean(dim=(1, 2), keepdim=True).sqrt()
    return detail_BSS.div_(contrast_B11.clamp_(min=FLAT))


def _whole(grey_BPP: Tensor) -> Tensor:
    """Return the sketches of whole pictures, [B, S, S]."""
    weight_SP = _blurred_squeezed(grey_BPP.shape[-1], grey_BPP.device)
    return _detail(weight_SP @ grey_BPP @ weight_SP.T)


def _outer_lines(grey_BPP: Tensor, count: int) -> Tensor:
    """Return the outermost lines without their ends, which may belong to the frame's other sides.

    Returns:
        [2 ends, 2 directions, B, count, M], from the outside to the inside.
    """
    side = grey_BPP.shape[-1]
    middle = slice(_deepest(side), side - _deepest(side))
    last = slice(side - count, None)
    rows, columns = grey_BPP[:, :, middle], grey_BPP.mT[:, :, middle]
    ends = rows[:, :count], columns[:, :count], rows[:, last].flip(1), columns[:, last].flip(1)
    return torch.stack(ends).view(2, 2, *ends[0].shape)


def _plain(line_22BLM: Tensor) -> Tensor:
    """Return which lines have one colour."""
    least_22BL, most_22BL = line_22BLM.aminmax(dim=-1)
    return most_22BL - least_22BL <= _RANGE


def _deepest(side: int) -> int:
    return int(side * DEEPEST)


def _parts(start_N: Tensor, length_N: Tensor, count: int, size: int) -> Tensor:
    """Return the matrices of means over equal parts of an interval, [*N, count, size].

    Args:
        start_N: the start of each interval in pixels, of any shape.
        length_N: the length of each interval in pixels.
        count: the number of parts.
        size: the number of pixels.
    """
    each_N11 = (length_N / count)[..., None, None]
    from_C1 = torch.arange(count, device=start_N.device)[:, None]
    pixel_P = torch.arange(size, device=start_N.device)
    from_NC1 = start_N[..., None, None] + each_N11 * from_C1
    until_NCP = torch.minimum(from_NC1 + each_N11, pixel_P + 1)
    return (until_NCP - torch.maximum(from_NC1, pixel_P)).clamp_(min=0).div_(each_N11)


@cache
def _squeezed(size: int, count: int, device: torch.device) -> Tensor:
    """Return the matrix of means over all of `size` pixels in `count` parts, [count, size]."""
    whole = torch.tensor([0.0, size], dtype=torch.float32, device=device)
    return _parts(whole[0], whole[1], count, size)


@cache
def _blurred_squeezed(size: int, device: torch.device) -> Tensor:
    """Return the matrix that shrinks `size` pixels to S and blurs them, [S, size]."""
    return _blur(device) @ _squeezed(size, SIDE, device)


@cache
def _blur(device: torch.device) -> Tensor:
    """Return the matrix of the blur of S pixels, [S, S]."""
    pixel_S = torch.arange(SIDE, dtype=torch.float32)
    weight_SS = (-((pixel_S[:, None] - pixel_S) / BLUR).square() / 2).exp()
    weight_SS /= weight_SS.sum(dim=1, keepdim=True)
    # Subnormal numbers make a product on a CPU five times as slow, and change no sketch.
    return weight_SS.masked_fill_(weight_SS < 1e-20, 0.0).to(device)


@cache
def _local_mean(device: torch.device) -> Tensor:
    """Return the matrix of the mean of up to _SMOOTH pixels around each pixel, [S, S]."""
    pixel_S = torch.arange(SIDE, dtype=torch.float32)
    near_SS = ((pixel_S[:, None] - pixel_S).abs() <= _SMOOTH // 2).float()
    return (near_SS / near_SS.sum(dim=1, keepdim=True)).to(device)


def key(sketch_BD: Tensor) -> Tensor:
    """Return the keys for the search of candidates, float32 [B, A = 64].

    A key is the pattern at 8 x 8 pixels, as sums and absolute differences of the pixels that a
    mirror exchanges. A picture and its mirror image therefore have the same key. Two keys are never
    farther apart than the 8 x 8 patterns, nor than one pattern and the mirror image of the other.
    Their distance divided by 8 is a root mean square, like `distance` of near_duplicates.
    """
    side, sketch_BSS = SIDE // KEY_SIDE, pattern(sketch_BD)
    row_B8S = reduce(torch.add, [sketch_BSS[:, start::side] for start in range(side)])
    sum_B88 = reduce(torch.add, [row_B8S[:, :, start::side] for start in range(side)])
    small_B88 = sum_B88 / side**2
    left_B84 = small_B88[:, :, : KEY_SIDE // 2]
    right_B84 = small_B88[:, :, KEY_SIDE // 2 :].flip(2)
    parts = left_B84 + right_B84, (left_B84 - right_B84).abs()
    return torch.cat(parts, dim=2).flatten(1) * math.sqrt(0.5)
