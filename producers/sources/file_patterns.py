"""Expansion of paths, globs and braces to lists of files."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

BRACES = re.compile(r"\{([^{}]*)\}")
MOST_NAMES = 1_000_000
"""The most names that the braces of one pattern may stand for."""


def find_files(patterns: str | Sequence[str], what: str, folders: bool = False) -> list[Path]:
    """Return the files that names, globs and brace expansions match, each glob sorted.

    In a glob, ** stands for any number of folders. Such a glob returns a file once, even if links
    make it appear in several folders.

    Args:
        patterns: one pattern, or several patterns in order.
        what: the word for a file in messages, such as "shard".
        folders: whether a folder counts as a file, as a ROS 2 bag does. Otherwise a glob leaves
            folders out.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: a pattern is the name of a folder, or matches a pipe or a device.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # A name of a file comes first, because it may contain braces and glob characters.
        for name in [pattern] if os.path.exists(pattern) else expand_braces(pattern):  # noqa: PTH110
            found = [name] if os.path.exists(name) else matches(name)  # noqa: PTH110
            if not found:
                whole = f" (of {pattern})" if name != pattern else ""
                raise FileNotFoundError(f"no {what} {name}{whole}: {_remedy(name)}")
            files += _readable(found, what, folders)
    if not files:
        raise FileNotFoundError(f"no {what}: pass a path, a glob or a{{00..09}}")
    return files


def _remedy(name: str) -> str:
    if "://" in name:
        return "download it, and give the file"
    below = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
    return f"no file{below} has this path or matches it as a pattern; give another"


def _readable(found: list[str], what: str, folders: bool) -> list[Path]:
    """Return the found paths without folders, unless these count as files.

    Raises:
        ValueError: there are only folders, or a path is a pipe or a device.
    """
    wanted = [path for path in map(Path, found) if folders or not path.is_dir()]
    if not wanted:
        folder = Path(found[0])
        raise ValueError(
            f"{folder} is a folder, and a file is needed ({what}): give a pattern of its "
            f"files, in quotes: '{pattern_in(folder)}'"
        )
    for path in wanted:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening it may block
            raise ValueError(
                f"{path} is a pipe or a device, and a file is needed ({what}): write its "
                "content to a file, and give that file"
            )
    return wanted


def pattern_in(folder: Path) -> Path:
    """Return a glob for the files of a folder that have the suffix with the most bytes.

    These are the files with the data. Files that describe other files, such as labels, are smaller.
    """
    sizes = Counter[str]()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sizes[path.suffix] += path.stat().st_size + 1
    return folder / f"*{max(sizes, key=sizes.__getitem__, default='')}"


def matches(pattern: str) -> list[str]:
    """Return the paths that a glob matches, sorted."""
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if "**" not in pattern:
        return found
    nearest_first = sorted(found, key=lambda path: path.count(os.sep))
    real = {os.path.realpath(path): path for path in reversed(nearest_first)}
    return sorted(real.values())


def expand_braces(pattern: str) -> list[str]:
    """Expand {a,b} and {08..11} as a shell does: return every combination, in order.

    Raises:
        ValueError: the braces contain neither a list nor a range of numbers, or stand for more
            than MOST_NAMES names.
    """
    match = BRACES.search(pattern)
    if match is None:
        return [pattern]
    head, inner, tail = pattern[: match.start()], match[1], pattern[match.end() :]
    bounds = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", inner)
    width, numbers = 0, range(0)
    if bounds:
        first, last = int(bounds[1]), int(bounds[2])
        step = 1 if first <= last else -1
        padded = any(re.match(r"0\d", bound) for bound in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        numbers = range(first, last + step, step)
    elif "," not in inner:
        raise ValueError(f"{pattern}: {{{inner}}} must be a range {{000..009}} or a list {{a,b}}")
    words, rests = inner.split(","), expand_braces(tail)
    if max(len(numbers), len(words)) * len(rests) > MOST_NAMES:
        raise ValueError(f"{pattern} has more than {MOST_NAMES:,} names: use several patterns")
    parts = [f"{number:0{width}d}" for number in numbers] if bounds else words
    return [head + part + rest for part in parts for rest in rests]
