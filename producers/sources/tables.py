"""Reads the rows of Parquet files, which may hold far more than their size shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.fields import check_pulled

MAX_COLUMN = 2**30  # bytes of a column in a row group of a Parquet file


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
    begins = tuple(f"{name}." for name in wanted)
    # Read as dictionaries, repeated texts are in memory once. A small file may repeat a long text.
    texts = [name for name in wanted if str(schema.field(name).type) in ("string", "large_string")]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            for part in map(group.column, range(group.num_columns)):
                name, size = part.path_in_schema, part.total_uncompressed_size
                if f"{name}.".startswith(begins) and size > MAX_COLUMN:
                    raise SourceError(
                        f"{path}: column {name!r} has a row group of {size} bytes; at most "
                        f"{MAX_COLUMN} are read. Write the file with smaller row groups"
                    )
        for batch in file.iter_batches(4096, columns=wanted):
            for row in range(batch.num_rows):
                yield {name: cell(batch.column(name)[row]) for name in wanted}


def cell(value: Any) -> Any:
    """Return a value of a Parquet file, or None if Python has none like it, such as a far date."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return None
