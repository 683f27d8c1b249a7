"""Tables in Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table


class TextTable(NamedTuple):
    """The headings and text rows of a table.

    The first `names` columns contain names, the others numbers.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 2


def markdown(table: TextTable) -> str:
    """Return the table as Markdown, under a heading."""
    numbers = len(table.headings) - table.names
    lines = [
        *([f"## {table.title}", ""] if table.title else []),
        _line(table.headings),
        _line([*["---"] * table.names, *["---:"] * numbers]),
        *(_line(row) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def console(table: TextTable) -> Table:
    """Return the table for a terminal.

    In a table with two name columns, a line separates rows with different first names.
    """
    made = Table(title=table.title, title_justify="left")
    for number, heading in enumerate(table.headings):
        made.add_column(heading, justify="left" if number < table.names else "right")
    before = None
    for row in table.rows:
        if before is not None and row[0] != before and table.names == 2:
            made.add_section()
        before = row[0]
        made.add_row(*row)
    return made


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
