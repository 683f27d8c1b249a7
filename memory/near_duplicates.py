"""A detailed comparison that finds whether two pictures show the same image.

The comparison ignores changes that cameras and encoders make. A cosine of thumbnails cannot do
this: two shirts on white have a larger cosine than two frames of a moving robot. The thumbnail
therefore only finds candidates. Each candidate is then compared in detail, by the difference at the
worst place. A copy differs nowhere. A person who walks through a fixed camera's picture differs in
one place, and so do two shirts.

The allowed difference depends on the other held pictures. Some pairs of trousers differ less than a
picture and its copy that was made smaller and larger again. But the copy is far nearer to its
picture than to any other, and a pair of trousers is about as near to the next one.

Shapes: A size of a key, B pictures, N pairs, n candidates, W pictures held besides the slots, S =
SIDE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from stream_ssl.memory.compute import in_full_precision, to_host
from stream_ssl.memory.duplicates import NOBODY, Action, Found
from stream_ssl.memory.slot_index import SlotIndex, nearest_rows

if TYPE_CHECKING:
    from stream_ssl.memory.memory import WorkingMemory

SIDE: Final = 32
"""The side of a sketch, in pixels."""

ALIKE: Final = 0.12
"""Pictures nearer than this are always near-duplicates; docs/duplicates.md gives the reasons."""

LIMIT: Final = 0.4
"""Pictures farther apart than this are never near-duplicates."""

APART: Final = 0.55
"""Between the two limits, the largest allowed ratio of the nearest and the next distance."""

FLAT: Final = 8.0
"""The least contrast that is set to 1, in grey levels of 255.

Lower contrast is the noise of a dark or covered camera.
"""

BLUR: Final = 1.5
"""The standard deviation of the blur, in pixels of a sketch.

