"""stream-ssl curate: choose a small, diverse set of pictures from any source, without a learner."""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from stream_ssl.config.file_faults import check_files
from stream_ssl.config.parser import Parser
from stream_ssl.process.failures import (
    DONE,
    INTERRUPTED,
    Failure,
    check_writable,
    configuring,
    reported,
    writing,
)
from stream_ssl.process.only_writer import only_writer
from stream_ssl.process.signals import stop_source_on_signals
from stream_ssl.process.threads import cores, share_cores
from stream_ssl.producers.sources import SOURCES, NpyVectors, Source
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.outside import (
    build_source,
    find_source,
    listed,
    must_be_one_of,
)

if TYPE_CHECKING:
    from stream_ssl.curation import Curator

log = logging.getLogger("stream_ssl.curate")

DESCRIPTION = """Reads a source once and keeps N different pictures. It drops near-duplicates, and
thins out pictures that resemble each other. It needs no training and no receiver. A pass that was
stopped continues with the same command, or ends with --finish."""

EXAMPLES = """examples:
  stream-ssl curate images --source.root photos --keep 2000 --out curated
  stream-ssl curate crawl --source.urls urls.txt --keep 5000 --out curated --features pretrained

stream-ssl curate SOURCE --help describes a source's own options. docs/curate.md describes the
files."""

STATE = ".state"
MARKER = "curated.parquet"
RESULTS = re.compile(r"curated-\d{6}\.tar|(bad|dropped)\.parquet|index\.faiss|report\.html")
"""The files that an interrupted command may leave beside its state."""


class Stopped(Exception):
    """A signal arrived before the result was complete."""


