"""Shares: each producer keeps a part of the slots under any eviction policy.

A newcomer joins first. Then the policy chooses a sample to evict among the producers that hold more
than their guarantee. A producer below its guarantee therefore grows with each admitted newcomer. A
producer at its guarantee loses slots only to its own newcomers.

All values are derived from the memory's column `producers`, so a state contains nothing else.

Shapes: B newcomers, K slots of all ranks, P producers, n slots of some ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.checks import check_number
from stream_ssl.memory.columns import REFUSED, Columns
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.memory.process_group import RankGroup

if TYPE_CHECKING:
    from stream_ssl.memory.eviction.base import Policy

NAMELESS = 0
"""The key of samples without a producer. They have no guarantee."""

HALF = 0.5

MOST_NAMES = 1 << 16
"""The largest number of producer names to keep, besides the names of the slots' producers."""

NAME_BYTES = 256
"""The bytes of a name that ranks exchange."""

SPARE = 1024
"""The number of producers without a slot to keep, besides as many as hold a slot."""

Owners = NDArray[np.int64]
Flags = NDArray[np.bool_]


@lru_cache(maxsize=1 << 16)
def key_of(name: str | None) -> int:
    """Return the number that represents a producer in the memory: positive, or 0 for None.

    >>> key_of(None), key_of("yard") == key_of("yard") > 0
    (0, True)
    """
    if name is None:
        return NAMELESS
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


@dataclass(frozen=True)
class Shares:
    """The number of slots that each producer is guaranteed.

    The producers that hold a slot, and the newcomer's producer, divide `part` of all slots by their
    weights.

    Args:
        part: the part of the slots that is guaranteed, at least 0 and below 1. The rest is free to
            all.
        weights: weights of producers by name, each at least 0. Producers without an entry have
            weight 1.

    >>> Shares.of({"yard": 3}).part
    0.5
    """

    part: float = HALF
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= check_number("shares", self.part) < 1:
            raise ValueError(
                f"shares is {self.part}: must be at least 0 and below 1; 0.5 guarantees each "
                "producer half of an equal share"
            )
        for name, weight in self.weights.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"shares name a producer {name!r}: must be a name, a string")
            if check_number(f"the share of {name}", weight) < 0:
                raise ValueError(f"the share of {name} is {weight}: must be at least 0")

    @classmethod
    def of(cls, given: Any) -> Shares | None:
        """Build shares from a number, or from weights by name. None means no shares."""
        if given is None or isinstance(given, Shares):
            return given
        if isinstance(given, Mapping):
            return cls(weights=dict(given))
        return cls(part=given)

    def by_key(self) -> dict[int, float]:
        """Return the weights by key."""
        named = {key_of(name): float(weight) for name, weight in self.weights.items()}
        return named | {NAMELESS: 0.0}

    def holdings(self, key_k: Tensor, slots: int) -> dict[int, Holding]:
        """Return what each producer holds and is guaranteed, by key.

        Args:
            key_k: the producer key of each occupied slot.
            slots: the number of slots that the guarantees divide.
        """
        keys, held_P = np.unique(key_k.numpy(), return_counts=True)
        weights = self.by_key()
        weight_P = np.array([weights.get(key, 1.0) for key in keys.tolist()])
        guaranteed_P = self.guaranteed(held_P > 0, weight_P, slots)
        columns = keys.tolist(), held_P.tolist(), guaranteed_P.tolist()
        return {key: Holding(held, kept) for key, held, kept in zip(*columns, strict=True)}

    def guaranteed(self, there_P: Flags, weight_P: NDArray[np.float64], slots: int) -> Owners:
        """Return the slots that each producer is guaranteed, int64 [P]; 0 for absent producers."""
        weight_P = np.where(there_P, weight_P, 0.0)
        total = math.fsum(weight_P.tolist())  # independent of the order of producers
        if total <= 0:
            return np.zeros(len(weight_P), dtype=np.int64)
        return np.floor(self.part * slots * weight_P / total).astype(np.int64)


