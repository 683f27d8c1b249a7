"""The conditions of a learner: lag, updates, the memory, checkpoints and the stream's samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from stream_ssl.observe import conditions as at
from stream_ssl.observe.trends import Figures, Finding, Trends
from stream_ssl.observe.wording import duration, percent, plural

SKIPS_OF_CHOICE = frozenset({"pace", "novelty"})


class LearnerChecks:
    """The checks of a learner's figures.

    Args:
        checkpoint_seconds: the configured seconds between two checkpoints.
        first: whether this process reports for all ranks.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        trends: Trends,
        checkpoint_seconds: float | None,
        first: bool,
        clock: Callable[[], float],
    ) -> None:
        self._trends, self._first, self._clock = trends, first, clock
        self._first_limit = at.CHECKPOINT_SECONDS
        if checkpoint_seconds is not None:
            self._first_limit = max(at.FIRST_CHECKPOINT_SECONDS, 3 * checkpoint_seconds)
        self._checkpoint_limit = max(at.CHECKPOINT_SECONDS, 3 * (checkpoint_seconds or 0.0))
        self._lags: deque[tuple[float, float]] = deque()
        self._progress = (math.nan, clock())  # (samples, time of the last change)
        self._updated = (math.nan, clock())
        self._anew: bool | None = None  # whether only damaged checkpoints existed at the start

    def findings(self, figures: Figures) -> Iterator[Finding]:
        """Yield the conditions that are present."""
        yield from self._lag(figures)
        yield from self._updates(figures)
        yield from self._collapse(figures)
        admitted = figures.by("producer_admitted_samples_total", "producer")
        dropped = figures.by("dropped_samples_total", "producer")
        bad = figures.by("quarantined_samples_total", "producer")
        yield from self._trends.shares(
            "bad-samples",
            bad,
            figures.by("producer_decoded_samples_total", "producer"),
            "{share} of {who}'s samples within {span} could not be decoded",
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
            yield "lag", "", f"the learner is {duration(lag)} behind the stream"
        elif grown:
            says = (
                f"the learner is {duration(lag)} behind the stream, and this has grown for 10 min"
            )
            yield "lag", "", says

    def _updates(self, figures: Figures) -> Iterator[Finding]:
        skipped = figures.by("skipped_updates_total", "reason")
        risen = self._trends.rise("skipped", at.EVENT_SECONDS, skipped)
        count = sum(value for reason, value in risen.items() if reason not in SKIPS_OF_CHOICE)
        in_a_row = figures.get("skipped_updates_in_a_row")
        reloads = self._trends.rise_of(
            "divergence_reloads_total", figures, at.CLOCK_JUMP_SHOWN_SECONDS
        )
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
            says = f"samples wait, and the learner has trained on none for {duration(stuck)}"
            yield "learner-stuck", "", says

    def _collapse(self, figures: Figures) -> Iterator[Finding]:
        rank, peak = figures.get("recent_effective_rank"), figures.get("effective_rank_peak")
        images = figures.get("recent_image_rank")
        image_peak = figures.get("image_rank_peak")
        varied = not images - 1 < at.IMAGE_SHARE * (image_peak - 1)
        fallen = self._trends.held("collapse", varied and rank - 1 < at.RANK_SHARE * (peak - 1))
        flat = self._trends.held("flat", varied and rank < at.COLLAPSED_RANK)
        if fallen > at.COLLAPSE_SECONDS or flat > at.COLLAPSED_SECONDS:
            says = (
                "the embeddings have collapsed: their effective rank is "
                f"{rank:.1f}, and it was {peak:.1f} before"
            )
            yield "collapse", "", says
        gradient, change = figures.get("gradient_norm"), figures.get("relative_weight_change")
        updates, flat = figures.get("steps_total"), rank - 1 < at.FLAT_SHARE * (images - 1)
        still = gradient < at.FLAT_GRADIENT and updates >= at.FLAT_UPDATES
        wild = change > at.FLAT_CHANGE and updates >= at.WILD_UPDATES
        other = change > at.OTHER_CHANGE and updates >= at.WILD_UPDATES
        if self._trends.held("not-learning", (flat and (still or wild)) or other) > at.FLAT_SECONDS:
            why = f"an update changes the weights by {percent(change)} of their norm"
            if still and not other:
                why = f"the gradient's norm is {gradient:.2g}"
            if flat:
                ranks = f"{rank:.1f} while that of the images is {images:.1f}"
                why = f"the effective rank of the embeddings is {ranks}, and {why}"
            yield "not-learning", "", f"the encoder does not learn: {why}"
        copies = figures.get("memory_near_duplicates_ratio")
        alike = images < at.ONE_PICTURE_RANK and copies >= at.ONE_PICTURE_COPIES
        if self._trends.held("one-picture", alike) > at.ONE_PICTURE_SECONDS:
            says = f"{percent(copies)} of the memory's slots are near-duplicates of others"
            yield "one-picture", "", f"the stream shows one picture over and over: {says}"

    def _dropped(
        self, figures: Figures, dropped: Mapping[str, float], admitted: Mapping[str, float]
    ) -> Iterator[Finding]:
        away = self._trends.rise("dropped", at.DROPPED_SECONDS, dropped)
        kept = self._trends.rise("admitted", at.DROPPED_SECONDS, admitted)
        steps = figures.get("steps_total")
        if steps != self._updated[0]:
            self._updated = (steps, self._clock())
        still = self._clock() - self._updated[1]
        idle = f"; no update for {duration(still)}" if still >= 60 else ""
        span = duration(self._trends.span("dropped"))
        over = self._trends.span("dropped") >= 0.9 * at.DROPPED_SECONDS
        for who, count in away.items():
            share = count / max(1.0, count + kept.get(who, 0.0))
            if over and count >= at.DROPPED_SAMPLES and share >= at.DROPPED_SHARE:
                says = f"{percent(share)} of {who}'s decoded samples within {span} were dropped"
                says += f" as near-duplicates{idle}"
                yield "everything-dropped", who, says

    def _checkpoints(self, figures: Figures) -> Iterator[Finding]:
        behind = figures.get("checkpoint_lag_seconds")
        none = math.isnan(figures.get("checkpoint_step"))
        if behind > (self._first_limit if none else self._checkpoint_limit):
            says = f"updates from {duration(behind)} ago are in no checkpoint yet"
            says += ", and the run has no checkpoint" if none else ""
            yield "checkpoint-old", "", says
        damaged = figures.get("checkpoints_damaged")
        if self._anew is None and not figures.get("starting") > 0:
            self._anew = damaged > 0 and not figures.get("checkpoint_step") > 0
        if damaged > 0:
            were = "checkpoint was" if damaged == 1 else "checkpoints were"
            says = f"{damaged:.0f} {were} damaged and renamed to damaged-*"
            if self._anew:
                says += "; none was whole, so the run began anew with new weights"
            yield "checkpoint-damaged", "", says
        unkept = figures.by("unkept_samples_total", "folder", reason="disk")
        risen = self._trends.rise("unkept", at.EVENT_SECONDS, unkept)
        lost = [f"{plural(n, 'sample')} to {folder}/" for folder, n in risen.items() if n > 0]
        if lost:
            yield "not-kept", "", f"within an hour, {' and '.join(lost)} could not be written"
        late = figures.get("checkpoint_copy_late_seconds")
        if late > at.COPY_SECONDS:
            says = f"a checkpoint waits for {duration(late)} to be copied to the bucket"
            yield "copies-late", "", says

    def _quality(self, figures: Figures) -> Iterator[Finding]:
        kinds = figures.by("collision_probability", "kind").values()
        likely = max(kinds, default=math.nan)
        if self._trends.held("collisions", likely > at.COLLISION_PROBABILITY) > at.QUALITY_SECONDS:
            says = f"a sample and a slot of the memory share a class with probability {likely:.2f}"
            yield "collisions", "", says
        alike = figures.get("memory_near_duplicates_ratio")
        crowded = self._trends.held("near-duplicates", alike > at.NEAR_DUPLICATE_SHARE)
        if crowded > at.QUALITY_SECONDS:
            says = f"{percent(alike)} of the memory's slots are near-duplicates of others"
            yield "near-duplicates", "", says
        changes = figures.by("drift_detections_total", "signal").get("image", 0.0)
        if self._trends.rise("drift", at.EVENT_SECONDS, {"image": changes})["image"] > 0:
            yield "drift", "", "the stream shows different things than an hour ago"
        parked = figures.get("parked_journals")
        if self._trends.held("parked", parked > 0) > 0:
            yield "parked-journal", "", f"no rank reads {parked:.0f} of the run's journals"
        busy = self._trends.rise(
            "busy", at.SLOW_RANK_SECONDS, figures.by("rank_busy_seconds_total", "rank")
        )
        span = self._trends.span("busy")
        if len(busy) > 1 and span > 0.9 * at.SLOW_RANK_SECONDS:
            usual = sorted(busy.values())[(len(busy) - 1) // 4]
            least = max(at.SLOW_RANK * usual, at.SLOW_RANK_BUSY * span)
            slow = [rank for rank, spent in busy.items() if spent > least]
            if slow:
                says = f"rank {', '.join(slow)} needs longer for each step than the others"
                yield "slow-rank", "", says
