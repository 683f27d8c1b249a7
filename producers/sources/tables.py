"""Reads the rows of tables: Parquet files within limits, and the facts in a row of any table."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.producers.sources.base import Skipped, SourceError
from stream_ssl.producers.sources.fields import fitting_meta, label_of, note_too_long
from stream_ssl.producers.sources.image_files import check_pulled
from stream_ssl.wire.sample import Scalar

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, RowGroupMetaData

MAX_COLUMN = 2**30  # bytes of a column in a row group of a Parquet file
ROWS = 4096  # read at once
MAX_BATCH = 2**26  # bytes of texts that are read at once, if each is as long as its column


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each row of a Parquet file, with those of the columns that the file has.

    Raises:
        SourceError: a column is too large.
        Exception: the file cannot be read.
    """
    from pyarrow import parquet

    check_pulled(path)
    schema = parquet.read_schema(path)
    wanted = [name for name in dict.fromkeys(columns) if name in schema.names]
    # Read as dictionaries, repeated texts are in memory once. A small file may repeat a long text.
    texts = {name for name in wanted if str(schema.field(name).type) in ("string", "large_string")}
    metadata = parquet.read_metadata(path)
    whole = delta_bytes(metadata, texts)
    rows = min(ROWS, max(1, MAX_BATCH // max(whole.values(), default=1)))
    with parquet.ParquetFile(path, read_dictionary=sorted(texts - whole.keys())) as file:
        for number in range(file.metadata.num_row_groups):
            check_group(path, file.metadata.row_group(number), wanted)
        for batch in file.iter_batches(rows, columns=wanted):
            for row in range(batch.num_rows):
                yield {name: cell(batch.column(name)[row]) for name in wanted}


def delta_bytes(metadata: FileMetaData, columns: Collection[str]) -> dict[str, int]:
    """Return the columns that Arrow cannot read as dictionaries, with their most bytes in a group.

    These columns have delta encodings, as DuckDB, Spark and Rust write them in Parquet's version 2.
    """
    found: dict[str, int] = {}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for part in map(group.column, range(group.num_columns)):
            name = part.path_in_schema
            if name in columns and any(one.startswith("DELTA") for one in part.encodings):
                found[name] = max(found.get(name, 0), part.total_uncompressed_size)
    return found


def check_group(path: Path, group: RowGroupMetaData, columns: Sequence[str]) -> None:
    """Check that the columns to read are not too large in a row group, as in a small file of zeros.

    Raises:
        SourceError: a column is too large.
    """
    begins = tuple(f"{name}." for name in columns)
    for part in map(group.column, range(group.num_columns)):
        name, size = part.path_in_schema, part.total_uncompressed_size
        if f"{name}.".startswith(begins) and size > MAX_COLUMN:
            raise SourceError(
                f"{path}: column {name!r} has a row group of {size} bytes; at most "
                f"{MAX_COLUMN} are read. Write the file with smaller row groups"
            )


class OutOfRange:
    """A value that Python cannot represent, such as a date after the year 9999."""


def cell(value: Any) -> Any:
    """Return a value of a Parquet file.

    Python's times have no nanoseconds, which are cut off.
    """
    import pyarrow
    from pyarrow import types

    try:
        return value.as_py()
    except (ValueError, OverflowError):
        kind = value.type
    try:
        if types.is_timestamp(kind):
            return value.cast(pyarrow.timestamp("us", kind.tz), safe=False).as_py()
        if types.is_time(kind):
            return value.cast(pyarrow.time64("us"), safe=False).as_py()
        if types.is_duration(kind):
            return value.cast(pyarrow.duration("us"), safe=False).as_py()
    except (ValueError, OverflowError):
        pass
    return OutOfRange()


def label_in(cells: Mapping[str, object], column: str, skipped: Skipped, what: str) -> int | None:
    """Return the label of a row, or None if it has none.

    If the column is missing, or its value cannot be sent, `skipped` counts a `bad label` and logs
    it with the sample `what`.
    """
    if column in cells:
        return label_of(cells[column], skipped, what)
    why = f"the row has no column {column!r}"
    skipped.note("bad label", f"the label of {what}", why)
    return None


def kept_facts(
    cells: Mapping[str, object], columns: Sequence[str], skipped: Skipped, what: str
) -> dict[str, Scalar] | None:
    """Return the columns of a row that are sent as meta, or None if there are none.

    If a column is missing, or its value cannot be sent, `skipped` counts `bad facts` and logs it
    with the sample `what`.
    """
    found = {name: scalar(cells.get(name)) for name in columns}
    for name, value in found.items():
        if name not in cells:
            skipped.note("bad facts", f"{name!r} of {what}", "the row has no such column")
        elif value is not None and not isinstance(value, str | int | float):
            why = f"it is {type(value).__name__}, and must be text or a number"
            skipped.note("bad facts", f"{name!r} of {what}", why)
    return fitting_meta(found, too_long=note_too_long(skipped, what))


def scalar(value: object) -> object:
    """Return the value of a cell. Times and decimal numbers become text."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, datetime.timedelta | decimal.Decimal) else value