The blur gives originals the contrast of their resized copies.
"""

SHIFT: Final = 2
"""The largest shift of one sketch in each direction, in pixels."""

WINDOW: Final = 8
"""The side of the square within which a difference is measured, in pixels."""

KEY_SIDE: Final = 8
NEIGHBOURS: Final = 4
"""The number of candidates of one picture that are compared in detail."""

REMEMBERED: Final = 2048
"""The number of newcomers whose keys are kept until they have slots, to avoid computing them again.
"""

REACH: Final = 0.3
"""The largest distance of two keys for which pictures are candidates, as a root mean square."""

_SMOOTH = 9  # side of the square whose mean is halved, in pixels

_GREY = (0.299, 0.587, 0.114)
_PAIRS_AT_A_TIME = 512  # more do not fit a CPU's cache


def sketch(image_BCHW: Tensor) -> Tensor:
    """Return the sketch of each picture: grey, S x S, blurred, with its contrast set to 1.

    Half of the mean around each pixel is subtracted, so that details count. Otherwise the outline
    has nearly all of the contrast of clothes on white.

    Args:
        image_BCHW: uint8, with any number of channels. 3 channels are colours; otherwise the mean
            of the channels is used.

    Returns:
        float32 [B, S, S], on the same device.
    """
    count, channels, high, wide = image_BCHW.shape
    weights = _GREY if channels == 3 else [1 / channels] * channels
    first_BHW, *others = image_BCHW.unbind(dim=1)
    grey_BHW = first_BHW.to(torch.float32).mul_(weights[0])
    for weight, pixel_BHW in zip(weights[1:], others, strict=True):
        grey_BHW.add_(pixel_BHW, alpha=weight)
    device = image_BCHW.device
    grey_BSS = _shrunk(high, device) @ grey_BHW @ _shrunk(wide, device).T
    local_SS = _local_mean(device)
    across_BSS, down_BSS = grey_BSS @ local_SS.T, local_SS.expand(count, -1, -1)
    detail_BSS = torch.baddbmm(grey_BSS, down_BSS, across_BSS, alpha=-0.5)
    detail_BSS -= detail_BSS.mean(dim=(1, 2), keepdim=True)
    contrast_B11 = detail_BSS.square().mean(dim=(1, 2), keepdim=True).sqrt()
    return detail_BSS.div_(contrast_B11.clamp_(min=FLAT))


@cache
def _shrunk(size: int, device: torch.device) -> Tensor:
    """Return the matrix that shrinks `size` pixels to S and blurs them, float32 [S, size]."""
    shrunk_SH = adaptive_avg_pool1d(torch.eye(size), SIDE).T
    pixel_S = torch.arange(SIDE)
    blur_SS = (-((pixel_S[:, None] - pixel_S) / BLUR).square() / 2).exp()
    return (blur_SS / blur_SS.sum(dim=1, keepdim=True) @ shrunk_SH).to(device)


@cache
def _local_mean(device: torch.device) -> Tensor:
    """Return the matrix of the mean of up to _SMOOTH pixels around each pixel, [S, S]."""
    pixel_S = torch.arange(SIDE)
    near_SS = ((pixel_S[:, None] - pixel_S).abs() <= _SMOOTH // 2).float()
    return (near_SS / near_SS.sum(dim=1, keepdim=True)).to(device)


def key(sketch_BSS: Tensor) -> Tensor:
    """Return the keys for the search of candidates, float32 [B, A = 64].

    A key is the sketch at 8 x 8 pixels, as sums and absolute differences of the pixels that a
    mirror exchanges. A picture and its mirror image therefore have the same key. Two keys are never
    farther apart than the 8 x 8 sketches, nor than one sketch and the mirror image of the other.
    Their distance divided by 8 is a root mean square, like `distance`.
    """
    side = SIDE // KEY_SIDE
    row_B8S = reduce(torch.add, [sketch_BSS[:, start::side] for start in range(side)])
    sum_B88 = reduce(torch.add, [row_B8S[:, :, start::side] for start in range(side)])
    small_B88 = sum_B88 / side**2
    left_B84 = small_B88[:, :, : KEY_SIDE // 2]
    right_B84 = small_B88[:, :, KEY_SIDE // 2 :].flip(2)
    parts = left_B84 + right_B84, (left_B84 - right_B84).abs()
    return torch.cat(parts, dim=2).flatten(1) * math.sqrt(0.5)


def distance(one_NSS: Tensor, other_NSS: Tensor) -> Tensor:
    """Return the difference of each pair of sketches at its worst place, [N].

    The difference is a root mean square within a window, in units of a picture's contrast. It is 0
    for equal pictures, and about 1.4 for pictures that are unrelated at some place. The other
    picture is mirrored if that makes it more similar. Pictures that are not ALIKE without a shift
    are compared at all shifts by up to SHIFT pixels, and the smallest value counts.
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
    mirrored_NSS = other_NSS.flip(2)
    alike_N, mirrored_N = ((one_NSS * it).sum(dim=(1, 2)) for it in (other_NSS, mirrored_NSS))
    turned_N = (mirrored_N > alike_N)[:, None, None]
    one_SSN = _softened(one_NSS)
    other_SSN = _softened(torch.where(turned_N, mirrored_NSS, other_NSS))
    least_N = _at(one_SSN, other_SSN, SHIFT, SHIFT)
    far = (least_N >= ALIKE).nonzero()[:, 0]
    if len(far):
        one_SSN, other_SSN = one_SSN[..., far], other_SSN[..., far]
        places = range(2 * SHIFT + 1)
        moved = [_at(one_SSN, other_SSN, down, right) for down in places for right in places]
        least_N[far] = reduce(torch.minimum, moved)
    return least_N


def _at(one_SSN: Tensor, other_SSN: Tensor, down: int, right: int) -> Tensor:
    """Return the distance with the other sketch shifted by (down - SHIFT, right - SHIFT), [N]."""
    inner = SIDE - 2 * SHIFT
    middle_iiN = one_SSN[SHIFT : SHIFT + inner, SHIFT : SHIFT + inner]
    moved_iiN = other_SSN[down : down + inner, right : right + inner]
    window_wwN = _windows((middle_iiN - moved_iiN).square_())
    return window_wwN.flatten(0, 1).amax(dim=0).sqrt() / WINDOW


def _windows(value_iiN: Tensor) -> Tensor:
    """Return sums over windows that overlap by half, computed from tiles of half their side.

    Tensors are added one by one, because torch's sum over a middle dimension takes four times as
    long.
    """
    half = WINDOW // 2
    row_tiN = reduce(torch.add, [value_iiN[start::half] for start in range(half)])
    tile_ttN = reduce(torch.add, [row_tiN[:, start::half] for start in range(half)])
    row_wtN = tile_ttN[:-1] + tile_ttN[1:]
    return row_wtN[:, :-1] + row_wtN[:, 1:]


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


