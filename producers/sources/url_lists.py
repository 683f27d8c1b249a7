"""Readers of URL lists in text, CSV, Parquet and JSON Lines files."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stream_ssl.producers.sources.base import SourceError, own_fault
from stream_ssl.producers.sources.image_files import check_pulled
from stream_ssl.producers.sources.tables import table_rows

MAX_LINE = 1 << 20  # characters; a list without line breaks must not fill the memory

PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma}
"""The modules that open a compressed list, by its first bytes."""
OTHERS = {b"PK\3\4": "a ZIP file", b"\x28\xb5\x2f\xfd": "compressed with Zstandard"}
PARQUET, ARROW = b"PAR1", b"ARROW1"
"""The first bytes of these files, whose names often end otherwise (part-0, a.parquet.gzip)."""
JSON = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class UrlRow:
    """A row of a URL list."""

    url: str
    facts: dict[str, Any] = field(default_factory=dict)


def read_rows(path: Path, column: str, facts: Sequence[str] = ()) -> Iterator[UrlRow]:
    """Yield the rows of a list: .csv, .tsv, Parquet, .jsonl (.ndjson, .json), or one URL per line.

    A list other than Parquet may be compressed with gzip, bzip2 or xz (.csv.gz). It is UTF-8, or
    UTF-16 with a byte-order mark. From a Parquet file, only the columns of the URL and of `facts`
    are read. A row that cannot be read has an empty URL. In a text file, empty lines and lines that
    begin with "#" are ignored.

    Raises:
        SourceError: the column does not exist, or the rest of the list cannot be read.
    """
    try:
        kind, opener = form_of(path)
        if kind == ".parquet":
            yield from parquet_rows(path, column, facts)
            return
        with opener(path, "rb") as file:
            head = file.read(4)
        wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if head == codecs.BOM_UTF32_LE or (b"\0" in head and not wide):
            raise SourceError(
                f"{path} is UTF-16 without a byte-order mark, or UTF-32: save it as UTF-8, such as "
                "with `iconv -f UTF-16LE -t UTF-8`"
            )
        # Spreadsheets begin their files with a byte-order mark, which both encodings remove.
        encoding = "utf-16" if wide else "utf-8-sig"
        with opener(path, "rt", encoding=encoding, errors="replace", newline="") as file:
            lines = bounded_lines(file)
            if kind in (".csv", ".tsv"):
                yield from csv_rows(path, lines, column, tabs=kind == ".tsv")
            elif kind in JSON:
                yield from json_rows(path, lines, column)
            else:
                urls = map(str.strip, lines)
                yield from (UrlRow(url) for url in urls if url and not url.startswith("#"))
    except SourceError:
        raise
    except Exception as error:  # libraries raise errors of any type for damaged bytes
        if own_fault(error):
            raise
        raise SourceError(f"{path} cannot be read: {error}") from error


def form_of(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return the suffix of a list's format, and the function that opens the list.

    Raises:
        SourceError: the list is compressed in a way, or has a form, that is not supported.
    """
    check_pulled(path)
    with path.open("rb") as file:
        head = file.read(8)
    other = next((form for magic, form in OTHERS.items() if head.startswith(magic)), "")
    module = next((module for magic, module in PACKED.items() if head.startswith(magic)), None)
    packed = module is not None and path.suffix.lower() in (".gz", ".bz2", ".xz")
    kind = Path(path.stem if packed else path.name).suffix.lower()
    if other or (module and kind == ".parquet"):
        raise SourceError(
            f"{path} is {other or 'a compressed Parquet file'}; only text, CSV, TSV and JSON Lines "
            "may be compressed, with gzip, bzip2 or xz. Unpack it"
        )
    if head.startswith(ARROW):
        raise SourceError(f"{path} is an Arrow (Feather) file: write it as Parquet")
    if head.startswith(PARQUET):
        kind = ".parquet"
    return kind, module.open if module else open


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a list. A line that is too long becomes a text that is not a URL."""
    while line := file.readline(MAX_LINE):
        long = len(line) == MAX_LINE
        while len(line) == MAX_LINE and line[-1] not in "\r\n":
            line = file.readline(MAX_LINE)
        yield "a line that is too long" if long else line


def parquet_rows(path: Path, column: str, facts: Sequence[str]) -> Iterator[UrlRow]:
    """Yield the rows of a Parquet file."""
    from pyarrow import parquet

    there = parquet.read_schema(path).names
    if column not in there:
        raise absent(path, column, there)
    for row in table_rows(path, [column, *facts]):
        yield UrlRow(text(row.pop(column)), row)


def csv_rows(path: Path, lines: Iterable[str], column: str, tabs: bool = False) -> Iterator[UrlRow]:
    """Yield the rows of a CSV file, or of a TSV file, in which quotes have no meaning.

    A row with more fields than there are columns has a text that is not a URL, because the comma in
    a URL without quotes would cut the URL and move the other fields.
    """
    lines = itertools.dropwhile(str.isspace, lines)  # the first line with a text names the columns
    how: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    names = next(csv.reader(lines, **how), [])
    if column not in names:
        raise absent(path, column, names)
    if names.count(column) > 1:
        raise SourceError(f"{path} has several columns {column!r}: rename all but one of them")
    for fields in csv_fields(lines, how):
        while len(fields) > len(names) and not fields[-1]:  # spreadsheets end rows with commas
            fields.pop()
        if len(fields) > len(names):
            sign = "tabs" if tabs else "commas without quotes"
            yield UrlRow(f"a row of {len(fields)} fields for {len(names)} columns: it has {sign}")
        elif fields:
            facts: dict[str, Any] = dict(itertools.zip_longest(names, fields))
            yield UrlRow(text(facts.pop(column)), facts)


def csv_fields(lines: Iterator[str], how: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the fields of each row of a CSV or TSV file; one empty field if it cannot be read.

    A quote that is never closed would make one row of all lines behind it. The line of such a quote
    is a row of its own, in which quotes have no meaning.
    """
    taken: list[str] = []  # the lines of the row that is read
    returned: deque[str] = deque()  # lines that were taken for a part of the row before them

    def each() -> Iterator[str]:
        while (line := returned.popleft() if returned else next(lines, None)) is not None:
            taken.append(line)
            yield line

    reader = csv.reader(each(), strict=True, **how)
    while True:
        taken.clear()
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            first, *rest = taken
            returned.extendleft(reversed(rest))
            reader = csv.reader(each(), strict=True, **how)
            try:
                both = iter([first, ""])
                fields = next(csv.reader(both, **how))
                if next(both, None) is None:  # the quote is still open at the end of the line
                    fields = next(csv.reader([first], quoting=csv.QUOTE_NONE))
                yield fields
            except csv.Error:  # a field is too long
                yield [""]


