"""Rows of measurements as a table for the terminal, and as a dated report named by hardware.

A row is a dict of values by column; the columns `target` (text such as ">= 30,000 samples/s") and
`met` (True, False, or None where there is no target) say what was asked for.
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

from stream_ssl.app.demo import machine

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What one benchmark gave, or why it gave nothing."""

    name: str
    rows: Sequence[Row]
    seconds: float
    error: str = ""
    picture: str = ""  # a file beside the report


def plain(row: Any) -> Row:
    """A row as a dict, also where the benchmark has a class for it."""
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row


def columns(rows: Sequence[Row]) -> list[str]:
    """All columns, in the order in which they first occur; target and met at the end."""
    names = dict.fromkeys(name for row in rows for name in row)
    last = [name for name in ("target", "met") if name in names]
    return [name for name in names if name not in last] + last


def text(value: Any) -> str:
    """A value as a reader wants it."""
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
    """Whether a column holds numbers, to be set to the right."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def table(result: Result) -> Table:
    """The rows for the terminal."""
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
    """The rows for the report."""
    head = f"## {result.name}\n\n`python -m benchmarks.{result.name}`, {result.seconds:.0f} s\n\n"
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
    """DATE-HARDWARE.md, so that reports of one machine stand beside each other; those of its GPU
    under the GPU's own name."""
    hardware = f"{machine.processor()} {machine.cores()} cores"
    if gpu:
        hardware = gpu_name() or "no gpu"
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return folder / f"{day.isoformat()}-{slug}.md"


def gpu_name() -> str:
    """Of the first CUDA GPU; empty where there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def write(path: Path, results: Sequence[Result], command: str) -> None:
    """Write the report; one of the same day and hardware is replaced."""
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
