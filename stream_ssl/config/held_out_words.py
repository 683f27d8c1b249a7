"""The short form `--observe.held_out NAME:PLACE` beside other options of the section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from stream_ssl.evaluation import sets

HELD_OUT = "--observe.held_out"


def with_source(arguments: Sequence[str]) -> list[str]:
    """Return a learner's arguments, with the source of `--observe.held_out NAME:PLACE` as a class.

    jsonargparse would drop the text beside other options of `observe.held_out`, in either order.
    """
    others, source = list[str](), list[str]()
    for before, argument in pairwise(["", *arguments]):
        option, _, value = argument.partition("=")
        if before == HELD_OUT and not argument.startswith("--"):
            value = argument
        elif option != HELD_OUT:
            others.append(argument)
            continue
        with suppress(ValueError):  # the learner's own error is about the option
            name, options = sets.place(value)
            value = json.dumps({"source": {"class_path": name, "init_args": options}})
        source = [f"{HELD_OUT}={value}"]
    at = next((at for at, one in enumerate(others) if one.startswith(HELD_OUT)), len(others))
    return [*others[:at], *source, *others[at:]]
