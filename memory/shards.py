"""A memory that several ranks hold: gather newcomers, send images, redistribute shards.

Shapes: B newcomers of all ranks, W ranks, C H W image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.memory.duplicates import Duplicates
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.process_group import RankGroup
from stream_ssl.memory.state import State, encode_names, part, producer_names, shard_of, totals_of

RANK_SEEDS = 1000
"""The distance between the seeds of two ranks. The seeds within one memory are consecutive."""


def check_shareable(
    capacity: int,
    group: RankGroup,
    policy: Policy,
    duplicates: Duplicates | None,
) -> None:
    """Raise ValueError unless several ranks can hold a memory with these parts together."""
    if capacity % group.size:
        lower = capacity - capacity % group.size
        raise ValueError(
            f"capacity {capacity} cannot be divided by {group.size} ranks: choose {lower} or "
            f"{lower + group.size}, or other ranks"
        )
    if not policy.across_ranks:
        said = ", ".join(f"{name}={value!r}" for name, value in policy.settings().items())
        raise ValueError(
            f"eviction {policy.name}{said and f' with {said}'} looks at the slots of one process, "
            f"and {group.size} ranks hold this memory: choose Duel or MostDuplicated with "
            'index="exact", Redundant, or Oldest'
        )
    if duplicates is not None and duplicates.action == "merge":
        raise ValueError(
            f"duplicates are merged in one process alone, and {group.size} ranks hold this memory: "
            'choose the action "count" or "refuse"'
        )
    if duplicates is not None and duplicates.threshold == "auto":
        raise ValueError(
            f"duplicates are compared closely in one process alone, and {group.size} ranks hold "
            'this memory: choose a cosine as threshold. learner.novelty can be "auto" on any '
            "number of ranks"
        )


class Meeting:
    """The newcomers of all ranks, in order of rank, without their images.

    Args:
        own: this rank's newcomers.
        added: the number of samples offered to the memory before.
        columns: the columns of this shard.

    Attributes:
        rows: the newcomers of all ranks.
        batch: the positions of this rank's newcomers among them.
    """

    def __init__(self, own: Rows, added: int, columns: Columns) -> None:
        self._columns, self._images, group = columns, own.images, columns.group
        rank_B = torch.full_like(own.ids, group.rank)
        own_key_B = torch.zeros_like(own.ids)
        if own.producers is not None:
            own_key_B = to_device(own.producers, own.ids.device)
        number_B5 = torch.stack([own.ids, own.labels, own.hashes, rank_B, own_key_B], dim=1)
        apart = own.descriptors is not own.embeddings
        row_BX = torch.cat([own.embeddings, own.descriptors], 1) if apart else own.embeddings
        number_B5, row_BX = group.all_gather(number_B5, row_BX)
        ids, labels, hashes, rank_B, key_B = number_B5.unbind(1)
        z_BD = row_BX[:, : own.embeddings.shape[1]].contiguous()
        born = torch.arange(added, added + len(ids), device=ids.device)
        descriptors = row_BX[:, z_BD.shape[1] :].contiguous() if apart else z_BD
        self.rows = Rows(
            ids.contiguous(),
            z_BD,
            descriptors,
            labels,
            hashes,
            born,
            producers=to_host(key_B.contiguous()),
        )
        self._rank_B = rank_B.cpu()
        counts: list[int] = torch.bincount(self._rank_B, minlength=group.size).tolist()
        first = sum(counts[: group.rank])
        self.batch = slice(first, first + counts[group.rank])

    def send_images(self, slot_B: Tensor) -> None:
        """Send the images of newcomers that stay to the ranks of their slots, and write them there.

        Args:
            slot_B: slots numbered over all ranks; -1 for a newcomer that did not join or has left
                again.
        """
        images, group, column = self._images, self._columns.group, self._columns.images
        if images is None or column is None:
            return
        ranks = range(group.size)
        to_B = torch.where(slot_B >= 0, slot_B % group.size, -1)
        sent = [(to_B[self.batch] == rank).nonzero()[:, 0] for rank in ranks]
        comes = [((to_B == group.rank) & (self._rank_B == rank)).nonzero()[:, 0] for rank in ranks]
        chosen = images[torch.cat(sent).to(images.device)]
        found_RCHW = group.send(
            to_device(chosen, self._columns.device),
            [len(rows) for rows in sent],
            [len(rows) for rows in comes],
        )
        slots = to_device(group.own(slot_B[torch.cat(comes)]), self._columns.device)
        column.write(slots, found_RCHW.to(column.data_KCHW.device))


def resharded(states: Sequence[State], rank: int, size: int) -> State:
    """Return the state of one rank of `size`, made from the states of all ranks that saved.

    Every slot is kept once. Policies count again from the rows, and random draws use new seeds.

    Args:
        states: results of `WorkingMemory.state_dict`, in any order.
        rank, size: the rank for which the state is made, and the new number of ranks.

    Raises:
        ValueError: a rank's state is missing, or the states belong to different moments.
    """
    by_rank = {shard_of(state)[0]: state for state in states}
    saved = shard_of(states[0])[1]
    if sorted(by_rank) != list(range(saved)) or len(states) != saved:
        raise ValueError(
            f"states of ranks {sorted(shard_of(state)[0] for state in states)} of {saved}: give "
            "the state of each rank once"
        )
    first = by_rank[0]
    if any(not torch.equal(state["counters"], first["counters"]) for state in states):
        raise ValueError("the states are not of one moment: give the states of one checkpoint")
    totals = totals_of(first)
    held = totals.inserted - totals.evicted
    state = {name: first[name] for name in ("counters", "description", "drift")}
    for name, column in part(first, "columns").items():
        whole = column.new_empty(held, *column.shape[1:])
        for old, saved_state in by_rank.items():
            whole[old::saved] = saved_state[f"columns.{name}"]
        state[f"columns.{name}"] = whole[rank::size].clone()
    generator = torch.Generator().manual_seed(totals.added + RANK_SEEDS * rank)
    state |= {"generator": generator.get_state(), "resharded": torch.ones(1)}
    state |= {name: first[name] for name in ("eviction.head", "seed") if name in first}
    state |= {name: value for name, value in first.items() if name.startswith("descriptor.")}
    names = {name for each in states for name in producer_names(each)}
    state["producer_names"] = encode_names(names)
    return state | ({"shard": torch.tensor([rank, size])} if size > 1 else {})
