"""One of the answers about a run: its level, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "watch", "bad", "wait", "unknown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        level: good, watch (worth a look), bad, wait (nothing is known yet), or unknown (the process
            that knows it does not answer).
        says: one or two sentences with a number.
        links: pairs of (text, address on the page) with the evidence.
    """

    question: str
    level: Level
    says: str
    links: Sequence[tuple[str, str]]

    @property
    def word(self) -> str:
        """The level as a word, for readers without colours: good, look, bad, now, soon..."""
        words = TO_DO_WORDS if self.question == "To do" else WORDS
        return words[self.level]


WORDS: Mapping[Level, str] = {
    "good": "good",
    "watch": "look",
    "bad": "bad",
    "wait": "wait",
    "unknown": "unknown",
}
TO_DO_WORDS: Mapping[Level, str] = {**WORDS, "good": "nothing", "watch": "soon", "bad": "now"}
