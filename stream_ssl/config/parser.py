"""A parser of options that explains its errors, for every command."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import pydoc
import re
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace, _signatures, auto_cli
from jsonargparse.typing import register_type

from stream_ssl.bounded_files import read_bytes
from stream_ssl.config.removed import why_refused
from stream_ssl.process.failures import readable

ABOVE_0 = {
    "optimiser.learning_rate",
    "optimiser.clip",
    "pace.updates_per_sample",
    "checkpoints.every_seconds",
    "ranks.timeout",
    "loss.init_args.temperature",
    "temperature",
}
"""Options whose numbers must be above 0, for the error about a number that is not finite."""

REFUSED = re.compile(r"given class_path '([\w.]+)':\s+Option '(\w+)' is not accepted")
"""jsonargparse's error about an option that a chosen class does not have."""

NOT_FINITE = re.compile(
    r"<class 'float'>.*(?:Got|Given) value: (?:[^\n]*[\[( ,'])?([-+]?(?:nan|inf(?:inity)?))\b",
    re.IGNORECASE | re.DOTALL,
)

KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "str": "must be text",
    "list": "must be a list",
    "tuple": "must be a list",
    "collections.abc.Sequence": "must be a list",
}
TYPED = re.compile(
    rf"(?:- )?Expected a (?:<class ')?({'|'.join(KINDS)})(?:'>| with \d+ elements)"
    r"(?:\. Got|\n +Given) value: (.*)"
)
"""jsonargparse's error about a value of another type, and what users read instead."""

KEY = re.compile(r'Parser key "([^"]+)":')
"""The option that an error of jsonargparse is about; an option within an option follows it."""

IN_GROUP = re.compile(r"Group '(.+)' does not accept option '(.+)'")
"""jsonargparse's error about an option that a section does not have."""

NO_SECTION = re.compile(r"Unable to load config (.+)")
"""jsonargparse's error about a value in place of a section."""

ALL_EMPTY = re.compile(r"Unexpected config: ([\w.]+):")
"""jsonargparse's error about a file with nothing but names of options."""

BOOLEANS = ("true", "false", "yes", "no", "on", "off")
"""The values of a switch, in any case."""

NO_PATH = "the path is empty"
FOR_SHELLS = re.compile(r"(~|\$\w+|\$\{\w+\})(/|$)")
"""The beginning of a path that a shell replaces, such as ~/ or $HOME/."""
NAME_BYTES = 255
"""The most bytes that the name of a file or folder may have."""

LONG_NAME = re.compile(r"a name of \d+ bytes: .*")
"""The error about a path with a name that is too long."""


def _path(text: object) -> Path:
    """Return the path. The path "" is refused, because it would be the working directory.

    Names that no file system takes are refused here, because each use would raise an error. ~ and
    variables are refused, because folders of these names would be made here.
    """
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"{text!r}: must be text without null bytes; put a number in quotes")
    if text == "":
        raise ValueError(NO_PATH)
    if text.endswith(("\r", "\n")):
        raise ValueError(f"{text!r}: must not end with a line break; remove it")
    if FOR_SHELLS.match(text):
        raise ValueError(
            f"{text!r}: must not begin with ~ or a variable, which only shells replace; write the "
            "whole path"
        )
    if (longest := max(len(os.fsencode(name)) for name in text.split("/"))) > NAME_BYTES:
        raise ValueError(f"a name of {longest} bytes: at most {NAME_BYTES} are allowed")
    return Path(text)


# For every option with a path: an unset variable of a shell gives "", as in --run "$RUN".
register_type(Path, str, _path, type_check=isinstance)


