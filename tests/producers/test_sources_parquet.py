"""Parquet files: the samples, the columns that are read, and damage."""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from going_on import check_goes_on
from pyarrow import parquet
from source_files import encoded, pixels
from table import table

from stream_ssl.producers.sources import ParquetFiles
from stream_ssl.producers.sources import parquet as parquet_source
from stream_ssl.producers.sources import tables as limits

PNGS = [encoded(image) for image in pixels(9, 6, 5, 3)]
JPEG = encoded(pixels(1, 6, 5, 3)[0], "jpeg")


def write(path: Path, columns: dict[str, Any], **how: Any) -> str:
    parquet.write_table(pa.table(columns), path, **how)
    return str(path)


def cells(images: list[bytes | None], path: str | None = None) -> list[dict[str, Any]]:
    return [{"bytes": image, "path": path} for image in images]


def given(source: ParquetFiles) -> list[tuple[str, bytes, str, int | None, Any]]:
    return [
        (sample.id.partition("#")[0], bytes(sample.data), sample.codec, sample.label, sample.meta)
        for sample, _ in source.samples()
    ]


def test_rows_are_sent_with_unchanged_images_labels_and_kept_columns(tmp_path: Path) -> None:
    columns = {"image": cells([*PNGS[:2], JPEG]), "label": [3, -1, None], "text": ["a", "b", "c"]}
    source = ParquetFiles(write(tmp_path / "train-00000.parquet", columns), keep=["text"])
    assert given(source) == [
        ("train-00000/0", PNGS[0], "png", 3, {"text": "a"}),
        ("train-00000/1", PNGS[1], "png", None, {"text": "b"}),
        ("train-00000/2", JPEG, "jpeg", None, {"text": "c"}),
    ]
    assert not source.skipped.by_reason


