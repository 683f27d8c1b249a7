"""stream-ssl demo: run the whole system on embedded images, and write a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stream_ssl.config.parser import run_function


def demo(seconds: float = 120.0, out: Path = Path("demo-out")) -> int:
    """Stream embedded real images to a receiver and a learner, then report what was learned.

    Three processes run, the same as in a daemon. A producer sends Fashion-MNIST images: one class
    is 27 times as frequent as each other, and a fifth are near-duplicates. A receiver journals
    them. A learner trains with negatives from a DUEL memory. A second learner uses a queue, for
    comparison.

    Args:
        seconds: how long the stream runs, at least 15. Start and evaluation take additional time.
        out: the run's folder. The files of an earlier demo are replaced.
    """
    from stream_ssl.demo.run import run

    return run(seconds, out)


def main(arguments: Sequence[str]) -> int:
    return run_function(demo, arguments)
