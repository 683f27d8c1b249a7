"""Lists of URLs in every form, and lists that unpack to more than memory holds."""

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyarrow import parquet
from table import table

from stream_ssl.producers.sources import tables, url_lists
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.tables import OutOfRange
from stream_ssl.producers.sources.url_lists import UrlRow, read_rows


@contextmanager
def measured() -> Iterator[pa.MemoryPool]:
    """Yield a pool that measures the memory of Arrow within the block."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(default)


@pytest.mark.parametrize("stored", [True, False])  # whether the file names Arrow's own types
def test_a_text_that_all_rows_share_is_held_once(stored: bool, tmp_path: Path) -> None:
    """The row group has few bytes, and unpacks to 80 MB in each column."""
    text, path = "http://host/" + "a" * 20_000, tmp_path / "a.parquet"
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array([text]))
    table = pa.table({"url": shared, "label": shared})
    parquet.write_table(table, path, compression="zstd", store_schema=stored)
    with measured() as pool:
        rows = list(zip(read_rows(path, "url", ["label"]), range(5000), strict=False))
    assert len(rows) == 4096
    assert rows[-1][0] == UrlRow(text, {"label": text})
    assert pool.max_memory() < 2**24


@table("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_texts_in_delta_encodings_are_read_in_small_batches(encoding: str, tmp_path: Path) -> None:
    """DuckDB, Spark and Rust write these encodings. The file stores 80 MB of one text once."""
    text, path = "http://host/" + "a" * 20_000, tmp_path / f"{encoding}.parquet"
    texts = [text] * (4096 if encoding == "DELTA_BYTE_ARRAY" else 3)
    how = {"use_dictionary": False, "column_encoding": {"url": encoding}}
    parquet.write_table(pa.table({"url": texts}), path, compression="zstd", **how)
    with measured() as pool, mock.patch.object(tables, "MAX_BATCH", 2**22):
        rows = list(read_rows(path, "url"))
    assert rows == [UrlRow(text)] * len(texts)
    assert pool.max_memory() < 2**24


def test_only_the_named_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    images = [bytes([n]) * 100_000 for n in range(3)]
    parquet.write_table(pa.table({"url": ["u", "v", None], "n": [1, 2, 3], "jpg": images}), path)
    monkeypatch.setattr(tables, "MAX_COLUMN", 10_000)
    with measured() as pool:
        rows = list(read_rows(path, "url", ["n", "absent"]))
    assert rows == [UrlRow("u", {"n": 1}), UrlRow("v", {"n": 2}), UrlRow("", {"n": 3})]
    assert pool.max_memory() < 100_000
    with pytest.raises(SourceError, match=r"'jpg' has a row group of .* at most 10000"):
        list(read_rows(path, "url", ["jpg"]))
    parquet.write_table(pa.table({"media.url": ["u"], "media.jpg": images[:1]}), path)
    assert list(read_rows(path, "media.url")) == [UrlRow("u")]
    with pytest.raises(SourceError, match=r"'media\.jpg' has a row group"):
        list(read_rows(path, "media.url", ["media.jpg"]))


ROWS = [UrlRow(f"http://host/{n}?a=1", {"caption": f'a "quoted, {n}'}) for n in range(50)]
LINES = {
    ".csv": "caption,url\n" + "".join(f'"a ""quoted, {n}",{ROWS[n].url}\n' for n in range(50)),
    ".tsv": "caption\turl\n" + "".join(f'a "quoted, {n}\t{ROWS[n].url}\n' for n in range(50)),
    ".jsonl": "".join(json.dumps({"url": row.url, **row.facts}) + "\n" for row in ROWS),
    ".txt": "".join(f"{row.url}\n" for row in ROWS),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])  # the shell of Windows
@pytest.mark.parametrize("module", [None, gzip, bz2, lzma])
@pytest.mark.parametrize("kind", LINES)
def test_a_list_is_read_in_each_form_compression_and_encoding(
    kind: str, module: Any, encoding: str, tmp_path: Path
) -> None:
    suffix = {None: "", gzip: ".gz", bz2: ".bz2", lzma: ".xz"}[module]
    path = tmp_path / f"a{kind}{suffix}"
    raw = LINES[kind].encode(encoding)
    path.write_bytes(raw if module is None else module.compress(raw))
    rows = list(read_rows(path, "url"))
    assert rows == ([UrlRow(row.url) for row in ROWS] if kind == ".txt" else ROWS)
    assert url_lists.count_rows(path) == LINES[kind].count("\n")


@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_empty_lines_before_the_names_of_columns_are_ignored(kind: str, tmp_path: Path) -> None:
    (tmp_path / f"a{kind}").write_text("\n \r\n" + LINES[kind])
    assert list(read_rows(tmp_path / f"a{kind}", "url")) == ROWS


QUOTED = """url,caption,label
http://host/1,"open,1
http://host/2,two,2
http://host/3,"three
lines",3
http://host/4,"4" long,4
http://host/5,"the end,5"""


def test_a_quote_that_is_never_closed_costs_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(QUOTED)
    rows = list(read_rows(tmp_path / "a.csv", "url"))
    assert [row.url for row in rows] == [f"http://host/{n}" for n in range(1, 6)]
    assert [row.facts["label"] for row in rows] == list("12345")
    captions = ['"open', "two", "three\nlines", "4 long", '"the end']
    assert [row.facts["caption"] for row in rows] == captions


