"""Tables of measurements for the terminal, and dated reports named by hardware.

A row is a dict of values by column. The column `target` contains text such as ">= 30,000
samples/s". The column `met` is True, False, or None if there is no target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from stream_ssl.demo import machine
from stream_ssl.process.threads import cores

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The rows of one benchmark, or the error that it raised."""

    name: str
    rows: Sequence[Row]
    seconds: float
    error: str = ""
    picture: str = ""  # a file in the folder of the report


def plain(row: Any) -> Row:
    """Return a row as a dict, even if the benchmark has a class for it."""
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row


def columns(rows: Sequence[Row]) -> list[str]:
    """Return all columns in the order of their first occurrence, with target and met at the end."""
    names = dict.fromkeys(name for row in rows for name in row)
    last = [name for name in ("target", "met") if name in names]
    return [name for name in names if name not in last] + last


def text(value: Any) -> str:
    """Format a value for a reader."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def numeric(rows: Sequence[Row], name: str) -> bool:
    """Return whether a column contains only numbers, so that it is aligned to the right."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def table(result: Result) -> Table:
    """Return the rows as a table for the terminal."""
    found = Table(
        title=f"{result.name} ({result.seconds:.0f} s)", title_justify="left", box=box.SIMPLE_HEAD
    )
    if result.error:
        found.add_column("failed", style="red")
        found.add_row(escape(result.error))
        return found
    for name in columns(result.rows):
        found.add_column(name, justify="right" if numeric(result.rows, name) else "left")
    for row in result.rows:
        style = "red" if row.get("met") is False else None
        cells = (escape(text(row.get(name))) for name in columns(result.rows))
        found.add_row(*cells, style=style)
    return found


def markdown(result: Result) -> str:
    """Return the rows as Markdown for the report."""
    head = f"## {result.name}\n\n`python -m benchmarks {result.name}`, {result.seconds:.0f} s\n\n"
    if result.error:
        return f"{head}Failed: {result.error}\n"
    names = columns(result.rows)
    lines = [
        _line(names),
        _line(["---:" if numeric(result.rows, name) else "---" for name in names]),
        *(_line([text(row.get(name)) for name in names]) for row in result.rows),
    ]
    drawn = f"\n![{result.name}]({result.picture})\n" if result.picture else ""
    return head + "\n".join(lines) + "\n" + drawn


def path_of(folder: Path, day: date, gpu: bool = False) -> Path:
    """Return the path DATE-HARDWARE.md of a report, so that reports of one machine sort together.

    Reports of a GPU use the name of the GPU.
    """
    hardware = f"{machine.processor()} {cores()} cores"
    if gpu:
        hardware = gpu_name() or "no gpu"
    return folder / f"{day.isoformat()}-{slug(hardware)}.md"


def slug(text: str) -> str:
    """Return the text in lower-case letters, digits and hyphens.

    >>> slug("AMD EPYC, 2 cores")
    'amd-epyc-2-cores'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def gpu_name() -> str:
    """Return the name of the first CUDA GPU, or "" if there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def write(path: Path, results: Sequence[Result], command: str) -> None:
    """Write the report, and replace a report of the same day and hardware."""
    gpu = {"GPU": gpu_name()} if gpu_name() else {}
    facts = machine.hardware() | gpu | machine.versions()
    asked = [row for result in results for row in result.rows if row.get("met") is not None]
    met = sum(bool(row["met"]) for row in asked)
    parts = [
        f"# Benchmarks, {path.name[:10]}\n",
        f"`{command}`\n",
        f"Targets met: {met} of {len(asked)}.\n",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n",
        *(markdown(result) for result in results),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
