"""Which records of one journal each of several ranks reads: no sample twice, none left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stream_ssl.batch import Offset


@dataclass(frozen=True, slots=True)
class JournalShare:
    """The records that one rank reads: every W-th.

    Args:
        rank, ranks: which, of how many.
        before: for each earlier number of ranks, the offset that each rank had reached: what was
            read then is not read again.
    """

    rank: int = 0
    ranks: int = 1
    before: Sequence[Sequence[Offset]] = ()

    def first(self, record: int) -> int | None:
        """The first sample of a record that is this rank's to read; None where none is."""
        if record % self.ranks != self.rank:
            return None
        first = 0
        for offsets in self.before:
            ended = offsets[record % len(offsets)]
            if record < ended.record:
                return None
            if record == ended.record:
                first = max(first, ended.sample)
        return first
