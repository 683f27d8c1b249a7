"""The five answers about a run: is it learning, is it healthy, which producer is of no use, what
does the memory hold, and what to do first.

The page and `stream-ssl status` both show what `answers` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from stream_ssl.observe.answer import Answer, Level
from stream_ssl.observe.conditions import CONDITIONS, DROPPED_SHARE
from stream_ssl.observe.learning_evidence import (
    LEAST_LABELLED,
    YOUNG_UPDATES,
    best_accuracy,
    few_labels,
    growing_lag,
    is_idle,
    is_young,
    lately,
)
from stream_ssl.observe.problems import State, census, problems_of
from stream_ssl.observe.wording import duration, few, listing, percent, plural, rate, sentences

BELOW_CHANCE = 0.95
"""A loss below this share of chance shows that the encoder learns."""
LITTLE_USE = 0.1
"""A producer with a smaller share of used samples is named among the worst."""
MOSTLY_DROPPED = 0.9
"""A share of dropped samples above this explains why no update is made."""
DROPPED_NOW = "the samples are dropped as near-duplicates"
NO_STREAM = {
    "no-producers": "no producer is connected",
    "nothing-received": "no producer sends",
}
"""The conditions under which no sample comes, each with the reason that it gives for no update."""
WAITING = "the sources have nothing new, which is normal for them"
CROWDED = 0.1
"""A share of near-duplicate slots above this is worth a look."""
FEW_DIRECTIONS = 2.0
"""Embeddings of fewer directions hardly differ, which is worth a look."""
BREAKS = ("learner-halted", "divergence", "collapse", "not-learning", "one-picture")
"""While one of these conditions holds, the known accuracy and loss are from before it began."""
WITHOUT_CHECKPOINT = {
    "collapse": "Stop the run, lower optimiser.learning_rate, and begin a new run",
    "not-learning": "Lower optimiser.learning_rate (0.001 suits Adam), and a temperature of the "
    "loss above 1. Then begin a new run",
}
"""The remedies of conditions whose usual remedy goes back to a checkpoint."""
RESTARTS = ("divergence", "learner-halted")
"""The conditions whose remedy restarts the learner from its newest checkpoint."""
OF_LEARNING = (*BREAKS, "learner-stuck", "loop-stopped", "updates-skipped", "lag")
OF_PRODUCERS = (
    *("no-producers", "nothing-received", "no-credit", "producer-silent", "bad-samples"),
    *("rejected-samples", "everything-dropped", "refusals", "clock"),
)
OF_MEMORY = ("near-duplicates", "collisions")
"""The conditions that each answer names, in the order of their weight."""
MOST_NAMED, MOST_PRODUCERS = 3, 5
"""The most conditions that an answer names, and the most producers for each of its sentences."""


def answers(states: Mapping[str, State]) -> list[Answer]:
    """Return the five answers, in the order of the questions."""
    problems = problems_of(states)
    receivers = [one for name, one in states.items() if name.startswith("receiver")]
    if receivers and "learner" in states and not any(map(_may_receive, receivers)):
        facts = {**states["learner"].get("facts", {}), "lag": None}  # old samples alone are read
        states = {**states, "learner": {**states["learner"], "facts": facts}}
    learner = states.get("learner", {"error": "the learner has not started"})
    ranks = [
        one["facts"]
        for name, one in states.items()
        if name.startswith("learner-") and "facts" in one
    ]
    if ranks and (own := learner.get("facts", {})).get("producers"):
        of_all = _uses_of_ranks([own, *ranks])
        learner = {**learner, "facts": {**own, "producers": {**own["producers"], **of_all}}}
    ended, waits = _ended(receivers), _waits(receivers)
    found = [
        _learning(learner, problems, ended is not None, waits),
        _health(states, problems),
        _producers(receivers, learner, problems, ended, waits),
        _memory(learner, problems),
    ]
    return [*found, _to_do(states, learner, problems, found, ended is not None)]


def _uses_of_ranks(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what became of the producers' samples on all ranks, as `facts` of one rank says it.

    Each rank reads its part of the samples, and may read another journal than the others.
    """
    uses = [one["producers"] for one in facts if one.get("producers")]
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for one in uses for row in (one["best"], *one["worst"]) if row is not None):
        before = rows.get(row["name"], {**row, "samples": 0.0})
        samples = before["samples"] + row["samples"]
        shares = {
            key: (before["samples"] * before[key] + row["samples"] * row[key]) / samples
            for key in ("used", "dropped", "bad")
        }
        rows[row["name"]] = {"name": row["name"], "samples": samples, **shares}
    found = sorted(rows.values(), key=lambda row: (-row["used"], -row["samples"], row["name"]))
    totals = {key: sum(one[key] for one in uses) for key in ("samples", "dropped")}
    return {"best": found[0] if found else None, "worst": found[:0:-1], **totals}


