"""The five answers about a run: is it learning, is it healthy, which producer is of no use, what
does the memory hold, and what to do first.

The page and `stream-ssl status` both show what `answers` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stream_ssl.observe.conditions import (
    CONDITIONS,
    DOWN,
    DROPPED_SHARE,
    NEAR_DUPLICATE_SHARE,
    TABLE,
    plural,
)
from stream_ssl.observe.trends import percent, seconds

Level = Literal["good", "watch", "bad", "wait"]
State = Mapping[str, Any]
"""A process's answer to the question `state` of `page/api.py`, or {"error": a sentence}."""

YOUNG_UPDATES = 300
"""With fewer updates, an accuracy near chance says nothing."""
ABOVE_CHANCE = 1.5
"""An accuracy of this many times chance shows that the encoder learns."""
FORGOTTEN = 0.05
"""An accuracy that fell by more than this is worth a look."""
LEAST_TREND_SECONDS = 60.0
"""A change over a shorter time is left out."""
MOSTLY_DROPPED = 0.9
"""A share of dropped samples above this explains why no update is made."""
CROWDED = 0.1
"""A share of near-duplicate slots above this is worth a look."""
OF_LEARNING = (
    *("learner-halted", "divergence", "collapse", "not-learning", "one-picture"),
    *("learner-stuck", "loop-stopped", "updates-skipped", "lag"),
)
OF_PRODUCERS = (
    *("no-producers", "nothing-received", "no-credit", "producer-silent", "bad-samples"),
    *("rejected-samples", "everything-dropped", "refusals", "clock"),
)
OF_MEMORY = ("near-duplicates", "collisions")
"""The conditions that each answer names, in the order of their weight."""
MOST_NAMED = 3
"""The most conditions that an answer names."""
ORDER = {condition.name: number for number, condition in enumerate(TABLE)}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        question: the name of the question.
        level: good, watch (worth a look), bad, or wait (nothing is known yet).
        says: one or two sentences with a number.
        links: pairs of (text, address on the page) with the evidence.
    """

    question: str
    level: Level
    says: str
    links: Sequence[tuple[str, str]]


def problems_of(states: Mapping[str, State]) -> list[dict[str, Any]]:
    """Return everything that needs attention in a run, the most severe first.

    Args:
        states: the state of each process, by its name, such as "learner" or "receiver-1".
    """
    found: list[dict[str, Any]] = []
    for state in states.values():
        if (error := state.get("error")) is not None:
            found.append(
                {
                    "name": "down",
                    "producer": "",
                    "severity": "critical",
                    "says": error,
                    "remedy": DOWN,
                    "since": None,
                    "runbook": "runbooks/down",
                }
            )
        found += state.get("problems", [])
    return sorted(
        found, key=lambda one: (one["severity"] != "critical", ORDER.get(one["name"], -1))
    )


def answers(states: Mapping[str, State]) -> list[Answer]:
    """Return the five answers, in the order of the questions.

    Args:
        states: the state of each process, by its name, such as "learner" or "receiver-1".
    """
    problems = problems_of(states)
    receivers = [one for name, one in states.items() if name.startswith("receiver")]
    learner = states.get("learner", {"error": "the learner has not started"})
    return [
        _learning(learner, problems),
        _health(states, problems),
        _producers(receivers, learner, problems),
        _memory(learner, problems),
        _to_do(states, learner, problems),
    ]


def as_json(given: Iterable[Answer]) -> list[dict[str, Any]]:
    """Return answers as plain values."""
    return [asdict(one) for one in given]


# -- one question each


def _learning(learner: State, problems: Sequence[Mapping[str, Any]]) -> Answer:
    links = [("loss and accuracy", "#figures")]
    if (unknown := _unknown(learner)) is not None:
        return Answer("Learning", unknown[0], unknown[1], links)
    figures, facts = learner.get("figures", {}), learner.get("facts", {})
    level, accuracy = _accuracy(facts)
    loss, chance = figures.get("loss"), facts.get("chance")
    limit = "" if chance is None else f"; chance is {chance:.2f}"
    numbers = [*accuracy, *([] if loss is None else [f"Loss {loss:.2f}{limit}"])]
    if lit := _named(OF_LEARNING, problems):
        says = _sentences([_told(lit[0]), *numbers])
        return Answer("Learning", _level(lit), says, [*_runbooks(lit), *links])
    updates = facts.get("updates", 0.0)
    if not updates:
        level, why = _no_update(facts)
        return Answer("Learning", level, _sentences([why, *numbers]), links)
    if not accuracy:
        level = "good" if chance is None or loss is None or loss < chance else "watch"
        numbers.append("No accuracy is known: it needs labels or a held-out set")
    pace = f"{plural(updates, 'update')} in the last {seconds(facts['updates_span'])}"
    return Answer("Learning", level, _sentences([*numbers, pace]), links)


def _health(states: Mapping[str, State], problems: Sequence[Mapping[str, Any]]) -> Answer:
    checks = [("all conditions", "#health")]
    if problems:
        known = list(dict.fromkeys(one["name"] for one in problems))
        names = ", ".join(known[:MOST_NAMED]) + (
            f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        )
        verb = "holds" if len(problems) == 1 else "hold"
        says = f"{plural(len(problems), 'condition')} {verb} now: {names}."
        return Answer("Health", _level(problems), says, [*_runbooks(problems), *checks])
    starting = [name for name, state in states.items() if state.get("starting")]
    if starting:
        return Answer("Health", "wait", f"{_and(starting)}: starting.", checks)
    watched = {one["name"] for state in states.values() for one in state.get("watched", [])}
    says = f"None of {plural(len(watched), 'condition')} holds, and {_and(list(states))} answer."
    return Answer("Health", "good", says, checks)


def _producers(
    receivers: Sequence[State], learner: State, problems: Sequence[Mapping[str, Any]]
) -> Answer:
    links = [("table of producers", "#producers")]
    answering = [one["figures"] for one in receivers if "figures" in one]
    if not answering:
        unknown = _unknown(receivers[0] if receivers else {"error": "no receiver has started"})
        assert unknown is not None, "a state has figures or an error"
        return Answer("Producers", unknown[0], unknown[1], links)
    connected = sum(one.get("producers") or 0.0 for one in answering)
    speed = sum(one.get("received") or 0.0 for one in answering)
    told = ["No producer is connected"]  # the rate is a mean of seconds in which one may have been
    if connected:
        told = [f"{plural(connected, 'producer')} connected, {rate(speed)} samples/s"]
    uses = learner.get("facts", {}).get("producers") or {}
    lit = _named(OF_PRODUCERS, problems)
    best, worst = uses.get("best"), uses.get("worst")
    if best is not None:
        used = percent(best["used"])
        if worst is not None and percent(worst["used"]) == used:
            told.append(f"Each producer has {used} of its samples used")
            worst = None
        else:
            told.append(f"Best: {best['name']}, {used} of its samples are used")
    if worst is not None:
        told.append(
            f"Worst: {worst['name']}, {percent(worst['used'])} used, "
            f"{percent(worst['dropped'])} near-duplicates, {percent(worst['bad'])} damaged"
        )
    shown = [one for one in lit if one["name"] != "everything-dropped" or one["producer"] == ""]
    told += [_told(one) for one in shown[:MOST_NAMED]]
    if lit:
        return Answer("Producers", _level(lit), _sentences(told), [*_runbooks(lit), *links])
    level: Level = "good" if connected and speed else "watch"
    level = "wait" if not connected and best is None else level
    return Answer("Producers", level, _sentences(told), links)


def _memory(learner: State, problems: Sequence[Mapping[str, Any]]) -> Answer:
    links = [("slots and pictures", "#memory")]
    if (unknown := _unknown(learner)) is not None:
        return Answer("Memory", unknown[0], unknown[1], links)
    figures, facts = learner.get("figures", {}), learner.get("facts", {})
    slots, capacity = figures.get("slots") or 0.0, figures.get("capacity") or 0.0
    if not slots:
        return Answer("Memory", "wait", f"0 of {plural(capacity, 'slot')} hold a sample.", links)
    told = [f"{slots:,.0f} of {plural(capacity, 'slot')} filled"]
    alike = figures.get("near_duplicates")
    if alike is not None:
        told[0] += f", {percent(alike)} near-duplicates"
    classes, uses = facts.get("classes"), facts.get("producers") or {}
    if classes is not None:
        told.append(
            f"{classes['count']} {'class' if classes['count'] == 1 else 'classes'}; the largest, "
            f"{classes['largest']}, has {percent(classes['share'])} of the labelled slots"
        )
    elif (rank := figures.get("memory_rank")) is not None:
        told.append(f"No labels; the embeddings take {rank:.0f} directions (effective rank)")
    if (most := uses.get("most_slots")) is not None:
        told.append(f"{most} has {percent(uses['most_slots_share'])} of the slots")
    lit = _named(OF_MEMORY, problems)
    level: Level = "watch" if (alike or 0.0) > CROWDED else "good"
    level = "bad" if (alike or 0.0) > NEAR_DUPLICATE_SHARE else level
    told += [_told(one) for one in lit]
    return Answer(
        "Memory", level if not lit else "bad", _sentences(told), [*_runbooks(lit), *links]
    )


def _to_do(
    states: Mapping[str, State], learner: State, problems: Sequence[Mapping[str, Any]]
) -> Answer:
    if problems:
        first = problems[0]
        who = f" ({first['producer']})" if first["producer"] else ""
        more = len(problems) - 1
        says = f"First, {first['name']}{who}: {first['remedy'] or first['says']}"
        if more:
            says = f"{says.rstrip('.')}. Then {plural(more, 'more condition')}"
        return Answer("To do", _level([first]), _sentences([says]), _runbooks([first]))
    if any(state.get("starting") for state in states.values()):
        return Answer("To do", "wait", "Nothing yet: the run is starting.", [])
    worst = (learner.get("facts", {}).get("producers") or {}).get("worst")
    if worst is not None and worst["dropped"] >= DROPPED_SHARE:
        remedy = CONDITIONS["everything-dropped"].remedy
        return Answer(
            "To do",
            "watch",
            f"{worst['name']} shows nothing new. {remedy}",
            [("everything-dropped", "runbooks/everything-dropped")],
        )
    return Answer("To do", "good", "Nothing: 0 conditions need attention.", [])


# -- parts of sentences


def _unknown(state: State) -> tuple[Level, str] | None:
    """Return (level, sentence) for a process without figures; None if it has some."""
    if (error := state.get("error")) is not None:
        return "bad", _sentences([f"{error[:1].upper()}{error[1:]}"])
    if state.get("starting"):
        return "wait", f"The {state['role']} is starting."
    return None


def _no_update(facts: Mapping[str, Any]) -> tuple[Level, str]:
    """Return (level, sentence) for a learner that made no update lately."""
    span, uses = seconds(facts.get("updates_span", 0.0)), facts.get("producers") or {}
    share = uses.get("dropped", 0.0) / max(1.0, uses.get("samples", 0.0))
    if share >= MOSTLY_DROPPED:
        why = f"{percent(share)} of the samples are dropped as near-duplicates"
        return "watch", f"No update in the last {span}, because {why}"
    if not facts.get("updates_done"):
        return "wait", f"No update yet, {span} after the start, because no batch is full"
    return "watch", f"No update in the last {span}, because no full batch of samples came"


def _accuracy(facts: Mapping[str, Any]) -> tuple[Level, list[str]]:
    """Return (level, sentence) of the best accuracy that is known; no sentence without one."""
    for key, of in (("held_out", "held-out images"), ("stream_knn", "the stream's next samples")):
        if (trend := facts.get(key)) is None:
            continue
        value, rise, classes = trend["value"], trend["rise"], None
        if key == "held_out":
            classes = facts.get("held_out_classes")
        says = f"kNN of {of} {percent(value)}"
        says += f" (chance {percent(1 / classes)})" if classes else ""
        if trend["seconds"] >= LEAST_TREND_SECONDS:
            points, way = abs(100 * rise), "up" if rise > 0 else "down"
            change = f"{way} {points:.1f} points" if points >= 0.05 else "unchanged"
            says += f", {change} in the last {seconds(trend['seconds'])}"
        level: Level = "watch" if rise < -FORGOTTEN else "good"
        if classes and value < ABOVE_CHANCE / classes:
            level = "wait" if facts.get("updates_done", 0) < YOUNG_UPDATES else "watch"
        return level, [says]
    return "wait", []


def _named(names: Sequence[str], problems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the problems with these names, in the order of the names."""
    return [one for name in names for one in problems if one["name"] == name]


def _told(one: Mapping[str, Any]) -> str:
    return f"{one['name']}: {one['says']}"


def _level(lit: Iterable[Mapping[str, Any]]) -> Level:
    return "bad" if any(one["severity"] == "critical" for one in lit) else "watch"


def _runbooks(lit: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    pairs = dict.fromkeys((one["name"], one["runbook"]) for one in lit if one.get("runbook"))
    return list(pairs)[:MOST_NAMED]


def _sentences(parts: Iterable[str]) -> str:
    """Return the parts as sentences, each with a full stop."""
    ended = (part if part.endswith((".", "!", "?")) else f"{part}." for part in parts)
    return " ".join(ended)


def rate(value: float) -> str:
    """Return a rate with one digit after the point if it is below 10."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