class Parser(ArgumentParser):
    """A parser that explains its errors, and refuses empty values and numbers that are not finite.

    Errors about an option in a config file name the file and the line.

    Attributes:
        carried: beginnings of options that another process checks; any of them may be a switch.
    """

    carried: tuple[str, ...] = ()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *arguments: Any, **options: Any
    ) -> Namespace:
        """Parse as jsonargparse does, and exit with an error on a value that it should refuse.

        A switch needs no value: `--json` means `--json true`.
        """
        for word in args or ():
            if not word.isascii() and word != word.encode(errors="ignore").decode():
                self.error(f"{word!r}: is not UTF-8; rename the file or folder, or link to it")
        given = None if args is None else self._with_values(args)
        given, carried = (None, {}) if given is None else self._without_carried(given)
        found: Namespace = super().parse_args(given, *arguments, **options)
        for section, values in carried.items():  # jsonargparse would replace the file's section
            of_file = found[section] if isinstance(found[section], Mapping) else {}
            found[section] = {**of_file, **values}
        for name, value in found.items():
            for option, number in _not_finite(name, value):
                self.error(self._place(option) + finite(option, number))
        options_of = [one.dest for one in self._actions if not one.dest.endswith(".help")]
        for section in sorted({name.rpartition(".")[0] for name in options_of} - {""}):
            if not isinstance(value := found.get(section, found), Namespace):
                said = "empty" if value is None else repr(value)
                self.error(self._place(section) + _wrong_section(section, said))
        for action in self._actions:
            takes_null = NoneType in get_args(getattr(action, "_typehint", None))
            if takes_null or action.default is None:
                continue
            if found.get(action.dest, action) is None:  # jsonargparse lets every option be null
                self.error(self._place(action.dest) + self._empty(action.dest))
        return found

    def _with_values(self, given: Sequence[str]) -> list[str]:
        """Return a command line, with "true" as the value of each switch that has none."""
        of_bool = (one for one in self._actions if getattr(one, "_typehint", None) is bool)
        switches = {name for one in of_bool for name in one.option_strings}
        found = []
        for word, after in zip_longest(given, given[1:], fillvalue="--"):
            ends = after.startswith("--")
            is_path = "/" in after or os.access(after, os.F_OK)  # such as the folder of the run
            is_bare = word in switches and (ends or is_path) and after.lower() not in BOOLEANS
            carried = word.startswith(self.carried) and "=" not in word and ends
            found.append(f"{word}=true" if is_bare or carried else word)
        return found

    def _without_carried(self, given: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
        """Return a command line without the carried options, and their values by section."""
        left: list[str] = []
        found: dict[str, dict[str, str]] = {}
        words = iter(given)
        for word in words:
            if word.startswith(self.carried):
                name, is_joined, value = word.partition("=")
                section, _, option = name.removeprefix("--").partition(".")
                found.setdefault(section, {})[option] = value if is_joined else next(words)
            else:
                left.append(word)
        return left, found

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        written = {one.dest: (*one.option_strings, one.dest.upper())[0] for one in self._actions}
        message = readable(message)
        keys = KEY.findall(message)
        place, option = "", ".".join(keys)
        if empty := ALL_EMPTY.match(message):
            beginning = f"{empty[1]}."
            is_section = f"--{beginning}" in self.carried or any(
                name.startswith(beginning) for name in written
            )
            said = _wrong_section(empty[1], "empty") if is_section else self._empty(empty[1])
            message = self._place(empty[1]) + said
        elif unknown := IN_GROUP.search(message):
            place = self._place(f"{unknown[1]}.{unknown[2]}")
        elif option and NO_PATH in message:
            message = self._place(option) + self._empty(option)
        elif option and (long := LONG_NAME.search(message)):
            message = f"{self._place(option)}{option} has {long[0]}"
        elif keys and (value := NO_SECTION.search(message)):
            message = self._no_section(keys[0], value[1], written)
        elif option:
            place = self._place(option)
        needed = {
            one.dest
            for one in self._actions
            if one.default is None and NoneType not in get_args(getattr(one, "_typehint", None))
        }
        said = hinted(message, written, getattr(self, "args", ()), needed)
        said += self._dotted(message) if said == message else ""
        super().error(
            place + TYPED.sub(lambda found: self._typed(option, *found.groups()), said), ex
        )

    def _dotted(self, message: str) -> str:
        """Return the remedy for an option without its dashes or its dot, as the end of the error.

        Programs that write texts replace two dashes by a long one.
        """
        sections = {one.dest.partition(".")[0] for one in self._actions if "." in one.dest}
        sections |= {one.strip("-.") for one in self.carried}
        words = r"unrecognized arguments: (\W*)([A-Za-z]+)([-_.])([\w.-]+)"
        if not (found := re.match(words, message)) or (found[1], found[3]) == ("--", "."):
            return ""
        section, option = found[2].lower(), found[4].lower().replace("-", "_")
        return f"; did you mean --{section}.{option}?" if section in sections else ""

    def _typed(self, option: str, kind: str, value: str) -> str:
        """Return the error about a value of another type, with the meaning of its option."""
        found = next((one for one in self._actions if one.dest == option), None)
        meaning = ((found and found.help) or "").partition(". ")[0].partition("; ")[0].rstrip(".")
        rule = KINDS[kind]
        if re.fullmatch(r"[\d.]+ *[a-zA-Z]+", value) and kind in ("int", "float"):
            rule += f"{' of bytes' * ('bytes' in meaning)}, without a unit"
        if kind == "str" and found and isinstance(found.default, str):
            rule += f", such as {found.default}"
        if kind == "tuple" and found and found.default:
            rule += f", such as {list(found.default)}"
        return f"'{value}': {rule}" + f" ({meaning})" * bool(meaning)

    def _empty(self, option: str) -> str:
        """Return the error about an option without a value."""
        positional = any(one.dest == option and not one.option_strings for one in self._actions)
        value = "a value" if positional else "a value, or leave it out"
        return f"{option} is empty: give {'the folder of the run' if option == 'run' else value}"

    def _no_section(self, section: str, value: str, written: Mapping[str, str]) -> str:
        """Return the error about a value in place of the options of a section."""
        first = next(name for name in written if name.startswith(f"{section}."))
        if place := self._place(section):
            name = first.rpartition(".")[2]
            remedy = f"write its options below it as NAME: VALUE, such as {name}: ..."
            return f"{place}section {section} is {value}: {remedy}"
        value = value.strip("'")
        return f"--{section} {value}: {section} has options; did you mean {written[first]} {value}?"

    def _place(self, option: str) -> str:
        """Return the config file and the line of an option, for the beginning of an error.

        The result is "" if the option comes from the command line, the environment or no file.
        """
        arguments: Sequence[str] = getattr(self, "args", ())
        names = [one[2:].partition("=")[0] for one in arguments if one.startswith("--")]
        variables = {
            f"STREAM_SSL_{one.dest.replace('.', '__').upper()}": one.dest for one in self._actions
        }
        names += [variables[name] for name in os.environ if name in variables]
        own = f"{option}."
        for name in (f"{one}.".replace(".init_args.", ".") for one in names):
            if own.startswith(name) or name.startswith(own):  # the error may name the section only
                return ""
        for file in reversed(config_files(arguments)):
            try:
                root = yaml.compose(read_bytes(Path(file), links=True).decode(), yaml.SafeLoader)
            except (OSError, ValueError, yaml.YAMLError, RecursionError):
                continue
            if (line := _line_of(root, option)) is not None:
                return f"{file}, line {line}: "
        return ""


class _WithDefaults(RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of texts, and names the default of each option with one."""

    def _get_help_string(self, action: Action) -> str:
        text, default = action.help or "", action.default
        has_none = any(default is one for one in (None, False, SUPPRESS)) or default == []
        if has_none or not action.option_strings:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default: {shown})".replace("%", "%%")


def command_parser(usage: str, description: str, examples: str) -> Parser:
    """Return the parser of `stream-ssl USAGE`, whose help keeps the lines of both texts."""
    return Parser(
        prog=f"stream-ssl {usage.partition(' ')[0]}",
        usage=f"stream-ssl {usage}",
        description=description,
        epilog=examples,
        formatter_class=_WithDefaults,
    )


def run_function(function: Callable[..., int], arguments: Sequence[str]) -> int:
    """Run a command that is one function, whose arguments are its options. Return its status."""
    prog = f"stream-ssl {function.__name__}"
    status = auto_cli(function, args=list(arguments), parser_class=Parser, prog=prog)
    assert isinstance(status, int)
    return status


def _wrong_section(section: str, said: str) -> str:
    """Return the error about a section that has no options below it."""
    remedy = "write its options below it as NAME: VALUE, or remove its line"
    return f"section {section} is {said}: {remedy}"


def config_files(arguments: Sequence[str]) -> list[str]:
    """Return the config files of a command line and of the environment.

    A shell leaves the ~ of --config=~/run.yaml, and jsonargparse replaces it.
    """
    variable = os.environ.get("STREAM_SSL_CONFIG")
    files = [
        *([] if variable is None else [variable]),
        *(after for option, after in pairwise(arguments) if option == "--config"),
        *(one.removeprefix("--config=") for one in arguments if one.startswith("--config=")),
    ]
    return [os.path.expanduser(one) for one in files]  # noqa: PTH111 - "" stays, and is refused


def _line_of(node: yaml.Node | None, option: str) -> int | None:
    """Return the line of an option, or of the section that is all there is of it; else None."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if f"{option}.".startswith(f"{key.value}."):
                below = _line_of(value, option.removeprefix(f"{key.value}").removeprefix("."))
                line: int = key.start_mark.line + 1
                return below or line
    return None


def finite(name: str, value: object) -> str:
    """Return the error about an option whose number is not finite."""
    return f"{name} is {value}: it must be a finite number{' above 0' if name in ABOVE_0 else ''}"


def _not_finite(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield each number within an option's value that is not finite, with its option."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name, value
    elif isinstance(value, Namespace | Mapping):
        for key, part in vars(value).items() if isinstance(value, Namespace) else value.items():
            yield from _not_finite(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _not_finite(name, part)


def hinted(
    message: str,
    written: Mapping[str, str],
    given: Sequence[str] = (),
    needed: Set[str] = frozenset(),
) -> str:
    """Return an error of jsonargparse with the options as users write them, and a suggestion.

    Args:
        written: the written form of each option by its name, such as
            {"learner.seed": "--learner.seed", "run": "RUN"}.
        needed: the names of the required options.
    """
    if (number := NOT_FINITE.search(message)) and (keys := KEY.findall(message)):
        return finite(".init_args.".join(keys), number[1])
    if message.startswith('Parser key "access":'):
        return message + (
            "\n  access is `plain`, or two files: --access.keys NAME.secret.json --access.allow "
            "LIST.json"
        )
    of_run = not {"receiver.bind", "learner.seed"}.isdisjoint(written)
    if of_run and message.startswith('Parser key "config": File does not exist'):
        return f"{message}; `stream-ssl init laptop > laptop.yaml` writes a configuration"
    if required := re.fullmatch(r"(the following arguments are required: )(.+)", message):
        return required[1] + ", ".join(written.get(name, name) for name in required[2].split(", "))
    if unknown := re.match(r"unrecognized arguments: --([^\s=]+)", message):
        wrong = unknown[1]
    elif message.startswith("unrecognized arguments: "):
        return message + _of_paths(message, written, given, needed)
    elif unknown := IN_GROUP.fullmatch(message):
        wrong = f"{unknown[1]}.{unknown[2]}"
    elif unknown := REFUSED.search(message):
        return message + _of_class(unknown[1], unknown[2])
    else:
        return message
    if (gone := why_refused(wrong, None)) is not None:
        return gone
    return message + _instead(wrong, written)


def _of_paths(
    message: str, written: Mapping[str, str], given: Sequence[str], needed: Set[str]
) -> str:
    """Return the remedy for paths that no option takes, as the end of the error; "" without any."""
    paths = [one for one in given if f" {one} " in f"{message} " and os.access(one, os.F_OK)]
    if not paths:
        return ""
    if "config" in written and Path(paths[0]).suffix in (".yaml", ".yml"):
        return f"; another config file needs its option: --config {paths[0]}"
    if not any(name.startswith("source.") for name in written):
        return ""
    before = given[: given.index(paths[0])]
    of_source = [one for one in before[-2:] if one.startswith("--source.")]
    if not of_source:  # no pattern stood where these paths stand
        first = [one for name, one in written.items() if name in needed and name[:7] == "source."]
        return f"; the source takes it as an option: {first[0]} {paths[0]}" if first else ""
    pattern = Path(paths[0]).parent / f"*{Path(paths[0]).suffix}"
    return (
        "; an option takes one path, and the shell replaces a pattern by many: quote the pattern, "
        f"such as '{pattern}'"
    )


def _of_class(path: str, option: str) -> str:
    """Return the options of a class, as the end of an error about an option that it lacks."""
    cls = pydoc.locate(path)
    assert callable(cls), "jsonargparse has found it"
    options = ", ".join(inspect.signature(cls).parameters) or "no options"
    name = path.rpartition(".")[2]
    return f"\n  {name} takes {options}; to set {option}, first name a class that takes it"


def _instead(wrong: str, written: Mapping[str, str]) -> str:
    """Return the options that may be meant by a wrong name, as the end of an error."""
    section, _, last = wrong.rpartition(".")
    of_section = {
        name: name.rpartition(".")[2]
        for name in written
        if not section or name.rpartition(".")[0] == section
    }
    close = difflib.get_close_matches(last, of_section.values(), 1, cutoff=0.7)
    meant = [name for name, end in of_section.items() if end in close]
    if not meant and not of_section:  # the name of the section may be wrong
        meant = difflib.get_close_matches(wrong, written, 1, cutoff=0.75)
    if not meant and section:  # an option of the wrong section, or a section
        meant = [n for n in written if n.startswith(f"{last}.")]
        meant = meant or [n for n in written if n.endswith(f".{last}")]
    if meant:
        return f"; did you mean {' or '.join(written[name] for name in sorted(meant))}?"
    if section and of_section:
        return f"; the options of {section} are {', '.join(written[n] for n in sorted(of_section))}"
    return ""


FINDER = "get_signature_parameters"
"""jsonargparse finds the parameters of a class or function with this private function."""

_parameters: Callable[..., list[Any]] | None = getattr(_signatures, FINDER, None)


def _with_plain_defaults(*arguments: Any, **options: Any) -> list[Any]:
    """Return the parameters of a class or function, without defaults that are code.

    Such a default is a class, a function or a partial function. jsonargparse would write it as a
    class path with all options of the class, or as text that cannot be parsed again. The class may
    reject such a value, and a checkpoint cannot store it. The call omits an option without default.
    """
    assert _parameters is not None, "only then is this function called"
    return [
        replace(one, default=SUPPRESS)
        if callable(one.default) and one.default is not inspect.Parameter.empty
        else one
        for one in _parameters(*arguments, **options)
    ]


if _parameters is not None:  # jsonargparse has no public way to leave out a default
    setattr(_signatures, FINDER, _with_plain_defaults)