def main(arguments: Sequence[str]) -> int:
    """Curate a source, and return the exit status: 130 if it was stopped before the end."""
    share_cores()
    names = argparse.ArgumentParser(
        prog="stream-ssl curate",
        usage="stream-ssl curate SOURCE --keep N --out FOLDER [OPTIONS]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [name for name, cls in SOURCES.items() if is_curated(cls)]
    known += listed()  # a source from outside is judged once it is chosen
    own = "or the path of your own class, such as my_package.sources.Mine"
    names.add_argument("source", metavar="SOURCE", help=", ".join([*known, own]))
    chosen = names.parse_args(list(arguments[:1]))
    try:
        cls = find_source(chosen.source, known)
    except ValueError as error:
        names.error(str(error))
    if not is_curated(cls):
        is_vectors = cls is NpyVectors
        broker = "is a broker, which waits for acknowledgements"
        kind = "reads vectors, not pictures" if is_vectors else broker
        must = must_be_one_of(known)
        names.error(f"source {chosen.source!r} {kind}, and cannot be curated: {must}")
    parser = curate_parser(chosen.source)
    check_files(parser, arguments[1:])
    settings = parser.parse_args(list(arguments[1:]))
    return reported(lambda: DONE if curate(settings, cls) else INTERRUPTED)


def is_curated(cls: type[Source]) -> bool:
    """Return whether a source is neither a broker nor one of vectors."""
    return not hasattr(cls, "acknowledged") and cls is not NpyVectors


def curate_parser(name: str) -> Parser:
    """Return the parser of all options with one source."""
    parser = Parser(
        prog=f"stream-ssl curate {name}",
        usage=f"stream-ssl curate {name} --keep N --out FOLDER [OPTIONS]",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--keep", type=int, required=True, help="number of pictures to keep")
    add("--out", type=Path, required=True, help="folder of the result; new or empty")
    add(
        "--features",
        type=Literal["thumbnail", "pretrained"],
        default="thumbnail",
        help="how pictures that resemble each other are found: by thumbnails, or by a pretrained "
        "network, which knows objects and takes about 20 ms a picture (the extra `pretrained`)",
    )
    add("--size", type=int, default=64, help="side to which pictures are decoded to compare them")
    add(
        "--fit",
        type=Literal["crop", "letterbox"],
        default="crop",
        help="compare the middle of a picture, or the whole picture with grey bars beside it",
    )
    add("--seed", type=int, default=0, help="seed of the random choices")
    add(
        "--finish",
        action="store_true",
        help="write the result of the samples that a stopped pass has read, and read no more; for "
        "a source without an end, such as a camera",
    )
    parser.add_class_arguments(find_source(name), "source", instantiate=False)
    return parser


def curate(settings: Namespace, cls: Callable[..., Source]) -> bool:
    """Read the source and write the result. Return False if it was stopped before the end."""
    from stream_ssl.curation import Curator
    from stream_ssl.durable import make_folder

    out: Path = settings.out
    if ".." in out.parts:  # a missing folder before it would be made, and left empty
        out = out.resolve()
    with configuring():
        _check_out(out)  # before the source lists its files
        source = build_source(cls, settings.get("source") or {})
        make_folder(out)
    with (
        only_writer(out, f"--out {out}: another `curate` writes there; choose another folder"),
        writing("--out", out, "and then the same command continues"),
    ):
        with configuring(f"lower --keep, because {settings.keep:,} pictures do not fit"):
            _check_out(out)  # another process may have finished by now
            options = {name: settings[name] for name in ("keep", "features", "size", "seed", "fit")}
            curator = Curator(out / STATE, threads=cores(), **options)
        if settings.finish and not curator.progress.read:
            raise Failure(
                f"--finish: no pass has read a sample for {out}; run the command without it first"
            )
        return _work(curator, source, out, settings.finish)


def _check_out(out: Path) -> None:
    """Raise ValueError if a folder holds anything but an unfinished pass."""
    check_writable(out, "--out", "choose a new or an empty folder")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if MARKER in names:
        raise ValueError(f"--out {out} holds a finished set ({MARKER}); choose a new folder")
    ours = {STATE, *filter(RESULTS.fullmatch, names)} if STATE in names else set()
    if others := sorted(names - ours):
        raise ValueError(f"--out {out} holds {others[0]}; choose a new or an empty folder")


def _work(curator: Curator, source: Source, out: Path, finish: bool = False) -> bool:
    """Read the source, unless `finish` is True, and write the result.

    Returns:
        False if a signal stopped the work.
    """
    if curator.progress.read and not finish:
        log.info("continuing after %d samples", curator.progress.read)
    scratch = out / STATE / "result"
    try:
        _write_result(curator, source, scratch, finish)
    except SourceError as error:
        raise Failure(str(error)) from error
    except Stopped:
        log.warning(
            "stopped; the same command continues after %d samples, and with --finish it writes "
            "their result",
            curator.progress.read,
        )
        return False
    _publish(scratch, out)
    counts = curator.progress
    log.info(
        "%s: kept %d of %d pictures; %d near-duplicates dropped, %d could not be decoded%s",
        out, counts.kept, counts.read, counts.dropped, sum(counts.bad.values()),
        " (bad.parquet names them)" if counts.bad else "",
    )  # fmt: skip
    if counts.bad and not counts.kept:
        raise Failure(f"{out}: no sample could be decoded; bad.parquet names the reasons")
    return True


def _write_result(curator: Curator, source: Source, scratch: Path, finish: bool) -> None:
    """Read the source, unless `finish` is True, and write the result to `scratch`.

    A progress bar shows how far the work is.

    Raises:
        SourceError: the source cannot be read.
        Stopped: a signal arrived.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from stream_ssl.curation import write_results
    from stream_ssl.evaluation.labelled import class_names
    from stream_ssl.process.progress import ShownProgress

    stop = stop_source_on_signals(source)
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(bar_width=20), TimeElapsedColumn())
    with ShownProgress(*columns) as shown:
        bar = shown.add_task("reading", total=None)
        for counts in () if finish else curator.run(source, stop.is_set):
            shown.update(
                bar,
                description=f"{counts.read:,} read, {counts.dropped:,} near-duplicates, "
                f"{sum(counts.bad.values()):,} bad, {counts.kept:,} kept",
            )
        bar = shown.add_task("writing", total=curator.progress.kept)

        def wrote(pictures: int) -> None:
            shown.update(bar, completed=pictures)
            if stop.is_set():
                raise Stopped

        wrote(0)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        write_results(curator, scratch, wrote, class_names(source) or ())


def _publish(scratch: Path, out: Path) -> None:
    """Move the result to its folder, and delete the state once the result is on the disk."""
    from stream_ssl.durable import sync

    paths = sorted(scratch.iterdir(), key=lambda path: path.name == MARKER)
    for path in paths:
        sync(path)
    for path in paths:
        if path.name == MARKER:  # it comes last: a folder with it is complete
            sync(out)
        path.replace(out / path.name)
    sync(out)
    shutil.rmtree(out / STATE)
