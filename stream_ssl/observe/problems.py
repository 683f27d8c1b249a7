"""The problems of a run: everything that needs attention, from the states of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stream_ssl.observe.conditions import (
    CONDITIONS,
    DOWN,
    TABLE,
    conditions_of,
    hung_remedy,
    problem,
)
from stream_ssl.observe.metric_spec import ROLES, role_of

State = Mapping[str, Any]
"""A process's answer to the question `state` of `page/api.py`, or {"error": a sentence}."""

BEFORE_START = {
    "failed": "Correct the error",
    "killed": "No sample is lost. Read the end of its log, and dmesg for a lack of memory",
}
"""The action before a process starts again, by how it ended."""
ALONE = {
    "learner": "A receiver alone only collects samples. To train, run stream-ssl learner CONFIG",
    "receiver": "A learner alone trains on the journal. To receive, run stream-ssl receiver CONFIG",
}
"""The advice about a process that never started in the run folder while others run."""
BUSY = "Ask again in a minute. If this stays, run less beside it on its machine."
"""The remedy for a process that answers too slowly."""
STOPPED = "If you stopped the run, continue it with stream-ssl run CONFIG. Otherwise: "
"""The beginning of the remedy if no process of the run answers."""
ORDER = {condition.name: number for number, condition in enumerate(TABLE)}
"""The position of each condition in the table. Problems of one severity are sorted by it."""


def problems_of(states: Mapping[str, State]) -> list[dict[str, Any]]:
    """Return everything that needs attention in a run, the most severe first.

    Args:
        states: the state of each process, by its name, such as "learner" or "receiver-1".
    """
    found: list[dict[str, Any]] = []
    for name, state in states.items():
        which = f"{name}: " if name.startswith("receiver-") else ""  # one of several
        for one in state.get("problems", []):
            found.append({**one, "says": f"{which}{one['says']}"})
    names = {one["name"] for one in found}
    # If no process answers, perhaps the user stopped the run, and only has to continue it.
    alive = [state for state in states.values() if state.get("hung") or state.get("busy")]
    all_gone = not alive and all("error" in state for state in states.values())
    for name, state in states.items():
        error = state.get("error", state.get("before"))
        reported = state.get("hung") and "process-hung" in names  # by the other process
        if error is not None and not reported:
            found.append(_problem_of(name, state, error, all_gone))
    for one in found:
        if one["name"] == "process-hung":
            one["remedy"] = hung_remedy(one["says"])
    return sorted(
        found,
        key=lambda one: (
            bool(one.get("over")),
            one["severity"] != "critical",
            ORDER.get(one["name"], -1),
            one["producer"],
        ),
    )


def _problem_of(name: str, state: State, error: str, all_gone: bool) -> dict[str, Any]:
    """Return the problem of a process that does not answer, or that was started again.

    Args:
        error: a sentence on the process.
        all_gone: whether no process of the run answers.
    """
    ended = state.get("ended")
    fault, severity = "process-hung" if state.get("hung") else "down", "critical"
    remedy = (STOPPED if all_gone else "") + DOWN.replace("the process", f"the {name}", 1)
    if state.get("absent") and not all_gone:
        severity, remedy = "warning", ALONE[role_of(name)]
    elif state.get("busy"):
        severity, remedy = "warning", BUSY
    elif "before" in state:
        fault, severity, remedy = "restarting", "warning", CONDITIONS["restarting"].remedy
    elif ended is not None and ended["end"] == "stopped":
        severity, remedy = "warning", f"Start it again with: {ended['again']}"
    elif ended is not None:
        remedy = f"{BEFORE_START[ended['end']]}, then start it again with: {ended['again']}"
    return problem(fault, error, severity, remedy)


@dataclass(frozen=True, slots=True)
class Census:
    """The names of all conditions. Those of a process that gives no answer are `unknown`."""

    present: Sequence[str]
    absent: Sequence[str]
    unknown: Sequence[str]


def census(states: Mapping[str, State], problems: Sequence[Mapping[str, Any]]) -> Census:
    """Return which conditions hold, do not hold, and are unknown; "down" is one of them."""
    present = list(dict.fromkeys(one["name"] for one in problems))
    silent = {role_of(name) for name, state in states.items() if "watched" not in state}
    unwatched = [one.name for role in ROLES if role in silent for one in conditions_of(role)]
    unknown = [name for name in dict.fromkeys(unwatched) if name not in present]
    known = [one["name"] for state in states.values() for one in state.get("watched", [])]
    absent = [name for name in dict.fromkeys(("down", *known)) if name not in (*present, *unknown)]
    return Census(present, absent, unknown)
