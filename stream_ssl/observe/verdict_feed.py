"""How samples fared in the memory, for the producers that asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from memory import Admission
from memory.compute import to_host
from stream_ssl.batch import Origin
from stream_ssl.learning.records import StepRecord
from stream_ssl.observe.slot_history import SlotHistory
from stream_ssl.wire.messages import Verdict


class Sender(Protocol):
    """Who takes verdicts away; see `stream_ssl.ingest.verdicts.VerdictSender`."""

    @property
    def wanted(self) -> bool: ...
    def send(self, verdicts: dict[str, list[Verdict]]) -> None: ...


class VerdictFeed:
    """Tells of each step's newcomers and evictions; on the learner's thread.

    Args:
        slots: what is known of the slots, which has consumed the same record before.
        sender: where to. Nothing is put together unless it is wanted.
    """

    def __init__(self, slots: SlotHistory, sender: Sender) -> None:
        self._slots, self._sender = slots, sender

    def consume(self, record: StepRecord) -> None:
        """Take one record."""
        if not self._sender.wanted:
            return
        verdicts: dict[str, list[Verdict]] = defaultdict(list)
        for origin in record.turned_away:
            if origin is not None:
                told = Verdict(origin.source, origin.id, "refused", near=True)
                verdicts[origin.producer].append(told)
        if record.admission is not None and record.origins_B is not None:
            self._admitted(record, record.admission, record.origins_B, verdicts)
        if verdicts:
            self._sender.send(verdicts)

    def _admitted(
        self,
        record: StepRecord,
        admission: Admission,
        origins_B: Sequence[Origin | None],
        verdicts: dict[str, list[Verdict]],
    ) -> None:
        refused, near = set(admission.refused.tolist()), set(admission.duplicates.tolist())
        counts: list[float | None] = [None] * len(origins_B)
        if record.duplicates_B is not None:
            counts = to_host(record.duplicates_B).tolist()
        ids = to_host(record.ids_B).tolist()
        for number, origin, count in zip(ids, origins_B, counts, strict=True):
            if origin is None:
                continue
            what = "refused" if number in refused else "kept"
            told = Verdict(origin.source, origin.id, what, count, number in near)
            verdicts[origin.producer].append(told)
        for gone in self._slots.latest:
            if gone.origin is not None:
                told = Verdict(gone.origin.source, gone.origin.id, "evicted", age=gone.age)
                verdicts[gone.origin.producer].append(told)
