"""The page and the metrics of a process of either role, and what the page shows of the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from stream_ssl.background import Background
from stream_ssl.config.options import split_address
from stream_ssl.daemon import torchrun
from stream_ssl.daemon.endpoints import holder, load
from stream_ssl.daemon.run_states import silence
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metric_spec import Role
from stream_ssl.observe.metrics import ProcessMetrics
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.peers import ASK_EVERY, Peers
from stream_ssl.observe.server import Server
from stream_ssl.observe.trends import LOOK_SECONDS
from stream_ssl.observe.watch import Watch, Watched
from stream_ssl.process.failures import listening


def serve_page(
    settings: Namespace,
    role: Role,
    metrics: ProcessMetrics,
    health: Health,
    sources: Sources,
    watched: Watched,
    stack: ExitStack,
    rank: int = 0,
) -> str:
    """Serve a process's metrics and page, ask its peers, and watch over its conditions.

    Args:
        metrics, health, sources: the data of the page. `sources.hung` is set.
        watched: the process's folders and settings that the watch needs.
        stack: closes the server and its threads.
        rank: the rank of a learner. The ranks of one host have ports in a row.

    Returns:
        The address of the page.
    """
    host, port = split_address(settings.http[role])
    port += torchrun.local_rank() if port and role == "learner" else 0
    public, registry = settings.http.public, metrics.registry
    server = listening(lambda: Server(registry, health, role, host, port, public, sources))
    stack.enter_context(server)
    peers = Peers(partial(peers_of, settings.run, f"{role}-{rank}" if rank else role))
    stack.enter_context(Background("peers", peers.ask, ASK_EVERY))
    sources.hung = peers.why
    watch = Watch(role, registry, health, metrics.set_conditions, watched, peers.hung)
    stack.enter_context(Background("watch", watch.try_look, LOOK_SECONDS))
    return server.address


def page_sources(settings: Namespace) -> Sources:
    """Return what a process's page can show, or raise ValueError about the token file."""
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
    """Return the state of one of the run's processes if it ended, starts or never ran, else {}."""
    folder = run.parent if role not in load(run) and role in load(run.parent) else run
    state = silence(folder, load(folder), [role])[role]
    return state if {"ended", "absent", "pid"} & state.keys() else {}


def peers_of(run: Path, role: str) -> dict[str, tuple[str, int]]:
    """Return the address and process id of the run's other living processes on this machine.

    A process lives if it holds its role's lock and has published its address. A process that has
    stopped, is starting, or runs on another machine is left out.
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
