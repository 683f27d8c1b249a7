"""Numbers and names as the page, `status`, `watch` and the conditions spell them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def plural(count: float, noun: str) -> str:
    """Return a number with a noun, such as "1 part" or "1,200 parts"."""
    return f"{count:,.0f} {noun}{'' if round(count) == 1 else 's'}"


def few(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return names with `between` between them, and the number of the names beyond `most`.

    >>> few(["yard", "gate", "lobby"], 2)
    'yard, gate and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def listing(names: Sequence[str]) -> str:
    """Return all names, with "and" before the last one.

    >>> listing(["receiver-0", "receiver-1", "learner"])
    'receiver-0, receiver-1 and learner'
    """
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def counted(counts: Mapping[str, float]) -> str:
    """Return counts as text, such as "3 denied, 1 no-key"."""
    return ", ".join(f"{count:.0f} {reason}" for reason, count in sorted(counts.items()))


def percent(share: float) -> str:
    """Return a share as a percentage. Only a share of 1 gives "100 %".

    >>> [percent(share) for share in (0, 0.025, 0.46, 0.99999, 1)]
    ['0 %', '2.5 %', '46 %', '99.99 %', '100 %']
    """
    if 0.99 < share < 1:
        return f"{min(100 * share, 99.99):.2f} %"
    return f"{100 * share:.{0 if share == 0 or share >= 0.1 else 1}f} %"


def duration(seconds: float) -> str:
    """Return a number of seconds as text: 45 s, 12 min, 3.5 h, 40 days."""
    if seconds > 36_500 * 86_400:
        return "more than 100 years"
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and name == "min"):
            shown = seconds / size
            return f"{shown:.1f} {name}" if shown < 10 and name != "min" else f"{shown:.0f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def rate(value: float) -> str:
    """Return a rate with one digit after the point if it is below 10."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def sentences(parts: Iterable[str]) -> str:
    """Return the parts as sentences, each with a full stop."""
    ended = (part if part.endswith((".", "!", "?")) else f"{part}." for part in parts)
    return " ".join(ended)
