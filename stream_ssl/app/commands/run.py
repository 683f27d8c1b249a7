"""stream-ssl run: the daemon."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stream_ssl.app import config
from stream_ssl.app.endpoints import RoleTaken, hold_role
from stream_ssl.app.failures import FAILED
from stream_ssl.app.signals import stop_on_signals
from stream_ssl.app.supervisor import Supervisor, command

log = logging.getLogger("stream_ssl")


def main(arguments: Sequence[str]) -> int:
    """Start receiver and learner, restart what dies, until SIGTERM or SIGINT.

    The receiver's settings are parsed here, for they cost nothing; the learner's by itself, so
    that this process never loads torch. One that finds its settings wrong stops the whole.
    """
    settings = config.read(config.receiver_parser("run"), arguments)
    roles = ("receiver", "learner")
    supervisor = Supervisor({role: command(role, *arguments) for role in roles})
    try:
        with hold_role(settings.run, "supervisor"):
            return supervisor.run(stop_on_signals())
    except RoleTaken as error:
        log.error("%s", error)
        return FAILED
