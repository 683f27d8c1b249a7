"""A source that reads images from the rows of Parquet files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.producers.sources.base import BrokenFileError, Skipped, SourceError, check_is_damage
from stream_ssl.producers.sources.fields import class_in, content_id
from stream_ssl.producers.sources.image_files import check_pulled, codec_of, no_image
from stream_ssl.producers.sources.recordings import CountedPasses
from stream_ssl.producers.sources.tables import cell, check_group, kept_facts, label_in, table_rows
from stream_ssl.wire.sample import Sample

if TYPE_CHECKING:
    from pyarrow import DataType, Schema, parquet

log = logging.getLogger(__name__)

ROWS = 32  # read at once; few, because a row may have an image of many megabytes
BUFFER = 2**18  # bytes of a column that are read at once
LABEL = "label"
ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # first bytes of Arrow's files and of its streams
PARTITION = (
    "names of folders such as '{}=...' are not read. Write the column into the files, such as by "
    "DuckDB's WRITE_PARTITION_COLUMNS"
)
MAX_NAMES = 2**16  # a column with more distinct texts has no names of classes


class ParquetFiles(CountedPasses):
    """Images in the rows of Parquet files, such as Hugging Face's `datasets` writes.

    A cell of the images' column holds the bytes of a JPEG, PNG or WebP file, or a structure whose
    field `bytes` holds them. Sample ids are FILE/ROW#DIGEST, with a digest of the image.

    A row without such an image is logged, counted in `skipped` and left out, and so are the rows of
    a row group from its first damage on. A label or a fact that cannot be sent is left out alone.

    A position is the number of a row, and files may be added after its file. The source needs
    about twice the memory of a row group's images. It rejects a row group with more than 1 GiB of
    images.

    Args:
        files: paths, globs, or brace expansions such as "train-{00000..00004}-of-00005.parquet".
        image: column of the images; null: the only column that can hold images.
        label: column of the class: a whole number, or a name, or empty or -1 for no class; null: no
            labels. A file may lack the column `label`, but no other one. The label of a name is its
            place among the sorted names of all files. If `datasets` has named the classes of the
            first file, its numbers hold for all files.
        keep: columns that are sent as meta: text, numbers, and times as text. Other values are
            counted as `bad facts`, and so is a column that a file lacks.
        epochs: number of passes, 1 or more; null: endless.
        name: the source's name.

    Attributes:
        classes: the names of the classes, as `datasets` writes them into a file, or as the labels'
            column has them; None if there are none.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ModuleNotFoundError: pyarrow is not installed.
        ValueError: the braces or `epochs` are invalid, or the first file cannot be read or lacks a
            column.
    """

    def __init__(
        self,
        files: list[str] | str,
        image: str | None = None,
        label: str | None = LABEL,
        keep: list[str] | None = None,
        epochs: int | None = 1,
        name: str = "parquet",
    ) -> None:
        import pyarrow  # noqa: F401  # fail early if it is not installed

        super().__init__(files, epochs, Skipped(name), "Parquet file", {"image": image})
        self._image, self._label, self._keep = image, label, keep or []
        try:
            with self._opened(self._files[0]) as file:
                if label not in file.schema_arrow.names and is_partition(self._files[0], label):
                    why = PARTITION.format(label)
                    log.warning("source %s: %s has no labels: %s", name, self._files[0], why)
                self.classes = class_names(file.schema_arrow, label)
                named = label in file.schema_arrow.names and is_text(file.schema_arrow, str(label))
        except BrokenFileError as error:
            raise SourceError(f"source {name!r}: {error}") from error
        if named:
            self.classes = self._names_in(str(label))
        self._numbers = {name: at for at, name in enumerate(self.classes or ())}

    def _names_in(self, column: str) -> list[str] | None:
        """Return the distinct names in a column of text, sorted; None if it has numbers."""
        names: set[str] = set()
        for text in self._texts(column):
            try:
                if text not in names and class_in(text) is not None:
                    return None
            except ValueError:
                names.add(text)
            if len(names) > MAX_NAMES:
                log.warning(
                    "source %s: column %r has more than %d different texts. They are no names of "
                    "classes: set label to another column, or to null",
                    self.name,
                    column,
                    MAX_NAMES,
                )
                return None
        return sorted(names)

    def _texts(self, column: str) -> Iterator[str]:
        """Yield the texts in a column of all files, as far as they can be read."""
        for path in self._files:
            try:
                cells = (row.get(column) for row in table_rows(path, [column]))
                yield from (cell for cell in cells if isinstance(cell, str))
            except Exception as error:  # the library raises errors of any type for damaged bytes
                check_is_damage(error, self.name)
                log.warning(
                    "source %s: the labels of %s cannot be read: %s", self.name, path, error
                )

    def _readable(
        self, path: Path, after: tuple[int] | None
    ) -> Iterator[tuple[Sample, tuple[int]]]:
        (start,) = after or (0,)
        try:
            with self._opened(path) as file:
                first = 0
                for number in range(file.metadata.num_row_groups):
                    end = first + file.metadata.row_group(number).num_rows
                    if start < end:
                        yield from self._group(path, file, number, first, start)
                    first = end
        except BrokenFileError as error:
            self.skipped.note_damage(path, error)

    def _opened(self, path: Path) -> parquet.ParquetFile:
        """Return a file that has the images' column and the labels'.

        Raises:
            BrokenFileError: the file cannot be read, or lacks a column.
        """
        from pyarrow import ArrowInvalid, parquet

        try:
            check_pulled(path)
            file = parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False)
            image_column(path, file.schema_arrow, self._image)
            if self._label not in (None, LABEL, *file.schema_arrow.names):
                raise absent(path, file.schema_arrow, str(self._label), "label")
        except BrokenFileError:
            raise
        except Exception as error:  # the library raises errors of any type for damaged bytes
            check_is_damage(error, self.name)
            why = str(error).rstrip(".")
            if is_arrow(path):
                why = (
                    "it is an Arrow (Feather) file, such as save_to_disk of datasets writes. Write "
                    "it as Parquet: datasets.load_from_disk(FOLDER).to_parquet(FILE)"
                )
            elif isinstance(error, ArrowInvalid):  # such as a file without its end
                why += ". If it is a Parquet file, finish writing it, or fetch it again"
            raise BrokenFileError(f"{path} cannot be read: {why}") from error
        return file

    def _group(
        self, path: Path, file: parquet.ParquetFile, number: int, first: int, start: int
    ) -> Iterator[tuple[Sample, tuple[int]]]:
        """Yield the samples of row group `number`, from row `start` of the file on.

        The group begins with row `first` of the file.
        """
        schema, row = file.schema_arrow, first
        image = image_column(path, schema, self._image)
        facts = [self._label or "", *self._keep]
        columns = parts_of(image, schema.field(image).type) or [image]
        columns += [name for name in facts if name in schema.names]
        group = file.metadata.row_group(number)
        names = class_names(schema, self._label)
        others = names if names != self.classes else None
        try:
            check_group(path, group, columns)
            for batch in file.iter_batches(ROWS, [number], columns, use_threads=False):
                for at in range(batch.num_rows):
                    if self._stopped.is_set():
                        return
                    row += 1
                    if row > start:
                        cells = {name: cell(batch.column(name)[at]) for name in batch.schema.names}
                        sample = self._sample(f"{path.stem}/{row - 1}", cells, image, others)
                        if sample is not None:
                            yield sample, (row,)
            if row < (end := first + group.num_rows):  # the library ends where the file ends
                missing = f"the last {end - row} rows are missing: the file became shorter"
                raise BrokenFileError(f"{missing}. Write or fetch it again")
        except Exception as error:
            self.skipped.note_damage(f"{path} from row {row} to the end of its row group", error)

    def _sample(
        self, name: str, cells: dict[str, Any], image: str, classes: list[str] | None
    ) -> Sample | None:
        """Return the sample of a row, or None if it has no image in the column `image`.

        `classes` are the names of the classes in the row's file. They are None if the file has no
        names, or those of the source.
        """
        held: Any = cells.get(image)
        path = None
        if isinstance(held, Mapping):
            path, held = held.get("path"), held.get("bytes")
        data = held or b""
        codec = codec_of(data)
        if codec is None:
            why = "it has a path and no bytes: write the table with the images' bytes"
            self.skipped.note("no image", name, why if path and held is None else no_image(data))
            return None
        label = None
        if self._label is not None and (self._label in cells or self._label != LABEL):
            value = cells.get(self._label)
            if classes and self._numbers and isinstance(value, int) and 0 <= value < len(classes):
                value = classes[value]
            if isinstance(value, str):
                cells = {**cells, self._label: self._numbers.get(value, value)}
            label = label_in(cells, self._label, self.skipped, name)
        meta = kept_facts(cells, self._keep, self.skipped, name)
        try:
            return Sample(
                content_id(name, data), data, codec, source=self.name, label=label, meta=meta
            )
        except ValueError as error:
            self.skipped.note("malformed", name, error)
            return None


def is_arrow(path: Path) -> bool:
    """Return whether a file begins as Arrow's own files do."""
    try:
        with path.open("rb") as file:
            return file.read(8).startswith(ARROW)
    except OSError:  # reading it raises the error
        return False


