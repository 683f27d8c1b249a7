"""The decision which conditions of a process are present, from the process's own metrics.

A `Background` thread runs it every two seconds, so it also finds a main loop that has stopped.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.registry import RestrictedRegistry

from stream_ssl.observe import conditions as at
from stream_ssl.observe.conditions import CONDITIONS, OF_CHECK, Lit, plural
from stream_ssl.observe.health import Health
from stream_ssl.observe.metric_spec import PREFIX, Role
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger("stream_ssl.health")

EVERY = 2.0
"""Seconds between two looks."""
GAPS_KEPT, LEAST_GAPS = 64, 3
KEYS = frozenset({"denied", "unauthorised", "no-key", "plain-receiver", "server-key"})
"""Reasons of refusal that concern a key."""
MISMATCHES = {
    "no-key": (
        "no-key: the producer uses plain text, and this receiver uses keys; restart the "
        "producer with --run or with a key"
    ),
    "plain-receiver": (
        "plain-receiver: the producer uses keys, and this receiver uses plain text; "
        "restart the producer"
    ),
}
"""The remedy by reason of refusal, if one side uses keys and the other does not."""
MISFITS = {
    "checksum": "packets are damaged on the way; check the network and the memory of the machine",
    "codec": "a producer sends a codec that this receiver does not know; upgrade the receiver",
    "handshake": (
        "peers disconnect at once or are not producers, such as the check of a load "
        "balancer; let it use /healthz, or look for a program with a wrong address"
    ),
    "internal": "the receiver failed on a message; read its log",
    "malformed": "a message does not follow the protocol; look at the program at that address",
    "names": (
        "one key uses more names than receiver.max_names; use fewer names, or raise "
        "receiver.max_names"
    ),
    "oversize": "messages are larger than the receiver allows; read the producer's log",
    "version": "the producer uses another version of the protocol; upgrade the older side",
    "zmtp": "a browser or another program connects to this port; stop this program",
}
"""Cause and remedy by reason of refusal, for reasons that do not concern a key."""
SKIPS_OF_CHOICE = frozenset({"pace", "novelty"})

Finding = tuple[str, str, str]
"""(condition's name, producer or "", sentence).

An empty sentence stands for the condition's summary."""


class Figures:
    """The metrics at one moment.

    Args:
        registry: the registry to read.
    """

    def __init__(self, registry: CollectorRegistry | RestrictedRegistry) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name.removeprefix(PREFIX)
                    self._samples[name].append((sample.labels, float(sample.value)))

    def get(self, name: str, **labels: str) -> float:
        """Return the sum over the series with these labels; NaN if there is none."""
        found = [
            value
            for given, value in self._samples.get(name, ())
            if all(given.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(found) if found else math.nan

    def by(self, name: str, label: str, **only: str) -> dict[str, float]:
        """Return the sums of a metric by the values of one label, over the series with `only`."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name, ()):
            if all(labels.get(other) == wanted for other, wanted in only.items()):
                sums[labels.get(label, "")] += value
        return dict(sums)


class Rise:
    """The rise of counters within a sliding window.

    Every counter starts at 0 with its process. Events before the first look count as a rise, such
    as damage that is found while the journal is opened.

    Args:
        seconds: the length of the window.
        clock: returns monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._old: deque[tuple[float, Mapping[str, float]]] = deque([(clock(), {})])

    def __call__(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Take the current totals, and return the rises. A total of NaN has a rise of NaN."""
        now = self._clock()
        while len(self._old) > 1 and self._old[1][0] <= now - self._seconds:
            self._old.popleft()
        before = self._old[0][1]
        if len(self._old) == 1 or now - self._old[-1][0] >= self._seconds / 24:
            known = {key: value for key, value in totals.items() if not math.isnan(value)}
            self._old.append((now, known))
        return {key: value - before.get(key, 0.0) for key, value in totals.items()}

    @property
    def span(self) -> float:
        """Seconds that the rises cover."""
        return self._clock() - self._old[0][0]


class Held:
    """The time for which conditions have been true without a break.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def __call__(self, key: str, true: bool) -> float:
        """Take the current state of a key, and return for how many seconds it has been true."""
        if not true:
            self._since.pop(key, None)
            return 0.0
        return self._clock() - self._since.setdefault(key, self._clock())


class Silence:
    """The time since each counter last changed, and the usual time between two changes.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}  # (value, time of change)
        self._gaps: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=GAPS_KEPT))

    def take(self, totals: Mapping[str, float]) -> None:
        """Take the current totals."""
        now = self._clock()
        for key, value in totals.items():
            before = self._last.get(key)
            if before is None or value != before[0]:
                if before is not None:  # an outage must not count as a usual gap
                    self._gaps[key].append(min(now - before[1], self._limit(key)))
                self._last[key] = (value, now)

    def restart(self, key: str | None) -> None:
        """Start the silence of one counter, or of all for None, again from now."""
        now = self._clock()
        for one, (value, _) in self._last.items():
            if key in (None, one):
                self._last[one] = (value, now)

    def usual(self, key: str) -> float | None:
        """Return the mean of the last gaps in seconds; None if there were fewer than LEAST_GAPS."""
        gaps = self._gaps[key]
        return statistics.fmean(gaps) if len(gaps) >= LEAST_GAPS else None

    def too_long(self, key: str) -> float:
        """Return the seconds of a silence that is too long; 0 if it is not."""
        if key not in self._last:
            return 0.0
        silent = self._clock() - self._last[key][1]
        return silent if silent > self._limit(key) else 0.0

    def _limit(self, key: str) -> float:
        usual = self.usual(key)
        if usual is None:
            return at.UNKNOWN_GAP_SECONDS
        return max(at.SILENT_SECONDS, at.GAPS * usual)


class Watch:
    """A watch over a process's metrics and health that finds the present conditions.

    The start of a condition is logged as a WARNING, its end as INFO.

    Args:
        role: the role of the process.
        registry: the metrics of the process.
        health: the loops and checks of the process. The watch sets `health.conditions`.
        light: exports the present conditions as metrics, by name and producer.
        folders: the folders that the process writes, by purpose.
        journal: for a learner, the folder of the journal. The receiver reports on its disk.
        checkpoint_seconds: the configured seconds between two checkpoints.
        first: whether this process reports for all ranks.
        hung: returns a sentence for each other process of the run that hangs.
        clock: returns monotonic seconds.
        wall: returns seconds since the Unix epoch.
    """

    def __init__(
        self,
        role: Role,
        registry: CollectorRegistry,
        health: Health,
        light: Callable[[Mapping[tuple[str, str], bool]], None],
        folders: Mapping[str, Path] | None = None,
        journal: Path | None = None,
        checkpoint_seconds: float | None = None,
        first: bool = True,
        hung: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._role, self._registry, self._health, self._light = role, registry, health, light
        self._folders, self._journal = folders or {}, journal
        self._checkpoint_limit = max(at.CHECKPOINT_SECONDS, 3 * (checkpoint_seconds or 0.0))
        self._first, self._hung, self._clock, self._wall = first, hung, clock, wall
        self._started = clock()
        self._rises: dict[str, Rise] = {}
        self._held, self._silence = Held(clock), Silence(clock)
        self._lags: deque[tuple[float, float]] = deque()
        self._offset = wall() - clock()
        self._jump = (-math.inf, 0.0)  # (time, seconds)
        self._clock_seen: dict[str, tuple[float, float]] = {}  # (difference, `_offset` then)
        self._progress = (math.nan, clock())  # (samples, time of the last change)
        self._updated = (math.nan, clock())
        self._lit: dict[tuple[str, str], Lit] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._log = RateLimitedLogger(log, seconds=600.0, lines=3)

    def try_look(self) -> None:
        """Look, and report to the health whether it worked. Call it every EVERY seconds."""
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
            condition, old = CONDITIONS[key[0]], self._lit.get(key)
            says = says or condition.summary.replace("{producer}", key[1] or "a producer")
            self._lit[key] = Lit(condition, key[1], says, old.since if old else self._wall())
            if old is None:
                text = f"{key[0]} begins: {says}. {condition.remedy} (runbook {key[0]}.md)"
                self._log.warning("/".join(key), text)
        for key in [one for one in self._lit if now - self._seen[one] >= at.HOLD_SECONDS]:
            says = self._lit.pop(key).says
            self._log.log(logging.INFO, "/".join((*key, "end")), f"{key[0]} ends: {says}")
        self._light(dict.fromkeys(self._lit, True))
        severe = sorted(
            self._lit.values(),
            key=lambda lit: (lit.condition.severity != "critical", lit.since, lit.producer),
        )
        self._health.conditions = tuple(severe)

    def _findings(self, figures: Figures) -> Iterator[Finding]:
        yield from self._process(figures)
        yield from self._disk(figures)
        yield from self._receiver(figures) if self._role == "receiver" else self._learner(figures)

    # -- both

    def _process(self, figures: Figures) -> Iterator[Finding]:
        up = self._clock() - self._started
        for name, part in self._health.ready().parts.items():
            condition = OF_CHECK.get(name)
            if part["ok"] or condition is None or condition == "no-credit":
                continue
            if "seconds_since_tick" in part:
                ago = seconds(float(str(part["seconds_since_tick"])))
                yield condition, "", f"the {name}'s main loop has made no round for {ago}"
            elif condition == "disk-low":
                yield condition, "", f"the run folder cannot be written: {part['detail']}"
            else:
                yield condition, "", f"{CONDITIONS[condition].summary}: {part['detail']}"
        if figures.get("starting") > 0 and up > at.START_SECONDS:
            yield "starting", "", f"the {self._role} has been starting for {seconds(up)}"
        if figures.get("restarts_total") > 0 and up < at.RESTART_SECONDS:
            says = f"the {self._role} has died and was started again {seconds(up)} ago"
            yield "restarting", "", says
        if hung := self._hung():
            yield "process-hung", "", "; ".join(hung)
        damaged = self._rise("journal", at.EVENT_SECONDS, {
            name: figures.get(name)
            for name in ("journal_damaged_segments_total", "journal_corrupt_records_total")
        })  # fmt: skip
        if any(value > 0 for value in damaged.values()):
            count = sum(value for value in damaged.values() if value > 0)
            yield (
                "journal-damaged",
                "",
                f"{plural(count, 'part')} of the journal was damaged",
            )

    def _disk(self, figures: Figures) -> Iterator[Finding]:
        """Yield at most one finding for all disks that are nearly full.

        The learner leaves out the disk of the journal, because the receiver reports it.
        """
        journal = None if self._journal is None else device(self._journal)
        least = at.DISK_CHECKPOINTS * figures.get("checkpoint_bytes")
        told: set[int | None] = set() if journal is None else {journal}
        short: list[str] = []
        for name, folder in self._folders.items():
            disk, free = device(folder), figures.get("disk_free_bytes", folder=name)
            if free < at.DISK_BYTES and disk not in told:
                told.add(disk)
                short.append(f"{free / 1e6:,.0f} MB are left on the disk of {folder}")
            elif name == "checkpoints" and at.DISK_BYTES <= free < least:
                short.append(
                    f"less than two checkpoints fit on the disk of {folder}: "
                    f"{free / 1e9:,.1f} GB are left"
                )
        if short:
            yield "disk-low", "", "; ".join(short)

    # -- receiver

    def _receiver(self, figures: Figures) -> Iterator[Finding]:
        yield from self._incoming(figures)
        failed = self._rise_of("journal_failures_total", figures, at.HOLD_SECONDS) > 0
        if failed and self._health.ready().parts.get("journal", {"ok": True})["ok"]:
            yield "journal-failing", "", "the journal could not be written within the last minute"
        missing = self._rise_of("missing_packets_total", figures, at.EVENT_SECONDS)
        if missing > 0:
            says = f"the journal lacks {plural(missing, 'acknowledged packet')}"
            yield "missing-packets", "", says
        commits = figures.get("journal_fsync_seconds_count")
        slow = commits - figures.get("journal_fsync_seconds_bucket", le="0.25")
        risen = self._rise("fsync", at.SLOW_SECONDS, {"all": commits, "slow": slow})
        if risen["slow"] >= max(at.SLOW_COMMITS, at.SLOW_COMMIT_SHARE * risen["all"]):
            share = risen["slow"] / risen["all"]
            yield "slow-disk", "", f"{share:.1%} of the commits take longer than 0.25 s"
        yield from self._refusals(figures)
        if figures.get("allow_list_broken") > 0:
            says = (
                "the new file cannot be read or is deleted, so keys that were revoked "
                "since then are still admitted"
            )
            yield "allow-list", "", f"the previous allow-list stays in force: {says}"
        yield from self._shares(
            "rejected-samples",
            figures.by("producer_rejected_samples_total", "producer"),
            figures.by("producer_samples_total", "producer"),
            "{share:.1%} of {who}'s samples were refused by the receiver within {span}",
        )
        yield from self._clocks(figures)

    def _incoming(self, figures: Figures) -> Iterator[Finding]:
        connected, credit = figures.get("producers_connected"), figures.get("credit_bytes")
        received = {"": figures.get("received_samples_total")}
        by_producer = figures.by("producer_samples_total", "producer")
        gone = self._held("no-producers", connected == 0)
        if gone > at.NO_PRODUCER_SECONDS:
            before = "since the start" if not received[""] > 0 else f"for {seconds(gone)}"
            yield "no-producers", "", f"no producer has been connected {before}"
        blocked = self._held("no-credit", connected > 0 and credit == 0)
        if blocked > at.NO_CREDIT_SECONDS:
            detail = self._health.ready().parts.get("credit", {}).get("detail") or "no credit"
            yield "no-credit", "", f"for {seconds(blocked)}: {detail}"
        finished = figures.by("producer_finished", "producer")
        for producer in by_producer:
            if finished.get(producer):
                self._silence.restart(producer)
        self._silence.take(received | by_producer)
        if blocked or not connected > 0:
            self._silence.restart("" if not connected > 0 else None)
            return
        silent = self._silence.too_long("")
        if silent:
            who = (
                "the connected producer has not"
                if connected == 1
                else (f"none of {connected:.0f} connected producers has")
            )
            yield "nothing-received", "", f"{who} sent for {seconds(silent)}"
            return
        for producer in by_producer:
            silent, usual = self._silence.too_long(producer), self._silence.usual(producer)
            if silent:
                often = "" if usual is None else f"; its usual gap is {seconds(usual)}"
                says = f"{producer} has sent nothing for {seconds(silent)}{often}"
                yield "producer-silent", producer, says

    def _refusals(self, figures: Figures) -> Iterator[Finding]:
        totals = figures.by("refused_connections_total", "reason")
        risen = self._rise("refused", at.REFUSED_SECONDS, totals)
        keys = {reason: risen.get(reason, 0.0) for reason in KEYS}
        told = []
        if sum(keys.values()) >= at.REFUSED or risen.get("silent", 0) >= at.SILENT_CONNECTIONS:
            shown = {reason: count for reason, count in keys.items() if count}
            if silent := risen.get("silent", 0.0):
                shown["silent"] = silent
            span, counts = seconds(at.REFUSED_SECONDS), counted(shown)
            why = "".join(f". {MISMATCHES[one]}" for one in sorted(MISMATCHES.keys() & shown))
            told.append(f"connections were refused within {span}: {counts}{why}")
        misfits = {reason: totals.get(reason, 0.0) for reason in MISFITS}
        again = sum(self._rise("misfits again", at.MISFITS_AGAIN_SECONDS, misfits).values())
        risen = self._rise("misfits", at.MISFITS_SECONDS, misfits)
        if sum(risen.values()) >= at.MISFITS and 0 < again < sum(risen.values()):
            shown = {reason: count for reason, count in risen.items() if count}
            span, counts, last = seconds(at.MISFITS_SECONDS), counted(shown), self._health.refused
            why = "".join(
                f". {one}: {MISFITS[one]}" + (f" (last: {last[one]})" if one in last else "")
                for one in sorted(shown)
            )
            told.append(f"messages or connections were refused within {span}: {counts}{why}")
        if told:
            yield "refusals", "", ". ".join(told)

    def _clocks(self, figures: Figures) -> Iterator[Finding]:
        now, offset = self._clock(), self._wall() - self._clock()
        if abs(offset - self._offset) > at.CLOCK_SECONDS:
            self._jump = (now, offset - self._offset)
        self._offset = offset
        when, by = self._jump
        if now - when < at.CLOCK_JUMP_SHOWN_SECONDS:
            way = "ahead" if by > 0 else "back"
            yield "clock", "", f"this machine's clock jumped {way} by {seconds(abs(by))}"
        received = figures.by("producer_last_received_timestamp_seconds", "producer")
        live = {
            who: captured - received.get(who, math.nan)
            for who, captured in figures.by(
                "producer_last_captured_timestamp_seconds", "producer"
            ).items()
        }
        clocks = self._producer_clocks(figures, live)
        usual = statistics.median(clocks.values()) if clocks else 0.0
        alike = all(abs(ahead - usual) <= at.CLOCK_SECONDS for ahead in clocks.values())
        if len(clocks) > 1 and alike and abs(usual) > at.CLOCK_SECONDS:
            way = "behind" if usual > 0 else "ahead of"
            says = f"this machine's clock is {seconds(abs(usual))} {way} the clocks of all"
            yield "clock", "", f"{says} {len(clocks)} producers that report their clocks"
            return
        for who in sorted({*clocks, *live}):
            ahead = clocks.get(who, 0.0)
            if abs(ahead) <= at.CLOCK_SECONDS:  # captures may lie in the past, as in recordings
                ahead = max(0.0, live.get(who, 0.0))
            if abs(ahead) > at.CLOCK_SECONDS:
                way = "ahead of" if ahead > 0 else "behind"
                yield (
                    "clock",
                    who,
                    f"{who}'s clock is {seconds(abs(ahead))} {way} this machine's clock",
                )

    def _producer_clocks(self, figures: Figures, live: Mapping[str, float]) -> dict[str, float]:
        """Return by how many seconds each producer's clock is ahead of this machine's clock now.

        Args:
            live: the capture time of the latest sample minus its arrival time, by producer.
        """
        told = figures.by("producer_clock_offset_seconds", "producer")
        finished = figures.by("producer_finished", "producer")
        clocks = {}
        for who, ahead in told.items():
            before = self._clock_seen.get(who)
            if before is None or before[0] != ahead:
                before = self._clock_seen[who] = (ahead, self._offset)
            ahead -= self._offset - before[1]  # this machine's clock has been changed since
            if abs(live.get(who, math.inf)) <= at.CLOCK_SECONDS:
                ahead = 0.0  # live samples show that the producer's clock is right now
            if not finished.get(who):
                clocks[who] = ahead
        return clocks

    # -- learner

    def _learner(self, figures: Figures) -> Iterator[Finding]:
        yield from self._lag(figures)
        yield from self._updates(figures)
        yield from self._collapse(figures)
        admitted = figures.by("producer_admitted_samples_total", "producer")
        dropped = figures.by("dropped_samples_total", "producer")
        bad = figures.by("quarantined_samples_total", "producer")
        yield from self._shares(
            "bad-samples",
            bad,
            figures.by("producer_decoded_samples_total", "producer"),
            "{share:.1%} of {who}'s samples within {span} could not be decoded",
        )
        yield from self._dropped(figures, dropped, admitted)
        yield from self._checkpoints(figures)
        if self._first:
            yield from self._quality(figures)

    def _lag(self, figures: Figures) -> Iterator[Finding]:
        now, lag = self._clock(), figures.get("lag_seconds")
        if not self._lags or now - self._lags[-1][0] >= 60.0:
            self._lags.append((now, lag))
        while len(self._lags) > at.LAG_GROWS_SECONDS / 60 + 1:
            self._lags.popleft()
        values = [value for _, value in self._lags]
        grown = (
            len(values) > at.LAG_GROWS_SECONDS / 60
            and lag > at.LAG_GROWN_SECONDS
            and all(before < after for before, after in pairwise(values))
        )
        if lag > at.LAG_SECONDS:
            yield "lag", "", f"the learner is {seconds(lag)} behind the stream"
        elif grown:
            says = f"the learner is {seconds(lag)} behind the stream, and this has grown for 10 min"
            yield "lag", "", says

    def _updates(self, figures: Figures) -> Iterator[Finding]:
        skipped = figures.by("skipped_updates_total", "reason")
        risen = self._rise("skipped", at.EVENT_SECONDS, skipped)
        count = sum(value for reason, value in risen.items() if reason not in SKIPS_OF_CHOICE)
        in_a_row = figures.get("skipped_updates_in_a_row")
        reloads = self._rise_of("divergence_reloads_total", figures, at.CLOCK_JUMP_SHOWN_SECONDS)
        halted = figures.get("learner_halted") > 0
        diverged = halted or in_a_row >= at.SKIPPED_IN_A_ROW or reloads > 0
        if halted:
            yield "learner-halted", "", ""
        if in_a_row >= at.SKIPPED_IN_A_ROW:
            says = f"{in_a_row:.0f} updates in a row had no finite loss or gradient"
            yield "divergence", "", says
        elif reloads > 0:
            says = f"the updates diverged, and a checkpoint was reloaded {plural(reloads, 'time')}"
            yield "divergence", "", says
        if count > at.SKIPPED_IN_AN_HOUR:
            why = "loss, gradient or keys were not usable"
            says = f"{count:.0f} updates within an hour were skipped: {why}"
            yield "updates-skipped", "", says
        done = sum(
            value
            for name in (
                "trained_samples_total",
                "near_duplicates_total",
                "quarantined_samples_total",
            )
            if not math.isnan(value := figures.get(name))
        )
        done += figures.by("skipped_samples_total", "reason").get("pace", 0.0)
        waiting = figures.get("lag_records") > 0 and not diverged
        if done != self._progress[0] or not waiting:
            self._progress = (done, self._clock())
        stuck = self._clock() - self._progress[1]
        if stuck > at.STUCK_SECONDS:
            says = f"samples wait, and the learner has trained on none for {seconds(stuck)}"
            yield "learner-stuck", "", says

    def _collapse(self, figures: Figures) -> Iterator[Finding]:
        rank, peak = figures.get("recent_effective_rank"), figures.get("effective_rank_peak")
        images = figures.get("recent_image_rank")
        image_peak = figures.get("image_rank_peak")
        varied = not images - 1 < at.IMAGE_SHARE * (image_peak - 1)
        fallen = self._held("collapse", varied and rank - 1 < at.RANK_SHARE * (peak - 1))
        flat = self._held("flat", varied and rank < at.COLLAPSED_RANK)
        if fallen > at.COLLAPSE_SECONDS or flat > at.COLLAPSED_SECONDS:
            says = (
                f"the effective rank of the embeddings is {rank:.1f}, and it was {peak:.1f} before"
            )
            yield "collapse", "", says
        gradient, change = figures.get("gradient_norm"), figures.get("relative_weight_change")
        updates, flat = figures.get("steps_total"), rank - 1 < at.FLAT_SHARE * (images - 1)
        still = gradient < at.FLAT_GRADIENT and updates >= at.FLAT_UPDATES
        wild = change > at.FLAT_CHANGE and updates >= at.WILD_UPDATES
        if self._held("not-learning", flat and (still or wild)) > at.FLAT_SECONDS:
            why = f"the gradient's norm is {gradient:.2g}"
            why = why if still else f"an update changes the weights by {change:.1%} of their norm"
            says = (
                "the encoder does not learn: the effective rank of the embeddings is "
                f"{rank:.1f} while that of the images is {images:.1f}, and {why}"
            )
            yield "not-learning", "", says
        copies = figures.get("memory_near_duplicates_ratio")
        alike = images < at.ONE_PICTURE_RANK and copies >= at.ONE_PICTURE_COPIES
        if self._held("one-picture", alike) > at.ONE_PICTURE_SECONDS:
            says = f"the stream shows one picture over and over: {copies:.0%} of the memory's slots"
            yield "one-picture", "", f"{says} are near-duplicates of others"

    def _dropped(
        self, figures: Figures, dropped: Mapping[str, float], admitted: Mapping[str, float]
    ) -> Iterator[Finding]:
        away = self._rise("dropped", at.DROPPED_SECONDS, dropped)
        kept = self._rise("admitted", at.DROPPED_SECONDS, admitted)
        steps = figures.get("steps_total")
        if steps != self._updated[0]:
            self._updated = (steps, self._clock())
        still = self._clock() - self._updated[1]
        idle = f"; no update for {seconds(still)}" if still >= 60 else ""
        over = self._rises["dropped"].span >= 0.9 * at.DROPPED_SECONDS
        for who, count in away.items():
            share = count / max(1.0, count + kept.get(who, 0.0))
            if over and count >= at.DROPPED_SAMPLES and share >= at.DROPPED_SHARE:
                says = f"{percent(share)} of {who}'s samples were dropped as near-duplicates{idle}"
                yield "everything-dropped", who, says

    def _checkpoints(self, figures: Figures) -> Iterator[Finding]:
        behind = figures.get("checkpoint_lag_seconds")
        if behind > self._checkpoint_limit:
            says = f"updates from {seconds(behind)} ago are in no checkpoint yet"
            yield "checkpoint-old", "", says
        damaged = figures.get("checkpoints_damaged")
        if damaged > 0:
            were = "checkpoint was" if damaged == 1 else "checkpoints were"
            says = f"{damaged:.0f} {were} damaged and renamed to damaged-*"
            yield "checkpoint-damaged", "", says

    def _quality(self, figures: Figures) -> Iterator[Finding]:
        kinds = figures.by("collision_probability", "kind").values()
        likely = max(kinds, default=math.nan)
        if self._held("collisions", likely > at.COLLISION_PROBABILITY) > at.QUALITY_SECONDS:
            says = f"a sample and a slot of the memory share a class with probability {likely:.2f}"
            yield "collisions", "", says
        alike = figures.get("memory_near_duplicates_ratio")
        if self._held("near-duplicates", alike > at.NEAR_DUPLICATE_SHARE) > at.QUALITY_SECONDS:
            says = f"{alike:.0%} of the memory's slots are near-duplicates of others"
            yield "near-duplicates", "", says
        changes = figures.by("drift_detections_total", "signal").get("image", 0.0)
        if self._rise("drift", at.EVENT_SECONDS, {"image": changes})["image"] > 0:
            yield "drift", "", "the stream shows different things than an hour ago"
        parked = figures.get("parked_journals")
        if self._held("parked", parked > 0) > 0:
            yield "parked-journal", "", f"no rank reads {parked:.0f} of the run's journals"
        busy = self._rise(
            "busy", at.SLOW_RANK_SECONDS, figures.by("rank_busy_seconds_total", "rank")
        )
        if len(busy) > 1 and self._rises["busy"].span > 0.9 * at.SLOW_RANK_SECONDS:
            usual = sorted(busy.values())[(len(busy) - 1) // 4]
            slow = [rank for rank, spent in busy.items() if spent > at.SLOW_RANK * usual]
            if slow:
                says = f"rank {', '.join(slow)} needs longer for each step than the others"
                yield "slow-rank", "", says

    # -- helpers

    def _shares(
        self, name: str, bad: Mapping[str, float], good: Mapping[str, float], says: str
    ) -> Iterator[Finding]:
        """Yield a finding for each producer whose share of bad samples is too large."""
        worse = self._rise(f"{name} bad", at.BAD_SECONDS, bad)
        better = self._rise(f"{name} good", at.BAD_SECONDS, good)
        span = seconds(max(EVERY, self._rises[f"{name} bad"].span))
        for who, count in worse.items():
            share = count / max(1.0, count + better.get(who, 0.0))
            if count >= at.BAD_SAMPLES and share > at.BAD_SHARE:
                yield name, who, says.format(share=share, who=who, span=span)

    def _rise(self, key: str, window: float, totals: Mapping[str, float]) -> dict[str, float]:
        if key not in self._rises:
            self._rises[key] = Rise(window, self._clock)
        return self._rises[key](totals)

    def _rise_of(self, name: str, figures: Figures, window: float) -> float:
        """Return the rise of one counter within `window` seconds; NaN if there is none."""
        return self._rise(name, window, {name: figures.get(name)})[name]


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


def counted(counts: Mapping[str, float]) -> str:
    """Return counts as text, such as "3 denied, 1 no-key"."""
    return ", ".join(f"{count:.0f} {reason}" for reason, count in sorted(counts.items()))


def percent(share: float) -> str:
    """Return a share as text, such as "99.90 %". Only a share of 1 gives "100 %"."""
    return "100 %" if share == 1 else f"{min(share, 0.9999):.2%}".replace("%", " %")


def seconds(value: float) -> str:
    """Return a duration as text: 45 s, 12 min, 3.5 h, 40 days."""
    if value > 36_500 * 86_400:
        return "more than 100 years"
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if value >= 2 * size or (value >= size and name == "min"):
            shown = value / size
            return f"{shown:.1f} {name}" if shown < 10 and name != "min" else f"{shown:.0f} {name}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
