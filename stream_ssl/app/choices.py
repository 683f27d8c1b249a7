"""A parser that suggests the nearest choice for a wrong one."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

WRONG = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
"""argparse's error about a value that is none of the choices."""


class ChoiceParser(argparse.ArgumentParser):
    """A parser whose error about a wrong choice ends with the choice that may be meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := WRONG.search(message):
            choices = [one.strip(" '") for one in wrong[2].split(",")]
            if close := difflib.get_close_matches(wrong[1], choices, 1):
                message += f"; did you mean {close[0]}?"
        super().error(message)
