"""Findings as tables, for Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

from stream_ssl.reproduction.arms import Arm
from stream_ssl.reproduction.findings import MEASURES, Found, Verdict
from stream_ssl.reproduction.spread import Spread


class Rows(NamedTuple):
    """A table: headings, rows of texts; the first `names` columns are names, the rest numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 2


def tables(found: Found, verdicts: Sequence[Verdict]) -> list[Rows]:
    """What is claimed; then each measure that a paper has a figure of, or that gains are told of;
    then all other measures in one. A cell without a run is empty."""
    told = [claims(verdicts)]
    own = [name for name in found.experiment.measures if MEASURES[name].share]
    told += [by_measure(found, name) for name in own]
    others = [name for name in found.experiment.measures if name not in own]
    if others:
        told.append(together(found, others))
    return told


def claims(verdicts: Sequence[Verdict]) -> Rows:
    """One line a claim: by how much its sum is above 0, in the paper and here."""
    rows = []
    for claim, paper, ours, word in verdicts:
        measure = MEASURES[claim.measure]
        figure = "" if paper is None else f"{paper:+.{measure.decimals}f}"
        seeds = str(len(ours.values) or "")
        told = [claim.text, claim.source, measure.heading]
        rows.append(
            [*told, figure, ours.text(measure.scale, measure.decimals, sign=True), seeds, word]
        )
    headings = ("claim", "source", "difference in", "paper", "ours", "seeds", "verdict")
    return Rows("Claims", headings, rows, 3)


def by_measure(found: Found, name: str) -> Rows:
    """A line an arm: ours, gain over its baseline, the paper's and its gain."""
    measure, figures = MEASURES[name], found.experiment.paper.get(name, {})
    rows = []
    for arm in found.arms():
        base = None if arm.against is None else figures.get((arm.against, arm.column))
        paper = figures.get(arm.cell)
        cells = [
            *(arm.column, arm.row, str(found.seeds(arm))),
            found.spread(arm, name).text(measure.scale, measure.decimals),
            found.gain(arm, name).text(measure.scale, measure.decimals, sign=True),
        ]
        if figures:
            gain = None if paper is None or base is None else paper - base
            cells += [
                "" if paper is None else f"{paper:.{measure.decimals}f}",
                "" if gain is None else f"{gain:+.{measure.decimals}f}",
            ]
        rows.append(cells)
    headings = ["", "arm", "seeds", "ours", "gain"]
    if figures:
        headings += ["paper", "paper's gain"]
    return Rows(measure.heading[0].upper() + measure.heading[1:], headings, rows)


def together(found: Found, names: Sequence[str]) -> Rows:
    """A line an arm, a column a measure."""
    rows = [[arm.column, arm.row, *_cells(found, arm, names)] for arm in found.arms()]
    return Rows("Also measured", ["", "arm", *(MEASURES[name].heading for name in names)], rows)


def _cells(found: Found, arm: Arm, names: Iterable[str]) -> list[str]:
    spreads: list[tuple[str, Spread]] = [(name, found.spread(arm, name)) for name in names]
    return [spread.text(MEASURES[name].scale, MEASURES[name].decimals) for name, spread in spreads]


def markdown(table: Rows) -> str:
    """With a heading."""
    numbers = len(table.headings) - table.names
    lines = [
        f"## {table.title}",
        "",
        _line(table.headings),
        _line([*["---"] * table.names, *["---:"] * numbers]),
        *(_line(row) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def console(table: Rows) -> Table:
    """The same for a terminal."""
    made = Table(title=table.title, title_justify="left")
    for number, heading in enumerate(table.headings):
        made.add_column(heading, justify="left" if number < table.names else "right")
    before = None
    for row in table.rows:
        if before is not None and row[0] != before and table.title != "Claims":
            made.add_section()
        before = row[0]
        made.add_row(*row)
    return made


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