def test_many_unclosed_quotes_cost_no_row(tmp_path: Path) -> None:
    lines = ["url,caption", *(f'http://host/{n},"open' for n in range(50_000))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert sum(row.url.startswith("http") for row in read_rows(tmp_path / "a.csv", "url")) == 50_000


@pytest.mark.parametrize(("kind", "sign"), [(".csv", ","), (".tsv", "\t")])
def test_a_row_of_too_many_fields_gives_no_url(kind: str, sign: str, tmp_path: Path) -> None:
    lines = ["url,label", "http://host/a,7,1", "http://host/b,2,,", "http://host/c,3"]
    path = tmp_path / f"a{kind}"
    path.write_text("\n".join(lines).replace(",", sign))
    cut, *whole = read_rows(path, "url")
    assert cut.url.startswith("a row of 3 fields for 2 columns")
    assert whole == [
        UrlRow("http://host/b", {"label": "2"}),
        UrlRow("http://host/c", {"label": "3"}),
    ]


QUICK_XZ = partial(lzma.compress, preset=0)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, QUICK_XZ])
def test_the_rows_before_the_damage_of_a_compressed_list_are_read(
    compress: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt.gz"
    rng = random.Random(0)
    text = "".join(f"http://host/{rng.random()}\n" for _ in range(100_000))
    packed = compress(text.encode())
    path.write_bytes(packed[: len(packed) * 3 // 4])
    rows: list[str] = []
    with pytest.raises(SourceError, match=r"a\.txt\.gz cannot be read: .*end"):
        rows.extend(row.url for row in read_rows(path, "url"))
    assert len(rows) > 1000
    assert rows == text.split()[: len(rows)]


def test_another_compression_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.zip"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(SourceError, match=r"a ZIP file; only text, .* xz\. Unpack it"):
        list(read_rows(path, "url"))
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(SourceError, match=r"a compressed Parquet file; .* Unpack it"):
        list(read_rows(path, "url"))


def test_a_cell_that_exceeds_the_range_of_python_costs_no_row(tmp_path: Path) -> None:
    path, far = tmp_path / "a.parquet", 1 << 62
    columns = {"us": pa.array([1, far], pa.timestamp("us")), "ns": pa.array([far, 0], pa.int64())}
    columns["ns"] = columns["ns"].cast(pa.timestamp("ns"))
    parquet.write_table(pa.table({"url": ["u", "v"], **columns}), path)
    first, second = read_rows(path, "url", ["us", "ns"])
    assert (first.url, second.url) == ("u", "v")
    assert first.facts["us"] is not None
    assert isinstance(second.facts["us"], OutOfRange)


def test_a_list_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array(["u"])] * 2, names=["url", "url"]), path)
    with pytest.raises(SourceError, match="cannot be read"):
        list(read_rows(path, "url"))


@pytest.mark.parametrize("name", ["part-0", "a.parquet.gzip", "a.txt"])
def test_a_parquet_file_is_recognised_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"url": ["u", "v"]}), tmp_path / name)
    assert list(read_rows(tmp_path / name, "url")) == [UrlRow("u"), UrlRow("v")]
    assert url_lists.count_rows(tmp_path / name) == 2


def test_a_file_of_json_lines_may_have_the_suffix_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(LINES[".jsonl"])
    assert list(read_rows(path, "url")) == ROWS


ARRAY = [{"url": "http://host/1"}]
UNREAD = {
    "a.feather": (b"ARROW1\0\0", "an Arrow .* file: write it as Parquet"),
    "a.json": (json.dumps(ARRAY).encode(), "one JSON value, .* jq -c"),
    "b.json": (json.dumps(ARRAY, indent=1).encode(), "one JSON value, .* jq -c"),
    "c.json": (json.dumps(ARRAY[0], indent=1).encode(), "one JSON value, .* jq -c"),
    "d.jsonl": (json.dumps(ARRAY).encode(), "one JSON value, .* jq -c"),
    "a.csv": (b"url;label\nhttp://host/1;2\n", "separated by ';': separate them by commas$"),
    "b.csv": (b"url\tlabel\nu\t2\n", r"separated by '\\t': .* by commas, or name the file \.tsv"),
    "a.tsv": (b"url,label\nu,2\n", r"separated by ',': .* by tabs, or name the file \.csv"),
    "d.csv": ("url\nhttp://host/1\n".encode("utf-16-le"), "without a byte-order mark, .*iconv"),
    "e.csv": ("url\nhttp://host/1\n".encode("utf-32"), "or UTF-32: save it as UTF-8, .*iconv"),
    "a.txt": ("http://host/1\n".encode("utf-16-be"), "without a byte-order mark, .*iconv"),
    "f.csv": (b"url,label,url\na,1,b\n", "several columns 'url': rename"),
    "c.csv": (b"http://host/1\nhttp://host/2\n", "first line must name the columns, and is 'http"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_list_of_another_form_is_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    content, message = UNREAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        list(read_rows(tmp_path / name, "url"))
