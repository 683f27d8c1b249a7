"""Lists of URLs: text, CSV, Parquet and JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from stream_ssl.producers.sources.base import SourceError

MAX_LINE = 1 << 20  # characters; a list without line ends must not fill the memory

MAX_COLUMN = 2**30  # bytes of a column in a row group of a Parquet file


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a list."""

    url: str
    facts: dict[str, Any] = field(default_factory=dict)


def read_rows(path: Path, column: str, facts: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a list: .csv, .parquet, .jsonl (or .ndjson), or text with a URL a line.

    The source reads only the columns of the URL and of the named facts from a Parquet file.

    A row that cannot be read has an empty URL. Empty lines of a text, and those that begin with
    "#", are none.

    Raises:
        SourceError: there is no such column, or the rest cannot be read.
    """
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            yield from parquet_rows(path, column, facts)
            return
        # utf-8-sig: spreadsheets begin their files with a mark.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = bounded_lines(file)
            if kind == ".csv":
                yield from csv_rows(path, lines, column)
            elif kind in (".jsonl", ".ndjson"):
                yield from map(partial(json_row, column), lines)
            else:
                urls = map(str.strip, lines)
                yield from (Row(url) for url in urls if url and not url.startswith("#"))
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a list; a line that is too long becomes one that holds no URL."""
    while line := file.readline(MAX_LINE):
        long = len(line) == MAX_LINE
        while len(line) == MAX_LINE and line[-1] not in "\r\n":
            line = file.readline(MAX_LINE)
        yield "a line that is too long" if long else line


def parquet_rows(path: Path, column: str, facts: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet file, which may be far larger than the file."""
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    if column not in schema.names:
        raise absent(path, column, schema.names)
    wanted = [name for name in dict.fromkeys([column, *facts]) if name in schema.names]
    # A text that many rows share is held once: a file of a kilobyte may repeat a megabyte.
    texts = [name for name in wanted if str(schema.field(name).type) in ("string", "large_string")]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for number in range(file.metadata.num_row_groups):
            for part in columns_of(file.metadata.row_group(number)):
                if part.path_in_schema.split(".")[0] in wanted:
                    check_bytes(path, part)
        for batch in file.iter_batches(4096, columns=wanted):
            for row in range(batch.num_rows):
                found = {name: batch.column(name)[row].as_py() for name in wanted}
                yield Row(text(found.pop(column)), found)


def columns_of(group: Any) -> Iterator[Any]:
    """Yield the metadata of each column of a row group."""
    return (group.column(number) for number in range(group.num_columns))


def check_bytes(path: Path, part: Any) -> None:
    """Refuse a column of a row group that would fill the memory.

    Raises:
        SourceError: it claims more than MAX_COLUMN bytes.
    """
    if part.total_uncompressed_size > MAX_COLUMN:
        raise SourceError(
            f"{path}: column {part.path_in_schema!r} has a row group of "
            f"{part.total_uncompressed_size} bytes; at most {MAX_COLUMN} are read. Write the file "
            "with smaller row groups"
        )


def csv_rows(path: Path, lines: Iterable[str], column: str) -> Iterator[Row]:
    """Those of a CSV file."""
    reader = csv.DictReader(lines)
    if column not in (reader.fieldnames or []):
        raise absent(path, column, list(reader.fieldnames or []))
    while True:
        try:
            facts = next(reader)
        except StopIteration:
            return
        except csv.Error:  # a field that is too long; the next line is another row
            yield Row("")
        else:
            yield Row(text(facts.pop(column)), facts)


def json_row(column: str, line: str) -> Row:
    """That of a line of JSON."""
    try:
        facts = json.loads(line)
        return Row(text(facts.pop(column)), facts)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return Row("")


def text(value: object) -> str:
    """Return a cell as a URL, without the spaces and line ends around it."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return "" if value is None else str(value).strip()


def absent(path: Path, column: str, there: list[str]) -> SourceError:
    """The error of a column that a list has not."""
    return SourceError(f"{path} has no column {column!r}; it has {', '.join(map(repr, there))}")


def count_rows(path: Path) -> int:
    """About how many rows a list has."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
