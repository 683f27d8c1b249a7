"""Lists of URLs: text, CSV, Parquet and JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a list."""

    url: str
    facts: dict[str, Any] = field(default_factory=dict)


def read_rows(path: Path, column: str) -> Iterator[Row]:
    """The rows of a list: .csv, .parquet, .jsonl (or .ndjson), or text with a URL a line.

    A row that cannot be read has an empty URL. Empty lines of a text, and those that begin with
    "#", are none.

    Raises:
        ValueError: there is no such column.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise absent(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(4096):
            for facts in batch.to_pylist():
                yield Row(str(facts.pop(column) or ""), facts)
        return
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        if kind == ".csv":
            reader = csv.DictReader(lines)
            if column not in (reader.fieldnames or []):
                raise absent(path, column, list(reader.fieldnames or []))
            for facts in reader:
                yield Row((facts.pop(column) or "").strip(), facts)
        elif kind in (".jsonl", ".ndjson"):
            for line in lines:
                try:
                    facts = json.loads(line)
                    yield Row(str(facts.pop(column)).strip(), facts)
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                    yield Row("")
        else:
            for line in lines:
                if (url := line.strip()) and not url.startswith("#"):
                    yield Row(url)


def absent(path: Path, column: str, there: list[str]) -> ValueError:
    """The error of a column that a list has not."""
    return ValueError(f"{path} has no column {column!r}; it has {', '.join(map(repr, there))}")


def count_rows(path: Path) -> int:
    """About how many rows a list has."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
