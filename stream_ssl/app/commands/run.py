"""stream-ssl run: start and supervise the receiver and the learner."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from jsonargparse import Namespace

from stream_ssl.config import options
from stream_ssl.daemon.endpoints import hold_role, load, withdraw
from stream_ssl.daemon.run_states import receivers_below
from stream_ssl.daemon.supervisor import Child, Supervisor, command, learner_command
from stream_ssl.durable import make_folder
from stream_ssl.process.failures import configuring, reported
from stream_ssl.process.signals import PARSED, stop_on_signals
from stream_ssl.wire.run_folder import ENDPOINTS, KEYS, make_keys

log = logging.getLogger("stream_ssl.run")

LEARNER_NEEDS = {
    "--memory.capacity": "STREAM_SSL_MEMORY__CAPACITY",
    "--batches.batch_size": "STREAM_SSL_BATCHES__BATCH_SIZE",
}
"""Options without a default, on the command line and in the environment."""
CONFIG_MISSING = (
    "CONFIG is missing: give a config file (stream-ssl init laptop > laptop.yaml), "
    f"or at least {' and '.join(LEARNER_NEEDS)}"
)

PARSE_SECONDS = 120.0
"""Seconds after which the receivers start, even if the learner has not parsed its settings yet."""


def main(arguments: Sequence[str]) -> int:
    """Start the receiver and the learner, and restart them when they die, until SIGTERM or SIGINT.

    This process parses the receiver's settings. The learner parses its own, so that this process
    never loads torch. The receivers start once the learner has parsed its settings. If a process
    rejects its settings, all processes stop.
    """
    count, given, rest = counts("run", arguments)
    settings = options.read(options.receiver_parser("run"), rest)
    if lacks_config(settings, rest):
        count.error(CONFIG_MISSING)
    commands = receivers(settings, given.receivers, given.ranks, rest)
    shared_keys = given.receivers > 1 and settings.access is None
    commands["learner"] = learner_command(
        given.ranks, [*rest, *journals_of(settings.run, given.receivers)]
    )
    supervisor = Supervisor(commands)

    def work() -> int:
        with ExitStack() as stack:
            with configuring():
                life = stack.enter_context(hold_role(settings.run, "supervisor"))
                if shared_keys:  # otherwise each receiver would make keys of its own
                    make_keys(settings.run)
            marker = Path(stack.enter_context(TemporaryDirectory())) / "parsed"
            os.environ[PARSED] = str(marker)
            *receiving, learner = supervisor.children
            parsed = learner_parsed(marker, learner)
            for child in receiving:
                child.may_start = parsed
            leave_other_receivers(settings.run, commands)
            prepare_receivers(settings.run, commands)
            stop = stop_on_signals()
            stop.interrupted, supervisor.ended = life.interrupted, life.child_ended
            status = supervisor.run(stop)
            if supervisor.fault:
                life.failed(f"{supervisor.fault}; its message is in the log")
            return status

    return reported(work)


def counts(
    command: str, arguments: Sequence[str]
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """Return a parser for errors, the numbers of ranks and receivers, and the other arguments.

    A number that cannot be ends the process with its error.
    """
    prog = f"stream-ssl {command}"
    usage = f"{prog} CONFIG [--SECTION.OPTION VALUE ...] [--ranks N] [--receivers N]"
    count = argparse.ArgumentParser(prog, usage, add_help=False, allow_abbrev=False)
    count.add_argument("--ranks", type=int, default=1)
    count.add_argument("--receivers", type=int, default=1)
    given, rest = count.parse_known_args(arguments)
    if given.ranks < 1:
        count.error(f"--ranks is {given.ranks}: must be at least 1")
    if not 1 <= given.receivers <= given.ranks:
        count.error(
            f"--receivers is {given.receivers}: must be 1 to {given.ranks}, because each "
            "receiver needs a rank"
        )
    return count, given, rest


def journals_of(run: Path, count: int) -> list[str]:
    """Return the learner's arguments that name the journals of `count` receivers.

    One receiver has the journal of the run itself, so there are none.
    """
    if count == 1:
        return []
    folders = [str(run / f"receiver-{number}") for number in range(count)]
    return ["--ranks.receivers", json.dumps(folders)]


def lacks_config(settings: Namespace, arguments: Sequence[str]) -> bool:
    """Return whether there is no config file, and none of the options without a default."""
    given = {one.partition("=")[0] for one in arguments} & LEARNER_NEEDS.keys()
    return not (settings.config or given or os.environ.keys() & LEARNER_NEEDS.values())


def learner_parsed(marker: Path, learner: Child) -> Callable[[], bool]:
    """Return whether the learner has parsed its settings, as a function. The receivers start then.

    It also returns True after a timeout and after a restart of the learner: a learner that is slow
    or fails for another reason must not block the receivers.
    """
    deadline = time.monotonic() + PARSE_SECONDS
    return lambda: time.monotonic() > deadline or learner.restarts > 0 or marker.exists()


def receivers(
    settings: Namespace, count: int, ranks: int, arguments: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return the receivers' command lines by name.

    Each of several receivers has a folder in the run's folder. Its ports follow the ports of the
    first receiver. The ports of the ranks' pages are left out.
    """
    if count == 1:
        return {"receiver": command("receiver", *arguments)}
    found: dict[str, Sequence[str]] = {}
    access: dict[str, str] = {}
    if settings.access is None:  # producers that know several receivers have one key for all
        folder = settings.run / KEYS
        access = {
            "access.keys": str(folder / "receiver.secret.json"),
            "access.allow": str(folder / "allow.json"),
        }
    learners = [port_after(settings.http.learner, rank) for rank in range(ranks)]
    taken = {page.rpartition(":")[2] for page in learners} - {"0"}
    pages = (port_after(settings.http.receiver, number) for number in range(count + ranks))
    free = [page for page in pages if page.rpartition(":")[2] not in taken]
    for number in range(count):
        name = f"receiver-{number}"
        options = {
            "run": str(settings.run / name),
            "receiver.bind": port_after(settings.receiver.bind, number),
            "http.receiver": free[number],
            **access,
        }
        given = [part for option, value in options.items() for part in (f"--{option}", value)]
        found[name] = command("receiver", *arguments, *given)
    return found


def leave_other_receivers(run: Path, commands: Container[str]) -> None:
    """Withdraw the addresses of receivers that this run does not start, and name their journals."""
    folders = {"receiver": run} | receivers_below(run)
    others = {name: folder for name, folder in folders.items() if name not in commands}
    for folder in others.values():
        with suppress(OSError, ValueError):  # a full disk, or a link
            withdraw(folder, "receiver")
    if journals := [str(folder) for folder in others.values() if (folder / "journal").is_dir()]:
        log.warning(
            "the journals in %s stay unread, because this run does not start their receivers: "
            "start it with the same --receivers as before, or remove the journals",
            ", ".join(journals),
        )


def prepare_receivers(run: Path, commands: Iterable[str]) -> None:
    """Make the folder of each of several receivers. Producers wait until each has an address."""
    for folder in (run / name for name in commands if name.startswith("receiver-")):
        make_folder(folder)
        with suppress(OSError, ValueError):
            if "receiver" not in load(folder):  # it was withdrawn while the run had fewer receivers
                (folder / ENDPOINTS).unlink(missing_ok=True)


def port_after(address: str, number: int) -> str:
    """Return the address with its port increased by `number`; port 0 or * stays."""
    host, _, port = address.rpartition(":")
    if port == "*":  # any free port, as 0
        return address
    if not port.isdecimal():
        return f"{address}-{number}"
    return f"{host}:{int(port) + number if int(port) else 0}"
