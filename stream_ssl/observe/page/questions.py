"""The arguments of a question to the API, and the refusal of a question."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


class Refused(Exception):
    """A question that the API does not answer, with the HTTP status and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Query:
    """The arguments of a question. Each method takes one; a wrong value raises a 400."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Take one of the choices; the first choice is the default."""
        value = self._given.pop(name, choices[0])
        if value not in choices:
            raise Refused(400, f"{name} is {value[:40]!r}: must be one of {', '.join(choices)}")
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int:
        """Take a whole number from `least` to `most`. It is required if `default` is None."""
        value = self._given.pop(name, None)
        if value is None and default is not None:
            return default
        if value is None:
            raise Refused(400, f"{name} is missing: must be a whole number, {least} to {most}")
        return _integer(name, value, least, most)

    def integers(self, name: str, most: int) -> list[int]:
        """Take 1 to `most` whole numbers >= 0, separated by commas."""
        values = self._given.pop(name, "").split(",")
        if not 1 <= len(values) <= most:
            raise Refused(400, f"{name} has {len(values)} numbers: must have 1 to {most}")
        return [_integer(name, value, 0, 1 << 40) for value in values]

    def number(self, name: str, default: float) -> float:
        """Take a finite number."""
        text = self._given.pop(name, None)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise Refused(400, f"{name} is {str(text)[:40]!r}: must be a finite number")
        return value

    def text(self, name: str, most: int) -> str:
        """Take a text of at most `most` characters; the default is empty."""
        value = self._given.pop(name, "")
        if len(value) > most:
            raise Refused(400, f"{name} has {len(value)} characters: must have at most {most}")
        return value

    def end(self) -> None:
        """Raise a 400 if arguments are left that no method has taken."""
        for name in self._given:
            raise Refused(400, f"this question has no argument {name[:40]!r}")


def _integer(name: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise Refused(400, f"{name} is {text[:40]!r}: must be a whole number, {least} to {most}")
    return int(text)
