"""Data that the pages of both roles share: the run, the other process and the token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from stream_ssl.daemon.endpoints import holder, load
from stream_ssl.daemon.run_states import silence
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.page.api import Sources


def page_sources(settings: Namespace) -> Sources:
    """Return what a process's page can show from its start.

    Raises:
        ValueError: the token file cannot be used.
    """
    file, run = settings.http.token_file, settings.run
    token = None if file is None else Token.load(file)
    gone = partial(ending_of, run)
    return Sources(run=run, peer=partial(process_of, run), gone=gone, token=token)


def process_of(run: Path, role: str) -> str | None:
    """Return the HTTP address of one of the run's processes; None if it is unknown.

    The receivers of `run --receivers` have their folders in the learner's run folder.
    """
    found: dict[str, str] = load(run).get(role) or load(run.parent).get(role) or {}
    return found.get("http")


def ending_of(run: Path, role: str) -> Mapping[str, Any]:
    """Return the state of one of the run's processes if it ended, starts or never ran, else {}.

    The receivers of `run --receivers` have their folders in the learner's run folder.
    """
    folder = run.parent if role not in load(run) and role in load(run.parent) else run
    state = silence(folder, load(folder), [role])[role]
    return state if {"ended", "absent", "pid"} & state.keys() else {}


def peers_of(run: Path, role: str) -> dict[str, tuple[str, int]]:
    """Return the address and process id of the run's other living processes on this machine.

    A process lives if it holds its role's lock and has published its address. A process that has
    stopped, is starting, or runs on another machine is left out.

    Args:
        run: this process's own run folder.
        role: this process's role.
    """
    found: dict[str, tuple[str, int]] = {}
    for folder in (run.parent, run, *sorted(run.glob("receiver-*"))):
        for other, entry in load(folder).items():
            pid = holder(folder, other)
            if pid is not None and pid == entry.get("pid") and (folder, other) != (run, role):
                found[other if folder == run else f"{folder.name}/{other}"] = entry["http"], pid
    return found


def announced(settings: Namespace) -> dict[str, str]:
    """Return what endpoints.json has beside addresses: the token file, for `stream-ssl status`."""
    file = settings.http.token_file
    return {} if file is None else {"token_file": str(file.absolute())}
