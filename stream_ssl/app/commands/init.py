"""stream-ssl init: print a configuration to start from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import stream_ssl
from stream_ssl.app.choices import ChoiceParser

PACKAGE = Path(stream_ssl.__file__).parent
FOLDERS = (PACKAGE / "app" / "configs", PACKAGE.parent / "deploy" / "configs")
"""The folder of the configurations in an installed package, and in a checkout."""

DESCRIPTION = (
    "Print a configuration to start from, with its comments: stream-ssl init laptop > run.yaml. "
    "A preset goes to a file of its own, which follows the first: stream-ssl run run.yaml "
    "--config simclr.yaml"
)


def main(arguments: Sequence[str]) -> int:
    """Print the named configuration, or the list of all, and return the exit status."""
    found = configs()
    name = init_parser().parse_args(list(arguments)).name
    if name is not None:
        print(found[name].read_text(encoding="utf-8"), end="")
        return 0
    width = max(map(len, found))
    for each, file in found.items():
        print(f"{each:<{width}}  {summary(file.read_text(encoding='utf-8'))}")
    return 0


def init_parser() -> ChoiceParser:
    """Return the parser of the command."""
    parser = ChoiceParser(prog="stream-ssl init", description=DESCRIPTION)
    parser.add_argument(
        "name",
        nargs="?",
        choices=[*configs()],
        metavar="NAME",
        help=f"one of {', '.join(configs())}; without a name: list them with a description",
    )
    return parser


def configs() -> dict[str, Path]:
    """Return the file of each configuration by its name, such as `presets/simclr`."""
    folder = next(folder for folder in FOLDERS if folder.is_dir())
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def summary(text: str) -> str:
    """Return the first sentence of the comment at the top of a configuration."""
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    text = " ".join(line[2:] for line in comment)
    return textwrap.shorten(
        re.split(r"(?<!et al)\. ", text)[0].rstrip(":."), 90, placeholder=" ..."
    )
