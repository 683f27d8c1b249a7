"""A detailed comparison that finds whether two pictures show the same image.

The comparison ignores changes that cameras and encoders make. A cosine of thumbnails cannot do
this: two shirts on white have a larger cosine than two frames of a moving robot. The thumbnail
therefore only finds candidates. Each candidate is then compared in detail, by the difference at the
worst place. A copy differs nowhere. A person who walks through a fixed camera's picture differs in
one place, and so do two shirts.

The allowed difference depends on the other held pictures. Some pairs of trousers differ less than a
picture and its copy that was made smaller and larger again. But the copy is far nearer to its
picture than to any other, and a pair of trousers is about as near to the next one.

A cropped copy shows a part of its picture, enlarged. It is compared with that part, if one
candidate is much nearer than the others.

Shapes: A size of a key, B pictures, N pairs, n candidates, W pictures held besides the slots, D
numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.compute import in_full_precision, to_device, to_host
from stream_ssl.memory.duplicates import NOBODY, Action, Found
from stream_ssl.memory.sketch_colours import recoloured
from stream_ssl.memory.sketch_distance import ALIKE, at_a_time, distance, zoomed_distance
from stream_ssl.memory.sketches import KEY_SIDE, key, sketch, sketch_and_frame, sketch_inside
from stream_ssl.memory.slot_index import SlotIndex, nearest_rows

if TYPE_CHECKING:
    from stream_ssl.memory.memory import WorkingMemory

LIMIT: Final = 0.4
"""Pictures farther apart than this are never near-duplicates."""

APART: Final = 0.55
"""Between the two limits, the largest allowed ratio of the nearest and the next distance."""

NEIGHBOURS: Final = 4
"""The number of candidates of one picture that are compared in detail."""

REMEMBERED: Final = 2048
"""The number of newcomers whose keys are kept until they have slots, to avoid computing them again.
"""

REACH: Final = 0.3
"""The largest distance of two keys for which pictures are candidates, as a root mean square."""

MOST_SQUARE: Final = REACH**2 * KEY_SIDE**2
"""The squared distance of two keys that are REACH apart."""

ALONE: Final = 0.7
"""The largest ratio of the squared distances of a sample's key to the nearest and to the next key
for which the nearest is a candidate at any distance, because it may be cropped."""

UNCLEAR: Final = 1.0
"""The largest distance of two pictures for which one may be a cropped copy of the other.

