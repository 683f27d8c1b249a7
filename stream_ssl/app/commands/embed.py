"""stream-ssl embed: write the features of a data set, from a run's encoder."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from stream_ssl.app.failures import TRUST_CODE, check_out_file, configuring, reported, writing
from stream_ssl.app.parser import Parser
from stream_ssl.app.threads import share_cores
from stream_ssl.observe.conditions import plural

DESCRIPTION = """Writes the features of a data set's images, made by a run's encoder, to an .npz
file with the arrays features (float32 [N, F]), ids (text [N]) and labels (int64 [N], -1: none)."""

EXAMPLES = """examples:
  stream-ssl embed runs/laptop --data images:photos --out features.npz
  stream-ssl embed exported --data cifar:data/cifar10 --source.split test --out test.npz

--help together with --data NAME also lists that source's options."""


def main(arguments: Sequence[str]) -> int:
    """Embed a data set, and return the exit status."""
    share_cores()
    from stream_ssl.app.evaluate import sets

    parser = embed_parser()
    name = sets.add_source(parser, arguments, fixed=sets.FIXED - {"split"})
    settings = parser.parse_args(list(arguments))
    assert name is not None, "--data is required"
    return reported(lambda: embed(settings, name))


def embed_parser() -> Parser:
    """Return the parser of all options except the source's own."""
    parser = Parser(
        prog="stream-ssl embed",
        usage="stream-ssl embed RUN --data NAME:PLACE [OPTIONS]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="folder of a run, a checkpoint or an export")
    add(
        "--data",
        required=True,
        help="NAME:PLACE with a NAME that `stream-ssl produce` knows: cifar:FOLDER, idx:FOLDER, "
        "images:FOLDER, webdataset:SHARDS, synthetic",
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
    add("--batch", type=int, default=256, help="images in one pass of the encoder")
    add("--trust-code", action="store_true", help=TRUST_CODE)
    return parser


def embed(settings: Namespace, name: str) -> None:
    """Encode the data set of the command line and write the file.

    Args:
        settings: the parsed options.
        name: name of the source in `settings.data`.
    """
    import numpy as np
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from stream_ssl import durable
    from stream_ssl.app import build
    from stream_ssl.app.encoder import load_encoder
    from stream_ssl.app.evaluate import sets
    from stream_ssl.evaluation.labelled import Division, Reader

    with configuring("lower --batch, or embed a part of the data"):
        if settings.batch < 1:
            raise ValueError(f"--batch {settings.batch}: must be at least 1")
        check_out_file(settings.out, "features.npz")
        build.check_device(settings.device)
        encoder = load_encoder(settings.run, settings.of, settings.device, settings.trust_code)
        options = settings.source.as_dict() if "source" in settings else {}
        source = sets.make(name, options, seed=0 if encoder.statistics == "batch" else None)
        reader = Reader(source, encoder.decoder, Division(1), settings.batch, labels=False)
        ids: list[str] = []
        features, labels = [], []
        progress = Progress(console=Console(stderr=True), transient=True)
        with progress, torch.inference_mode():
            bar = progress.add_task("encoding images", total=reader.length)
            for batch in reader:
                image_BCHW = torch.from_numpy(batch.image_BHWC).permute(0, 3, 1, 2)
                features.append(encoder(image_BCHW).cpu().numpy())
                labels.append(batch.label_B)
                ids += batch.ids
                progress.update(bar, completed=reader.seen)
        if not ids:
            raise ValueError(f"--data {settings.data} contains no image that can be decoded")
    content = io.BytesIO()
    feature_NF, label_N = np.concatenate(features), np.concatenate(labels)
    np.savez(content, features=feature_NF, ids=np.array(ids), labels=label_N)
    with writing("--out", settings.out):
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        durable.write(settings.out, content.getbuffer())
    print(f"{settings.out}: {plural(len(ids), 'image')}, {encoder.dim} {encoder.of} each")
    if refused := reader.refused.total():
        reasons = ", ".join(sorted(reader.refused))
        print(f"{refused:,} of {plural(reader.seen, 'sample')} were left out ({reasons})")
