"""stream-ssl receiver: receive samples from producers and write them to the journal."""

from __future__ import annotations

from collections.abc import Sequence

from stream_ssl.config import options
from stream_ssl.process.failures import reported
from stream_ssl.process.signals import stop_on_signals


def main(arguments: Sequence[str]) -> int:
    """Receive until SIGTERM or SIGINT, and return the exit status."""
    stop = stop_on_signals()
    parser = options.receiver_parser()
    settings = options.read(parser, arguments)

    def work() -> None:
        from stream_ssl.daemon.receive import receive

        receive(settings, options.resolved(parser, settings), stop)

    return reported(work)
