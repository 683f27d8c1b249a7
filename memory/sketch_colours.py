"""The comparison of two sketches by colours, for pictures whose patterns are alike.

A red flag and a blue one may have the same grey pattern. A copy may be brighter, paler, moved or
grey, so only large differences count.

Shapes: N pairs, M = 2 N pictures, D numbers of a sketch, m 2: a picture and its mirror image.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stream_ssl.memory.sketches import colours

RECOLOURED: Final = 40.0
"""The least difference of two cells of different colours, in levels of 255."""

FADED: Final = 0.3
"""A copy may also differ by this share of a cell's own colour, because copies may be paler."""

COLOURLESS: Final = 8.0
"""A picture whose cells all have less colour than this may be a grey copy, in levels of 255."""

INNER: Final = (slice(None), slice(1, -1), slice(1, -1))
"""The cells that are not at the edge."""


def recoloured(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """Return which pairs of sketches have different colours at some place, bool [N].

    Each cell of either picture that is not at its edge is compared with nine cells of the other
    one: with that at its place and with those around it, because copies are moved and cropped. The
    colours differ if a cell differs from all nine by more than RECOLOURED plus FADED of its own
    colour. They must also differ from those of the mirrored picture. A colourless picture may be a
    grey copy, so its colours never differ.
    """
    one_288N, other_288N = _pairs_last(one_ND), _pairs_last(other_ND)
    if one_ND.device.type != "cpu":
        return _differ(one_288N, other_288N)
    own_66N = torch.minimum(_strength(one_288N[INNER]), _strength(other_288N[INNER]))
    apart_66N = _strength(one_288N[INNER] - other_288N[INNER])
    differ_N = torch.sub(apart_66N, own_66N, alpha=FADED).amax(dim=(0, 1)) > RECOLOURED
    doubtful = differ_N.nonzero()[:, 0]  # few of the pictures with one pattern
    differ_N[doubtful] = _differ(one_288N[..., doubtful], other_288N[..., doubtful])
    return differ_N


def _differ(one_288N: Tensor, other_288N: Tensor) -> Tensor:
    cell_288M = torch.cat([one_288N, other_288N], dim=3)
    other_288M = torch.cat([other_288N, one_288N], dim=3)
    both_2m88M = torch.stack([other_288M, other_288M.flip(2)], dim=1)
    beside_2m3366M = both_2m88M.unfold(2, 6, 1).unfold(3, 6, 1).movedim(4, -1)
    apart_m3366M = _strength(cell_288M[INNER][:, None, None, None] - beside_2m3366M)
    own_88M = _strength(cell_288M)
    beyond_m66M = torch.sub(apart_m3366M.amin(dim=(1, 2)), own_88M[INNER[1:]], alpha=FADED)
    beyond_N = beyond_m66M.amax(dim=(1, 2)).view(2, 2, -1).amax(dim=1).amin(dim=0)
    most_N: Tensor = own_88M.amax(dim=(0, 1)).view(2, -1).amin(dim=0)
    return (most_N >= COLOURLESS) & (beyond_N > RECOLOURED)


def _pairs_last(sketch_ND: Tensor) -> Tensor:
    """Return the colours as [2, 8, 8, N], so that every step reads contiguous memory."""
    return colours(sketch_ND).permute(1, 2, 3, 0).contiguous()


def _strength(colour_288N: Tensor) -> Tensor:
    """Return how far cells are from grey, for any trailing dimensions."""
    red, yellow = colour_288N
    square_88N: Tensor = (red * red).addcmul_(yellow, yellow)
    return square_88N.sqrt_()
