"""Verdicts for producers that ask for them: which of their samples the memory keeps.

Shapes: B samples of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream_ssl.batch import Origin
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import Admission
from stream_ssl.memory.compute import to_host
from stream_ssl.observe.slot_history import SlotHistory
from stream_ssl.wire.messages import Verdict

if TYPE_CHECKING:
    from stream_ssl.receiver.verdicts import VerdictSender


class VerdictFeed:
    """A feed that sends producers the verdicts on their samples, on the learner's thread.

    Args:
        history: the history of the slots. It must consume each record before the feed does.
        sender: sends the verdicts. The feed makes none unless `sender.wanted` is true.
    """

    def __init__(self, history: SlotHistory, sender: VerdictSender) -> None:
        self._history, self._sender = history, sender

    def consume(self, record: StepRecord) -> None:
        """Send the verdicts of one record: kept, refused and evicted samples."""
        if not self._sender.wanted:
            return
        verdicts: dict[str, list[Verdict]] = defaultdict(list)
        for origin in record.dropped_origins:
            if origin is not None:
                verdict = Verdict(origin.source, origin.id, "refused", near=True)
                verdicts[origin.producer].append(verdict)
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
            verdict = Verdict(origin.source, origin.id, what, count, number in near)
            verdicts[origin.producer].append(verdict)
        for gone in self._history.latest:
            if gone.origin is not None:
                verdict = Verdict(gone.origin.source, gone.origin.id, "evicted", age=gone.age)
                verdicts[gone.origin.producer].append(verdict)
