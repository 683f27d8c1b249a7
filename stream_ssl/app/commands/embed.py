"""stream-ssl embed: write the features of a data set, from a run's encoder."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from jsonargparse import Namespace

from stream_ssl.config.parser import Parser, command_parser
from stream_ssl.observe.wording import plural
from stream_ssl.process.failures import (
    DONE,
    INTERRUPTED,
    TRUST_CODE,
    check_out_file,
    check_writable,
    configuring,
    reported,
    writing,
)
from stream_ssl.process.only_writer import only_writer
from stream_ssl.process.signals import stop_source_on_signals
from stream_ssl.process.threads import cores, share_cores
from stream_ssl.producers.sources import Source

if TYPE_CHECKING:
    from stream_ssl.feed.decode import Pixels
    from stream_ssl.feed.large_pictures import OneByOne
    from stream_ssl.trained.encoder import Encoder
    from stream_ssl.trained.feature_file import FeatureFile, Read

log = logging.getLogger("stream_ssl.embed")

T = TypeVar("T")

DESCRIPTION = """Writes the features of a data set's samples, made by a run's encoder, to an .npz
file with the arrays features (float32 [N, F]), ids (text [N]) and labels (int64 [N], -1: none).
A command that was stopped continues when it is repeated."""

EXAMPLES = """examples:
  stream-ssl embed runs/laptop --data images:photos --out features.npz
  stream-ssl embed exported --data cifar:data/cifar10 --source.split test --out test.npz

--help together with --data NAME also lists that source's options."""

SAVE_SECONDS = 30.0
"""A kill loses the work of this time at most."""


def main(arguments: Sequence[str]) -> int:
    """Embed a data set, and return the exit status: 130 if it was stopped before the end."""
    share_cores()
    from stream_ssl.evaluation import sets

    parser = embed_parser()
    name = sets.add_source(parser, arguments, fixed=sets.FIXED - {"split"})
    settings = parser.parse_args(list(arguments))
    assert name is not None, "--data is required"
    return reported(lambda: DONE if embed(settings, name) else INTERRUPTED)


