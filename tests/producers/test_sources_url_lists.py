"""Lists of URLs in Parquet files that claim, or hold, more than the memory does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from stream_ssl.producers.sources import url_lists
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.url_lists import UrlRow, read_rows


@contextmanager
def measured() -> Iterator[pa.MemoryPool]:
    """The memory that Arrow takes within the block."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(default)


@pytest.mark.parametrize("stored", [True, False])  # whether the file tells Arrow's own types
def test_a_text_that_all_rows_share_is_held_once(stored: bool, tmp_path: Path) -> None:
    """A row group of few bytes that unpacks to 80 MB in each column."""
    text, path = "http://host/" + "a" * 20_000, tmp_path / "a.parquet"
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array([text]))
    table = pa.table({"url": shared, "label": shared})
    parquet.write_table(table, path, compression="zstd", store_schema=stored)
    with measured() as pool:
        rows = list(zip(read_rows(path, "url", ["label"]), range(5000), strict=False))
    assert len(rows) == 4096
    assert rows[-1][0] == UrlRow(text, {"label": text})
    assert pool.max_memory() < 2**24


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    images = [bytes([n]) * 100_000 for n in range(3)]
    parquet.write_table(pa.table({"url": ["u", "v", None], "n": [1, 2, 3], "jpg": images}), path)
    monkeypatch.setattr(url_lists, "MAX_COLUMN", 10_000)
    with measured() as pool:
        rows = list(read_rows(path, "url", ["n", "absent"]))
    assert rows == [UrlRow("u", {"n": 1}), UrlRow("v", {"n": 2}), UrlRow("", {"n": 3})]
    assert pool.max_memory() < 100_000
    with pytest.raises(SourceError, match=r"'jpg' has a row group of .* at most 10000"):
        list(read_rows(path, "url", ["jpg"]))
