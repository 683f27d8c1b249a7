"""Tables of the footage: what a memory holds of a recording, and what its encoder tells apart.

A page marks the place of a table with two comments: `<!-- footage: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.experiments.findings import Deviation, FinishedRuns, Spread, pooled_deviation
from benchmarks.experiments.footage.training import ARMS, TITLES
from benchmarks.experiments.results import RunResult
from benchmarks.experiments.tables import TextTable, markdown

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "benchmarks" / "reports" / "footage" / "runs.jsonl"
PAGES = ("docs/duplicates.md",)
PLACE = re.compile(r"(<!-- footage: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SHARE, COUNT, NUMBER = "share", "count", "number"

COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "cameras": {
        "slots robot": ("slots: robot", COUNT),
        "slots yard": ("yard", COUNT),
        "slots films": ("films", COUNT),
        "near_duplicates": ("near-duplicates, %", SHARE),
        "kinds": ("kinds of objects", COUNT),
        "gap": ("mean gap by scene", NUMBER),
        "worst_gap": ("gap, worst 1 %", NUMBER),
        "knn_balanced": ("floor, kNN, %", SHARE),
        "linear_balanced": ("floor, linear, %", SHARE),
        "room_knn_balanced": ("room, kNN, %", SHARE),
        "room_linear_balanced": ("room, linear, %", SHARE),
        "object_knn_balanced": ("object, kNN, %", SHARE),
        "object_linear_balanced": ("object, linear, %", SHARE),
    },
    "crawl": {
        "classes": ("classes", COUNT),
        "copies": ("copies, %", SHARE),
        "near_duplicates": ("near-duplicates, %", SHARE),
        "gap": ("mean gap", NUMBER),
        "worst_gap": ("gap, worst 1 %", NUMBER),
        "knn_balanced": ("kNN, %", SHARE),
        "linear_balanced": ("linear, %", SHARE),
    },
}
"""By recording: measurements of a run, with their headings and units."""

COMPARED = tuple(
    f"{of}{by}_balanced" for of in ("", "room_", "object_") for by in ("knn", "linear")
)


def found_in(results: Mapping[str, RunResult]) -> FinishedRuns:
    """Return the runs by (arm, recording) and seed, in the order of ARMS."""
    runs = []
    for name, result in results.items():
        recording, arm, seed = name.split(" / ")
        runs.append(((arm, recording), int(seed.removeprefix("seed")), result))
    runs.sort(key=lambda run: (*ARMS,).index(run[0][0]))
    return FinishedRuns.of(runs)


def table(found: FinishedRuns, recording: str, title: str = "") -> TextTable:
    """Return what each arm's memory holds, as means over seeds."""
    columns = {
        number: shown
        for number, shown in COLUMNS[recording].items()
        if any(found.spread(cell, number).values for cell in found.results if cell[1] == recording)
    }
    rows = [
        [
            TITLES[cell[0]],
            str(found.seeds(cell)),
            *(_text(found.spread(cell, number), unit) for number, (_, unit) in columns.items()),
        ]
        for cell in found.results
        if cell[1] == recording
    ]
    return TextTable(
        title, ["memory", "seeds", *(name for name, _ in columns.values())], rows, names=1
    )


def _text(spread: Spread, unit: str) -> str:
    if unit == SHARE:
        return f"{100 * spread.mean:.1f}"
    return f"{spread.mean:.3f}" if unit == NUMBER else f"{spread.mean:.1f}"


def differences(found: FinishedRuns, recording: str, ours: str = "duel on both") -> TextTable:
    """Return the paired differences of accuracies between `ours` and each other arm, in points."""
    numbers = [
        number
        for number in COMPARED
        if number in COLUMNS[recording] and found.spread((ours, recording), number).values
    ]
    deviations = {number: pooled_deviation([found], number, recording) for number in numbers}
    rows = [
        [TITLES[arm], *(_gain(found, (ours, arm), recording, deviations, n) for n in numbers)]
        for arm, where in found.results
        if where == recording and arm != ours
    ]
    headings = [
        f"{COLUMNS[recording][number][0]} points".replace(", % ", ", ") for number in numbers
    ]
    return TextTable("", [f"{TITLES[ours]}, minus", *headings], rows, names=1)


def _gain(
    found: FinishedRuns,
    arms: tuple[str, str],
    recording: str,
    deviations: Mapping[str, Deviation | None],
    number: str,
) -> str:
    ours, theirs = ((arm, recording) for arm in arms)
    return found.gain(ours, theirs, number).difference(deviations[number])


def tables(found: FinishedRuns) -> dict[str, TextTable]:
    """Return all tables by the names that pages use."""
    made: dict[str, TextTable] = {}
    for recording in COLUMNS:
        if any(cell[1] == recording for cell in found.results):
            made[recording] = table(found, recording)
            made[f"{recording}_gains"] = differences(found, recording)
    return made


def text(made: Mapping[str, TextTable]) -> str:
    """Return all tables as one page of Markdown."""
    parts: Sequence[str] = [
        markdown(rows._replace(title=name.replace("_", ", "))) for name, rows in made.items()
    ]
    return "\n".join(["# Footage\n", *parts])


def written(page: str, made: Mapping[str, TextTable]) -> str:
    """Return the text of a page with these tables."""
    return PLACE.sub(lambda place: place[1] + markdown(made[place[2]]) + place[3], page)