class Holdings:
    """The producer of each slot, and the slots that each producer holds; the same on all ranks.

    Producers are numbered in the order in which they appear. `columns` are read only by the
    constructor.
    """

    def __init__(self, columns: Columns, shares: Shares) -> None:
        self.shares, self.capacity = shares, columns.capacity_of_all
        self.group: RankGroup = columns.group
        self._weights = shares.by_key()
        (key_K,) = columns.group.all_gather(columns.producers)
        by_rank_WK = to_host(key_K).view(columns.group.size, -1)  # slot j is on rank j mod W
        key_k = by_rank_WK.T.flatten()[: columns.occupied_of_all].numpy()
        keys, owner_k = np.unique(key_k, return_inverse=True)
        self.owner_K: Owners = np.zeros(self.capacity, dtype=np.int64)
        self.owner_K[: len(owner_k)] = owner_k
        self._number = {key: number for number, key in enumerate(keys.tolist())}
        self.held_P: Owners = np.bincount(owner_k, minlength=len(keys)).astype(np.int64)
        self.weight_P = np.array([self._weights.get(key, 1.0) for key in self._number])

    @property
    def crowded(self) -> bool:
        """Whether so many producers hold no slot that the holdings should be rebuilt."""
        return len(self.held_P) > 2 * int((self.held_P > 0).sum()) + SPARE

    def owners(self, key_B: Owners) -> Owners:
        """Return the number of each newcomer's producer."""
        keys, inverse_B = np.unique(key_B, return_inverse=True)
        new = [key for key in keys.tolist() if key not in self._number]
        if new:
            self._number |= {key: len(self._number) + more for more, key in enumerate(new)}
            weights = [self._weights.get(key, 1.0) for key in new]
            self.weight_P = np.concatenate([self.weight_P, weights])
            self.held_P = np.concatenate([self.held_P, np.zeros(len(new), dtype=np.int64)])
        numbers = np.array([self._number[key] for key in keys.tolist()], dtype=np.int64)
        return numbers[inverse_B]

    def fill(self, slots: Owners, owner_B: Owners) -> None:
        """Record that newcomers took these distinct slots, which were empty."""
        self.owner_K[slots] = owner_B
        self.held_P += np.bincount(owner_B, minlength=len(self.held_P))

    def take(self, slots: Owners, owner_B: Owners) -> None:
        """Record that newcomers took these slots in turn; -1 means a refusal."""
        joins = slots != REFUSED
        slots, owner_B = slots[joins], owner_B[joins]
        once = np.unique(slots)
        count = len(self.held_P)
        self.held_P -= np.bincount(self.owner_K[once], minlength=count)
        self.owner_K[slots] = owner_B  # the last newcomer of several stays
        self.held_P += np.bincount(self.owner_K[once], minlength=count)


class Turns:
    """Newcomers that take slots in turn, and the producers whose slots each newcomer may not take.

    Args:
        holdings: the holdings before the first newcomer. They are not changed.
        owner_B: the number of each newcomer's producer.

    Attributes:
        owner_K: the number of each slot's producer before the first newcomer.
        group: the ranks that hold the slots.
    """

    def __init__(self, holdings: Holdings, owner_B: Owners) -> None:
        self._holdings, self.owner_B = holdings, owner_B
        self.group = holdings.group
        self.owner_K, self._held_P = holdings.owner_K, holdings.held_P
        self._guaranteed: dict[bytes, Owners] = {}

    def __getitem__(self, part: slice) -> Turns:
        return Turns(self._holdings, self.owner_B[part])

    def guaranteed(self, there_P: Flags) -> Owners:
        """Return the slots guaranteed to each producer while producers `there_P` are present."""
        known = there_P.tobytes()
        if known not in self._guaranteed:
            holdings = self._holdings
            self._guaranteed[known] = holdings.shares.guaranteed(
                there_P, holdings.weight_P, holdings.capacity
            )
        return self._guaranteed[known]

    def shut(self) -> Tensor:
        """Return which slots are closed to the first newcomer, bool [K + 1] on the CPU.

        The last value says whether the newcomer must join.
        """
        return torch.from_numpy(Walk(self).barred(0)[np.append(self.owner_K, self.owner_B[0])])

    def are_free(self) -> bool:
        """Return whether every newcomer may take any slot.

        This is so if no producer can fall below its guarantee, even if all newcomers of other
        producers take its slots.
        """
        held_P, weight_P = self._held_P, self._holdings.weight_P
        there_P = held_P > 0
        if not (there_P | (weight_P == 0))[self.owner_B].all():
            return False
        others_P = len(self.owner_B) - np.bincount(self.owner_B, minlength=len(held_P))
        enough_P = held_P - self.guaranteed(there_P) >= others_P
        return bool((enough_P | ~there_P | (weight_P == 0)).all())


