"""stream-ssl run: the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from stream_ssl.app.signals import stop_on_signals
from stream_ssl.app.supervisor import Supervisor, command


def main(arguments: Sequence[str]) -> int:
    """Check the configuration in the two roles' own parsers, then start and watch both."""
    from stream_ssl.app.commands import check

    return check.main(arguments, quiet=True) or _watch(list(arguments))


def _watch(arguments: list[str]) -> int:
    supervisor = Supervisor({role: command(role, *arguments) for role in ("receiver", "learner")})
    return supervisor.run(stop_on_signals())