Unrelated pictures are about 1.4 apart, so few of them are enlarged."""


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
    _born_K: Tensor  # births of the samples whose keys the index has, because ids may repeat
    _ids_R: Tensor  # ids of newcomers whose keys are remembered
    _key_RA: Tensor
    _written: int  # writes of slots when the index last followed them

    def __init__(self, memory: WorkingMemory) -> None:
        shape = memory.image_shape
        if shape is None or min(shape[1:]) < KEY_SIDE:
            raise ValueError(
                f"near-duplicates are found among pictures, and this memory keeps {shape}: give "
                f"it images of at least {KEY_SIDE} x {KEY_SIDE} pixels, or null as threshold"
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
        samples of the batch. A sample in a frame is also looked up without its frame, unless its
        nearest held candidate is ALIKE. The look-up whose nearest candidate is nearer counts.
        Candidates keep their frames. Several ranks use the slots, the pictures beside them and the
        batches of all ranks together, in order of rank.

        Args:
            image_BCHW: this rank's samples, uint8, on any device.
            beside_WCHW: other pictures of this rank that count as held, uint8, on any device.
            action: as in `Duplicates`. "merge" requires a single process and no pictures beside the
                slots.
            ids_B: this rank's ids, int64, under which the memory may later receive the same
                pictures. Their slots then need no new sketch. Either every rank passes ids, or none
                does.

        Returns:
            The result. Its `nearest_B` numbers the slots first, then the pictures beside them, then
            the samples.
        """
        own_BCHW = to_device(image_BCHW, self.device)
        own_BD, own_framed_B = sketch_and_frame(own_BCHW)
        own = [
            own_BD,
            own_framed_B.to(torch.uint8),
            *([] if ids_B is None else [to_device(ids_B, self.device)]),
        ]
        sketch_BD, framed_B, *ids = self._memory.group.all_gather(*own)
        key_BA = key(sketch_BD)
        beside_WD = sketch(to_device(beside_WCHW, self.device))
        held = self._held(sketch_BD, key_BA, beside_WD)
        again_B = (framed_B > 0) & (held.far_Rn >= ALIKE).all(dim=1)
        behind = len(self._memory) + len(beside_WCHW)
        looks = _LookUps(held, behind, again_B, torch.empty(0, dtype=torch.int64))
        answer = _in_turn(looks, action)
        if answer.again_B.any():
            framed_F = torch.from_numpy(np.flatnonzero(answer.again_B))
            if self._memory.group.size == 1:
                inside_FD = sketch_inside(own_BCHW[to_device(framed_F, self.device)])
            else:
                (inside_BD,) = self._memory.group.all_gather(sketch_inside(own_BCHW))
                inside_FD = inside_BD[to_device(framed_F, self.device)]
            inside = self._held(inside_FD, key(inside_FD), beside_WD)
            looks = looks._replace(held=held.and_then(inside), framed_F=framed_F)
            answer = _in_turn(looks, action)
        found = Found(len(self._memory), ~answer.new_B)
        if action != "count":
            found.admitted_B = answer.new_B
        if not self._looks_at_all:
            for every_B in ids:
                self._remember(every_B, key_BA, found.admitted_B)
        found.distance_B, found.nearest_B = answer.distance_B, answer.nearest_B
        if action == "merge":
            found.twin_B = np.where(answer.new_B, NOBODY, found.nearest_B)
        return found

    @in_full_precision
    def of_slots(self, slot_S: Tensor) -> Tensor:
        """Return which slots are near-duplicates of another slot of this rank, bool [S].

        Args:
            slot_S: int64, occupied slots.
        """
        self._follow_the_slots()
        sketch_SD = self._sketch_of(slot_S)
        square_Sn, row_Sn = self._index.nearest(key(sketch_SD), NEIGHBOURS + 1)
        square_Sn = square_Sn.masked_fill(row_Sn == slot_S[:, None], torch.inf)
        square_Sn, best_Sn = torch.topk(square_Sn, NEIGHBOURS, dim=1, largest=False)
        far_Sn = look_closely(
            sketch_SD,
            square_Sn,
            row_Sn.gather(1, best_Sn),
            self._sketch_of,
            self._looks_at_all,
            next_B=square_Sn[:, 1],
        )
        return _are_near(far_Sn)

    @property
    def device(self) -> torch.device:
        """The memory's device."""
        return self._memory.device

    @property
    def _looks_at_all(self) -> bool:
        """Whether the images are on a GPU, which compares more than needed rather than wait."""
        images = self._memory.images
        return images is not None and images.device.type != "cpu"

    def _held(self, sketch_BD: Tensor, key_BA: Tensor, beside_WD: Tensor) -> _Held:
        """Return the candidates that the ranks hold."""
        self._follow_the_slots()
        slots, group = len(self._memory), self._memory.group
        square_Bn, row_Bn = self._index.nearest(key_BA, NEIGHBOURS)
        if len(beside_WD):
            beside_Bn, at_Bn = nearest_rows(key_BA, key(beside_WD), NEIGHBOURS)
            both_B = torch.cat([square_Bn, beside_Bn], dim=1)
            square_Bn, best_Bn = torch.topk(both_B, NEIGHBOURS, dim=1, largest=False)
            row_Bn = torch.cat([row_Bn, slots + at_Bn], dim=1).gather(1, best_Bn)

        def sketches_of(row_N: Tensor) -> Tensor:
            if not len(beside_WD):
                return self._sketch_of(row_N)
            if not slots:
                return beside_WD[row_N]
            of_slots_ND = self._sketch_of(row_N.clamp(max=slots - 1))
            beside_ND = beside_WD[(row_N - slots).clamp(min=0)]
            return torch.where((row_N < slots)[:, None], of_slots_ND, beside_ND)

        if group.size > 1:
            (every_B,) = group.all_gather(square_Bn)
            every_Br = every_B.view(group.size, *square_Bn.shape).transpose(0, 1).flatten(1)
            square_Bn, nearest_Bn = torch.topk(every_Br, NEIGHBOURS, dim=1, largest=False)
            row_Bn = row_Bn.gather(1, nearest_Bn % NEIGHBOURS)
            row_Bn = row_Bn.masked_fill(nearest_Bn // NEIGHBOURS != group.rank, NOBODY)
        far_Bn = torch.full_like(square_Bn, torch.inf)
        if slots or len(beside_WD):
            every = self._looks_at_all
            next_B = square_Bn[:, 1]
            far_Bn = look_closely(sketch_BD, square_Bn, row_Bn, sketches_of, every, next_B)
        if group.size > 1:
            (every_B,) = group.all_gather(far_Bn)
            far_Bn = every_B.view(group.size, *far_Bn.shape).amin(dim=0)
        return _Held(sketch_BD, key_BA, square_Bn[:, 0], row_Bn, far_Bn)

    def _follow_the_slots(self) -> None:
        """Put the keys of all slots that changed since the last batch into the index."""
        ids_k, born_k, k = self._memory.ids, self._memory.born, len(self._memory)
        if self._index.device != self.device or k < len(self._index):  # moved, or loaded
            self._forget()
        changed_k = born_k != self._born_K[:k]
        if self._looks_at_all:  # the host knows how many changed at most
            most = min(k, self._memory.written - self._written)
            changed = changed_k.to(torch.float32).topk(most).indices
        else:
            changed = changed_k.nonzero()[:, 0]
        for slots in torch.split(changed, at_a_time(self.device)):
            held = k if self._looks_at_all else None
            self._index.put(slots, self._keys_of(slots, ids_k[slots]), held)
        self._born_K[:k], self._written = born_k, self._memory.written

    def _remember(self, ids_B: Tensor, key_BA: Tensor, admitted_B: NDArray[np.bool_]) -> None:
        """Keep the keys of admitted newcomers, newest first."""
        in_b = torch.from_numpy(admitted_B.nonzero()[0]).to(self.device)
        self._ids_R = torch.cat([ids_B[in_b], self._ids_R])[:REMEMBERED]
        self._key_RA = torch.cat([key_BA[in_b], self._key_RA])[:REMEMBERED]

    def _keys_of(self, slots: Tensor, ids: Tensor) -> Tensor:
        """Return the keys of slots that hold these ids, remembered or computed.

        Two remembered samples with the same id may differ, so the keys of such ids are computed.
        """
        if not len(self._ids_R):
            return key(self._sketch_of(slots))
        id_R, row_R = self._ids_R.sort()
        first_N = torch.searchsorted(id_R, ids)
        once_N = torch.searchsorted(id_R, ids, right=True) - first_N == 1
        key_NA = self._key_RA[row_R[first_N.clamp(max=len(id_R) - 1)]]
        unknown = (~once_N).nonzero()[:, 0]
        if len(unknown):
            key_NA[unknown] = key(self._sketch_of(slots[unknown]))
        return key_NA

    def _forget(self) -> None:
        """Reset the index and the remembered keys."""
        capacity, dim, device = self._memory.capacity, KEY_SIDE**2, self.device
        self._index = SlotIndex(capacity, dim, device)
        self._born_K = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._ids_R = torch.empty(0, dtype=torch.int64, device=device)
        self._key_RA = torch.empty(0, dim, dtype=torch.float32, device=device)
        self._written = 0

    def _sketch_of(self, slots: Tensor) -> Tensor:
        images = self._memory.images
        assert images is not None  # checked by the constructor
        return sketch(images[slots.to(images.device)].to(self.device))

    @in_full_precision
    def state(self) -> dict[str, Tensor]:
        """Return the state that is needed besides the memory for the same answers."""
        self._follow_the_slots()  # `load` counts no changes that are still to come
        return self._index.state()

    @in_full_precision
    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`, with the memory as it was then."""
        self._forget()
        self._index.load(state)


def look_closely(
    sketch_BD: Tensor,
    square_Bn: Tensor,
    row_Bn: Tensor,
    sketches_of: Callable[[Tensor], Tensor],
    all_of_them: bool,
    next_B: Tensor | None = None,
) -> Tensor:
    """Return the distance of each sketch to its candidates, [B, n].

    It is infinite beyond reach, and for pictures below LIMIT whose colours differ.

    Args:
        sketch_BD: one sketch for each row of candidates.
        square_Bn: the squared distances of the keys; the nearest first, if `next_B` is given.
        row_Bn: the numbers of the candidates, or NOBODY.
        sketches_of: a function from N candidate numbers to their sketches [N, D].
        all_of_them: compute the distances of candidates beyond reach, too, because the number of
            those within reach is not known without a wait for the device.
        next_B: the squared distance of the key to the next picture after the nearest candidate. If
            the candidate is ALONE before it, find out whether one picture is cropped from the
            other. None: do not.
    """
    within_Bn, alone_B = square_Bn <= MOST_SQUARE, None
    if next_B is not None:
        alone_B = (square_Bn[:, 0] <= ALONE * next_B) & square_Bn[:, 0].isfinite()
        within_Bn[:, 0] |= alone_B
    within_Bn &= row_Bn != NOBODY
    pairs = _Pairs(sketch_BD, row_Bn, within_Bn, alone_B, sketches_of)
    return pairs.all() if all_of_them else pairs.within_reach()


class _Pairs(NamedTuple):
    """Sketches and their candidates, as in `look_closely`."""

    sketch_BD: Tensor
    row_Bn: Tensor
    within_Bn: Tensor  # whether the distance is needed
    alone_B: Tensor | None  # whether the first candidate is ALONE; None: not asked
    sketches_of: Callable[[Tensor], Tensor]

    def within_reach(self) -> Tensor:
        """Return the distances, [B, n]. The host waits for the number of those within reach."""
        row_Bn = self.row_Bn
        far_Bn = torch.full(row_Bn.shape, torch.inf, dtype=torch.float32, device=row_Bn.device)
        step = at_a_time(row_Bn.device)
        turn_N, place_N = self.within_Bn.nonzero(as_tuple=True)
        for turns, places in zip(
            torch.split(turn_N, step), torch.split(place_N, step), strict=True
        ):
            one_ND, other_ND = self.sketch_BD[turns], self.sketches_of(row_Bn[turns, places])
            far_Bn[turns, places] = _unless_recoloured(distance(one_ND, other_ND), one_ND, other_ND)
        if self.alone_B is not None:
            first_B = far_Bn[:, 0]
            for turns in torch.split(_are_unclear(first_B, self.alone_B).nonzero()[:, 0], step):
                one_ND, other_ND = self.sketch_BD[turns], self.sketches_of(row_Bn[turns, 0])
                least_N = torch.minimum(first_B[turns], zoomed_distance(one_ND, other_ND))
                first_B[turns] = _unless_recoloured(least_N, one_ND, other_ND)
        return far_Bn

    def all(self) -> Tensor:
        """Return the same without a wait for the device: compute all, and drop the others."""
        n, far, differ = self.row_Bn.shape[1], [], []
        step = at_a_time(self.row_Bn.device) // n
        parts = torch.split(self.sketch_BD, step), torch.split(self.row_Bn, step)
        for own_bD, row_bn in zip(*parts, strict=True):
            one_ND, other_ND = (
                own_bD.repeat_interleave(n, dim=0),
                self.sketches_of(row_bn.flatten()),
            )
            far_bn = distance(one_ND, other_ND).view(-1, n)
            if self.alone_B is not None:
                zoomed_b = zoomed_distance(own_bD, other_ND[::n])
                far_bn = torch.cat([far_bn, zoomed_b[:, None]], dim=1)
            far.append(far_bn)
            differ.append(recoloured(one_ND, other_ND).view(-1, n))
        far_Bm = torch.cat(far)
        far_Bn = torch.where(self.within_Bn, far_Bm[:, :n], torch.inf)
        if self.alone_B is not None:
            first_B, zoomed_B = far_Bn[:, 0], far_Bm[:, n]
            unclear_B = _are_unclear(first_B, self.alone_B)
            first_B.copy_(torch.where(unclear_B, torch.minimum(first_B, zoomed_B), first_B))
        return far_Bn.masked_fill_((far_Bn < LIMIT) & torch.cat(differ), torch.inf)


def _unless_recoloured(far_N: Tensor, one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """Return the distances, infinite for pictures that are near and have different colours."""
    near = (far_N < LIMIT).nonzero()[:, 0]
    far_N[near[recoloured(one_ND[near], other_ND[near])]] = torch.inf
    return far_N


def _are_unclear(first_B: Tensor, alone_B: Tensor) -> Tensor:
    """Return which samples may be cropped copies of their nearest candidate, bool [B]."""
    return alone_B & (first_B >= ALIKE) & (first_B < UNCLEAR)


class _Answer(NamedTuple):
    """An answer on the host: which samples are new, and the nearest candidate of each."""

    new_B: NDArray[np.bool_]
    distance_B: NDArray[np.float32]
    nearest_B: NDArray[np.int64]
    open_B: NDArray[np.bool_]  # the samples whose answer is not final
    again_B: NDArray[np.bool_]  # the samples to look up without their frames


class _Held(NamedTuple):
    """Look-ups, and the candidates that the ranks hold.

    A candidate of this rank is a slot k, or len(memory) + w for a picture beside the slots. A
    candidate of another rank is NOBODY.
    """

    sketch_RD: Tensor
    key_RA: Tensor
    square_R: Tensor  # the squared distance of the key to the nearest one that is held
    row_Rn: Tensor
    far_Rn: Tensor

    def and_then(self, other: _Held) -> _Held:
        """Return these look-ups and then the others."""
        return _Held(*(torch.cat(both) for both in zip(self, other, strict=True)))


class _LookUps(NamedTuple):
    """The look-ups of a batch: of its samples as they are, then of what some frames hold."""

    held: _Held
    behind: int  # number of the batch's first sample, after all candidates that are held
    again_B: Tensor  # the samples to look up without their frames, bool
    framed_F: Tensor  # the samples of the look-ups after the first B, int64 on the CPU

    def chosen(self, far_Rm: Tensor) -> Tensor | slice:
        """Return each sample's look-up whose nearest candidate is nearer."""
        count = len(self.again_B)
        if len(far_Rm) == count:
            return slice(None)
        nearest_R, framed_F = far_Rm.amin(dim=1), to_device(self.framed_F, far_Rm.device)
        inside_F = torch.arange(count, len(far_Rm), device=far_Rm.device)
        better_F = nearest_R[inside_F] < nearest_R[framed_F]
        look_B = torch.arange(count, device=far_Rm.device)
        return look_B.index_copy(0, framed_F, torch.where(better_F, inside_F, framed_F))

    def for_each(self, value_B: Tensor) -> Tensor:
        """Return the value of each look-up's sample, [R]."""
        if not len(self.framed_F):
            return value_B
        return torch.cat([value_B, value_B[to_device(self.framed_F, value_B.device)]])

    def any_of(self, flag_R: Tensor) -> Tensor:
        """Return whether a flag is set for any look-up of each sample, bool [B]."""
        if not len(self.framed_F):
            return flag_R
        flag_B, framed_F = flag_R[: len(self.again_B)], to_device(self.framed_F, flag_R.device)
        return flag_B.index_copy(0, framed_F, flag_B[framed_F] | flag_R[len(flag_B) :])

    def new(self, far_Rm: Tensor) -> Tensor:
        """Return which samples are new, given the distances to all candidates."""
        return ~_are_near(far_Rm[self.chosen(far_Rm)])

    def answer(self, far_Rm: Tensor, row_Rm: Tensor, new_B: Tensor, open_B: Tensor) -> _Answer:
        """Return the answer with these candidates. The host waits once."""
        look_B = self.chosen(far_Rm)
        far_B, best_B1 = far_Rm[look_B].min(dim=1, keepdim=True)
        row_B = row_Rm[look_B].gather(1, best_B1).masked_fill_(far_B.isinf(), NOBODY)
        columns = [new_B[:, None], far_B, row_B, open_B[:, None], self.again_B[:, None]]
        known_5B = to_host(torch.cat([it.double() for it in columns], dim=1).T).numpy()
        new, far, row, more, again = known_5B
        rows = row.astype(np.int64)
        return _Answer(new > 0, far.astype(np.float32), rows, more > 0, again > 0)


def _in_turn(looks: _LookUps, action: Action) -> _Answer:
    """Compare each sample with the nearest earlier admitted samples of its batch.

    Which samples are admitted depends on the answer, so the answer is found in rounds. Each round
    uses the answer of the previous round. A sample's answer is correct once the answers of all
    earlier samples are correct. The rounds therefore end with the answer of a loop over the
    samples.

    Args:
        looks: the look-ups, with the candidates that are held.
        action: as in `Duplicates`. "count" admits near-duplicates too.
    """
    held, count = looks.held, len(looks.again_B)
    sketch_BD, device = held.sketch_RD[:count], held.key_RA.device
    own_R, place_B = held.key_RA.square().sum(dim=1), torch.arange(count, device=device)
    place_R = looks.for_each(place_B)
    square_RB = torch.addmm(
        own_R[:, None] + own_R[:count], held.key_RA, held.key_RA[:count].T, alpha=-2
    )
    square_RB.masked_fill_(place_B >= place_R[:, None], torch.inf)
    nearest_R = square_RB.amin(dim=1) if count else own_R
    reach_R = (ALONE * held.square_R).clamp_(MOST_SQUARE, torch.finfo(own_R.dtype).max)
    open_R = nearest_R <= reach_R
    if action != "merge":  # an ALIKE held picture decides alone
        open_R &= held.far_Rn.amin(dim=1) >= ALIKE
    new_B = looks.new(held.far_Rn)
    answer = looks.answer(held.far_Rn, held.row_Rn, new_B, looks.any_of(open_R))
    if not answer.open_B.any():  # most samples have nothing within reach
        return answer
    near_Rm = held.far_Rn.new_full((len(own_R), min(NEIGHBOURS, count)), torch.inf)
    earlier_Rm = torch.zeros_like(near_Rm, dtype=torch.int64)
    open_B = torch.from_numpy(answer.open_B)
    row_r = to_device(looks.for_each(open_B).nonzero()[:, 0], device)
    square_rB, sketch_rD, held_r = square_RB[row_r], held.sketch_RD[row_r], held.square_R[row_r]
    asked_rm: Tensor | None = None
    while True:
        admitted_B = torch.ones_like(new_B) if action == "count" else new_B
        of_those_rB = square_rB.masked_fill(~admitted_B, torch.inf)
        square_rm, earlier_rm = torch.topk(of_those_rB, near_Rm.shape[1], dim=1, largest=False)
        next_r = square_rm[:, 1].minimum(held_r) if count > 1 else held_r
        was_rm, asked_rm = asked_rm, torch.cat([square_rm, earlier_rm, next_r[:, None]], dim=1)
        todo: Tensor | slice = slice(None)
        if was_rm is not None and device.type == "cpu":  # the other distances stay as they are
            todo = (asked_rm != was_rm).any(dim=1).nonzero()[:, 0]
        near_Rm[row_r[todo]] = look_closely(
            sketch_rD[todo],
            square_rm[todo],
            earlier_rm[todo],
            sketch_BD.__getitem__,
            device.type != "cpu",
            next_r[todo],
        )
        earlier_Rm[row_r] = earlier_rm
        far_Rm = torch.cat([held.far_Rn, near_Rm], dim=1)
        row_Rm = torch.cat([held.row_Rn, looks.behind + earlier_Rm], dim=1)
        was_B, new_B = new_B, looks.new(far_Rm)
        answer = looks.answer(far_Rm, row_Rm, new_B, was_B != new_B)
        if action == "count" or not answer.open_B.any():
            return answer


def _are_near(far_Bn: Tensor) -> Tensor:
    """Return which pictures are near-duplicates, given the distances to their candidates, [B]."""
    return are_near_duplicates(torch.topk(far_Bn, 2, dim=1, largest=False).values)