class Walk:
    """One pass through turns from the first newcomer on. Earlier evictions change its answers."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held_P = turns._held_P.copy()
        self._owner_B = turns.owner_B

    def barred(self, turn: int) -> Flags:
        """Return the producers whose slots this newcomer may not take, bool [P].

        They include the newcomer's own producer if it is below its guarantee.
        """
        held_P = self._held_P
        own = self._owner_B[turn]
        held_P[own] += 1
        barred_P: Flags = held_P <= self._turns.guaranteed(held_P > 0)
        held_P[own] -= 1
        return barred_P

    def move(self, turn: int, owner: int) -> None:
        """Record that this newcomer joined and that a sample of producer `owner` left."""
        self._held_P[self._owner_B[turn]] += 1
        self._held_P[owner] -= 1


class Gate:
    """The candidates and newcomers that each step may evict, for duel/simulate.py.

    Args:
        turns: the turns of the newcomers.
        slot_c: the slots of the candidates.
    """

    def __init__(self, turns: Turns, slot_c: Tensor) -> None:
        self._walk, self._owner_K = Walk(turns), turns.owner_K
        owner_c = turns.owner_K[to_host(slot_c).numpy()]
        self._owner_W = np.concatenate([owner_c, turns.owner_B])  # of each column
        self._barred: list[Flags] = []

    def shut(self, columns: int) -> Flags:
        """Return which of the first `columns` columns the next newcomer may not take, bool."""
        barred_P = self._walk.barred(len(self._barred))
        self._barred.append(barred_P)
        shut_W: Flags = barred_P[self._owner_W[:columns]]
        return shut_W

    def may_take(self, slot: int, column: int | None) -> bool:
        """Return whether the newcomer of the last `shut` may take this slot.

        Args:
            slot: a slot of any rank.
            column: the column that stands in it; None if it is no candidate's slot.
        """
        owner = self._owner_K[slot] if column is None else self._owner_W[column]
        return not self._barred[-1][owner]

    def leaves(self, column: int) -> None:
        """Record that the sample of this column leaves at the step of the last `shut`."""
        self._walk.move(len(self._barred) - 1, int(self._owner_W[column]))

    def barred(self, steps: int, groups: Groups) -> Barred:
        """Return what was barred at the first `steps` steps, for the slots of these groups."""
        return Barred(np.stack(self._barred[:steps]), groups.owner_n)


class Groups:
    """The slots of this rank's shard, grouped by whether newcomers may take them.

    Args:
        turns: the turns of the newcomers.
        device: the device of the attributes.

    Attributes, bool [n] except the first:
        owner_n: the number of each slot's producer.
        first_n: slots that the first newcomer may take.
        open_n: slots that all newcomers may take: their producer holds more than its guarantee.
        own_n: slots that only some newcomers may take: the producer holds exactly its guarantee,
            and the batch contains newcomers of it; or the first newcomer may take them, because it
            is of a new producer, which lowers the guarantees of the others.
    """

    def __init__(self, turns: Turns, device: torch.device) -> None:
        group = turns.group
        own_n = np.ascontiguousarray(turns.owner_K[group.rank :: group.size])
        self.owner_n = to_device(torch.from_numpy(own_n), device)
        held_P = turns._held_P
        guaranteed_P = turns.guaranteed(held_P > 0)
        comes_P = np.isin(np.arange(len(held_P)), turns.owner_B)
        first_P = ~Walk(turns).barred(0)
        self.first_n, self.open_n, self.own_n = (
            to_device(torch.from_numpy(of_P), device)[self.owner_n]
            for of_P in (
                first_P,
                held_P > guaranteed_P,
                ((held_P == guaranteed_P) & comes_P) | first_P,
            )
        )

    def at(self, index: Tensor) -> Groups:
        """Return the groups of these slots only."""
        found = copy(self)
        for name in ("owner_n", "first_n", "open_n", "own_n"):
            setattr(found, name, getattr(self, name)[index])
        return found

    def largest(self, value_n: Tensor, count: int) -> Tensor:
        """Return the positions of the largest values, in ascending order of position.

        The result has `count` of the slots open to all newcomers. It also has a quarter as many of
        the slots that are open only to newcomers of their own producer.
        """
        found = [
            value_n.masked_fill(~group_n, -torch.inf).topk(min(number, len(value_n))).indices
            for group_n, number in ((self.open_n, count), (self.own_n, -(-count // 4)))
        ]
        slots: Tensor = torch.cat(found).sort().values
        first = torch.ones_like(slots, dtype=torch.bool)
        first[1:] = slots[1:] != slots[:-1]
        return slots[first]


class SlotWalk:
    """A walk that also tracks the producer of each slot."""

    def __init__(self, turns: Turns) -> None:
        self._walk, self._owner_B = Walk(turns), turns.owner_B
        self.owner_K = turns.owner_K.copy()
        self._turn = 0

    def open(self) -> Flags:
        """Return the slots that the next newcomer may take, bool [K]."""
        open_K: Flags = ~self._walk.barred(self._turn)[self.owner_K]
        return open_K

    def first_open(self, tried_R: Sequence[int]) -> int:
        """Return the first of these slots that the next newcomer may take, see `random.walked`."""
        barred_P = self._walk.barred(self._turn)
        if tried_R[0] == REFUSED:
            if not barred_P[self._owner_B[self._turn]]:
                return REFUSED
            tried_R = tried_R[1:]
        for slot in tried_R:
            if not barred_P[self.owner_K[slot]]:
                return slot
        open_n = np.flatnonzero(~barred_P[self.owner_K])
        return int(open_n[tried_R[-1] * len(open_n) // len(self.owner_K)])

    def take(self, slot: int) -> None:
        """Record that the next newcomer takes this slot, or is refused if the slot is -1."""
        if slot != REFUSED:
            self._walk.move(self._turn, int(self.owner_K[slot]))
            self.owner_K[slot] = self._owner_B[self._turn]
        self._turn += 1


class Barred:
    """The producers barred at each step, in the form that the engines use.

    Args:
        barred_TP: bool, the barred producers by step.
        owner_n: the number of each slot's producer, on a device.
    """

    def __init__(self, barred_TP: Flags, owner_n: Tensor) -> None:
        self._owner_n, device = owner_n, owner_n.device
        pattern_UP, of_T = np.unique(barred_TP, axis=0, return_inverse=True)
        self.pattern_T: list[int] = of_T.reshape(-1).tolist()
        self._barred_PT = to_device(torch.from_numpy(barred_TP.T.copy()), device)
        self._patterns_PU = to_device(torch.from_numpy(pattern_UP.T.copy()), device)

    def penalties(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Return -inf for barred slots and 0 for others, [U, b].

        `pattern_T` maps each step to its row.
        """
        barred_bU = self._patterns_PU[self._owner_n[part]]
        zero_bU = torch.zeros(barred_bU.shape, dtype=dtype, device=barred_bU.device)
        return zero_bU.masked_fill_(barred_bU, -torch.inf).T.contiguous()

    def steps(self, index: Tensor | slice | None = None) -> Tensor:
        """Return at which steps each of these slots is barred, bool [R, T].

        None means all slots.
        """
        return self._barred_PT[self._owner_n if index is None else self._owner_n[index]]

    def always(self) -> Tensor:
        """Return whether each slot is barred at every step, bool [n]."""
        return self._barred_PT.all(dim=1)[self._owner_n]

    def sometimes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the slots that are barred at some steps but not at all, by producer, with these
        steps.
        """
        some_P = self._barred_PT.any(dim=1) & ~self._barred_PT.all(dim=1)
        for owner in to_host(some_P.nonzero()[:, 0]).tolist():
            slots = (self._owner_n == owner).nonzero()[:, 0]
            if len(slots):
                yield slots, self._barred_PT[owner]


class Holding(NamedTuple):
    """The slots of one producer."""

    slots: int  # slots that it holds
    guaranteed: int  # slots that it keeps once it holds them


class ProducerNames:
    """The names, by key, of producers that hold a slot or were seen recently.

    Args:
        names: the initial names.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {key_of(name): name for name in names}
        self._met: set[int] = set()  # keys whose names all ranks have; the same on all ranks

    def meet(self, key_B: Tensor, own: slice, group: RankGroup, device: torch.device) -> None:
        """Exchange the names of producers whose keys come for the first time.

        All ranks must make this call, with the same keys.

        Args:
            key_B: the keys of the newcomers of all ranks, on the CPU.
            own: the positions of this rank's newcomers among them.
            group: the ranks.
            device: the device of the tensors that ranks send to each other.
        """
        new = {*key_B.tolist()} - self._met - {NAMELESS}
        if not new:
            return
        if len(self._met) > MOST_NAMES:
            self._met.clear()
        self._met |= new
        mine = {key: self._names[key] for key in {*key_B[own].tolist()} & new}
        packed = [name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0") for name in mine.values()]
        name_RN = torch.frombuffer(bytearray(b"".join(packed) or b"\0"), dtype=torch.uint8)
        name_RN = name_RN[: len(mine) * NAME_BYTES].view(-1, NAME_BYTES)
        key_R = torch.tensor([*mine], dtype=torch.int64)
        key_R, name_RN = group.all_gather(key_R.to(device), name_RN.to(device))
        for key, name in zip(to_host(key_R).tolist(), to_host(name_RN), strict=True):
            text = name.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            self._names.setdefault(key, text)

    def keys(self, producers: Any, count: int, held_k: Tensor) -> Tensor:
        """Return the key of each name, int64 [B], and remember the names.

        If there are too many names, only the names of the slots' keys are kept.
        """
        names = check_names(producers, count)
        if len(self._names) > MOST_NAMES:
            held = to_host(torch.unique(held_k)).tolist()
            self._names = {key: self._names[key] for key in held if key in self._names}
        self._names |= {key_of(name): name for name in set(names) if name is not None}
        return torch.tensor([key_of(name) for name in names], dtype=torch.int64)

    def of(self, key: int) -> str | None:
        """Return the name of a key, or the key in hexadecimal digits if the name is unknown."""
        return None if key == NAMELESS else self._names.get(key, f"{key:016x}")

    def held(self, keys: Iterable[int]) -> list[str]:
        """Return the names of these keys, as far as they are known."""
        return [self._names[key] for key in keys if key in self._names]


def check_kept(policy: Policy) -> None:
    """Raise ValueError unless the policy can keep shares."""
    if not policy.keeps_shares:
        raise ValueError(
            f"eviction {policy.name} cannot keep shares of producers: set shares to None "
            "(`memory.shares: null` in a configuration), or give the policy a method choose_shared"
        )


def check_names(producers: Any, count: int) -> Sequence[str | None]:
    """Return the names of producers after checking that there is one for each row."""
    if isinstance(producers, str) or not hasattr(producers, "__len__"):
        raise ValueError(f"producers are {producers!r}: must be names, one for each row")
    if len(producers) != count:
        raise ValueError(f"{len(producers)} producers for {count} rows: must be one for each row")
    wrong = next((n for n in producers if not (n is None or (isinstance(n, str) and n))), None)
    if wrong is not None or "" in producers:
        raise ValueError(f"a producer is {wrong!r}: must be a name, a string, or None")
    return producers  # type: ignore[no-any-return]
