"""stream-ssl search: find the samples of a run's memory that look like a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from stream_ssl.config.parser import Parser, command_parser
from stream_ssl.process.failures import (
    TRUST_CODE,
    Failure,
    check_out_file,
    configuring,
    reported,
    writing,
)
from stream_ssl.process.threads import share_cores
from stream_ssl.rate_limited_logger import printable

if TYPE_CHECKING:
    from stream_ssl.trained.search import Hit

DESCRIPTION = """Prints the samples in a run's memory that are most similar to a picture, with their
origins. It only reads the newest checkpoint, so the daemon may be running."""

EXAMPLES = """examples:
  stream-ssl search runs/laptop photo.jpg
  stream-ssl search runs/laptop photo.jpg --k 50 --out similar.html"""

PICTURES = (".png", ".html")
"""Suffixes of the files that `--out` can name."""

HEADINGS = ("similarity", "slot", "producer", "source", "id", "label", "time (UTC)")


def main(arguments: Sequence[str]) -> int:
    """Search, and return the exit status."""
    share_cores()
    settings = search_parser().parse_args(list(arguments))
    return reported(lambda: run(settings))


def search_parser() -> Parser:
    """Return the parser of all options."""
    parser = command_parser("search RUN IMAGE [OPTIONS]", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("run", type=Path, help="folder of a run (its newest whole checkpoint) or of a checkpoint")
    add("image", type=Path, help="the picture: a JPEG, PNG or WebP file")
    add("--k", type=int, default=10, help="number of samples to print")
    add(
        "--by",
        type=Literal["embeddings", "descriptors"],
        default="embeddings",
        help="compare the memory's embeddings, or the descriptors on which it counts duplicates",
    )
    add(
        "--out",
        type=Path | None,
        default=None,
        help="also write the pictures to this file, FILE.png or FILE.html; an existing file is "
        "replaced",
    )
    add("--trust-code", action="store_true", help=TRUST_CODE)
    return parser


def run(settings: Namespace) -> None:
    """Print the table of the results, and write the pictures."""
    out: Path | None = settings.out
    with configuring():
        if settings.k < 1:
            raise ValueError(f"--k {settings.k}: must be at least 1")
        if out is not None:
            if out.suffix.lower() not in PICTURES:
                raise ValueError(f"--out {out}: name a file that ends in {' or '.join(PICTURES)}")
            check_out_file(out, "similar.html")
        if settings.image.is_dir() and settings.run.is_file():
            raise ValueError(
                f"{settings.run} is a file and {settings.image} is a folder: the run comes first: "
                f"stream-ssl search {settings.image} {settings.run}"
            )
        _check_picture(settings.image)
    # After the checks: these imports take seconds.
    from stream_ssl import durable
    from stream_ssl.trained.encoder import read_newest
    from stream_ssl.trained.search import search
    from stream_ssl.trained.search_sheet import page, sheet

    with configuring():
        result = read_newest(
            settings.run,
            lambda checkpoint: search(
                checkpoint, settings.image, settings.k, settings.by, settings.trust_code
            ),
        )
    print(f"checkpoint: {result.checkpoint}")
    for line in table(result.hits):
        print(line)
    if out is not None:
        with writing("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            durable.write(out, sheet(result) if out.suffix.lower() == ".png" else page(result))
        print(f"pictures: {out}")


def _check_picture(file: Path) -> None:
    """Raise an error if the file cannot be read, or is no JPEG, PNG or WebP."""
    from stream_ssl.producers._images import as_sample

    try:
        as_sample(file, id="picture")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror or error}") from error


def table(hits: Sequence[Hit]) -> list[str]:
    """Return the lines of a table with a line for each hit."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for hit in hits:
        producer, source, name = hit.origin[:3] if hit.origin else ("-", "-", "-")
        texts = (printable(text) for text in (producer, source, name))
        label = "-" if hit.label is None else str(hit.label)
        rows.append((f"{hit.similarity:.4f}", str(hit.slot), *texts, label, hit.time or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
