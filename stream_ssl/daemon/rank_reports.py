"""The figures that the ranks of a run exchange, for metrics, health and the page."""

from __future__ import annotations

import logging
import socket

from jsonargparse import Namespace

from stream_ssl.daemon.learner_server import LearnerServer
from stream_ssl.daemon.ranks import Part
from stream_ssl.journal.segment import journal_id
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.saved import Saved
from stream_ssl.observe.page.group import GroupView, Member

log = logging.getLogger("stream_ssl.learner")


class RankReports:
    """The reports of all ranks. All ranks must construct it together.

    Args:
        part: the journal of this rank.
        checkpointer: knows the journals of the run.
        saved: the checkpoint that the run resumes from.
        server: its metrics, health and page show the reports.
    """

    def __init__(
        self,
        ranks: Ranks,
        part: Part,
        checkpointer: Checkpointer,
        saved: Saved | None,
        settings: Namespace,
        server: LearnerServer,
    ) -> None:
        self._metrics, self._health = server.metrics, server.health
        own = {"host": socket.gethostname(), "journal": journal_id(part.folder / "journal")}
        members = [Member(**member) for member in ranks.tell(own)]
        parked = self._parked(members, checkpointer, settings) if part.apart else []
        if parked and not ranks.group.rank:
            unknown = sorted(set(settings.ranks.lost) - checkpointer.positions.journals)
            log.warning(
                "parked: %s. No rank reads the journals of these ids, and checkpoints "
                "keep their positions. Start the group with their hosts to continue "
                "reading them%s",
                ", ".join(parked),
                f". ranks.lost names none of them: {', '.join(unknown)}" if unknown else "",
            )
        known = checkpointer.positions.journals
        if part.apart and saved is not None and part.journal not in known and not part.number:
            log.warning(
                "journal %s in %s is new to this run: reading it from its beginning",
                part.journal,
                part.folder,
            )
        self._view = server.page.group = GroupView(members, parked, settings.memory.capacity)

    def _parked(
        self, members: list[Member], checkpointer: Checkpointer, settings: Namespace
    ) -> list[str]:
        """Return the run's journals that no rank reads, because their hosts are away."""
        read = {member.journal for member in members}
        parked = sorted(checkpointer.positions.journals - read - set(settings.ranks.lost))
        self._metrics.parked(len(parked))
        return parked

    def tell(self, learner: Learner) -> None:
        """Tell the other ranks whether this rank is ready, and export the figures of all ranks."""
        ranks, group = learner.ranks, learner.ranks.group
        if ranks.alone:
            return
        parts = self._health.ready().parts.items()
        ranks.ready = all(bool(part["ok"]) for name, part in parts if name != "ranks")
        unready = [str(rank) for rank, ready in enumerate(ranks.last.ready) if not ready]
        why = f"not ready: rank {', '.join(unready)}" if unready else ""
        self._health.set("ranks", not unready, why)
        slots = group.shares(learner.memory.occupied_of_all)
        self._metrics.observe_ranks([one.busy for one in ranks.work], slots, group)
        self._view.consume(learner.step, ranks.work, slots, ranks.last.offsets)