def _may_receive(receiver: State) -> bool:
    """Return whether a receiver has producers or new samples, or does not answer."""
    figures = receiver.get("figures", {"producers": None})
    return figures.get("producers") != 0 or bool(figures.get("received"))


def as_json(given: Iterable[Answer]) -> list[dict[str, Any]]:
    """Return answers as plain values."""
    return [{**asdict(one), "word": one.word} for one in given]


# -- one question each


def _learning(
    learner: State,
    problems: Sequence[Mapping[str, Any]],
    ended: bool = False,
    waits: bool = False,
) -> Answer:
    links = [("loss and accuracy", "#figures")]
    if (unknown := _unknown(learner)) is not None:
        return Answer("Learning", unknown[0], unknown[1], links)
    figures, facts = learner.get("figures", {}), learner.get("facts", {})
    level, accuracy = best_accuracy(facts, figures.get("majority"))
    measured = level != "wait"
    loss, chance = figures.get("loss"), facts.get("chance")
    limit = "" if chance is None else f"; chance is {chance:.2f}"
    numbers = [*accuracy, *([] if loss is None else [f"Loss {loss:.2f}{limit}"])]
    if named := _named(OF_LEARNING, problems):
        if named[0]["name"] in BREAKS:
            numbers = best_accuracy(facts, None, before=True)[1]
        says = sentences([_sentence(named[0]), *numbers])
        return Answer("Learning", _level(named), says, [*_runbooks(named), *links])
    updates, done = facts.get("updates", 0.0), facts.get("updates_done", 0.0)
    if is_idle(facts):
        level, why = _no_update(facts, problems, ended, waits)
        return Answer("Learning", level, sentences([why, *numbers]), links)
    learns = chance is None or loss is None or loss < BELOW_CHANCE * chance
    if is_young(facts):
        level = "wait"  # an encoder without any update may be above chance, too
    elif not measured:
        level = "good" if learns else "watch"
    elif level == "good" and facts.get("held_out_first") is None and not learns:
        level = "watch"
        numbers.append("The loss is hardly below chance, so this may be an untrained encoder")
    if not measured and not accuracy:
        numbers.append(f"No accuracy is known: {_missing_labels(facts)}")
    if level == "wait":
        most = facts.get("updates_at_most", done)
        made = ("at most " if most > done else "") + plural(most, "update")
        numbers.insert(0, f"Too early to tell after {made}")
    best = (facts.get("producers") or {}).get("best")
    if best is not None and best["used"] < 1 - DROPPED_SHARE:
        level = "watch"
        numbers.insert(0, "The updates repeat old samples, because no producer sends anything new")
    pace = f"{plural(updates, 'update')} in the last {lately(facts['updates_span'])}"
    if (behind := growing_lag(facts)) is not None:
        level, numbers = "watch", [behind, *numbers]
        links = [("lag", "runbooks/lag"), *links]
    if not updates:
        pace = f"The last update is {duration(facts['idle'])} old, as usual for this stream"
    return Answer("Learning", level, sentences([*numbers, pace]), links)


def _health(states: Mapping[str, State], problems: Sequence[Mapping[str, Any]]) -> Answer:
    checks = [("all conditions", "#health")]
    found = census(states, problems)
    if problems:
        parts = []
        for over in (False, True):
            chosen = [name for name in found.present if _over(name, problems) is over]
            if names := [_in_brief(name, problems) for name in chosen]:
                verb = "holds" if len(names) == 1 else "hold"
                when = "ended less than a minute ago" if over else f"{verb} now"
                parts.append(f"{plural(len(names), 'condition')} {when}: {few(names, MOST_NAMED)}")
        if found.unknown:
            parts.append(f"{len(found.unknown)} of the others are unknown")
        return Answer("Health", _level(problems), sentences(parts), [*_runbooks(problems), *checks])
    starting = [name for name, state in states.items() if state.get("starting")]
    if starting:
        return Answer("Health", "wait", f"{listing(starting)}: starting.", checks)
    answering = listing(list(states))
    parts = [f"None of {plural(len(found.absent), 'condition')} holds, and {answering} answer"]
    if growing_lag(states.get("learner", {}).get("facts", {})) is not None:
        parts.append("But the learner falls further and further behind the stream")
        return Answer("Health", "watch", sentences(parts), [("lag", "runbooks/lag"), *checks])
    return Answer("Health", "good", sentences(parts), checks)


