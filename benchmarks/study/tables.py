"""What the runs say together: one row an arm and stream, over the seeds that are done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.study.arms import BASE, TITLES
from benchmarks.study.results import Results
from benchmarks.study.streams import CLASSES, STREAMS
from benchmarks.study.streams import TITLES as STREAM_TITLES
from stream_ssl.reproduction.spread import Spread

CEILING = "shuffled"
NAMES = {arm.name: title for arm, title in TITLES.items()}
PROBES = ("knn", "linear")


@dataclass(frozen=True)
class Row:
    """An arm on a stream.

    Attributes:
        stream, arm: their names.
        seeds: of the runs that are done.
        values: by number, over the seeds.
        gains: by probe, over the queue on the same stream with the same seed.
        shares: by probe, of what the queue reaches on the shuffled stream with the same seed.
    """

    stream: str
    arm: str
    seeds: tuple[str, ...]
    values: dict[str, Spread]
    gains: dict[str, Spread]
    shares: dict[str, Spread]


def rows(results: Results) -> list[Row]:
    """A row for each arm and stream with a finished run, the best kNN first within a stream."""
    done: dict[tuple[str, str], list[str]] = {}
    for name in results.names():
        stream, arm, seed = name.split(" ")
        if stream in STREAMS:
            done.setdefault((stream, arm), []).append(seed)
    found = [_row(results, stream, arm, sorted(seeds)) for (stream, arm), seeds in done.items()]
    order = list(STREAMS)
    return sorted(found, key=lambda row: (order.index(row.stream), -row.values["knn"].mean))


def _row(results: Results, stream: str, arm: str, seeds: Sequence[str]) -> Row:
    runs = {seed: results[f"{stream} {arm} {seed}"] for seed in seeds}

    def against(there: str, other: str, number: str, share: bool) -> Spread:
        pairs = []
        for seed, numbers in runs.items():
            name = f"{there} {other} {seed}"
            if name in results and name != f"{stream} {arm} {seed}":
                base = results[name][number]
                pairs.append(numbers[number] / base if share else numbers[number] - base)
        return Spread(tuple(pairs))

    names = sorted({name for numbers in runs.values() for name in numbers})
    return Row(
        stream,
        arm,
        tuple(seeds),
        {name: Spread(tuple(n[name] for n in runs.values() if name in n)) for name in names},
        {probe: against(stream, BASE.name, probe, share=False) for probe in PROBES},
        {probe: against(CEILING, BASE.name, probe, share=True) for probe in PROBES},
    )


HEADINGS = (
    *("memory", "seeds", "near-copies, %", "entropy, %", "kNN, %", "linear, %"),
    *("kNN - queue", "linear - queue", "kNN of ceiling, %", "linear of ceiling, %"),
)


def cells(row: Row) -> list[str]:
    """As HEADINGS has them; a gain has its paired standard error."""
    nothing = Spread(())
    entropy = row.values.get("entropy", nothing)
    return [
        NAMES.get(row.arm, row.arm.replace("/", " / ")),
        str(len(row.seeds)),
        row.values.get("copies", nothing).text(),
        Spread(tuple(value / math.log(CLASSES) for value in entropy.values)).text(),
        *(row.values[probe].text() for probe in PROBES),
        *(gain(row.gains[probe]) for probe in PROBES),
        *(
            f"{100 * row.shares[probe].mean:.1f}" * bool(row.shares[probe].values)
            for probe in PROBES
        ),
    ]


def gain(spread: Spread) -> str:
    """In points, with the standard error of the mean of pairs from two on.

    >>> gain(Spread((0.02, 0.04)))
    '+3.0 ± 1.0'
    """
    if not spread.values:
        return ""
    mean, count = f"{100 * spread.mean:+.1f}", len(spread.values)
    if count < 2:
        return mean
    return f"{mean} ± {100 * statistics.stdev(spread.values) / math.sqrt(count):.1f}"


def markdown(found: Sequence[Row]) -> str:
    """One table a stream."""
    lines: list[str] = []
    for stream, those in by_stream(found).items():
        lines += [f"### {STREAM_TITLES[stream]}", "", _line(HEADINGS)]
        lines.append(_line(["---", *["---:"] * (len(HEADINGS) - 1)]))
        lines += [*(_line(cells(row)) for row in those), ""]
    return "\n".join(lines)


def summary(found: Sequence[Row]) -> str:
    """One table of all streams: kNN / linear accuracy of the arms that have a title."""
    shown = [name for name in NAMES if any(row.arm == name for row in found)]
    lines = [_line(["kNN / linear, %", *(NAMES[name] for name in shown)])]
    lines.append(_line(["---", *["---:"] * len(shown)]))
    for stream, those in by_stream(found).items():
        by_arm = {row.arm: row for row in those}
        accuracies = [_both(by_arm[name]) if name in by_arm else "" for name in shown]
        lines.append(_line([STREAM_TITLES[stream], *accuracies]))
    return "\n".join(lines)


def _both(row: Row) -> str:
    knn, linear = (f"{100 * row.values[probe].mean:.1f}" for probe in PROBES)
    return f"{knn} / {linear}" + (f" ({len(row.seeds)})" if len(row.seeds) > 1 else "")


def tables(found: Sequence[Row]) -> list[Table]:
    """The same for a terminal."""
    made = []
    for stream, those in by_stream(found).items():
        table = Table(title=STREAM_TITLES[stream], title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
        for row in those:
            table.add_row(*cells(row), style="bold" if row.arm == BASE.name else None)
        made.append(table)
    return made


def by_stream(found: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each stream, in order."""
    parts: dict[str, list[Row]] = {}
    for row in found:
        parts.setdefault(row.stream, []).append(row)
    return parts


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"
