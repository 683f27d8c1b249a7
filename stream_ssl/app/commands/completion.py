"""stream-ssl completion: print a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import shtab
from jsonargparse import capture_parser

from stream_ssl.config.schema import table_of

DESCRIPTION = (
    "Print a script with which a shell completes commands, options and their values. A command "
    "whose extra is not installed is completed by its name alone."
)
EPILOG = """\
bash: stream-ssl completion bash > ~/.local/share/bash-completion/completions/stream-ssl
zsh:  stream-ssl completion zsh > ~/.zfunc/_stream-ssl, a folder of your fpath
"""

SECTION_HELP = "Path to a configuration file."
"""The help of an option that reads a section from a file. Our help does not show these options."""


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell, and return the exit status."""
    shell = completion_parser().parse_args(list(arguments)).shell
    print(shtab.complete(command_line(), shell))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="stream-ssl completion",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that reads the script")
    return parser


def command_line() -> argparse.ArgumentParser:
    """Return one parser of all commands, as a shell has to know them."""
    from stream_ssl.app.cli import COMMANDS
    from stream_ssl.app.commands.curate import is_curated
    from stream_ssl.config.help import summary
    from stream_ssl.producers.sources import SOURCES

    top = argparse.ArgumentParser(prog="stream-ssl")
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers()
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name in ("produce", "curate"):
            sources = command.add_subparsers()
            for source, cls in SOURCES.items():
                if name == "curate" and not is_curated(cls):
                    continue
                copy_options([name, source], sources.add_parser(source, help=summary(cls)))
        else:
            copy_options([name], command)
    return top


def copy_options(words: Sequence[str], target: argparse.ArgumentParser) -> None:
    """Add to `target` the options of the command that `words` name."""
    with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
        for action in options(words):
            nested = action.help == SECTION_HELP or action.dest.endswith(".help")
            if nested or action.dest == "help" or action.help == argparse.SUPPRESS:
                continue
            hint = getattr(action, "_typehint", action.type)
            more: dict[str, Any] = {
                "help": " ".join((action.help or "").replace("%", "%%").split())
            }
            if action.nargs == 0:
                more["action"] = "store_true"
            elif values := [*(action.choices or ()), *values_of(hint)]:
                more |= {"choices": values, "nargs": action.nargs}
            added = target.add_argument(*(action.option_strings or [action.dest]), **more)
            if action.dest == "config" or hint in (Path, Path | None):
                added.complete = shtab.FILE  # type: ignore[attr-defined]


def options(words: Sequence[str]) -> Iterator[argparse.Action]:
    """Yield the options of a command. Without its extra, raise ModuleNotFoundError."""
    from stream_ssl.config import options

    name = words[0]
    module = importlib.import_module(f"stream_ssl.app.commands.{name}")
    if name in ("run", "receiver", "learner", "check"):
        parser: argparse.ArgumentParser = (
            options.receiver_parser() if name == "receiver" else options.run_parser()
        )
        yield argparse.Action([], "CONFIG", type=Path, help="config file")
    elif name == "produce":
        parser = module.source_parser(words[1])
    elif name == "curate":
        parser = module.curate_parser(words[1])
    elif own := getattr(module, f"{name}_parser", None):
        parser = own()
    else:
        parser = capture_parser(lambda: module.main([]))
    yield from parser._actions
    for count in ("ranks", "receivers") if name in ("run", "check") else ():
        yield argparse.Action([f"--{count}"], count, help=f"number of {count}")


def values_of(hint: Any) -> list[str]:
    """Return the words that an option of a type takes; other values may be right, too."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, types.UnionType):
        return [word for part in get_args(hint) for word in values_of(part)]
    return [*table_of(hint)] if isinstance(hint, type) else []
