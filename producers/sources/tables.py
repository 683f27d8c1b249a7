"""Reads the rows of Parquet files, which may hold far more than their size shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stream_ssl.producers.sources.base import SourceError

MAX_COLUMN = 2**30  # bytes of a column in a row group of a Parquet file


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each row of a Parquet file, with those of the columns that the file has.

    Raises:
        SourceError: a column is too large.
        Exception: the file cannot be read.
    """
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    wanted = [name for name in dict.fromkeys(columns) if name in schema.names]
    # Read as dictionaries, repeated texts are in memory once. A small file may repeat a long text.
    texts = [name for name in wanted if str(schema.field(name).type) in ("string", "large_string")]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for number in range(file.metadata.num_row_groups):
            for part in columns_of(file.metadata.row_group(number)):
                if f"{part.path_in_schema}.".startswith(tuple(f"{name}." for name in wanted)):
                    check_bytes(path, part)
        for batch in file.iter_batches(4096, columns=wanted):
            for row in range(batch.num_rows):
                yield {name: cell(batch.column(name)[row]) for name in wanted}


def cell(value: Any) -> Any:
    """Return a value of a Parquet file, or None if Python has none like it, such as a far date."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return None


def columns_of(group: Any) -> Iterator[Any]:
    """Yield the metadata of each column of a row group."""
    return (group.column(number) for number in range(group.num_columns))


def check_bytes(path: Path, part: Any) -> None:
    """Check that a column of a row group fits into memory.

    Raises:
        SourceError: the column claims more than MAX_COLUMN bytes.
    """
    if part.total_uncompressed_size > MAX_COLUMN:
        raise SourceError(
            f"{path}: column {part.path_in_schema!r} has a row group of "
            f"{part.total_uncompressed_size} bytes; at most {MAX_COLUMN} are read. Write the file "
            "with smaller row groups"
        )
