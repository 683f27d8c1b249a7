"""Evidence of learning in the figures of a learner: accuracy, a growing lag, missing updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_ssl.observe.answer import Level
from stream_ssl.observe.page.history import LATELY
from stream_ssl.observe.wording import duration, percent

LEAST_LABELLED = 100
"""An accuracy on fewer labelled samples of the stream says nothing."""
YOUNG_UPDATES = 300
"""With fewer updates, neither loss nor accuracy shows whether the encoder learns."""
IDLE_SECONDS, IDLE_GAPS = 60.0, 5.0
"""No update for this many seconds, and for this many of the usual gaps, is worth a look."""
ABOVE_CHANCE = 1.5
"""An accuracy of this many times chance shows that the encoder learns."""
LEARNED = 0.05
"""A run that learns avoids at least this part of the errors that it made at its start."""
ABOVE_MAJORITY = 1.1
"""On the stream, an accuracy of this many times the accuracy of guessing the most frequent class
shows that the encoder learns."""
ABOVE_CHANCE_KAPPA = 0.1
"""A kappa (Cohen) above this shows the same, also if one class is so frequent that no encoder is
far above guessing it. Guessing has a kappa of 0."""
NO_CLASSES = "This accuracy says nothing if the labels are not classes, but names of folders"
FORGOTTEN = 0.05
"""An accuracy that fell by more than this is worth a look."""
CLEAR = 2.0
"""A change of accuracy of fewer standard errors is not clear."""
LEAST_TREND_SECONDS = 60.0
"""A change over a shorter time is left out."""
BEHIND_SECONDS, BEHIND_MORE_SECONDS, BEHIND_SPAN = 30.0, 10.0, 45.0
"""A lag above BEHIND_SECONDS is worth a look if it grew by more than BEHIND_MORE_SECONDS within the
last minute. The lag must be known for at least BEHIND_SPAN seconds. The condition `lag` begins
later.
"""


def growing_lag(facts: Mapping[str, Any]) -> str | None:
    """Return a sentence if the learner falls further and further behind the stream."""
    lag = facts.get("lag")
    if lag is None or lag["seconds"] < BEHIND_SPAN or lag["value"] < BEHIND_SECONDS:
        return None
    if lag["rise"] < BEHIND_MORE_SECONDS:
        return None
    return (
        f"The learner is {duration(lag['value'])} behind the stream; the lag grew by "
        f"{duration(lag['rise'])} in the last {duration(lag['seconds'])}"
    )


def lately(span: float) -> str:
    """Return a span for "in the last ...", which is "minute" for about LATELY."""
    return "minute" if 0.9 * LATELY <= span <= 1.1 * LATELY else duration(span)


def is_young(facts: Mapping[str, Any]) -> bool:
    """Return whether the run has made too few updates to show whether it learns."""
    return bool(facts.get("updates_at_most", 0.0) < YOUNG_UPDATES)


def is_idle(facts: Mapping[str, Any]) -> bool:
    """Return whether the learner has made no update for longer than usual, or none at all."""
    if not facts.get("updates_done"):
        return True
    usual = facts.get("update_gap") or 0.0
    return bool(facts.get("idle", 0.0) > max(IDLE_SECONDS, IDLE_GAPS * usual))


def few_labels(facts: Mapping[str, Any]) -> bool:
    """Return whether the stream brought some labelled samples, and too few for an accuracy."""
    labelled = facts.get("labelled")
    return labelled is not None and 0 < labelled < LEAST_LABELLED


def best_accuracy(
    facts: Mapping[str, Any], majority: float | None, before: bool = False
) -> tuple[Level, list[str]]:
    """Return (level, sentences) for the best accuracy that is known; no sentences if none is known.

    An accuracy on held-out images is better than an accuracy on the stream.

    Args:
        facts: the facts of the learner's state; `observe/facts.py` makes them.
        majority: the accuracy of guessing the most frequent class of the stream; None: unknown.
        before: the accuracy is from before a fault, so its change says nothing.
    """
    notes = []
    if (held_out := facts.get("held_out")) is not None:
        if facts.get("held_out_since") is not False:
            return _on_held_out(facts, held_out, before)
        says = f"kNN of held-out images was {percent(held_out['value'])} before the first update"
        notes = [f"{says}, and was not evaluated since"]
    if (stream := facts.get("stream_knn")) is not None and not few_labels(facts):
        level, found = _on_stream(facts, stream, majority, before)
        return level, [*found, *notes]
    return "wait", notes


def _on_held_out(
    facts: Mapping[str, Any], trend: Mapping[str, float], before: bool
) -> tuple[Level, list[str]]:
    """Return (level, sentences) for the accuracy on held-out images.

    It is compared with chance and with the accuracy at the start of the run, where these are known.
    """
    value, error = trend["value"], facts.get("held_out_error") or 0.0
    classes, first = facts.get("held_out_classes"), facts.get("held_out_first")
    known = [f"chance {percent(1 / classes)}"] if classes else []
    if first is not None:
        known.append(f"at the run's start {percent(first)}")
    says = f"kNN of held-out images {'was ' * before}{percent(value)}"
    says += f" ({', '.join(known)})" if known else ""
    says += _change(trend, error, before)
    level: Level = "watch" if _fell(trend, error) else "good"
    learned = first is None or value >= first + LEARNED * (1 - first)
    if not is_young(facts) and not learned:
        than = "less" if first is not None and value < first else "hardly more"
        level, says = "watch", f"{says}; that is {than} than at the start"
    if classes and value < ABOVE_CHANCE / classes:
        level = "watch"
    return level, [says]


def _on_stream(
    facts: Mapping[str, Any], trend: Mapping[str, float], majority: float | None, before: bool
) -> tuple[Level, list[str]]:
    """Return (level, sentences) for the accuracy on the stream's next samples."""
    value, error = trend["value"], facts.get("stream_knn_error") or 0.0
    says = f"kNN of the stream's next samples {'was ' * before}{percent(value)}"
    guessed = None if before else majority
    if guessed is not None:
        says += f" (by guessing the most frequent class: {percent(guessed)})"
    says += _change(trend, error, before)
    if guessed is not None and value < ABOVE_MAJORITY * guessed:
        kappa = facts.get("stream_kappa") or 0.0
        if kappa < ABOVE_CHANCE_KAPPA:
            return "watch", [says, NO_CLASSES]
        says += f"; kappa {kappa:.2f}, and 0 for guessing"
    return "watch" if _fell(trend, error) else "good", [says]


def _fell(trend: Mapping[str, float], error: float) -> bool:
    """Return whether an accuracy fell clearly, and by more than FORGOTTEN."""
    return trend["rise"] < -max(FORGOTTEN, CLEAR * error)


def _change(trend: Mapping[str, float], error: float, before: bool) -> str:
    """Return the change of an accuracy and its time as the end of a sentence; "" if unknown."""
    if trend["seconds"] < LEAST_TREND_SECONDS or before:
        return ""
    return f", {_points(trend['rise'], error)} in the last {duration(trend['seconds'])}"


def _points(rise: float, error: float) -> str:
    """Return the change of an accuracy, with its standard error if that is above 0."""
    points, around = abs(100 * rise), f" ± {100 * error:.1f}" if error else ""
    if points < 0.05:
        return "unchanged"
    if points < 100 * CLEAR * error:
        return f"no clear change ({100 * rise:+.1f}{around} points)"
    return f"{'up' if rise > 0 else 'down'} {points:.1f}{around} points"
