"""What both roles' pages have in common: the run, the other process, and the token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jsonargparse import Namespace

from stream_ssl.app.endpoints import holder, load
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.page.api import Sources


def page_sources(settings: Namespace) -> Sources:
    """What a process's page can tell of from its start.

    Raises:
        ValueError: the token file cannot be used.
    """
    file, run = settings.http.token_file, settings.run
    token = None if file is None else Token.load(file)
    return Sources(run=run, peer=partial(process_of, run), token=token)


def process_of(run: Path, role: str) -> str | None:
    """The HTTP address of a run's process; `run --receivers` keeps the folders of receivers in the
    learner's."""
    found: dict[str, str] = load(run).get(role) or load(run.parent).get(role) or {}
    return found.get("http")


def peers_of(run: Path, role: str) -> dict[str, tuple[str, int]]:
    """Return the address and the process id of the run's other processes that live on this machine.

    A process lives if it holds its role's lock and has told its address. A process that was
    stopped, that starts, or that runs on another machine is left out.

    Args:
        run: this process's own run folder.
        role: of this process.
    """
    found: dict[str, tuple[str, int]] = {}
    for folder in (run.parent, run, *sorted(run.glob("receiver-*"))):
        for other, entry in load(folder).items():
            pid = holder(folder, other)
            if pid is not None and pid == entry.get("pid") and (folder, other) != (run, role):
                found[other if folder == run else f"{folder.name}/{other}"] = entry["http"], pid
    return found


def announced(settings: Namespace) -> dict[str, str]:
    """What endpoints.json tells beside addresses: where `stream-ssl status` finds the token."""
    file = settings.http.token_file
    return {} if file is None else {"token_file": str(file.absolute())}
