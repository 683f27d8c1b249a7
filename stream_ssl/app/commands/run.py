"""stream-ssl run: the daemon."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

from stream_ssl.app import config
from stream_ssl.app.endpoints import hold_role
from stream_ssl.app.failures import DONE, configuring, reported
from stream_ssl.app.signals import stop_on_signals
from stream_ssl.app.supervisor import Supervisor, command, learner_command


def main(arguments: Sequence[str]) -> int:
    """Start receiver and learner, restart what dies, until SIGTERM or SIGINT.

    The receiver's settings are parsed here, for they cost nothing; the learner's by itself, so
    that this process never loads torch. One that finds its settings wrong stops the whole.
    """
    settings = config.read(config.receiver_parser("run"), arguments)
    count = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    count.add_argument("--ranks", type=int, default=1)
    given, rest = count.parse_known_args(arguments)
    if given.ranks < 1:
        count.error(f"--ranks is {given.ranks}: at least 1 process has to learn")
    learner = learner_command(given.ranks, rest)
    supervisor = Supervisor({"receiver": command("receiver", *rest), "learner": learner})
    status = DONE

    def work() -> None:
        nonlocal status
        with ExitStack() as stack:
            with configuring():
                stack.enter_context(hold_role(settings.run, "supervisor"))
            status = supervisor.run(stop_on_signals())

    return reported(work) or status
