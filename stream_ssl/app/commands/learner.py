"""stream-ssl learner: train from the journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from stream_ssl.config import options
from stream_ssl.config.help import print_learner_help
from stream_ssl.process.allocator import keep_freed_memory
from stream_ssl.process.failures import reported
from stream_ssl.process.signals import PARSED, stop_on_signals
from stream_ssl.process.threads import share_cores


def main(arguments: Sequence[str]) -> int:
    """Train until SIGTERM or SIGINT, and return the exit status."""
    if {"-h", "--help"} & {*arguments}:
        print_learner_help()
    share_cores()
    keep_freed_memory()
    parser = options.learner_parser()
    settings = options.read(parser, arguments)
    if marker := os.environ.get(PARSED):
        with contextlib.suppress(OSError):
            Path(marker).touch()

    def work() -> None:
        from stream_ssl.daemon.learn import learn

        learn(parser, settings, stop_on_signals())  # until here, SIGTERM ends the process at once

    return reported(work)
