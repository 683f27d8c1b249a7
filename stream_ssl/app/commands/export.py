"""stream-ssl export: write a run's encoder and its memory, for use elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from typing import Literal

from jsonargparse import ActionYesNo, Namespace

from stream_ssl.buckets.folders import Target, resolved, target
from stream_ssl.config.parser import Parser, command_parser
from stream_ssl.observe.wording import plural
from stream_ssl.process.failures import TRUST_CODE, configuring, reported, writing
from stream_ssl.process.threads import share_cores

DESCRIPTION = """Writes the results of a run: its encoder, as safetensors and ONNX, and the samples
of its memory, as WebDataset shards with embeddings. It only reads a checkpoint, so the daemon may
be running. docs/encoder.md explains how to use the files."""

EXAMPLES = """examples:
  stream-ssl export runs/laptop --encoder encoder --memory samples
  stream-ssl export runs/laptop/checkpoints/step-000004000 --encoder encoder --no-onnx
  stream-ssl export runs/laptop --hub encoder-for-transformers
  stream-ssl export runs/laptop --encoder s3://bucket/encoder"""


def main(arguments: Sequence[str]) -> int:
    """Export a run, and return the exit status."""
    share_cores()
    settings = export_parser().parse_args(list(arguments))
    return reported(lambda: export(settings))


def export_parser() -> Parser:
    """Return the parser of all options."""
    parser = command_parser(
        "export RUN [--encoder DIR] [--memory DIR] [--hub DIR] [OPTIONS]", DESCRIPTION, EXAMPLES
    )
    add = parser.add_argument
    add("run", type=Path, help="folder of a run (its newest whole checkpoint) or of a checkpoint")
    add(
        "--encoder",
        type=str | None,
        default=None,
        help="folder for the encoder, or its address in a bucket; an existing export is replaced",
    )
    add(
        "--memory",
        type=str | None,
        default=None,
        help="folder for the memory, or its address in a bucket; an existing export is replaced",
    )
    add(
        "--hub",
        type=str | None,
        default=None,
        help="folder for the encoder in the form of Hugging Face's transformers, or its address in "
        "a bucket; an existing export is replaced",
    )
    add(
        "--of",
        type=Literal["features", "embeddings"],
        default="features",
        help=(
            "output of the encoder: features of the backbone, or embeddings of the "
            "projector, which the memory holds"
        ),
    )
    add(
        "--onnx",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="also write the encoder as ONNX, and compare it with torch",
    )
    add("--trust-code", action="store_true", help=TRUST_CODE)
    return parser


def export(settings: Namespace) -> None:
    """Write the requested files, and print their folders."""
    with configuring():
        check_settings(settings)
    # After the check: these imports take seconds.
    from stream_ssl.trained.encoder import ENCODER, read_newest
    from stream_ssl.trained.export import MEMORY, check_onnx, check_target
    from stream_ssl.trained.hub import CONFIG

    markers = {"encoder": ENCODER, "memory": MEMORY, "hub": CONFIG}
    with configuring(), ExitStack() as stack:
        targets = {
            name: stack.enter_context(target(f"--{name}", settings[name], marker))
            for name, marker in markers.items()
            if settings[name] is not None
        }
        if settings.encoder is not None and settings.onnx:
            check_onnx()
        for name, one in targets.items():
            check_target(one.option, one.folder, markers[name])
        read_newest(settings.run, lambda checkpoint: write(settings, checkpoint, targets))


def write(settings: Namespace, checkpoint: Path, targets: Mapping[str, Target]) -> None:
    """Write the encoder and the memory of one checkpoint into their targets."""
    print(f"checkpoint: {checkpoint}")
    writers = {"encoder": _write_encoder, "hub": _write_hub, "memory": _write_memory}
    for name, write_one in writers.items():
        if name in targets:
            write_one(settings, checkpoint, targets[name])


def _write_encoder(settings: Namespace, checkpoint: Path, to: Target) -> None:
    from stream_ssl.trained.export import ONNX_TOLERANCE, export_encoder

    with _written(to, "writing the encoder"):
        difference = export_encoder(
            checkpoint, to.folder, settings.of, settings.onnx, settings.trust_code
        )
    print(f"encoder: {settings.encoder}")
    if difference is not None:
        print(
            f"ONNX differs from torch by at most {difference:.1e} of the largest value "
            f"({ONNX_TOLERANCE:.0e} is allowed)"
        )


def _write_hub(settings: Namespace, checkpoint: Path, to: Target) -> None:
    from stream_ssl.trained.hub import export_hub

    with _written(to, "writing the encoder for transformers"):
        knn = export_hub(checkpoint, to.folder, settings.trust_code)
    accuracy = "not measured"
    if knn.accuracy is not None:
        accuracy = f"{knn.accuracy:.1%}; guessing the most frequent class: {knn.majority:.1%}"
    print(f"hub: {settings.hub}, accuracy of the memory's labels: {accuracy}")


def _write_memory(settings: Namespace, checkpoint: Path, to: Target) -> None:
    from stream_ssl.trained.export import export_memory

    with _written(to, "writing the memory") as tell:
        found = export_memory(checkpoint, to.folder, tell, settings.trust_code)
    counts = f"{plural(found.samples, 'sample')} in {plural(found.shards, 'shard')}"
    print(f"memory: {settings.memory}, {counts}")
    if found.originals:
        print(f"originals: {plural(found.originals, 'file')} as they were sent")
    if not found.samples:
        print(
            "warning: the memory of this checkpoint is empty, because the run had not trained "
            "on a batch yet. Export again after the run's next checkpoint",
            file=sys.stderr,
        )
    if not found.indexed:
        print(
            "no index.faiss was written, because faiss is not installed: pip install "
            "'stream-ssl[cpu]'"
        )


@contextmanager
def _written(one: Target, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of the block, which writes a target. Then copy it to its address.

    The block gets a function that takes its progress: (parts done, total parts).
    """
    from stream_ssl.process.progress import ShownProgress

    with writing(one.option, one.folder), ShownProgress() as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
    one.publish()


def check_settings(settings: Namespace) -> None:
    """Raise ValueError unless there are targets, and each is a place apart from the others."""
    options = {}
    for name in ("encoder", "memory", "hub"):
        if settings[name] == "":  # an unset variable of a shell; it would be the working directory
            raise ValueError(f"--{name} is empty: give a folder or an address, or leave it out")
        if settings[name] is not None:
            options[f"--{name} {settings[name]}"] = resolved(settings[name])
    if not options:
        raise ValueError(
            "nothing to export: give --encoder DIR, --memory DIR, --hub DIR, or several"
        )
    for (first, outer), (second, inner) in permutations(options.items(), 2):
        if outer == inner or outer in inner.parents:
            where = "is the same place as" if outer == inner else "lies in"
            raise ValueError(
                f"{second} {where} {first}, which is replaced as a whole: give two separate folders"
            )
