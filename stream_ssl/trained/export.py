"""Export a checkpoint's encoder and its memory, for `stream-ssl export`.

Shapes: B images, K samples of the memory, C channels, H height, W width, D dimensions of an
embedding, A numbers of a descriptor.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl import __version__
from stream_ssl.durable import MANIFEST, UNREADABLE, listed, move, publish, seal, write_json
from stream_ssl.feed.decode import VectorDecoder
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.saved import memory_of, origins_of
from stream_ssl.learning.vectors import Vectors
from stream_ssl.memory.index import write_flat
from stream_ssl.memory.scores import Linear
from stream_ssl.memory.state import columns_of, decode, upgraded
from stream_ssl.originals import Originals, suffix_of
from stream_ssl.pictures import png
from stream_ssl.process.failures import Failure, check_writable, first_line, missing_extra
from stream_ssl.process.only_writer import only_writer
from stream_ssl.producers.sources import Synthetic
from stream_ssl.tensor_file import unshared
from stream_ssl.trained.encoder import (
    ENCODER,
    EXPORT_FORMAT,
    PARTS,
    WEIGHTS,
    Encoder,
    Of,
    facts,
    load_encoder,
    stored_settings,
)
from stream_ssl.wire.sample import MAX_TIME

ONNX = "encoder.onnx"
MEMORY = "memory.json"

ONNX_TORCH = "2.14"
"""The first version of torch that exports our encoders, and refuses what it cannot export."""
ONNX_TOLERANCE = 1e-4
"""Largest accepted difference between onnxruntime and torch, relative to the largest value."""

SHARD = 1000
"""Samples in a tar shard."""


def check_target(option: str, folder: Path, marker: str) -> None:
    """Reject a folder that cannot be written, or whose files an export would remove.

    Args:
        option: the name of the option in the error.
        folder: the folder that the export replaces.
        marker: a file that every export of this kind holds.

    Raises:
        ValueError: the folder is rejected.
    """
    remedy, folder = "choose an empty or a new folder", folder.resolve()
    if folder.is_mount():  # such as a volume of a container
        raise ValueError(
            f"{option} {folder} is a mount point, which an export cannot replace: give a folder "
            f"in it, such as {folder / 'export'}"
        )
    check_writable(folder, option, remedy)
    check_writable(folder.parent, f"the folder above {option}", remedy)
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = set()
    if {marker, MANIFEST} <= found:
        with suppress(*UNREADABLE):  # another program may have written such a file
            ours = {MANIFEST, *listed(folder)}
    if others := sorted(found - ours):
        raise ValueError(
            f"{option} {folder} contains {others[0]}, which no export has written, and "
            f"the whole folder would be replaced; {remedy}"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into. It replaces `folder` once its files are all on disk.

    Raises:
        Failure: another process writes there.
    """
    folder = folder.resolve()
    scratch, before = (folder.with_name(f".{w}-{folder.name}") for w in ("incomplete", "discarded"))
    scratch.mkdir(parents=True, exist_ok=True)
    refusal = f"{folder}: another `export` writes there; wait for its end, or choose another folder"
    with only_writer(scratch, refusal):
        try:
            for file in scratch.iterdir():  # an export that was killed has left them
                file.unlink()
            yield scratch
            seal(scratch)
            shutil.rmtree(before, ignore_errors=True)
            if folder.exists():
                move(folder, before)
            publish(scratch, folder)
            shutil.rmtree(before, ignore_errors=True)  # slow, but readers see the new folder by now
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


# -- The encoder


def export_encoder(
    checkpoint: Path, folder: Path, of: Of, onnx: bool, trust_code: bool = False
) -> float | None:
    """Write a checkpoint's encoder into a folder.

    Args:
        folder: the folder to replace.
        of: what the encoder returns, "features" or "embeddings".
        onnx: write an ONNX model too, and compare it with torch.

    Returns:
        The largest difference between ONNX and torch, relative to the largest value; None without
            `onnx`.

    Raises:
        Failure: the difference exceeds ONNX_TOLERANCE. `folder` is then unchanged.
    """
    stored = facts(checkpoint)
    encoder = load_encoder(checkpoint, of, trust_code=trust_code)
    difference = None
    with replacing(folder) as scratch:
        weights = unshared(encoder.networks.state_dict())
        (scratch / WEIGHTS).write_bytes(safetensors.torch.save(weights))
        write_json(scratch / ENCODER, describe(encoder, stored, trust_code))
        if onnx:
            difference = write_onnx(encoder, scratch / ONNX)
            if not difference <= ONNX_TOLERANCE:  # this also rejects NaN
                raise Failure(
                    f"the ONNX model differs from torch by {difference:.1e} of the "
                    f"largest value, and {ONNX_TOLERANCE:.0e} is allowed; nothing was "
                    "written: use --no-onnx, or try another version of onnxruntime"
                )
    return difference


