"""The short form `--observe.held_out NAME:PLACE` beside other options of the section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from stream_ssl.evaluation import sets

HELD_OUT = "--observe.held_out"


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
        name, options = sets.place(value)
        return json.dumps({"source": {"class_path": name, "init_args": options}})
    return value