def json_rows(path: Path, lines: Iterator[str], column: str) -> Iterator[UrlRow]:
    """Yield the rows of a list with one JSON object on each line.

    Raises:
        SourceError: the list is one JSON value of many lines, or an array.
    """
    for number, line in enumerate(lines):
        if number == 0 and (line.startswith("[") or line.strip() == "{"):
            raise SourceError(
                f"{path} is one JSON value, and each row must be an object on a line of its own "
                "(JSON Lines): write an array so with jq -c '.[]'"
            )
        yield json_row(column, line)


def json_row(column: str, line: str) -> UrlRow:
    """Return the row in a line of JSON; its URL is empty if the line is invalid."""
    try:
        facts = json.loads(line)
        return UrlRow(text(facts.pop(column)), facts)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return UrlRow("")


def text(value: object) -> str:
    """Return a cell as a URL, without surrounding spaces and line breaks."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return "" if value is None else str(value).strip()


def absent(path: Path, column: str, there: list[str]) -> SourceError:
    """Return the error for a column that a list does not have."""
    has = f"it has {', '.join(map(repr, there))}: set column to one of them"
    mark = next((mark for mark in "\t;|," if len(there) == 1 and mark in there[0]), None)
    if any("://" in name for name in there):
        has = f"its first line must name the columns, and is {there[0]!r:.80}: add such a line"
    elif mark is not None:
        own = ("tabs", ".csv") if path.suffix.lower() == ".tsv" else ("commas", ".tsv")
        has = f"its columns are separated by {mark!r}: separate them by {own[0]}"
        has += f", or name the file {own[1]}" * (mark in "\t,")
    return SourceError(f"{path} has no column {column!r}; {has}")


def count_rows(path: Path) -> int:
    """Return the approximate number of rows in a list."""
    kind, opener = form_of(path)
    if kind == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    with opener(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
