"""stream-ssl receiver: receive samples from producers and write them to the journal."""

from __future__ import annotations

from collections.abc import Sequence

from stream_ssl.app import config
from stream_ssl.app.failures import reported
from stream_ssl.app.signals import stop_on_signals


def main(arguments: Sequence[str]) -> int:
    """Receive until SIGTERM or SIGINT, and return the exit status."""
    stop = stop_on_signals()
    parser = config.receiver_parser()
    settings = config.read(parser, arguments)

    def work() -> None:
        from stream_ssl.app.receive import receive

        receive(settings, config.resolved(parser, settings), stop)

    return reported(work)
