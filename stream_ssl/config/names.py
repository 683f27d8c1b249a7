"""Short names of losses, methods, policies, scores, sources and schedules in options.

jsonargparse accepts a class path, or the name of a class. This module adds the names in our tables,
for every option of such a type: in config files, on the command line, in the environment. The
place of a held-out set, NAME:PLACE, is a short form of its source.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import jsonargparse
from jsonargparse import _typehints

from stream_ssl.config.schema import classes_of
from stream_ssl.evaluation import sets
from stream_ssl.evaluation.labelled import Labelled
from stream_ssl.learning.schedule import SCHEDULES, Schedule
from stream_ssl.losses import LOSSES, Loss
from stream_ssl.memory.eviction import POLICIES, Policy
from stream_ssl.memory.scores import SCORES, Score
from stream_ssl.methods import METHODS, Method
from stream_ssl.producers.sources import SOURCES
from stream_ssl.renamed import current

TABLES: dict[Any, tuple[str, dict[str, type]]] = {
    Loss: ("loss", LOSSES),
    Method: ("method", METHODS),
    Policy: ("eviction policy", POLICIES),
    Score: ("score", SCORES),
    Labelled: ("source", SOURCES),
    Schedule: ("schedule", SCHEDULES),
}
"""The kind of class and its table, by the type of an option."""

D_MOCO = (
    "method d-moco: D-MoCo is the method moco with the memory of the DUEL paper, and a "
    "method's name does not set the memory; leave the name out and add --config "
    "deploy/configs/presets/d-moco.yaml"
)
"""The error for the name that the DUEL paper gives to MoCo with its memory."""

HELD_OUT = "--observe.held_out"

LOOKUP = "resolve_class_path_by_name"
"""jsonargparse finds a class with this private function."""


def checked_lookup(found: Any) -> Callable[[Any, str], str]:
    """Return jsonargparse's lookup of a class by its name.

    Raises:
        ImportError: the lookup is missing or takes other arguments, so short names would be
            unknown.
    """
    if not callable(found) or list(inspect.signature(found).parameters) != ["cls", "name"]:
        raise ImportError(
            f"jsonargparse {jsonargparse.__version__} finds classes in another way than by "
            f"{LOOKUP}(cls, name), to which stream-ssl adds short names: install the version in "
            "constraints.txt"
        )
    return cast(Callable[[Any, str], str], found)


_by_class_name = checked_lookup(getattr(_typehints, LOOKUP, None))


def class_path(cls: Any, name: str) -> str:
    """Return the path of the class that an option of type `cls` names.

    Raises:
        ValueError: the name is no text, or it is unknown. The message lists the known ones.
    """
    if not isinstance(name, str):  # a YAML file may hold any value
        raise ValueError(f"class_path is {name!r}: give a class path such as package.module.Class")
    if cls is Method and name == "d-moco":
        raise ValueError(D_MOCO)
    what, table = TABLES.get(cls, ("", {}))
    known = {found.__name__: found for found in table.values()} | table
    if name in known:
        return _by_class_name(known[name], known[name].__name__)
    path = _by_class_name(cls, current(name))
    if "." not in path:
        if table:
            raise ValueError(f"there is no {what} {name!r}: choose {choices(cls)}")
        ours = [names[-1] for names in classes_of(cls).values()]
        such = ", ".join(ours) or "package.module.Class"
        raise ValueError(f"there is no class {name!r}: give a class path such as {such}")
    return path


def choices(cls: Any) -> str:
    """Return the accepted values of an option of type `cls`, for help and errors."""
    _, table = TABLES[cls]
    return f"one of {', '.join(sorted(table))}, or a class path such as package.module.Class"


def with_source(arguments: Sequence[str]) -> list[str]:
    """Return a learner's arguments, with the source of `--observe.held_out NAME:PLACE` as a class.

    jsonargparse would drop the text beside other options of `observe.held_out`, in either order.
    Those that stand before it follow it in the result. Alone, the text stays as it is.
    """
    if not any(argument.startswith(f"{HELD_OUT}.") for argument in arguments):
        return list(arguments)
    options: list[list[str]] = []  # each with its values
    for argument in arguments:
        if argument.startswith("--") or not options:
            options.append([argument])
        else:
            options[-1].append(argument)
    found: list[list[str]] = []
    for words in options:
        name, equals, value = words[0].partition("=")
        if name != HELD_OUT or not (equals or words[1:]):
            found.append(words)
            continue
        before = [one for one in found if one[0].startswith(f"{HELD_OUT}.")]
        found = [one for one in found if one not in before]
        value, *more = [value] * bool(equals) + words[1:]
        found += [[f"{HELD_OUT}={_source(value)}", *more], *before]
    return [word for words in found for word in words]


def _source(value: str) -> str:
    with suppress(ValueError):  # the learner's own error is about the option
        name, options = sets.source_of(value)
        return json.dumps({"source": {"class_path": name, "init_args": options}})
    return value


# jsonargparse has no public way to add a name for a class. All its entry points call this function;
# tests/config/test_names.py checks each of them.
setattr(_typehints, LOOKUP, class_path)
