"""stream-ssl curate: choose a small, diverse set of pictures from any source, without a learner."""

from __future__ import annotations

import argparse
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from stream_ssl.app.config import check_files
from stream_ssl.app.failures import Failure, check_writable, configuring, reported
from stream_ssl.app.parser import Parser
from stream_ssl.app.signals import stop_on_signals
from stream_ssl.app.threads import share_cores
from stream_ssl.producers.sources import SOURCES, Source
from stream_ssl.producers.sources.base import SourceError, stop_source

log = logging.getLogger("stream_ssl.curate")

DESCRIPTION = """Reads a source once and keeps N different pictures. It drops near-duplicates, and
thins out pictures that resemble each other. It needs no training and no receiver. A pass that was
stopped continues with the same command."""

EXAMPLES = """examples:
  stream-ssl curate images --source.root photos --keep 2000 --out curated
  stream-ssl curate crawl --source.urls urls.txt --keep 5000 --out curated --features pretrained

stream-ssl curate SOURCE --help describes a source's own options. docs/curate.md describes the
files."""

STATE = ".state"
MARKER = "curated.parquet"


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
    known = [name for name, cls in SOURCES.items() if not hasattr(cls, "acknowledged")]
    names.add_argument("source", choices=known, metavar="SOURCE", help=", ".join(known))
    chosen = names.parse_args(list(arguments[:1]))
    parser = curate_parser(chosen.source)
    check_files(parser, arguments[1:])
    settings = parser.parse_args(list(arguments[1:]))
    whole: list[bool] = []
    status = reported(lambda: whole.append(curate(settings, SOURCES[chosen.source])))
    return 130 if whole == [False] else status


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
    parser.add_class_arguments(SOURCES[name], "source", instantiate=False)
    return parser


def curate(settings: Namespace, cls: Callable[..., Source]) -> bool:
    """Read the source and write the result. Return False if it was stopped before the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from stream_ssl.curation import Curator, write_results
    from stream_ssl.durable import make_folder

    out: Path = settings.out
    with configuring():
        check_writable(out, "--out", "choose a new or an empty folder")
        others = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
        if MARKER in others:
            raise ValueError(f"--out {out} holds a finished set ({MARKER}); choose a new folder")
        if set(others) - {STATE}:
            raise ValueError(f"--out {out} holds {others[0]}; choose a new or an empty folder")
        source = cls(**settings.source)
        make_folder(out)
        options = {name: settings[name] for name in ("keep", "features", "size", "seed", "fit")}
        curator = Curator(out / STATE, **options)
    if curator.progress.read:
        log.info("continuing after %d samples", curator.progress.read)
    stop = stop_on_signals()
    threading.Thread(target=_stop_source, args=(source, stop), daemon=True).start()
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task("reading", total=None)
        try:
            for counts in curator.run(source, stop.is_set):
                shown.update(
                    bar,
                    description=f"{counts.read:,} read, {counts.dropped:,} near-duplicates, "
                    f"{sum(counts.bad.values()):,} bad, {counts.kept:,} kept",
                )
        except SourceError as error:
            raise Failure(str(error)) from error
        if stop.is_set():
            log.warning(
                "stopped; the same command continues after %d samples", curator.progress.read
            )
            return False
        kept = curator.progress.kept
        bar = shown.add_task("writing", total=kept)
        scratch = out / STATE / "result"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        write_results(curator, scratch, lambda done: shown.update(bar, completed=done))
    # The marker comes last: a folder with it is complete.
    for path in sorted(scratch.iterdir(), key=lambda path: path.name == MARKER):
        path.replace(out / path.name)
    shutil.rmtree(out / STATE)
    counts = curator.progress
    log.info(
        "%s: kept %d of %d pictures; %d near-duplicates dropped, %d could not be decoded",
        out, counts.kept, counts.read, counts.dropped, sum(counts.bad.values()),
    )  # fmt: skip
    return True


def _stop_source(source: Source, stop: threading.Event) -> None:
    """Stop the source when `stop` is set: a source that waits for files does not see `stop`."""
    stop.wait()
    stop_source(source)
