"""A parser of options that explains its errors, for every command."""

from __future__ import annotations

import difflib
import inspect
import math
import pydoc
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

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
}
TYPED = re.compile(
    rf"(?:- )?Expected a <class '({'|'.join(KINDS)})'>(?:\. Got|\n +Given) value: (.*)"
)
"""jsonargparse's error about a value of another type, and what users read instead."""


class Parser(ArgumentParser):
    """A parser that explains its errors and refuses numbers that are not finite."""

    def parse_args(self, *arguments: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Parse as jsonargparse does, and exit with an error on a number that is not finite."""
        found: Namespace = super().parse_args(*arguments, **options)
        for name, value in found.items():
            for number in _not_finite(value):
                self.error(finite(name, number))
        return found

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        written = {one.dest: (*one.option_strings, one.dest.upper())[0] for one in self._actions}
        said = hinted(readable(message), written)
        super().error(TYPED.sub(lambda found: f"'{found[2]}': {KINDS[found[1]]}", said), ex)


def finite(name: str, value: object) -> str:
    """Return the error about an option whose number is not finite."""
    return f"{name} is {value}: it must be a finite number{' above 0' if name in ABOVE_0 else ''}"


def _not_finite(value: object) -> Iterator[float]:
    """Yield the numbers within an option's value that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield value
    elif isinstance(value, Namespace):
        yield from _not_finite(value.as_dict())
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _not_finite(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _not_finite(part)


def hinted(message: str, written: Mapping[str, str]) -> str:
    """Return an error of jsonargparse with the options as users write them, and a suggestion.

    Args:
        message: the error.
        written: the written form of each option by its name, such as
            {"learner.seed": "--learner.seed", "run": "RUN"}.
    """
    if number := NOT_FINITE.search(message):
        keys = re.findall(r'Parser key "([^"]+)":', message)
        if keys:
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
    elif unknown := re.fullmatch(r"Group '(.+)' does not accept option '(.+)'", message):
        wrong = f"{unknown[1]}.{unknown[2]}"
    elif unknown := REFUSED.search(message):
        return message + _of_class(unknown[1], unknown[2])
    else:
        return message
    if (gone := why_refused(wrong, None)) is not None:
        return gone
    return message + _instead(wrong, written)


def _of_class(path: str, option: str) -> str:
    """Return the options of a class, as the end of an error about one that it does not have."""
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
    if not meant and not of_section:  # the section's name may be the one that is wrong
        meant = difflib.get_close_matches(wrong, written, 1, cutoff=0.75)
    if not meant and section:  # an option of the wrong section, or a section
        meant = [n for n in written if n.startswith(f"{last}.")]
        meant = meant or [n for n in written if n.endswith(f".{last}")]
    if meant:
        return f"; did you mean {' or '.join(written[name] for name in sorted(meant))}?"
    if section and of_section:
        return f"; the options of {section} are {', '.join(written[n] for n in sorted(of_section))}"
    return ""
