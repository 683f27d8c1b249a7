"""The metrics, health and page of a learner, served from the first second of its start."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from jsonargparse import Namespace
from prometheus_client import CollectorRegistry

from stream_ssl.daemon import torchrun
from stream_ssl.daemon.endpoints import Announcement
from stream_ssl.daemon.page import announced, ending_of, page_sources, process_of, serve_page
from stream_ssl.daemon.ranks import Part
from stream_ssl.feed.quarantine import quarantine_folder
from stream_ssl.learning.checkpoint_layout import FOLDER
from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.health import STARTING, Health
from stream_ssl.observe.metrics import LearnerMetrics
from stream_ssl.observe.watch import Watched

log = logging.getLogger("stream_ssl.learner")


class LearnerServer:
    """A server of the metrics and the page, and a watch over the conditions.

    The learner is built afterwards, because this may take minutes.

    Args:
        settings: the parsed options, whose parts are not built yet.
        rank: the number of this process among the ranks.
        stack: closes the server and its threads.

    Attributes:
        metrics, health, page: what the server shows; the parts of the learner fill them.
        announcements: write this process's addresses into the run folder, and into the folder of
            a receiver outside the run folder.
    """

    def __init__(self, settings: Namespace, rank: int, stack: ExitStack) -> None:
        run = Path(settings.run)
        folders = {"checkpoints": run / FOLDER, "quarantine": quarantine_folder(run, rank)}
        self.metrics = LearnerMetrics(
            CollectorRegistry(),
            memories=(WORKING, *settings.shadows),
            classes=settings.classes,
            folders=folders,
        )
        self.health = Health()
        self.health.set("started", False, STARTING)
        self.page = page_sources(settings)
        watched = Watched(
            folders,
            journal=run / "journal",
            checkpoint_seconds=settings.checkpoints.every_seconds,
            first=rank == 0,
        )
        address = serve_page(
            settings, "learner", self.metrics, self.health, self.page, watched, stack, rank
        )
        self._run, self._addresses = run, {"http": address, **announced(settings)}
        self.announcements = [Announcement(run, torchrun.role(), **self._addresses)]
        log.info("page at %s/, metrics at %s/metrics", address, address)

    def link_receiver(self, part: Part) -> None:
        """Connect the page with the receiver whose journal this rank reads.

        If the receiver is outside the run folder, this process announces the receiver's folder in
        the run folder, and its own address in the receiver's folder. `stream-ssl status` of either
        folder, and the receiver's page, then find the whole run. The receiver's folder also names
        the record of how this process ended.
        """
        folder = part.folder.absolute()
        self.page.peer = partial(process_of, folder)
        self.page.gone = partial(ending_of, folder)
        if self._run.absolute() in (folder, folder.parent):
            return
        both = {**self._addresses, "receiver": str(folder)}
        self.announcements = [Announcement(self._run, torchrun.role(), **both)]
        if part.number == 0:
            ours = {**self._addresses, "record": str(self._run.absolute() / torchrun.role())}
            self.announcements.append(Announcement(folder, "learner", **ours))
