"""Write the pictures that a `Curator` kept: WebDataset shards, Parquet, a FAISS index, a report.

Shapes: K pictures kept, D features of a picture, N rows of a table.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from stream_ssl.curation.curator import Curator, Kept, batches
from stream_ssl.curation.report import write_report
from stream_ssl.memory.index import write_flat
from stream_ssl.pictures import png
from stream_ssl.producers.sources.fields import utf8_name

CURATED: Final = "curated.parquet"
DROPPED: Final = "dropped.parquet"
BAD: Final = "bad.parquet"
INDEX: Final = "index.faiss"
REPORT: Final = "report.html"
SHARD: Final = 1000  # pictures

IMAGE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("image", IMAGE),
        ("label", pa.int64()),
        ("source", pa.string()),
        ("position", pa.string()),
        ("meta", pa.string()),
    ]
)
"""Columns of curated.parquet."""

_SAMPLE: Final = [
    *(("id", pa.string()), ("source", pa.string()), ("label", pa.int64())),
    ("position", pa.string()),
]
DROPPED_SCHEMA: Final = pa.schema(
    [
        *_SAMPLE,
        *(("of_id", pa.string()), ("of_source", pa.string()), ("of_kept", pa.bool_())),
        ("distance", pa.float64()),
    ]
)
BAD_SCHEMA: Final = pa.schema([*_SAMPLE, ("reason", pa.string()), ("message", pa.string())])


def write_results(
    curator: Curator,
    folder: Path,
    done: Callable[[int], None] = lambda _: None,
    classes: Sequence[str] = (),
) -> None:
    """Write what a curator kept and dropped into an empty folder.

    - curated-000000.tar, ...: WebDataset shards with the original bytes, a JSON file beside each
    - curated.parquet: id, image ({bytes, path}), label, source, position, meta (JSON)
    - dropped.parquet: the near-duplicates, each with the picture that it repeats
    - bad.parquet: the samples that could not be decoded, each with the reason
    - index.faiss: inner products of the features, in the row order of curated.parquet
    - report.html: counts, a contact sheet, and near-duplicates beside their originals

    Pictures that arrived as raw pixels are stored as PNG; all others keep their bytes.

    Args:
        curator: the curator at the end of its pass.
        folder: the folder, which exists.
        done: called with the number of pictures written so far.
        classes: the names of the classes, by label.

    Raises:
        OSError: a file cannot be written, or an original is gone.
    """
    _write_pictures(curator, folder, done, described(classes, curator.kept))
    _write_dropped(curator, folder / DROPPED)
    _write_rows(map(asdict, curator.bad()), BAD_SCHEMA, folder / BAD)
    write_flat(curator.memory.embeddings.numpy(), folder / INDEX)
    write_report(curator, folder / REPORT, classes)


def described(classes: Sequence[str], kept: Sequence[Kept]) -> pa.Schema:
    """Return the columns of curated.parquet with the features of Hugging Face's `datasets`.

    They name the images, and the classes by label. `datasets` takes neither two classes of one name
    nor a label without a name.
    """
    features: dict[str, Any] = {
        name: {"dtype": "int64" if name == "label" else "string", "_type": "Value"}
        for name in SCHEMA.names
    }
    features["image"] = {"_type": "Image"}
    names = [utf8_name(name) for name in classes]
    most = max((one.label for one in kept if one.label is not None), default=-1)
    if most < len(set(names)) == len(names) > 0:
        features["label"] = {"names": names, "_type": "ClassLabel"}
    return SCHEMA.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def encoded(curator: Curator, one: Kept) -> tuple[bytes, str]:
    """Return the bytes of a picture's file and its suffix."""
    data = curator.originals.read(one.original)
    if one.codec != "raw":
        return data, {"jpeg": "jpg"}.get(one.codec, one.codec)
    assert one.shape is not None
    return png(np.frombuffer(data, np.uint8).reshape(one.shape)), "png"


def _write_pictures(
    curator: Curator, folder: Path, done: Callable[[int], None], schema: pa.Schema
) -> None:
    kept, written = curator.kept, 0
    with parquet.ParquetWriter(folder / CURATED, schema) as table:
        for start in range(0, len(kept), SHARD):
            path = folder / f"curated-{start // SHARD:06d}.tar"
            with tarfile.open(path, "w") as shard:
                rows = _add(curator, shard, kept[start : start + SHARD], start)
                for group in batches(rows, lambda row: len(row["image"]["bytes"])):
                    table.write_table(pa.Table.from_pylist(group, schema))
                    written += len(group)
                    done(written)


def _add(
    curator: Curator, shard: tarfile.TarFile, part: list[Kept], first: int
) -> Iterator[dict[str, Any]]:
    """Add pictures to a shard, and yield their rows of curated.parquet."""
    for number, one in enumerate(part, start=first):
        data, suffix = encoded(curator, one)
        about = {
            "id": one.id,
            "source": one.source,
            "label": one.label,
            "time": one.time,
            "position": json.loads(one.position),
        }
        for name, value in json.loads(one.meta or "{}").items():
            while name in about:
                name = f"source_{name}"
            about[name] = value
        key = f"{number:09d}"
        _add_file(shard, f"{key}.{suffix}", data, one.time)
        _add_file(shard, f"{key}.json", json.dumps(about).encode(), one.time)
        if one.label is not None:
            _add_file(shard, f"{key}.cls", str(one.label).encode(), one.time)
        yield {
            "id": one.id,
            "image": {"bytes": data, "path": f"{key}.{suffix}"},
            "label": one.label,
            "source": one.source,
            "position": one.position,
            "meta": one.meta,
        }


def _add_file(shard: tarfile.TarFile, name: str, data: bytes, time: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(max(0.0, time))
    shard.addfile(info, io.BytesIO(data))


def _write_dropped(curator: Curator, path: Path) -> None:
    """Write the near-duplicates. `of_kept`: the picture that it repeats is kept."""
    kept = {(one.source, one.id) for one in curator.kept}
    rows = (
        {**asdict(one), "of_kept": (one.of_source, one.of_id) in kept} for one in curator.dropped()
    )
    _write_rows(rows, DROPPED_SCHEMA, path)


def _write_rows(rows: Iterable[dict[str, Any]], schema: pa.Schema, path: Path) -> None:
    left = iter(rows)
    with parquet.ParquetWriter(path, schema) as table:
        while group := list(islice(left, 10_000)):
            table.write_table(pa.Table.from_pylist(group, schema))