def _producers(
    receivers: Sequence[State],
    learner: State,
    problems: Sequence[Mapping[str, Any]],
    ended: str | None,
    waits: bool,
) -> Answer:
    links = [("table of producers", "#producers")]
    answering = [one["figures"] for one in receivers if "figures" in one]
    if not answering:
        unknown = _unknown(receivers[0] if receivers else {"error": "no receiver has started"})
        assert unknown is not None, "a state has figures or an error"
        return Answer("Producers", unknown[0], unknown[1], links)
    connected = sum(one.get("producers") or 0.0 for one in answering)
    speed = sum(one.get("received") or 0.0 for one in answering)
    parts = ["No producer is connected"]  # a rate covers a minute in which one may have been
    if ended is not None:
        parts.append(ended)
    if connected:
        parts = [
            f"{plural(connected, 'producer')} connected, {rate(speed)} samples/s in the last minute"
        ]
    if waits and not speed:
        parts.append(WAITING.capitalize())
    named = _named(OF_PRODUCERS, problems)
    of_use, useless = _uses(learner.get("facts", {}), {one["producer"] for one in named})
    parts += of_use
    if connected and "error" in learner:
        parts.append("The learner, which knows how many of their samples are used, does not answer")
    for name in list(dict.fromkeys(one["name"] for one in named))[:MOST_NAMED]:
        of_name = _named((name,), named)
        parts += [_sentence(one) for one in of_name if not one["producer"]]
        parts += [_sentence(one) for one in of_name if one["producer"]][:1]
        if others := _names(of_name)[1:]:
            parts.append(f"The same condition holds for {few(others, MOST_PRODUCERS)}")
    if named:
        return Answer("Producers", _level(named), sentences(parts), [*_runbooks(named), *links])
    # A condition begins when no producer has been connected for a while.
    level: Level = "watch" if connected else "wait"
    level = "good" if (connected and (speed or waits)) or ended is not None else level
    # Nobody can change what a source sends that has ended.
    if ended is None and any(row["used"] <= 1 - DROPPED_SHARE for row in useless):
        level = "watch"
    return Answer("Producers", level, sentences(parts), links)


