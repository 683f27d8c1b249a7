"""The positions of all ranks' streams, as checkpoints store them.

A journal is divided among the ranks that read it. After a restart with another number of ranks, the
earlier divisions matter until all ranks have passed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from stream_ssl.batch import START, Offset
from stream_ssl.learning.checkpoint_layout import offset_as_json, offset_of
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.saved import Divisions, Saved


class StreamPositions:
    """The positions in the journals of a run.

    Args:
        ranks: the ranks of the run.

    Attributes:
        journal: id of the journal that this rank reads, to which offsets refer.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.journal: str | None = None
        self._before: Sequence[Sequence[Offset]] = ()  # earlier divisions of the journal
        self._journals: dict[str, Any] | None = None  # divisions by id, if there are several

    @property
    def journals(self) -> Set[str]:
        """Ids of the journals that the checkpoint knows, if ranks have their own journals."""
        return set(self._journals or ())

    def resume(self, saved: Saved) -> None:
        """Continue from the positions of a checkpoint."""
        self._before = saved.before(self._ranks.group.size)
        self.journal = saved.journal

    def read_apart(self, journal: str, saved: Saved | None) -> None:
        """Switch to one journal per rank, with `journal` for this rank. All ranks must call this.

        The positions in the checkpoint's other journals, which no rank reads now, are kept.
        """
        self.journal, self._before = journal, ()
        self._journals = {}
        if saved is not None and saved.journals is not None:
            self._journals |= saved.journals
        elif saved is not None and saved.journal is not None:
            self._journals[saved.journal] = [
                [offset_as_json(one) for one in offsets] for offsets in saved.divisions()
            ]

    def follow(self, journal: str | None) -> bool:
        """Set the journal of the next steps. Return whether it is a different journal."""
        before, self.journal = self.journal, journal or self.journal
        changed = before not in (None, self.journal)
        if changed:
            self._before = ()
        return changed

    def replayed_from(self, saved: Saved) -> Offset | None:
        """Return the smallest offset in this rank's journal that a run from a checkpoint reads.

        None: the checkpoint of step 0 needs nothing, because it starts at the beginning.

        Raises:
            ValueError, KeyError, TypeError: the facts are damaged.
        """
        if not saved.facts["step"]:
            return None
        if self._journals is None:
            return offset_of(saved.facts) if saved.journal in (None, self.journal) else START
        ended = saved.divisions(self.journal)
        return min(ended[-1]) if ended else START

    def facts(self, offset: Mapping[str, int]) -> dict[str, Any]:
        """Return the facts about the positions of all ranks. All ranks must call this.

        A single process with one journal that no other ranks have read needs no such facts.

        Args:
            offset: this rank's position.
        """
        if self._journals is not None:
            ranks = {"ranks": self._ranks.group.size, "offset": dict(offset)}
            return ranks | {"journals": self._divided(self._journals, offset)}
        if self._ranks.alone and not self._before:
            return {}
        offsets = [Offset(**position) for position in self._ranks.tell(dict(offset))]
        least = min(offsets)
        self._before = [ended for ended in self._before if max(ended) > least]
        divisions = [*self._before, offsets]
        return {
            "ranks": self._ranks.group.size,
            "offset": offset_as_json(least),
            "divisions": [[offset_as_json(one) for one in offsets] for offsets in divisions],
        }

    def _divided(self, journals: dict[str, Any], offset: Mapping[str, int]) -> Divisions:
        """Return the divisions of all journals. Those that no rank reads do not change."""
        read: dict[str, list[Offset]] = {}
        for journal, position in self._ranks.tell([self.journal, dict(offset)]):
            read.setdefault(journal, []).append(Offset(**position))
        for journal, offsets in read.items():
            before = [
                [Offset(**one) for one in divisions] for divisions in journals.get(journal, ())
            ]
            if before and len(before[-1]) == len(offsets):
                before.pop()  # the earlier position of the same ranks
            before = [ended for ended in before if max(ended) > min(offsets)]
            journals[journal] = [
                [offset_as_json(one) for one in ended] for ended in (*before, offsets)
            ]
        return dict(journals)