def describe(encoder: Encoder, stored: Mapping[str, Any], trust_code: bool) -> dict[str, Any]:
    """Return the content of encoder.json: all that `load_encoder` needs beside the weights."""
    config = stored["config"]
    settings = stored_settings(config, trust_code=trust_code)
    sections = {name: settings[name].as_dict() for name in PARTS}
    views = sections.pop("views")
    # Plain values name a class by its path. The initial weights are not needed again.
    views["transform"] = (config.get("views") or {}).get("transform")
    sections["decoder"]["subclass"] = (config.get("decoder") or {}).get("subclass")
    model = (config.get("encoder") or {}).get("model")
    sections["encoder"] |= {"model": model, "weights": None}
    return sections | {
        "format": EXPORT_FORMAT,
        "version": __version__,
        "of": encoder.of,
        "dim": encoder.dim,
        "projector": None if encoder.projector is None else sections["projector"],
        "statistics": encoder.statistics,
        "normalisation": {name: views.pop(name) for name in ("mean", "std")},
        "views": views,
        "step": int(stored["step"]),
        "samples": int(stored["samples"]),
    }


def check_onnx() -> None:
    """Raise ValueError if a package that writes or runs ONNX models is not installed."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(module) is None:
            hint = missing_extra(ModuleNotFoundError(name=module))
            raise ValueError(f"{hint}; or use --no-onnx")


def write_onnx(encoder: Encoder, path: Path) -> float:
    """Write the encoder as ONNX, and compare it with torch on batches of 1, 2 and 16.

    The model maps uint8 images [batch, C, H, W], or float32 vectors [batch, D], to float32 [batch,
    F].

    Returns:
        The largest difference, relative to the largest value if that is not 0.

    Raises:
        Failure: torch cannot export the encoder.
    """
    import onnxruntime

    name, image_BCHW = "images", examples(encoder, 16)
    if image_BCHW.is_floating_point():
        name = "vectors"
    try:
        torch.onnx.export(
            encoder,
            (image_BCHW,),
            path,
            input_names=[name],
            output_names=[encoder.of],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    except Exception as error:  # each step of the exporter raises errors of its own
        raise Failure(
            f"torch {torch.__version__} cannot write this encoder as ONNX "
            f"({first_line(error)}): use torch {ONNX_TORCH} or newer, or --no-onnx"
        ) from error
    # The content in place of the path, which must be UTF-8 for this library.
    content = path.read_bytes()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    parts = [image_BCHW[:count] for count in (1, 2, 16)]
    expected = torch.cat([encoder(part_bCHW) for part_bCHW in parts])
    answers = [session.run(None, {name: part_bCHW.numpy()})[0] for part_bCHW in parts]
    difference = torch.from_numpy(np.concatenate(answers)) - expected
    largest = float(expected.abs().max())  # 0 for an encoder that has collapsed
    return float(difference.abs().max()) / (largest or 1.0)


def examples(encoder: Encoder, count: int) -> Tensor:
    """Return inputs of the encoder: synthetic images, or random vectors."""
    if isinstance(encoder.decoder, VectorDecoder):
        return torch.randn(count, encoder.decoder.dim, generator=torch.Generator().manual_seed(0))
    source = Synthetic(count=count, size=encoder.size, channels=encoder.channels, shift=0)
    images = [
        encoder.preprocess(np.frombuffer(sample.data, np.uint8).reshape(sample.shape or ()))
        for sample, _ in source.samples()
    ]
    return torch.stack(images)


# -- The memory


@dataclass(frozen=True)
class MemoryExport:
    """The result of an export: counts of samples and shards, and whether faiss wrote an index.

    Attributes:
        originals: the number of samples whose files were exported as they were sent.
    """

    samples: int
    shards: int
    indexed: bool
    originals: int = 0


def export_memory(
    checkpoint: Path,
    folder: Path,
    tell: Callable[[int, int], object],
    trust_code: bool = False,
) -> MemoryExport:
    """Write the samples of a checkpoint's memory, in the order of their slots.

    Args:
        folder: the folder to replace.
        tell: progress callback: (slots written, total slots).

    Raises:
        ValueError: a later version wrote the memory, or its policy is a class that is not trusted.
        OSError: a file cannot be read or written.
    """
    stored = facts(checkpoint)
    dtype = Vectors(**(stored["config"].get("vectors") or {})).kept
    state = upgraded(memory_of(checkpoint))
    columns = columns_of(state)
    embedding_KD = columns["embeddings"].numpy().astype(np.float32)
    descriptor_KA = columns.get("descriptors", columns["embeddings"]).numpy().astype(np.float32)
    origins = Origins()
    origins.load(origins_of(checkpoint), columns["ids"].tolist())
    rows = _rows(columns, origins, stored["config"], trust_code)
    shards = range(0, len(rows), SHARD)
    originals, found = Originals(checkpoint.resolve().parent.parent / "originals", create=False), 0
    with replacing(folder) as scratch:
        for shard, start in enumerate(shards):
            stop = min(start + SHARD, len(rows))
            slots_B = np.arange(start, stop)
            image_BCHW = images_of(columns, slots_B)
            with tarfile.open(scratch / f"memory-{shard:06d}.tar", "w") as tar:
                for number, image_CHW in enumerate(image_BCHW, start=start):
                    _add(tar, f"{number:09d}", encoded(image_CHW, dtype), rows[number])
            found += _add_originals(
                scratch / f"originals-{shard:06d}.tar", originals, rows[start:stop], start
            )
            tell(stop, len(rows))
        np.save(scratch / "embeddings.npy", embedding_KD)
        np.save(scratch / "descriptors.npy", descriptor_KA)
        indexed = write_flat(embedding_KD, scratch / "index.faiss")
        described = {
            "format": EXPORT_FORMAT,
            "version": __version__,
            "step": int(stored["step"]),
            "samples": int(stored["samples"]),
            "count": len(rows),
            "memory": decode(state),
        }
        write_json(scratch / MEMORY, described)
    return MemoryExport(len(rows), len(shards), indexed, found)


def _add_originals(path: Path, originals: Originals, rows: list[dict[str, Any]], start: int) -> int:
    """Write a shard of the samples whose files are kept as they were sent. Return their number.

    There is no shard without such samples. A running learner may delete a file meanwhile.
    """
    found = 0
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows, start=start):
            if (name := (row["origin"] or {}).get("original")) is None:
                continue
            try:
                data = originals.read(name)
            except OSError:
                continue
            _add(tar, f"{number:09d}", (suffix_of(data), data), row)
            found += 1
    if not found:
        path.unlink()
    return found


def _rows(
    columns: Mapping[str, Tensor], origins: Origins, config: Mapping[str, Any], trust_code: bool
) -> list[dict[str, Any]]:
    """Return the facts about each sample, beside its image and embedding."""
    policy = stored_settings(config, "eviction", trust_code=trust_code).memory.eviction
    score = Linear() if policy is None else policy.score
    counts_K = score.counts(columns.get("descriptors", columns["embeddings"]))
    named = {
        "id": columns["ids"],
        "hash": columns["hashes"],
        "label": columns["labels"],
        "born": columns["born"],
        "encoded": columns["encoded"],
        "multiplicity": columns["multiplicity"],
        "duplicates": counts_K,
        "drawn": columns["draws"],
    }
    values = zip(*(column.tolist() for column in named.values()), strict=True)
    rows = [dict(zip(named, row, strict=True)) for row in values]
    for row, origin in zip(rows, origins.of(named["id"].tolist()), strict=True):
        row["origin"] = origin and origin.known()
    return rows


def images_of(columns: Mapping[str, Tensor], slots_B: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the images [B, C, H, W] of these slots.

    Raises:
        ValueError: an earlier version kept them in a file outside the checkpoint.
    """
    if "images" not in columns:
        raise ValueError(
            "the memory's images are in a file (memory.image_file), which does not exist any more"
        )
    images: NDArray[np.uint8] = columns["images"][slots_B].numpy()
    return images


def encoded(image_CHW: NDArray[np.uint8], dtype: str | None) -> tuple[str, bytes]:
    """Return the suffix and content of a shard's member: a PNG for an image, .npy for a vector.

    Args:
        image_CHW: the image, or the bytes of a vector.
        dtype: dtype of the vector's numbers; None for an image.
    """
    if dtype is None:
        return "png", png(image_CHW.transpose(1, 2, 0))
    out = io.BytesIO()
    np.save(out, np.frombuffer(image_CHW.tobytes(), dtype))
    return "npy", out.getvalue()


def _add(tar: tarfile.TarFile, key: str, member: tuple[str, bytes], row: dict[str, Any]) -> None:
    members = dict([member]) | {"json": json.dumps(row).encode()}
    if row["label"] >= 0:
        members["cls"] = str(row["label"]).encode()
    time = (row["origin"] or {}).get("time", 0.0)
    for suffix, data in members.items():
        info = tarfile.TarInfo(f"{key}.{suffix}")
        info.size, info.mtime = len(data), int(min(max(0.0, time), MAX_TIME))
        tar.addfile(info, io.BytesIO(data))
