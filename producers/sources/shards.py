"""Tar shards: which ones, and their members in order from any header on."""

from __future__ import annotations

import glob
import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

MAX_MEMBER = 256 * 2**20
SEEK = 2**24  # bytes between two looks at whether to stop
DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError)
BRACES = re.compile(r"\{([^{}]*)\}")


class ShardError(Exception):
    """A shard cannot be read on from here."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a shard."""

    start: int  # where its header begins, in bytes of the unpacked shard
    name: str
    data: bytes | None  # None: not wanted


def find_files(patterns: str | Sequence[str], what: str) -> list[Path]:
    """The files that names, globs and brace expansions stand for, each pattern's sorted.

    Args:
        patterns: one, or several in their order.
        what: how the message calls a file, such as "shard".

    Raises:
        FileNotFoundError: a pattern matches no file.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in expand_braces(pattern):
            # A file of that very name first: its name may hold what a glob takes for a pattern.
            found = [name] if Path(name).exists() else sorted(glob.glob(name))  # noqa: PTH207
            if not found:
                raise FileNotFoundError(
                    f"no {what} {name}" + f" (of {pattern})" * (name != pattern)
                )
            files += map(Path, found)
    if not files:
        raise FileNotFoundError(f"no {what}: pass a path, a glob or a{{00..09}}")
    return files


def expand_braces(pattern: str) -> list[str]:
    """What a shell makes of {a,b} and {08..11}: every combination, in order.

    Raises:
        ValueError: braces that hold neither a list nor a range of numbers.
    """
    match = BRACES.search(pattern)
    if match is None:
        return [pattern]
    head, inner, tail = pattern[: match.start()], match[1], pattern[match.end() :]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
    if bounds:
        first, last = int(bounds[1]), int(bounds[2])
        step = 1 if first <= last else -1
        width = max(map(len, bounds.groups())) if inner.startswith("0") else 0
        parts = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    elif "," in inner:
        parts = inner.split(",")
    else:
        raise ValueError(f"{pattern}: {{{inner}}} must be a range {{000..009}} or a list {{a,b}}")
    return [head + part + rest for part in parts for rest in expand_braces(tail)]


@contextmanager
def open_shard(path: Path) -> Iterator[IO[bytes]]:
    """The shard's tar bytes, unpacked on the way where it is gzipped."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(IO[bytes], unpacked)


def read_members(
    path: Path,
    start: int,
    suffixes: tuple[str, ...],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Member]:
    """The shard's files from the header at byte `start` on, wanted ones with their content.

    The last item has an empty name and stands where the members end; there is none once stopped.

    Raises:
        ShardError: the shard is damaged or cut off; names the byte.
    """
    at = start
    try:
        with open_shard(path) as file:
            for at in (*range(0, start, SEEK), start):  # unpacks so far where it is gzipped
                if stopped():
                    return
                file.seek(at)
            if not file.read(1):
                if start == 0:
                    raise ShardError("the file is empty")
                return
            file.seek(start)
            # Not tarfile's streaming mode: that cannot begin at an offset.
            with tarfile.open(fileobj=file, mode="r:", errorlevel=0) as tar:
                while (info := tar.next()) is not None:
                    if stopped():
                        return
                    # Else it keeps every header that it has seen.
                    tar.members.clear()  # type: ignore[attr-defined]
                    at = info.offset
                    if info.isfile():
                        wanted = info.name.lower().endswith(suffixes) and info.size <= MAX_MEMBER
                        content = tar.extractfile(info) if wanted else None
                        yield Member(at, info.name, content.read() if content else None)
                at = tar.offset
                # tarfile takes a damaged header within the archive for its end.
                file.seek(at)
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise ShardError(f"no header at byte {at}")
                yield Member(at, "", None)
    except DAMAGE as error:
        raise ShardError(f"unreadable from byte {at}: {error}") from error