def image_column(path: Path, schema: Schema, name: str | None) -> str:
    """Return the name of the images' column: `name`, or the only one that can hold images.

    Raises:
        BrokenFileError: there is no such column, it cannot hold images, or several columns can.
    """
    from pyarrow import types

    if name is not None and name not in schema.names:
        raise absent(path, schema, name, "image")
    structures: list[str] = [field.name for field in schema if parts_of(field.name, field.type)]
    binary: list[str] = [field.name for field in schema if types.is_binary(plain(field.type))]
    if name is not None:
        if name in (*structures, *binary):
            return name
        raise BrokenFileError(
            f"column {name!r} of {path} is {str(schema.field(name).type)!r:.80}; images are binary "
            "cells, or structures with a field 'bytes'"
        )
    found = structures or binary
    if not found:
        names = ", ".join(map(repr, schema.names))
        raise BrokenFileError(
            f"{path} has no column that can hold images; it has {names}. Images are binary cells, "
            "or structures with a field 'bytes'. For a column of URLs, use the source crawl"
        )
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        raise BrokenFileError(
            f"{path} has {len(found)} columns that can hold images: set image to one of {names}"
        )
    return found[0]


def plain(kind: DataType) -> DataType:
    """Return the type of binary cells for each of its forms, and other types unchanged."""
    import pyarrow
    from pyarrow import types

    held = kind.value_type if types.is_dictionary(kind) else kind
    forms = (types.is_binary, types.is_large_binary, types.is_binary_view)
    is_bytes = any(form(held) for form in (*forms, types.is_fixed_size_binary))
    return pyarrow.binary() if is_bytes else kind


