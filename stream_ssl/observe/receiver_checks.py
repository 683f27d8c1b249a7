"""The conditions of a receiver: producers, refusals, the journal and clocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping

from stream_ssl.observe import conditions as at
from stream_ssl.observe.health import Health
from stream_ssl.observe.trends import Figures, Finding, Silence, Trends
from stream_ssl.observe.wording import counted, duration, few, percent, plural
from stream_ssl.receiver.records import SOURCE_ENDED

MOST_NAMED = 5
"""The most producers that a sentence names."""
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


def only_sporadic(figures: Figures) -> bool:
    """Return whether all producers that have not ended may be silent for long."""
    sporadic = figures.by("producer_sporadic", "producer")
    finished = figures.by("producer_finished", "producer")
    left = [who for who, how in finished.items() if not how]
    return bool(left) and all(sporadic.get(who) for who in left)


class ReceiverChecks:
    """The checks of a receiver's figures.

    Args:
        clock: returns monotonic seconds.
        wall: returns seconds since the Unix epoch.
    """

    def __init__(
        self,
        trends: Trends,
        health: Health,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._trends, self._health, self._clock, self._wall = trends, health, clock, wall
        self._silence = Silence(clock)
        self._received = math.nan  # samples at the last look
        self._offset = wall() - clock()
        self._jump = (-math.inf, 0.0)  # (time, seconds)
        self._clock_seen: dict[str, tuple[float, float]] = {}  # (difference, `_offset` then)

    def findings(self, figures: Figures) -> Iterator[Finding]:
        """Yield the conditions that are present."""
        yield from self._incoming(figures)
        failed = self._trends.rise_of("journal_failures_total", figures, at.HOLD_SECONDS) > 0
        if failed and self._health.ready().parts.get("journal", {"ok": True})["ok"]:
            yield "journal-failing", "", "the journal could not be written within the last minute"
        missing = self._trends.rise_of("missing_packets_total", figures, at.EVENT_SECONDS)
        if missing > 0:
            says = f"the journal lacks {plural(missing, 'acknowledged packet')}"
            yield "missing-packets", "", says
        commits = figures.get("journal_fsync_seconds_bucket", le="+Inf")
        slow = commits - figures.get("journal_fsync_seconds_bucket", le="0.25")
        risen = self._trends.rise("fsync", at.SLOW_SECONDS, {"all": commits, "slow": slow})
        if risen["slow"] >= max(at.SLOW_COMMITS, at.SLOW_COMMIT_SHARE * risen["all"]):
            share = risen["slow"] / risen["all"]
            yield "slow-disk", "", f"{percent(share)} of the commits take longer than 0.25 s"
        yield from self._refusals(figures)
        if figures.get("allow_list_broken") > 0:
            says = (
                "the new file cannot be read or is deleted, so keys that were revoked "
                "since then are still admitted"
            )
            yield "allow-list", "", f"the previous allow-list stays in force: {says}"
        yield from self._trends.shares(
            "rejected-samples",
            figures.by("producer_rejected_samples_total", "producer"),
            figures.by("producer_samples_total", "producer"),
            "{share} of {who}'s samples were refused by the receiver within {span}",
        )
        yield from self._clocks(figures)

    def _incoming(self, figures: Figures) -> Iterator[Finding]:
        connected = figures.get("producers_connected")
        received = figures.get("received_samples_total")
        finished = figures.by("producer_finished", "producer")
        came = {*figures.by("producer_samples_total", "producer"), *finished}  # some sent nothing
        ended = came and all(finished.get(who) == SOURCE_ENDED for who in came)
        # A producer may connect, send and leave between two looks.
        arrived, self._received = received != self._received, received
        absent = connected == 0 and not arrived and not ended
        gone = self._trends.held("no-producers", absent)
        if gone > at.NO_PRODUCER_SECONDS:
            before = f"for {duration(gone)}" if came else "since the start"
            left = sorted(who for who in came if not finished.get(who))
            names = f"; {few(left, MOST_NAMED)} did not end normally" if left else ""
            yield "no-producers", "", f"no producer has been connected {before}{names}"
        # A receiver that waits for the learner grants credit in short turns between two looks.
        without = connected > 0 and figures.get("credit_bytes") == 0
        blocked = self._trends.held("no-credit", without and not arrived)
        if blocked > at.NO_CREDIT_SECONDS:
            detail = self._health.ready().parts.get("credit", {}).get("detail") or "no credit"
            yield "no-credit", "", f"for {duration(blocked)}, {detail}"
        # Nobody can send without credit. A producer that was silent before still is.
        yield from self._silences(figures, self._trends.held("no-credit-now", without) > 0)

    def _silences(self, figures: Figures, paused: bool) -> Iterator[Finding]:
        """Yield producers that are silent for too long; the time does not count while `paused`."""
        connected = figures.get("producers_connected")
        by_producer = figures.by("producer_samples_total", "producer")
        finished = figures.by("producer_finished", "producer")
        sporadic = figures.by("producer_sporadic", "producer")
        for producer in by_producer:
            if finished.get(producer) or sporadic.get(producer):
                self._silence.restart(producer)
        received = {"": figures.get("received_samples_total")}
        self._silence.take(received | by_producer, paused=paused)
        if not connected > 0 or only_sporadic(figures):
            self._silence.restart("")
            return
        silent = self._silence.too_long("")
        if silent:
            who = f"none of {connected:.0f} connected producers has"
            if connected == 1:
                who = "the connected producer has not"
            yield "nothing-received", "", f"{who} sent for {duration(silent)}"
            return
        for producer in by_producer:
            silent, usual = self._silence.too_long(producer), self._silence.usual(producer)
            if silent:
                often = "" if usual is None else f"; its usual gap is {duration(usual)}"
                says = f"{producer} has sent nothing for {duration(silent)}{often}"
                yield "producer-silent", producer, says

    def _refusals(self, figures: Figures) -> Iterator[Finding]:
        totals = figures.by("refused_connections_total", "reason")
        risen = self._trends.rise("refused", at.REFUSED_SECONDS, totals)
        keys = {reason: risen.get(reason, 0.0) for reason in KEYS}
        sentences = []
        if sum(keys.values()) >= at.REFUSED or risen.get("silent", 0) >= at.SILENT_CONNECTIONS:
            shown = {reason: count for reason, count in keys.items() if count}
            if silent := risen.get("silent", 0.0):
                shown["silent"] = silent
            span, counts = duration(at.REFUSED_SECONDS), counted(shown)
            why = "".join(f". {MISMATCHES[one]}" for one in sorted(MISMATCHES.keys() & shown))
            sentences.append(f"connections were refused within {span}: {counts}{why}")
        misfits = {reason: totals.get(reason, 0.0) for reason in MISFITS}
        again = sum(self._trends.rise("misfits again", at.MISFITS_AGAIN_SECONDS, misfits).values())
        risen = self._trends.rise("misfits", at.MISFITS_SECONDS, misfits)
        if sum(risen.values()) >= at.MISFITS and 0 < again < sum(risen.values()):
            shown = {reason: count for reason, count in risen.items() if count}
            span, counts, last = duration(at.MISFITS_SECONDS), counted(shown), self._health.refused
            why = "".join(
                f". {one}: {MISFITS[one]}" + (f" (last: {last[one]})" if one in last else "")
                for one in sorted(shown)
            )
            sentences.append(f"messages or connections were refused within {span}: {counts}{why}")
        if sentences:
            yield "refusals", "", ". ".join(sentences)

    def _clocks(self, figures: Figures) -> Iterator[Finding]:
        now, offset = self._clock(), self._wall() - self._clock()
        if abs(offset - self._offset) > at.CLOCK_SECONDS:
            self._jump = (now, offset - self._offset)
        self._offset = offset
        when, by = self._jump
        if now - when < at.CLOCK_JUMP_SHOWN_SECONDS:
            way = "ahead" if by > 0 else "back"
            yield "clock", "", f"this machine's clock jumped {way} by {duration(abs(by))}"
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
            says = f"this machine's clock is {duration(abs(usual))} {way} the clocks of all"
            yield "clock", "", f"{says} {len(clocks)} producers that report their clocks"
            return
        for who in sorted({*clocks, *live}):
            ahead = clocks.get(who, 0.0)
            if abs(ahead) <= at.CLOCK_SECONDS:  # captures may lie in the past, as in recordings
                ahead = max(0.0, live.get(who, 0.0))
            if abs(ahead) > at.CLOCK_SECONDS:
                way = "ahead of" if ahead > 0 else "behind"
                says = f"{who}'s clock is {duration(abs(ahead))} {way} this machine's clock"
                yield "clock", who, says

    def _producer_clocks(self, figures: Figures, live: Mapping[str, float]) -> dict[str, float]:
        """Return by how many seconds each producer's clock is ahead of this machine's clock now.

        Args:
            live: the capture time of the latest sample minus its arrival time, by producer.
        """
        offsets = figures.by("producer_clock_offset_seconds", "producer")
        finished = figures.by("producer_finished", "producer")
        clocks = {}
        for who, ahead in offsets.items():
            before = self._clock_seen.get(who)
            if before is None or before[0] != ahead:
                before = self._clock_seen[who] = (ahead, self._offset)
            ahead -= self._offset - before[1]  # this machine's clock has been changed since
            if abs(live.get(who, math.inf)) <= at.CLOCK_SECONDS:
                ahead = 0.0  # live samples show that the producer's clock is correct by now
            if not finished.get(who):
                clocks[who] = ahead
        return clocks
