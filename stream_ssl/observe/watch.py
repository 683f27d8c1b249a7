"""The decision which conditions of a process are present, from the process's own metrics.

A `Background` thread runs it every two seconds, so it also finds a main loop that has stopped. The
conditions of each role are in `receiver_checks.py` and `learner_checks.py`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from stream_ssl.observe import conditions as at
from stream_ssl.observe.catalogue import LAST_END
from stream_ssl.observe.conditions import CONDITIONS, OF_CHECK, PresentCondition
from stream_ssl.observe.health import Health
from stream_ssl.observe.learner_checks import LearnerChecks
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.receiver_checks import ReceiverChecks
from stream_ssl.observe.trends import Figures, Finding, Trends
from stream_ssl.observe.wording import duration, plural
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger("stream_ssl.health")


@dataclass(frozen=True)
class Watched:
    """The parts of a process that differ from run to run.

    Attributes:
        folders: the folders that the process writes, by purpose.
        journal: for a learner, the folder of the journal. The receiver reports on its disk.
        checkpoint_seconds: the configured seconds between two checkpoints.
        first: whether this process reports for all ranks.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    journal: Path | None = None
    checkpoint_seconds: float | None = None
    first: bool = True


class Watch:
    """A watch over a process's metrics and health that finds the present conditions.

    The start of a condition is logged as a WARNING, its end as INFO.

    Args:
        health: the loops and checks of the process. The watch sets `health.conditions`.
        export: exports the present conditions as metrics, by name and producer.
        hung: returns a sentence for each other process of the run that hangs.
    """

    def __init__(
        self,
        role: Role,
        registry: CollectorRegistry,
        health: Health,
        export: Callable[[Collection[tuple[str, str]]], None],
        watched: Watched | None = None,
        hung: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._role, self._registry, self._health, self._export = role, registry, health, export
        self._watched = watched = watched or Watched()
        self._hung, self._clock, self._wall = hung, clock, wall
        health.folders = {name: folder.absolute() for name, folder in watched.folders.items()}
        self._started = clock()
        self._trends = Trends(clock)
        self._checks: ReceiverChecks | LearnerChecks
        if role == "receiver":
            self._checks = ReceiverChecks(self._trends, health, clock, wall)
        else:
            seconds_between = watched.checkpoint_seconds
            self._checks = LearnerChecks(self._trends, seconds_between, watched.first, clock)
        self._present: dict[tuple[str, str], PresentCondition] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._said: dict[tuple[str, str], str] = {}
        self._log = RateLimitedLogger(log, seconds=600.0, lines=3)

    def try_look(self) -> None:
        """Look, and report to the health whether it worked. Call it every LOOK_SECONDS seconds."""
        try:
            self.look()
        except Exception as error:
            text = f"the conditions cannot be checked: {type(error).__name__}: {error}"
            self._health.set("conditions", False, text)
            self._log.log(logging.ERROR, "conditions", text, exc_info=True)
        else:
            self._health.set("conditions", True)

    def look(self) -> None:
        """Decide once which conditions are present."""
        now, figures = self._clock(), Figures(self._registry)
        found = {(name, who): says for name, who, says in self._findings(figures)}
        for key, says in found.items():
            self._seen[key] = now
            condition, old = CONDITIONS[key[0]], self._present.get(key)
            says = says or condition.summary.replace("{producer}", key[1] or "a producer")
            self._said[key] = says
            since, folders = old.since if old else self._wall(), self._health.folders
            remedy, where = condition.advice(folders), condition.where(folders)
            self._present[key] = PresentCondition(condition, key[1], says, since, remedy, where)
            if old is None:
                text = f"{key[0]} begins: {says}. {remedy} (runbook {key[0]}.md)"
                self._log.warning("/".join(key), text)
        for key in self._present.keys() - found.keys():
            says = f"{self._said[key]} (this ended {duration(now - self._seen[key])} ago)"
            self._present[key] = replace(self._present[key], says=says, over=True)
        for key in [one for one in self._present if now - self._seen[one] >= at.HOLD_SECONDS]:
            del self._present[key]
            text = f"{key[0]} ends; its last state: {self._said.pop(key)}"
            self._log.log(logging.INFO, "/".join((*key, "end")), text)
        self._export(tuple(self._present))
        severe = sorted(
            self._present.values(),
            key=lambda one: (one.condition.severity != "critical", one.since, one.producer),
        )
        self._health.conditions = tuple(severe)

    def _findings(self, figures: Figures) -> Iterator[Finding]:
        yield from self._process(figures)
        yield from self._disk(figures)
        yield from self._checks.findings(figures)

    def _process(self, figures: Figures) -> Iterator[Finding]:
        up = self._clock() - self._started
        for name, part in self._health.ready().parts.items():
            condition = OF_CHECK.get(name)
            if part["ok"] or condition is None or condition == "no-credit":
                continue
            if "seconds_since_tick" in part:
                ago = duration(float(str(part["seconds_since_tick"])))
                yield condition, "", f"the {name}'s main loop has made no round for {ago}"
            elif condition == "disk-low":
                yield condition, "", f"the run folder cannot be written: {part['detail']}"
            else:
                yield condition, "", f"{CONDITIONS[condition].summary}: {part['detail']}"
        if figures.get("starting") > 0 and up > at.START_SECONDS:
            yield "starting", "", f"the {self._role} has been starting for {duration(up)}"
        if figures.get("restarts_total") > 0 and up < at.RESTART_SECONDS:
            ended = os.environ.get(LAST_END) or "has died"
            restarts = plural(figures.get("restarts_total"), "restart")
            says = f"the {self._role} {ended} and was started again {duration(up)} ago"
            yield "restarting", "", f"{says}; {restarts} since stream-ssl run began"
        if hung := self._hung():
            yield "process-hung", "", "; ".join(hung)
        damaged = self._trends.rise("journal", at.EVENT_SECONDS, {
            name: figures.get(name)
            for name in ("journal_damaged_segments_total", "journal_corrupt_records_total")
        })  # fmt: skip
        if any(value > 0 for value in damaged.values()):
            count = sum(value for value in damaged.values() if value > 0)
            says = f"{plural(count, 'part')} of the journal was damaged"
            yield "journal-damaged", "", says

    def _disk(self, figures: Figures) -> Iterator[Finding]:
        """Yield at most one finding for all disks that are nearly full.

        The learner leaves out the disk of the journal, because the receiver reports it.
        """
        journal = None if self._watched.journal is None else device(self._watched.journal)
        least = at.DISK_CHECKPOINTS * figures.get("checkpoint_bytes")
        reported: set[int | None] = set() if journal is None else {journal}
        short: dict[Path, str] = {}
        for name, folder in self._watched.folders.items():
            folder = folder.absolute()
            disk, free = device(folder), figures.get("disk_free_bytes", folder=name)
            if disk not in reported and (files := free_files(folder)) < at.DISK_FILES:
                reported.add(disk)
                short[folder] = (
                    f"only {plural(files, 'more file')} can be made on the disk of {folder}, "
                    "whatever its free bytes: delete files there (df -i shows their number)"
                )
            elif free < at.DISK_BYTES and disk not in reported:
                reported.add(disk)
                short[folder] = f"{free / 1e6:,.0f} MB are left on the disk of {folder}"
            elif name == "checkpoints" and at.DISK_BYTES <= free < least:
                short[folder] = (
                    f"less than two checkpoints fit on the disk of {folder}: "
                    f"{free / 1e9:,.1f} GB are left"
                )
        if short:
            full = " and of ".join(map(str, short))
            self._health.folders = {**self._health.folders, "full": full}
            yield "disk-low", "", "; ".join(short.values())


def free_files(folder: Path) -> float:
    """Return how many more files the disk of a folder takes, by its free inodes.

    Return infinity if the file system sets no limit. A folder that does not exist yet is on the
    disk of its nearest parent.
    """
    for path in (folder, *folder.parents):
        try:
            disk = os.statvfs(path)
        except OSError:
            continue
        return disk.f_favail if disk.f_files else math.inf
    return math.inf


def device(folder: Path) -> int | None:
    """Return the device id of the disk of a folder, or of its nearest readable parent.

    Return None if no parent is readable.
    """
    for path in (folder, *folder.parents):
        try:
            return path.stat().st_dev
        except OSError:
            continue
    return None