def parts_of(name: str, kind: DataType) -> list[str]:
    """Return the columns to read for a structure with the field `bytes`, and [] for other types."""
    from pyarrow import types

    if not types.is_struct(kind):
        return []
    fields = {field.name: field.type for field in kind}
    if "bytes" not in fields or not types.is_binary(plain(fields["bytes"])):
        return []
    return [f"{name}.{part}" for part in ("bytes", "path") if part in fields]


def is_text(schema: Schema, column: str) -> bool:
    """Return whether a column holds text, perhaps as a dictionary."""
    from pyarrow import types

    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def class_names(schema: Schema, label: str | None) -> list[str] | None:
    """Return the names of the classes that `datasets` wrote beside the columns, or None."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label][
            "names"
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if listed else None


def absent(path: Path, schema: Schema, name: str, argument: str) -> BrokenFileError:
    """Return the error for a column that a file lacks."""
    names = ", ".join(map(repr, schema.names))
    remedy = f"set {argument}"
    if is_partition(path, name):
        remedy = PARTITION.format(name)
    return BrokenFileError(f"{path} has no column {name!r}; it has {names}: {remedy}")


def is_partition(path: Path, name: str | None) -> bool:
    """Return whether a folder above the file is named after the column, as Hive names folders."""
    return any(part.startswith(f"{name}=") for part in path.parts[:-1])