def _uses(
    facts: Mapping[str, Any], faulty: Collection[str]
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return sentences about the share of samples that is used, and the producers of little use.

    Args:
        facts: the facts of the learner.
        faulty: producers that are left out among the worst, because a condition names them.
    """
    uses = facts.get("producers") or {}
    best, rows = uses.get("best"), uses.get("worst") or []
    parts = []
    if best is not None:
        used, span = percent(best["used"]), duration(facts.get("span", 0.0))
        if not rows:
            parts.append(f"In the last {span}, {used} of {best['name']}'s samples are used")
        elif percent(rows[0]["used"]) == used:
            parts.append(f"In the last {span}, each producer has {used} of its samples used")
            rows = []
        else:
            parts.append(f"Best of the last {span}: {best['name']}, {used} of its samples are used")
    useless = [row for row in rows if row["used"] < LITTLE_USE and row["name"] not in faulty]
    worst = useless or [row for row in rows[:1] if row["name"] not in faulty]
    if worst and best is not None and percent(worst[0]["used"]) != percent(best["used"]):
        parts.append(f"Worst: {_worst(worst)}")
    return parts, useless


def _memory(learner: State, problems: Sequence[Mapping[str, Any]]) -> Answer:
    links = [("slots and pictures", "#memory")]
    if (unknown := _unknown(learner)) is not None:
        return Answer("Memory", unknown[0], unknown[1], links)
    figures, facts = learner.get("figures", {}), learner.get("facts", {})
    slots, capacity = figures.get("slots") or 0.0, figures.get("capacity") or 0.0
    if ranks := len(shards := facts.get("shards") or ()):  # each rank holds a shard of this size
        slots, capacity = sum(shards), ranks * capacity
    if not slots:
        empty = f"0 of {plural(capacity, 'slot')} hold" if capacity else "No slot holds"
        if _mostly_dropped(facts, problems):
            return Answer("Memory", "watch", f"{empty} a sample, because {DROPPED_NOW}.", links)
        if _named(("learner-halted",), problems):
            why = "the learner has stopped taking samples"
            return Answer("Memory", "watch", f"{empty} a sample, because {why}.", links)
        if not capacity:  # a memory that is restored may hold many
            return Answer("Memory", "wait", "The learner has not counted its slots yet.", links)
        return Answer("Memory", "wait", f"{empty} a sample yet.", links)
    parts = [f"{slots:,.0f} of {plural(capacity, 'slot')} filled"]
    parts[0] += f" on {ranks} ranks" if ranks else ""
    alike = figures.get("near_duplicates")
    if alike is not None:
        parts[0] += f", {percent(alike)} near-duplicates"
    rank = figures.get("memory_rank")
    of_slots = "slots of the first rank" if ranks else "slots"
    classes, uses = facts.get("classes"), facts.get("producers") or {}
    if classes is not None:
        parts.append(
            f"{'More than ' if classes.get('more') else ''}{classes['count']} "
            f"{'class' if classes['count'] == 1 else 'classes'}; the largest, class "
            f"{classes['largest']}, has {percent(classes['share'])} of the labelled {of_slots}"
        )
    elif rank is not None:
        parts.append(f"No labels; the embeddings take {plural(rank, 'direction')}")
    uniform = alike is None and rank is not None and rank < FEW_DIRECTIONS
    if uniform:
        parts.append("The pictures hardly differ for the encoder; look at the mosaic")
    if (most := uses.get("most_slots")) is not None:
        parts.append(f"{most} has {percent(uses['most_slots_share'])} of the {of_slots}")
    named = _named(OF_MEMORY, problems)
    level: Level = "watch" if uniform or (alike or 0.0) > CROWDED else "good"
    parts += [_sentence(one) for one in named]
    return Answer(
        "Memory",
        level if not named else _level(named),
        sentences(parts),
        [*_runbooks(named), *links],
    )


def _to_do(
    states: Mapping[str, State],
    learner: State,
    problems: Sequence[Mapping[str, Any]],
    others: Sequence[Answer],
    ended: bool,
) -> Answer:
    now = [one for one in problems if not one.get("over")]
    if problems and not now:
        names = list(dict.fromkeys(one["name"] for one in problems))
        says = f"Nothing, unless {few(names, MOST_NAMED)} begins again. Look again in a minute."
        return Answer("To do", "wait", says, _runbooks(problems))
    if now:
        return _first_to_do(now, census(states, now).present, learner)
    if any(state.get("starting") for state in states.values()):
        return Answer("To do", "wait", "Nothing yet: the run is starting.", [])
    rows = (learner.get("facts", {}).get("producers") or {}).get("worst") or []
    stale = sorted(row["name"] for row in rows if row["dropped"] >= DROPPED_SHARE)
    if stale and not ended:
        verb = "shows" if len(stale) == 1 else "show"
        return Answer(
            "To do",
            "watch",
            f"{few(stale, MOST_PRODUCERS)} {verb} nothing new. "
            f"{CONDITIONS['everything-dropped'].remedy}",
            [("everything-dropped", "runbooks/everything-dropped")],
        )
    if (behind := growing_lag(learner.get("facts", {}))) is not None:
        says = sentences([behind, CONDITIONS["lag"].remedy])
        return Answer("To do", "watch", says, [("lag", "runbooks/lag")])
    for one in others:
        if one.level == "watch":
            says = f"No condition holds, but look at {one.question}: {one.says}"
            return Answer("To do", "watch", says, one.links)
    learning, _, producers, _ = others
    if producers.level == "wait":  # none is connected
        says = "Start a producer: stream-ssl produce, or a program of your own."
        return Answer("To do", "wait", says, [])
    if ended and _read_all(learner.get("facts", {})):
        says = "0 conditions need attention. Every source has ended: send more, or stop the run."
        return Answer("To do", "good", says, producers.links)
    if learning.level == "wait":
        return Answer("To do", "wait", _wait(learner.get("facts", {})), [])
    return Answer("To do", "good", "0 conditions need attention.", [])


def _first_to_do(now: Sequence[Mapping[str, Any]], names: Sequence[str], learner: State) -> Answer:
    """Return the answer "To do" while the conditions of these names hold, the most severe first."""
    first = now[0]
    who = _who(_named((first["name"],), now))
    says = f"First, {first['name']}{who and f' ({who})'}: {_remedy(first, learner)}"
    if more := [name for name in names if name != first["name"]]:
        then = [_placed(_named((name,), now)[0]) for name in more]
        says = f"{says.rstrip('.')}. Then: {few(then, MOST_NAMED)}"
    return Answer("To do", _level([first]), sentences([says]), _runbooks([first]))


def _wait(facts: Mapping[str, Any]) -> str:
    """Return for how long a young run needs no attention."""
    done = facts.get("updates_at_most", 0.0)
    updates = facts.get("updates", 0.0)
    if not updates or done >= YOUNG_UPDATES:
        return "Look again when the first updates are done."
    left = (YOUNG_UPDATES - done) * facts["updates_span"] / updates
    then = f"the run then has {YOUNG_UPDATES} updates"
    return f"Look again in {duration(max(60.0, left))}: {then}."


def _remedy(problem: Mapping[str, Any], learner: State) -> str:
    """Return what to do about a problem, in a sentence that fits the run's checkpoints."""
    name, usual = problem["name"], problem["remedy"] or problem["says"]
    facts = learner.get("facts", {})
    if name not in (*WITHOUT_CHECKPOINT, *RESTARTS) or "checkpoint" not in facts:
        return str(usual)
    if (saved := facts["checkpoint"]) is None:
        if name in RESTARTS:
            return f"{usual} No checkpoint exists, so it begins with new weights."
        return f"{WITHOUT_CHECKPOINT[name]}: no checkpoint exists to go back to."
    age, since = saved["age"], problem.get("since")
    text = f"{usual} The newest checkpoint is {duration(age)} old"
    if name in RESTARTS or since is None:
        return f"{text}."
    began = max(0.0, learner["now"] - since)
    if age < began:
        return f"{text}, and younger than the condition, which began {duration(began)} ago."
    return f"{text}; the condition began {duration(began)} ago."


# -- parts of sentences


def _unknown(state: State) -> tuple[Level, str] | None:
    """Return (level, sentence) for a process without figures; None if it has some."""
    if (error := state.get("error")) is not None:
        error = state.get("ended", {}).get("says") or error.partition(" at http")[0]
        return "unknown", sentences([f"{error[:1].upper()}{error[1:]}"])
    if state.get("starting"):
        return "wait", f"The {state['role']} is starting."
    return None


def _missing_labels(facts: Mapping[str, Any]) -> str:
    """Return what an accuracy needs that this run does not have."""
    if not few_labels(facts):
        return "it needs labels or a held-out set"
    came = plural(facts["labelled"], "labelled sample")
    return f"{came} came, and it needs {LEAST_LABELLED}"


def _no_update(
    facts: Mapping[str, Any], problems: Sequence[Mapping[str, Any]], ended: bool, waits: bool
) -> tuple[Level, str]:
    """Return (level, sentence) for a learner that made no update lately."""
    text = f"No update for {duration(facts.get('idle', 0.0))}"
    if not facts.get("updates_done"):
        text = f"No update yet, {duration(facts.get('age', 0.0))} after the start"
    if ended and _read_all(facts):
        text += ", because every source has ended. The learner has read all samples"
        if pending := facts.get("pending"):
            text += f", and {plural(pending, 'sample')} wait for a full batch"
        return "good", text
    for name, why in NO_STREAM.items():
        if _named((name,), problems):
            return "watch", f"{text}, because {why}"
    if _mostly_dropped(facts, problems):
        return "watch", f"{text}, because {DROPPED_NOW}"
    if _named(("no-credit",), problems):
        return "watch", f"{text}, because no producer may send"
    if not facts.get("updates_done"):
        if facts.get("unread") is None:
            return "wait", f"{text}. The learner has not counted its waiting samples yet"
        return "wait", f"{text}, because no batch is full"
    if waits and _read_all(facts):
        return "good", f"{text}, because {WAITING}"
    return "watch", f"{text}, because no full batch of samples came"


def _read_all(facts: Mapping[str, Any]) -> bool:
    """Return whether the learner has read the journal; False if it has not said so yet."""
    return facts.get("unread") == 0


def _ended(receivers: Iterable[State]) -> str | None:
    """Return a sentence on the last producer if the sources of all producers have ended.

    A producer's name decides its receiver, so some of several receivers may have none.
    """
    facts = [one.get("facts") or {} for one in receivers]
    found = [one.get("ended") for one in facts if one.get("known") != 0]
    if not found or not all(found):
        return None
    last = max((one for one in found if one), key=lambda one: float(one["received"]))
    at = datetime.fromtimestamp(last["received"]).astimezone().isoformat(" ", "seconds")
    return f"The last, {last['last']}, ended normally; its last sample came at {at}"


def _waits(receivers: Iterable[State]) -> bool:
    """Return whether producers are connected, and all of them may be silent for long."""
    facts = [
        one.get("facts") or {} for one in receivers if (one.get("figures") or {}).get("producers")
    ]
    return bool(facts) and all(one.get("waits") for one in facts)


def _mostly_dropped(facts: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    uses = facts.get("producers") or {}
    share = uses.get("dropped", 0.0) / max(1.0, uses.get("samples", 0.0))
    return bool(share >= MOSTLY_DROPPED or _named(("everything-dropped",), problems))


def _named(names: Sequence[str], problems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the problems with these names, in the order of the names."""
    return [one for name in names for one in problems if one["name"] == name]


def _over(name: str, problems: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a condition has ended for everything that it concerned."""
    return all(one.get("over") for one in problems if one["name"] == name)


def _in_brief(name: str, problems: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a condition with its sentences, or with its producers.

    The answers to other questions have the sentences of the conditions in OF_LEARNING, OF_PRODUCERS
    and OF_MEMORY.
    """
    same = [one for one in problems if one["name"] == name]
    if name not in (*OF_LEARNING, *OF_PRODUCERS, *OF_MEMORY):
        return f"{name} ({'; '.join(dict.fromkeys(one['says'] for one in same))})"
    who = _who(same)
    return f"{name} ({who})" if who else name


def _who(same: Sequence[Mapping[str, Any]]) -> str:
    """Return the producers of problems; "" if they concern none."""
    return few(_names(same), MOST_PRODUCERS)


def _placed(one: Mapping[str, Any]) -> str:
    """Return the name of a problem with the folders that it concerns."""
    where = one.get("where")  # another version of the process may not have it
    return f"{one['name']} (see {where})" if where else str(one["name"])


def _names(same: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the producers of problems, each once, though several ranks may report it."""
    return list(dict.fromkeys(one["producer"] for one in same if one["producer"]))


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return producers with the share of their samples that was used, and why the rest was not."""
    if len(rows) == 1:
        (row,) = rows
        parts = ((row["dropped"], "near-duplicates"), (row["bad"], "damaged"))
        why = "".join(f", {percent(share)} {what}" for share, what in parts if share)
        return f"{row['name']} ({percent(row['used'])} used{why})"
    by_fault: dict[str, list[str]] = {}
    for row in rows:
        fault = "damaged" if row["bad"] > row["dropped"] else "near-duplicates"
        by_fault.setdefault(fault, []).append(row["name"])
    return "; ".join(
        f"{few(sorted(names), MOST_PRODUCERS)} (less than {percent(LITTLE_USE)} used, {fault})"
        for fault, names in by_fault.items()
    )


def _sentence(one: Mapping[str, Any]) -> str:
    """Return the text of a problem as the beginning of a sentence, without the problem's name."""
    says, who = one["says"], one["producer"]
    return str(says if who and says.startswith(who) else says[:1].upper() + says[1:])


def _level(problems: Iterable[Mapping[str, Any]]) -> Level:
    now = [one["severity"] for one in problems if not one.get("over")]
    return "bad" if "critical" in now else "watch"


def _runbooks(problems: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    pairs = dict.fromkeys((one["name"], one["runbook"]) for one in problems if one.get("runbook"))
    return list(pairs)[:MOST_NAMED]