def embed_parser() -> Parser:
    """Return the parser of all options except the source's own."""
    parser = command_parser("embed RUN --data NAME:PLACE [OPTIONS]", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("run", type=Path, help="folder of a run, a checkpoint or an export")
    add(
        "--data",
        required=True,
        help="NAME:PLACE with a NAME that `stream-ssl produce` knows: cifar:FOLDER, idx:FOLDER, "
        "images:FOLDER, webdataset:SHARDS, parquet:FILES, synthetic",
    )
    add(
        "--out",
        type=Path,
        default=Path("features.npz"),
        help="file to write; an existing file is replaced",
    )
    add(
        "--of",
        type=Literal["features", "embeddings"] | None,
        default=None,
        help=(
            "features of the backbone, or embeddings of the projector; null: features, or "
            "the kind that was exported"
        ),
    )
    add("--device", type=str, default="cpu", help='"cpu", "cuda" or "cuda:1"')
    add("--batch", type=int, default=256, help="samples in one pass of the encoder")
    add("--trust-code", action="store_true", help=TRUST_CODE)
    return parser


def embed(settings: Namespace, name: str) -> bool:
    """Encode the source `name` and write the file. Return False if a signal stopped the command."""
    from stream_ssl.config import build
    from stream_ssl.durable import make_folder
    from stream_ssl.evaluation import sets
    from stream_ssl.trained.feature_file import FeatureFile, state_folder

    out: Path = settings.out
    with configuring("lower --batch"), writing("--out", out, "and then the same command continues"):
        if settings.batch < 1:
            raise ValueError(f"--batch {settings.batch}: must be at least 1")
        check_out_file(out, "features.npz")
        if out.suffix != ".npz":
            raise ValueError(f"--out {out}: must end in .npz, NumPy's format, such as features.npz")
        check_writable(state_folder(out), "the folder of unfinished rows,", "choose another --out")
        build.check_device(settings.device)
        encoder, made = _encoder(settings)
        options = settings.source.as_dict() if "source" in settings else {}
        source = sets.make(name, options, seed=0 if encoder.statistics == "batch" else None)
        begun = {
            "the encoder": made,
            "--data": settings.data,
            "the source options": json.dumps(options, default=str, sort_keys=True),
            "--batch": settings.batch,
        }
        make_folder(state_folder(out))
        refusal = f"--out {out}: another `embed` writes it; choose another file"
        with (
            only_writer(state_folder(out), refusal),
            closing(FeatureFile(out, encoder.dim, begun)) as file,
        ):
            if not _encode(file, encoder, source, settings.batch):
                return False
            if not file.rows:
                file.discard()
                raise ValueError(
                    f"--data {settings.data} contains no sample that can be decoded: "
                    f"{_left_out(file.read) or 'it is empty'}"
                )
            file.publish()
    print(f"{out}: {plural(file.rows, encoder.kind)}, {encoder.dim} {encoder.of} each")
    if left_out := _left_out(file.read):
        print(left_out)
    return True


def _left_out(read: Read) -> str:
    """Return a sentence with the number of samples that could not be decoded, or ""."""
    if not read.bad:
        return ""
    bad, reasons = sum(read.bad.values()), ", ".join(sorted(read.bad))
    return f"{bad:,} of {plural(read.samples, 'sample')} were left out ({reasons})"


def _encoder(settings: Namespace) -> tuple[Encoder, str]:
    """Return the encoder, and a text that names its folder and its weights."""
    from stream_ssl.trained.encoder import is_export, load_encoder, read_newest

    def load(place: Path) -> tuple[Path, Encoder]:
        chosen = settings.of, settings.device, settings.trust_code
        return place.resolve(), load_encoder(place, *chosen)

    exported = is_export(settings.run)
    place, encoder = load(settings.run) if exported else read_newest(settings.run, load)
    digest = hashlib.sha256(repr((encoder, vars(encoder.decoder))).encode())
    for weight in encoder.state_dict().values():
        digest.update(weight.cpu().contiguous().view(-1).numpy().tobytes())
    return encoder, f"{place} ({encoder.of}, {digest.hexdigest()[:12]})"


def _encode(file: FeatureFile, encoder: Encoder, source: Source, batch: int) -> bool:
    """Encode the rest of the source. Return False if a signal stopped it."""
    import numpy as np
    import torch

    from stream_ssl.evaluation.labelled import length
    from stream_ssl.feed.large_pictures import for_own_files
    from stream_ssl.process.progress import ShownProgress

    stop = stop_source_on_signals(source)
    if file.read.samples:
        log.info("continuing after %d samples", file.read.samples)
    rows = Rows(source, for_own_files(encoder.decoder), file.read)
    due_s = time.monotonic() + SAVE_SECONDS
    with ShownProgress() as progress, torch.inference_mode():
        bar = progress.add_task(f"encoding {encoder.kind}s", total=length(source))
        for some in batches(rows, batch):
            if stop.is_set():
                break
            image_BCHW = torch.from_numpy(np.stack([row.pixels_HWC for row in some]))
            feature_BF = encoder(image_BCHW.permute(0, 3, 1, 2)).cpu().numpy()
            label_B = np.array([row.label for row in some], np.int64)
            file.append(feature_BF, label_B, [row.id for row in some], some[-1].read)
            bad = sum(file.read.bad.values())
            progress.update(
                bar,
                completed=file.read.samples,
                description=f"encoding {encoder.kind}s, {bad:,} bad",
            )
            if time.monotonic() >= due_s:
                file.save()
                due_s = time.monotonic() + SAVE_SECONDS
    if not stop.is_set():
        file.read = rows.read  # the last samples may be bad
    file.save()
    if stop.is_set():
        log.warning("stopped; the same command continues after %d samples", file.read.samples)
    return not stop.is_set()


class Row(NamedTuple):
    """An image, and the part of the source that ends with it."""

    pixels_HWC: Pixels
    label: int
    id: str
    read: Read


class Rows:
    """The images of a source that can be decoded, in order, after the part `read`.

    Attributes:
        read: the part of the source that was read so far.
    """

    def __init__(self, source: Source, decoder: OneByOne, read: Read) -> None:
        self._source, self._decoder, self.read = source, decoder, read

    def __iter__(self) -> Iterator[Row]:
        """Yield each image. A few samples for each core are decoded at a time."""
        from stream_ssl.evaluation.labelled import decoded
        from stream_ssl.feed.decode import BadSample
        from stream_ssl.trained.feature_file import Read

        threads = cores()
        samples = self._source.samples(self.read.position)
        with ThreadPoolExecutor(threads) as pool:
            # The first sample comes alone: it shows whether the source has images or vectors.
            while some := list(islice(samples, 2 * threads if self.read.samples else 1)):
                first = not self.read.samples
                decode = partial(
                    decoded, decoder=self._decoder, source=self._source.name, first=first
                )
                images = pool.map(decode, [sample for sample, _ in some])
                for (sample, position), image in zip(some, images, strict=True):
                    bad = self.read.bad
                    if isinstance(image, BadSample):
                        bad = bad | {image.reason: bad.get(image.reason, 0) + 1}
                    self.read = Read(position, self.read.samples + 1, bad)
                    if not isinstance(image, BadSample):
                        label = -1 if sample.label is None else max(-1, sample.label)
                        yield Row(image, label, sample.id, self.read)


def batches(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` rows, and the rest in two halves; see `last_batches`.

    >>> [len(batch) for batch in batches(range(21), 10)]
    [10, 6, 5]
    """
    from stream_ssl.evaluation.labelled import last_batches

    waiting: list[T] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == 2 * size:
            yield waiting[:size]
            del waiting[:size]
    yield from last_batches(waiting, size)
