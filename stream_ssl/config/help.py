"""The help of the daemon's commands, and the learner's help without torch."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from importlib.resources import files
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter

WIDTH = 100
LONGEST_DEFAULT = 60
"""Longest default value, in characters, in the help. `--print_config` prints longer ones."""

LEARNER_HELP = files("stream_ssl.config") / "learner_help.txt"
"""The stored text of `stream-ssl learner --help`. `make docs` writes it, which imports torch."""


class HelpFormatter(DefaultHelpFormatter):
    """A formatter that writes `--option TYPE, default: VALUE` above each description."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=6, width=WIDTH)  # type: ignore[no-untyped-call]

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help or ""

    def _format_action(self, action: argparse.Action) -> str:
        # jsonargparse can read a section from a file of its own; CONFIG has all sections.
        if action.help == "Path to a configuration file." or action.dest.endswith(".help"):
            return ""
        return super()._format_action(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.dest in ("help", "print_config", "config"):
            return argparse.HelpFormatter._format_action_invocation(self, action)
        shown = f"{action.option_strings[0]} {self._type_of(action)}"
        if action.required:
            return f"{shown}, required"
        default = str(self._expand("%(default)s", action))
        if len(default) > LONGEST_DEFAULT:
            default = "see --print_config"
        return f"{shown}, default: {default}"

    def _type_of(self, action: argparse.Action) -> str:
        text = self._get_type_str(action) or ""
        text = re.sub(r"\b[a-z_]+(\.[a-z_]+)*\.(?=[A-Z])", "", text)  # package names of classes
        text = re.sub(r"<class '(.+)'>", r"\1", text)
        # A function takes a section of the other role without checking it.
        text = re.sub(r"<function .+>", "section", text)
        text = re.sub(r"Optional\[(.+)\]", r"\1 | null", text)
        literal = re.fullmatch(r"Literal\[(.+)\]", text)
        return literal[1].replace("'", "").replace(", ", " | ") if literal else text

    def _expand(self, text: str, action: argparse.Action) -> str:
        kept, action.help = action.help, text
        try:
            return self._expand_help(action)
        finally:
            action.help = kept


def summary(cls: Any) -> str:
    """Return the first line of a class's docstring, or the name of the class if it has none."""
    return (inspect.getdoc(cls) or str(cls.__name__)).partition("\n")[0]


def print_learner_help() -> NoReturn:
    """Print the stored help of the learner's options, and exit."""
    print(LEARNER_HELP.read_text(), end="")
    sys.exit(0)


if __name__ == "__main__":  # for `make docs`
    from stream_ssl.config.options import learner_parser

    print(learner_parser().format_help(), end="")