def are_near_duplicates(two_B2: Tensor) -> Tensor:
    """Return whether pictures with these distances are near-duplicates, bool [B].

    Args:
        two_B2: the distances to the nearest and to the next candidate, infinite if there is none.
    """
    near_B, next_B = two_B2.unbind(dim=1)
    return (near_B < ALIKE) | ((near_B < LIMIT) & (near_B < APART * next_B))


class NearDuplicates:
    """A detector of samples that are near-duplicates of a memory's contents or of their own batch.

    Args:
        memory: a memory that keeps images.

    Raises:
        ValueError: the memory keeps no images, or images of less than 8 x 8 pixels.
    """

    _index: SlotIndex
    _ids_K: Tensor  # ids of the samples whose keys the index has
    _ids_R: Tensor  # ids of newcomers whose keys are remembered
    _key_RA: Tensor

    def __init__(self, memory: WorkingMemory) -> None:
        shape = memory.image_shape
        if shape is None or min(shape[1:]) < KEY_SIDE:
            raise ValueError(
                f"near-duplicates are found among pictures, and this memory keeps {shape}: give "
                f"it images of at least {KEY_SIDE} x {KEY_SIDE} pixels, or a cosine as threshold"
            )
        self._memory = memory
        self._forget()

    def admitted(self, image_BCHW: Tensor, beside_WCHW: Tensor) -> NDArray[np.bool_]:
        """Return which samples are not near-duplicates, bool [B of all ranks]; see `find`."""
        return self.find(image_BCHW, beside_WCHW, "refuse").admitted_B

    @in_full_precision
    def find(
        self,
        image_BCHW: Tensor,
        beside_WCHW: Tensor,
        action: Action,
        ids_B: Tensor | None = None,
    ) -> Found:
        """Return the near-duplicates among the samples of all ranks, decided in turn.

        A sample has up to 2 NEIGHBOURS candidates. Half of them are the nearest of all slots and of
        the pictures beside the slots. The other half are the nearest of the earlier admitted
        samples of the batch. Several ranks use the slots, the pictures beside them and the batches
        of all ranks together, in order of rank.

        Args:
            image_BCHW: this rank's samples, uint8.
            beside_WCHW: other pictures of this rank that count as held, uint8.
            action: as in `Duplicates`. "merge" requires a single process and no pictures beside the
                slots.
            ids_B: this rank's ids, int64, under which the memory may later receive the same
                pictures. Their slots then need no new sketch. Either every rank passes ids, or none
                does.

        Returns:
            The result. Its `nearest_B` numbers the slots first, then the pictures beside them, then
            the samples.
        """
        own = [sketch(image_BCHW).flatten(1), *([] if ids_B is None else [ids_B.to(self.device)])]
        flat_BD, *ids = self._memory.group.all_gather(*own)
        sketch_BSS = flat_BD.view(-1, SIDE, SIDE)
        key_BA = key(sketch_BSS)
        row_Bn, held_Bn = self._held(sketch_BSS, key_BA, sketch(beside_WCHW))
        earlier_Bn, near_Bn, new_B = _in_turn(sketch_BSS, key_BA, held_Bn, action)
        found = Found(len(self._memory), ~new_B)
        if action != "count":
            found.admitted_B = new_B
        for every_B in ids:
            self._remember(every_B, key_BA, found.admitted_B)
        behind = len(self._memory) + len(beside_WCHW)
        far_B, best_B = torch.cat([held_Bn, near_Bn], dim=1).min(dim=1)
        row_B = torch.cat([row_Bn, behind + earlier_Bn], dim=1).gather(1, best_B[:, None])[:, 0]
        found.distance_B = to_host(far_B).numpy()
        found.nearest_B = to_host(row_B.masked_fill(far_B.isinf(), NOBODY)).numpy()
        if action == "merge":
            found.twin_B = np.where(new_B, NOBODY, found.nearest_B)
        return found

    @property
    def device(self) -> torch.device:
        """The memory's device."""
        return self._memory.device

    def _held(
        self, sketch_BSS: Tensor, key_BA: Tensor, beside_WSS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the candidates that the ranks hold and their distances, both [B, n].

        A candidate of this rank is a slot k, or len(memory) + w for a picture beside the slots. A
        candidate of another rank is NOBODY.
        """
        self._follow_the_slots()
        square_Bn, slot_Bn = self._index.nearest(key_BA, NEIGHBOURS)
        far_Bn = _look_closely(sketch_BSS, square_Bn, slot_Bn, self._sketch_of)
        beside_square_Bn, row_Bn = nearest_rows(key_BA, key(beside_WSS), NEIGHBOURS)
        beside_far_Bn = _look_closely(
            sketch_BSS, beside_square_Bn, row_Bn, lambda row_N: beside_WSS[row_N]
        )
        group, both = self._memory.group, 2 * NEIGHBOURS
        here_B = torch.cat([square_Bn, beside_square_Bn, far_Bn, beside_far_Bn], dim=1)
        (every_B,) = group.all_gather(here_B)
        square_Br, far_Br = (
            part.transpose(0, 1).flatten(1)
            for part in every_B.view(group.size, len(key_BA), 2, both).unbind(dim=2)
        )
        nearest_Bn = torch.topk(square_Br, NEIGHBOURS, dim=1, largest=False).indices
        own_B = torch.cat([slot_Bn, len(self._memory) + row_Bn], dim=1)
        row_Bn = own_B.gather(1, nearest_Bn % both)
        row_Bn = row_Bn.masked_fill(nearest_Bn // both != group.rank, NOBODY)
        return row_Bn, far_Br.gather(1, nearest_Bn)

    def _follow_the_slots(self) -> None:
        """Put the keys of all slots that changed since the last batch into the index."""
        ids_k, k = self._memory.ids, len(self._memory)
        if self._index.device != self.device or k < len(self._index):  # moved, or loaded
            self._forget()
        changed = (ids_k != self._ids_K[:k]).nonzero()[:, 0]
        for slots in torch.split(changed, _PAIRS_AT_A_TIME):
            self._index.put(slots, self._keys_of(slots, ids_k[slots]))
        self._ids_K[:k] = ids_k

    def _remember(self, ids_B: Tensor, key_BA: Tensor, admitted_B: NDArray[np.bool_]) -> None:
        """Keep the keys of admitted newcomers, newest first."""
        in_b = torch.from_numpy(admitted_B.nonzero()[0]).to(self.device)
        self._ids_R = torch.cat([ids_B[in_b], self._ids_R])[:REMEMBERED]
        self._key_RA = torch.cat([key_BA[in_b], self._key_RA])[:REMEMBERED]

    def _keys_of(self, slots: Tensor, ids: Tensor) -> Tensor:
        """Return the keys of slots that hold these ids, remembered or computed."""
        if not len(self._ids_R):
            return key(self._sketch_of(slots))
        id_R, row_R = self._ids_R.sort(stable=True)  # newest first among equal ids
        place_N = torch.searchsorted(id_R, ids).clamp_(max=len(id_R) - 1)
        key_NA = self._key_RA[row_R[place_N]]
        unknown = (id_R[place_N] != ids).nonzero()[:, 0]
        if len(unknown):
            key_NA[unknown] = key(self._sketch_of(slots[unknown]))
        return key_NA

    def _forget(self) -> None:
        """Reset the index and the remembered keys."""
        capacity, dim, device = self._memory.capacity, KEY_SIDE**2, self.device
        self._index = SlotIndex(capacity, dim, device)
        self._ids_K = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._ids_R = torch.empty(0, dtype=torch.int64, device=device)
        self._key_RA = torch.empty(0, dim, device=device)

    def _sketch_of(self, slots: Tensor) -> Tensor:
        images = self._memory.images
        assert images is not None  # checked by the constructor
        return sketch(images[slots.to(images.device)].to(self.device))

    def state(self) -> dict[str, Tensor]:
        """Return the state that is needed besides the memory for the same answers."""
        return self._index.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`, with the memory as it was then."""
        self._forget()
        self._index.load(state)


def _look_closely(
    sketch_BSS: Tensor,
    square_Bn: Tensor,
    row_Bn: Tensor,
    sketches_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the distance of each sketch to its candidates, [B, n]; infinite beyond reach.

    Args:
        sketch_BSS: one sketch for each row of candidates.
        square_Bn: the squared distances of the keys.
        row_Bn: the numbers of the candidates.
        sketches_of: a function from N candidate numbers to their sketches [N, S, S].
    """
    far_Bn = torch.full_like(square_Bn, torch.inf)
    turn_N, place_N = (square_Bn <= REACH**2 * KEY_SIDE**2).nonzero(as_tuple=True)
    for turns, places in zip(
        torch.split(turn_N, _PAIRS_AT_A_TIME),
        torch.split(place_N, _PAIRS_AT_A_TIME),
        strict=True,
    ):
        other_NSS = sketches_of(row_Bn[turns, places])
        far_Bn[turns, places] = distance(sketch_BSS[turns], other_NSS)
    return far_Bn


def _in_turn(
    sketch_BSS: Tensor, key_BA: Tensor, held_Bn: Tensor, action: Action
) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
    """Compare each sample with the nearest earlier admitted samples of its batch.

    Which samples are admitted depends on the answer, so the answer is found in rounds. Each round
    uses the answer of the previous round. A sample's answer is correct once the answers of all
    earlier samples are correct. The rounds therefore end with the answer of a loop over the
    samples.

    Args:
        sketch_BSS: the sketches of the batch.
        key_BA: their keys.
        held_Bn: distances to the candidates that are held.
        action: as in `Duplicates`. "count" admits near-duplicates too.

    Returns:
        The candidates among the earlier samples, int64 [B, m], their distances, and which samples
        are not near-duplicates, bool [B].
    """
    count = len(key_BA)
    near_Bm = held_Bn.new_full((count, min(NEIGHBOURS, count)), torch.inf)
    earlier_Bm = torch.zeros_like(near_Bm, dtype=torch.int64)
    new_B = ~_told(held_Bn)
    own_B = key_BA.square().sum(dim=1)
    square_BB = torch.addmm(own_B[:, None] + own_B, key_BA, key_BA.T, alpha=-2)
    within_BB = (square_BB <= REACH**2 * KEY_SIDE**2).tril_(-1)
    if action != "merge":  # an ALIKE held picture decides alone
        within_BB &= (held_Bn >= ALIKE).all(dim=1, keepdim=True)
    row_b = within_BB.any(dim=1).nonzero()[:, 0]  # most samples have nothing within reach
    if not len(row_b):
        return earlier_Bm, near_Bm, to_host(new_B).numpy()
    square_bB = square_BB[row_b].masked_fill_(~within_BB[row_b], torch.inf)
    known_bB = torch.full_like(square_bB, torch.nan)  # distances
    sketch_bSS, held_bn = sketch_BSS[row_b], held_Bn[row_b]
    while True:
        admitted_B = torch.ones_like(new_B) if action == "count" else new_B
        of_those_bB = square_bB.masked_fill(~admitted_B, torch.inf)
        best = torch.topk(of_those_bB, near_Bm.shape[1], dim=1, largest=False)
        near_bm = known_bB.gather(1, best.indices).masked_fill(best.values.isinf(), torch.inf)
        unknown = near_bm.isnan()
        asked_bm = best.values.masked_fill(~unknown, torch.inf)
        looked_bm = _look_closely(sketch_bSS, asked_bm, best.indices, lambda row: sketch_BSS[row])
        near_bm = torch.where(unknown, looked_bm, near_bm)
        turn_N, place_N = unknown.nonzero(as_tuple=True)
        known_bB[turn_N, best.indices[turn_N, place_N]] = near_bm[turn_N, place_N]
        was_b, new_b = new_B[row_b], ~_told(torch.cat([held_bn, near_bm], dim=1))
        new_B[row_b] = new_b
        if action == "count" or bool(to_host((was_b == new_b).all())):
            earlier_Bm[row_b], near_Bm[row_b] = best.indices, near_bm
            return earlier_Bm, near_Bm, to_host(new_B).numpy()


def _told(far_Bn: Tensor) -> Tensor:
    """Return which pictures are near-duplicates, given the distances to their candidates, [B]."""
    return are_near_duplicates(torch.topk(far_Bn, 2, dim=1, largest=False).values)
