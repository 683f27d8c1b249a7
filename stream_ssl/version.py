"""The version of the running program, with the commit if the program knows it."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from stream_ssl import __version__

CHECKOUT = Path(__file__).parents[1]
SHORT = 8
"""The digits of a commit that are shown."""


@cache
def version() -> str:
    """Return the version, such as "0.1.0 (1a2b3c4d)", or "0.1.0" if the commit is unknown.

    The commit is known in a checkout, and in a package that pip installed from a repository.
    """
    commit = _of_checkout(CHECKOUT / ".git") or _of_package()
    return f"{__version__} ({commit[:SHORT]})" if commit else __version__


def _of_checkout(folder: Path) -> str | None:
    try:
        if folder.is_file():  # a work tree beside its repository
            folder = Path(folder.read_text().removeprefix("gitdir:").strip())
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return _commit(head)
        common = folder
        if (folder / "commondir").is_file():
            common = folder / (folder / "commondir").read_text().strip()
        name = head.removeprefix("ref: ")
        if (common / name).is_file():
            return _commit((common / name).read_text().strip())
        packed = (common / "packed-refs").read_text().splitlines()
        return next((_commit(row.split()[0]) for row in packed if row.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None


def _of_package() -> str | None:
    try:
        text = metadata.distribution("stream-ssl").read_text("direct_url.json")
        return _commit(json.loads(text or "{}")["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return None


def _commit(text: str) -> str | None:
    return text if re.fullmatch("[0-9a-f]{40,64}", text) else None
