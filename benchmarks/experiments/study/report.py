"""Tables of the study, with a row per arm and stream over the finished seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.experiments.findings import Deviation, FinishedRuns, Spread, pooled_deviation
from benchmarks.experiments.results import Cell, Results, RunResult, entries
from benchmarks.experiments.study.arms import BASE, TITLES
from benchmarks.experiments.study.streams import CLASSES, STREAMS
from benchmarks.experiments.study.streams import TITLES as STREAM_TITLES
from benchmarks.experiments.tables import TextTable, markdown

CEILING: Cell = (BASE.name, "shuffled")
NAMES = {arm.name: title for arm, title in TITLES.items()}
PROBES = ("knn", "linear")


def found_in(results: Mapping[str, RunResult]) -> FinishedRuns:
    """Return the runs by (arm, stream) and seed, from their names, planned or not.

    Streams are in their usual order. The arms of a stream are sorted by kNN accuracy, best first.
    """
    runs = []
    for name, result in results.items():
        stream, arm, seed = name.split(" ")
        if stream in STREAMS:
            runs.append(((arm, stream), int(seed.removeprefix("seed")), result))
    found, order = FinishedRuns.of(runs), list(STREAMS)

    def place(cell: Cell) -> tuple[int, float]:
        return order.index(cell[1]), -found.spread(cell, "knn").mean

    return FinishedRuns({cell: found.results[cell] for cell in sorted(found.results, key=place)})


def by_stream(found: FinishedRuns) -> dict[str, list[str]]:
    """Return the arms of each stream, in order."""
    parts: dict[str, list[str]] = {}
    for arm, stream in found.results:
        parts.setdefault(stream, []).append(arm)
    return parts


HEADINGS = (
    *("memory", "seeds", "near-duplicates, %", "entropy, %", "kNN, %", "linear, %"),
    *("kNN - queue", "linear - queue", "kNN of ceiling, %", "linear of ceiling, %"),
)


Deviations = Mapping[str, Deviation | None]
"""The pooled deviation of a paired difference, by probe; see `findings.pooled_deviation`."""


def deviations(path: Path) -> Deviations:
    """Return the pooled deviations over all runs of a file, whatever their settings."""
    shared = {json.dumps(entry["settings"], sort_keys=True) for entry in entries(path)}
    families = [found_in(Results(path, json.loads(each)).by_name()) for each in sorted(shared)]
    return {probe: pooled_deviation(families, probe) for probe in PROBES}


def tables(found: FinishedRuns, deviation: Deviations) -> list[TextTable]:
    """Return a table per stream. A gain over the queue has its paired standard error."""
    return [
        TextTable(
            STREAM_TITLES[stream],
            HEADINGS,
            [cells(found, (arm, stream), deviation) for arm in arms],
            names=1,
        )
        for stream, arms in by_stream(found).items()
    ]


def cells(found: FinishedRuns, cell: Cell, deviation: Deviations) -> list[str]:
    """Return a row of texts under HEADINGS."""
    arm, stream = cell
    entropy = Spread(
        tuple(value / math.log(CLASSES) for value in found.spread(cell, "entropy").values)
    )
    gains = ((probe, pair(found, cell, (BASE.name, stream), probe)) for probe in PROBES)
    shares = (pair(found, cell, CEILING, probe, share=True) for probe in PROBES)
    return [
        NAMES.get(arm, arm.replace("/", " / ")),
        str(found.seeds(cell)),
        found.spread(cell, "copies").text(),
        entropy.text(),
        *(found.spread(cell, probe).text() for probe in PROBES),
        *(gain.difference(deviation[probe]) for probe, gain in gains),
        *(f"{100 * share.mean:.1f}" * bool(share.values) for share in shares),
    ]


def pair(found: FinishedRuns, cell: Cell, base: Cell, probe: str, share: bool = False) -> Spread:
    """Compare a cell with another cell, seed by seed; the result is empty for the cell itself."""
    if cell == base:
        return Spread(())
    return (found.share if share else found.gain)(cell, base, probe)


def summary(found: FinishedRuns) -> TextTable:
    """Return one table of all streams, with kNN / linear accuracy of the arms that have a title."""
    shown = [name for name in NAMES if any(arm == name for arm, _ in found.results)]
    rows = []
    for stream in by_stream(found):
        accuracies = [both(found, (arm, stream)) for arm in shown]
        rows.append([STREAM_TITLES[stream], *accuracies])
    return TextTable("", ["kNN / linear, %", *(NAMES[name] for name in shown)], rows, names=1)


def both(found: FinishedRuns, cell: Cell) -> str:
    """Return "45.6 / 48.7 (3)": mean kNN and linear accuracy and the number of seeds."""
    if cell not in found.results:
        return ""
    knn, linear = (f"{100 * found.spread(cell, probe).mean:.1f}" for probe in PROBES)
    return f"{knn} / {linear} ({found.seeds(cell)})"


def text(found: FinishedRuns, deviation: Deviations) -> str:
    """Return the report in Markdown: the summary, and the table of each stream."""
    whole: Sequence[TextTable] = tables(found, deviation)
    head = f"{markdown(summary(found))}\nNumbers in brackets give the seeds.\n"
    return "\n".join([head, *map(markdown, whole)])
