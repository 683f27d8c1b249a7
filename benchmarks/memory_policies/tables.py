"""What the runs say together: one row an arm and stream, with mean and spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.memory_policies.arms import BASE, Arm, Run
from benchmarks.memory_policies.results import Results
from benchmarks.memory_policies.stream import CLASSES, Shape
from stream_ssl.reproduction.spread import Spread


@dataclass(frozen=True)
class Row:
    """An arm on a stream.

    Attributes:
        seeds: runs that are done.
        entropy: of the memory's classes, as a share of its greatest.
        collision: chance that an anchor and a slot share their class.
        knn, linear: accuracy on the balanced test.
        knn_gain, linear_gain: over the plain queue with the same seed.
    """

    shape: Shape
    arm: Arm
    seeds: int
    entropy: Spread
    collision: Spread
    knn: Spread
    linear: Spread
    knn_gain: Spread
    linear_gain: Spread


def rows(results: Results, runs: Iterable[Run]) -> list[Row]:
    """A row for each arm and stream with at least one finished run, the best kNN first within a
    stream."""
    done: dict[tuple[Shape, Arm], list[Run]] = {}
    for run in runs:
        if run in results:
            done.setdefault((run.shape, run.arm), []).append(run)
    found = [_row(results, shape, arm, those) for (shape, arm), those in done.items()]
    return sorted(found, key=lambda row: (-row.shape.bias, row.shape.block, -row.knn.mean))


def _row(results: Results, shape: Shape, arm: Arm, runs: Sequence[Run]) -> Row:
    def over(name: str, scale: float = 1.0) -> Spread:
        return Spread(tuple(results[run][name] * scale for run in runs))

    def gain(name: str) -> Spread:
        pairs = [(run, Run(shape, BASE, run.seed)) for run in runs]
        return Spread(
            tuple(
                results[one][name] - results[base][name] for one, base in pairs if base in results
            )
        )

    base = arm == BASE
    return Row(
        shape,
        arm,
        len(runs),
        over("entropy", 1 / math.log(CLASSES)),
        over("collision"),
        over("knn"),
        over("linear"),
        Spread(()) if base else gain("knn"),
        Spread(()) if base else gain("linear"),
    )


HEADINGS = (
    *("memory / anchors / freshness", "seeds", "entropy, % of ln 10", "collision, %"),
    *("kNN, %", "linear, %", "kNN gain", "linear gain"),
)


def cells(row: Row) -> list[str]:
    """As HEADINGS has them."""
    return [
        row.arm.name.replace("/", " / "),
        str(row.seeds),
        row.entropy.text(),
        row.collision.text(),
        row.knn.text(),
        row.linear.text(),
        row.knn_gain.text(sign=True),
        row.linear_gain.text(sign=True),
    ]


def markdown(found: Sequence[Row]) -> str:
    """One table a stream."""
    lines: list[str] = []
    for shape, those in by_shape(found).items():
        lines += [f"### {title(shape)}", "", _line(HEADINGS)]
        lines.append(_line(["---", *["---:"] * (len(HEADINGS) - 1)]))
        lines += [*(_line(cells(row)) for row in those), ""]
    return "\n".join(lines)


def tables(found: Sequence[Row]) -> list[Table]:
    """The same for a terminal."""
    made = []
    for shape, those in by_shape(found).items():
        table = Table(title=title(shape), title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
        for row in those:
            table.add_row(*cells(row), style="bold" if row.arm == BASE else None)
        made.append(table)
    return made


def by_shape(found: Iterable[Row]) -> dict[Shape, list[Row]]:
    """Rows of each stream, in order."""
    parts: dict[Shape, list[Row]] = {}
    for row in found:
        parts.setdefault(row.shape, []).append(row)
    return parts


def title(shape: Shape) -> str:
    """What a reader calls a stream."""
    bias = "balanced" if shape.bias == 1 else f"one class x{shape.bias}"
    return f"{bias}, {'iid' if shape.block == 1 else f'blocks of {shape.block}'}"


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"