def test_a_label_that_only_the_folder_names_is_reported_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hive, Spark and DuckDB leave the column of a partition out of its files."""
    (tmp_path / "label=cat").mkdir()
    file = write(tmp_path / "label=cat" / "0.parquet", {"image": cells(PNGS[:2])})
    assert [label for *_, label, _ in given(ParquetFiles(file))] == [None, None]
    assert "'label=...' are not read" in caplog.text
    (tmp_path / "kind=cat").mkdir()
    file = write(tmp_path / "kind=cat" / "0.parquet", {"image": cells(PNGS[:2])})
    with pytest.raises(ValueError, match="WRITE_PARTITION_COLUMNS"):
        ParquetFiles(file, label="kind")


FIXED, CATEGORIES = pa.binary(len(PNGS[0])), pa.dictionary(pa.int32(), pa.binary())


@table("kind", [pa.binary(), pa.large_binary(), FIXED, CATEGORIES], ids=str)
def test_a_column_of_plain_bytes_may_hold_the_images(tmp_path: Path, kind: pa.DataType) -> None:
    images = [image for image in PNGS if len(image) == len(PNGS[0])]
    columns = {"picture.png": pa.array(images).cast(kind), "path": ["x"] * len(images)}
    source = ParquetFiles(write(tmp_path / "a.parquet", columns))
    assert [data for _, data, *_ in given(source)] == images


def test_the_type_of_views_of_bytes_counts_as_plain_bytes() -> None:
    """pyarrow 21 reads views from its own files. pyarrow 20 reads plain bytes from them."""
    assert parquet_source.plain(pa.binary_view()) == pa.binary()


def test_a_column_of_image_structures_is_preferred_to_plain_bytes(tmp_path: Path) -> None:
    columns = {"md5": [b"0123", b"4567"], "image": cells(PNGS[:2]), "vector": [[0.5], [1.5]]}
    file = write(tmp_path / "a.parquet", columns)
    assert [data for _, data, *_ in given(ParquetFiles(file))] == PNGS[:2]
    with pytest.raises(ValueError, match="not one sample of a whole pass can be read"):
        given(ParquetFiles(file, image="md5"))


@table(
    ("columns", "options", "message"),
    [
        ({"a": [1], "b": ["x"]}, {}, "no column that can hold images; it has 'a', 'b'. Images are"),
        (
            {"a": cells(PNGS[:1]), "b": cells(PNGS[:1]), "c": [1]},
            {},
            "has 2 columns that can hold images: set image to one of 'a', 'b'$",
        ),
        ({"a": [b"x"], "b": [b"x"]}, {}, "has 2 columns .*: set image to one of 'a', 'b'$"),
        ({"a": [b"x"]}, {"image": "b"}, "has no column 'b'; it has 'a': set image"),
        ({"a": [b"x"], "b": [1]}, {"image": "b"}, "column 'b' of .* is 'int64'; images are"),
        ({"a": [[b"x"]]}, {"image": "a"}, "column 'a' of .* is 'list<.*; images are binary"),
        ({"a": [b"x"]}, {"label": "class"}, "has no column 'class'; it has 'a': set label"),
        ({"a": [b"x"]}, {"epochs": 0}, "epochs 0: must be 1 or more"),
    ],
)
def test_the_constructor_refuses_wrong_columns_and_epochs(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=message):
        ParquetFiles(file, **options)


def test_the_constructor_refuses_a_file_that_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(ValueError, match=r"source 'parquet': .*a.parquet cannot be read"):
        ParquetFiles(str(tmp_path / "a.parquet"))
    with pytest.raises(FileNotFoundError):
        ParquetFiles(str(tmp_path / "b.parquet"))


def test_the_refusal_of_a_file_without_its_end_names_the_remedy(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.parquet", {"image": cells(PNGS)}))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is a Parquet file, finish writing it, or fetch it again"):
        ParquetFiles(str(file))


@table("form", ["stream", "file"])
def test_the_refusal_of_an_arrow_file_names_the_remedy(tmp_path: Path, form: str) -> None:
    """`datasets.Dataset.save_to_disk` and Feather write such files."""
    rows, path = pa.table({"image": cells(PNGS)}), tmp_path / f"{form}.arrow"
    create = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[form]
    with create(path, rows.schema) as writer:
        writer.write_table(rows)
    with pytest.raises(ValueError, match=r"is an Arrow \(Feather\) file.* as Parquet: datasets"):
        ParquetFiles(str(path))


def test_rows_without_an_image_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = [PNGS[0], None, b"", b"GIF89a...", PNGS[1]]
    column = pa.array(cells(images, "cat.png"))
    column = pa.concat_arrays([column, pa.array([None], column.type)])
    source = ParquetFiles(write(tmp_path / "a.parquet", {"image": column}))
    assert [name for name, *_ in given(source)] == ["a/0", "a/4"]
    assert source.skipped.by_reason == {"no image": 4}
    assert "a/1 (no image): it has a path and no bytes: write the table with" in caplog.text
    assert "a/3 (no image): neither JPEG, PNG nor WebP by its first bytes: GIF" in caplog.text
    assert "a/5 (no image): empty: it has 0 bytes" in caplog.text


@table(
    ("facts", "names"),
    [
        ('{"info": {"features": {"label": {"names": ["ant", "bee"]}}}}', ["ant", "bee"]),
        ('{"info": {"features": {"label": {"names": [1]}, "other": {"names": ["a"]}}}}', None),
        ('{"info": {"features": {"label": []}}}', None),
        ("[" * 100_000, None),
        ("{}", None),
    ],
    ids=["names", "numbers", "no structure", "deep", "empty"],
)
def test_names_of_classes_are_read_from_valid_metadata_only(
    tmp_path: Path, facts: str, names: list[str] | None
) -> None:
    found = pa.table({"image": cells(PNGS[:1]), "label": [0]})
    parquet.write_table(found.replace_schema_metadata({"huggingface": facts}), tmp_path / "a")
    assert ParquetFiles(str(tmp_path / "a")).classes == names


def named(path: Path, labels: list[object], names: list[str]) -> None:
    """Write a file whose labels have these names, as `datasets` does."""
    facts = json.dumps({"info": {"features": {"label": {"names": names}}}})
    found = pa.table({"image": cells(PNGS[: len(labels)]), "label": labels})
    parquet.write_table(found.replace_schema_metadata({"huggingface": facts}), path)


def test_all_files_use_the_class_numbers_of_the_first_file(
    tmp_path: Path,
) -> None:
    named(tmp_path / "a.parquet", [0, 1, None], ["dog", "cat"])
    named(tmp_path / "b.parquet", [0, 1, 2], ["cat", "dog", "emu"])
    named(tmp_path / "c.parquet", [0, -1, 7], ["cat"])
    write(tmp_path / "d.parquet", {"image": cells(PNGS[:2]), "label": ["cat", "dog"]})
    write(tmp_path / "e.parquet", {"image": cells(PNGS[:2]), "label": [0, 1]})
    source = ParquetFiles(str(tmp_path / "*.parquet"))
    assert source.classes == ["dog", "cat"]
    labels = [label for *_, label, _ in given(source)]
    assert labels == [0, 1, None, 1, 0, None, 1, None, 7, 1, 0, 0, 1]
    assert source.skipped.by_reason == {"bad label": 1}


@table("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_class_names_in_the_label_column_get_numbers_over_all_files(
    tmp_path: Path, kind: pa.DataType, caplog: pytest.LogCaptureFixture
) -> None:
    for name, labels in (("a", ["cat", "ant", None]), ("b", ["bee", "", "cat"])):
        columns = {"image": cells(PNGS[:3]), "kind": pa.array(labels).cast(kind)}
        write(tmp_path / f"{name}.parquet", columns)
    write(tmp_path / "c.parquet", {"image": cells(PNGS[:1]), "kind": [["cat"]]})
    (tmp_path / "d.parquet").write_bytes(b"no table")
    source = ParquetFiles(str(tmp_path / "*.parquet"), label="kind")
    assert "the labels of" in caplog.text
    assert source.classes == ["ant", "bee", "cat"]
    assert [label for *_, label, _ in given(source)] == [2, 0, None, 1, None, 2, None]
    assert source.skipped.by_reason == {"bad label": 1, "damaged": 1}


def test_class_names_of_digits_and_underscores_are_not_read_as_numbers(tmp_path: Path) -> None:
    columns = {"image": cells(PNGS[:3]), "label": ["1_2", "1_10", "1_2"]}
    source = ParquetFiles(write(tmp_path / "a.parquet", columns))
    assert source.classes == ["1_10", "1_2"]
    assert [label for *_, label, _ in given(source)] == [1, 0, 1]


@table("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_names_of_classes_may_have_any_encoding(tmp_path: Path, encoding: str) -> None:
    """Arrow reads texts of these encodings, but not as a dictionary."""
    how = {"use_dictionary": ["image"], "column_encoding": {"label": encoding}}
    columns = {"image": PNGS[:3], "label": ["cat", "ant", "cat"]}
    source = ParquetFiles(write(tmp_path / f"{encoding}.parquet", columns, **how))
    assert source.classes == ["ant", "cat"]
    assert [label for *_, label, _ in given(source)] == [1, 0, 1]
    assert source.skipped.by_reason == {}


def test_more_texts_than_the_limit_are_not_read_as_class_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parquet_source, "MAX_NAMES", 2)
    columns = {"image": cells(PNGS[:3]), "label": ["a dog", "a cat", "two dogs"]}
    source = ParquetFiles(write(tmp_path / "a.parquet", columns))
    assert source.classes is None
    assert [label for *_, label, _ in given(source)] == [None] * 3
    assert source.skipped.by_reason == {"bad label": 3}
    assert "'label' has more than 2 different texts. They are no names of classes" in caplog.text


def test_a_bad_label_or_fact_costs_no_sample(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 31)
    columns = {
        "image": cells(PNGS[:3]),
        "label": ["2", "cat", "1.0"],
        "day": [day, None, day],
        "box": [[1, 2], None, None],
    }
    source = ParquetFiles(write(tmp_path / "a.parquet", columns), keep=["day", "box", "none"])
    found = given(source)
    assert [label for *_, label, _ in found] == [2, None, 1]
    assert [meta for *_, meta in found] == [{"day": "2026-01-31"}, None, {"day": "2026-01-31"}]
    assert source.skipped.by_reason == {"bad label": 1, "bad facts": 4}
    without = ParquetFiles(str(tmp_path / "a.parquet"), label=None)
    assert [label for *_, label, _ in given(without)] == [None] * 3


def test_times_keep_microseconds_and_far_dates_are_counted(tmp_path: Path) -> None:
    nanoseconds = pa.array([1_700_000_000_123_456_789, None])
    columns = {
        "image": cells(PNGS[:2]),
        "at": nanoseconds.cast(pa.timestamp("ns", "UTC")),
        "clock": pa.array([3_600 * 10**9 + 1_001, None]).cast(pa.time64("ns")),
        "took": pa.array([1_001, None]).cast(pa.duration("ns")),
        "far": pa.array([10**12, None]).cast(pa.timestamp("s")),
    }
    file = write(tmp_path / "a.parquet", columns)
    source = ParquetFiles(file, keep=["at", "clock", "took", "far"])
    assert [meta for *_, meta in given(source)] == [
        {
            "at": "2023-11-14T22:13:20.123456+00:00",
            "clock": "01:00:00.000001",
            "took": "0:00:00.000001",
        },
        None,
    ]
    assert source.skipped.by_reason == {"bad facts": 1}


def test_every_row_is_read_once_over_row_groups_and_files(tmp_path: Path) -> None:
    for number in range(2):
        images = [PNGS[row % 9] for row in range(100 * number, 100 * number + 90)]
        columns = {"image": cells(images), "row": list(range(90))}
        write(tmp_path / f"a-{number}.parquet", columns, row_group_size=40)
    found = check_goes_on(lambda: ParquetFiles(str(tmp_path / "a-{0..1}.parquet"), keep=["row"]))
    assert [(sample.meta or {})["row"] for sample, _ in found] == [*range(90)] * 2
    assert len({sample.id for sample, _ in found}) == 180


def test_damage_costs_the_rest_of_its_row_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    images = [PNGS[0] + rng.bytes(2000) for _ in range(30)]
    file = Path(write(tmp_path / "a.parquet", {"image": cells(images)}, row_group_size=10))
    column = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    whole = bytearray(file.read_bytes())
    begin = column.data_page_offset
    whole[begin : begin + 100] = bytes(100)
    file.write_bytes(whole)
    source = ParquetFiles(str(file))
    rows = [int(name.partition("/")[2]) for name, *_ in given(source)]
    assert {*range(10), *range(20, 30)} <= set(rows)
    assert len(rows) == len(set(rows)) < 30
    assert source.skipped.by_reason == {"damaged": 1}
    assert "to the end of its row group (damaged)" in caplog.text


def test_row_groups_that_a_shortened_file_has_lost_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    images = [PNGS[0] + rng.bytes(200_000) for _ in range(12)]
    file = Path(write(tmp_path / "a.parquet", {"image": cells(images)}, row_group_size=2))
    second = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    source = ParquetFiles(str(file))
    samples = source.samples()
    next(samples)
    os.truncate(file, second.data_page_offset)  # like a program that writes the file again
    assert len(list(samples)) <= 3
    assert source.skipped.by_reason["damaged"] >= 4  # one for each row group
    assert "the last 2 rows are missing: the file became shorter" in caplog.text


def test_a_later_file_of_another_form_costs_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.parquet", {"image": cells(PNGS[:2])})
    write(tmp_path / "b.parquet", {"text": ["x"]})
    (tmp_path / "c.parquet").write_bytes(b"")
    write(tmp_path / "d.parquet", {"image": cells(PNGS[2:4])})
    source = ParquetFiles(str(tmp_path / "*.parquet"))
    assert [name for name, *_ in given(source)] == ["a/0", "a/1", "d/0", "d/1"]
    assert source.skipped.by_reason == {"damaged": 2}
    assert "b.parquet has no column that can hold images" in caplog.text


def test_a_column_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_COLUMN", 10_000)
    columns = {"image": cells([JPEG + bytes(5000)] * 4), "other": ["x" * 50_000] * 4}
    source = ParquetFiles(write(tmp_path / "a.parquet", columns, use_dictionary=False))
    caplog.set_level(logging.WARNING)
    with pytest.raises(ValueError, match="not one sample"):
        given(source)
    assert "column 'image.bytes' has a row group of 2" in caplog.text
