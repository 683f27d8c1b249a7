"""stream-ssl demo: the whole system at work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import auto_cli


def demo(seconds: float = 120.0, out: Path = Path("demo-out")) -> int:
    """Stream embedded real images to a receiver and a learner, then report what was learned.

    Three processes, the same that a daemon consists of: a producer sends Fashion-MNIST images, one
    class 27 times as frequent as each other, a fifth of them near-duplicates; a receiver journals
    them; a learner trains with negatives from a DUEL memory, beside a queue for comparison.

    Args:
        seconds: how long the stream runs, at least 15; start and evaluation come on top.
        out: the run's folder; what an earlier demo left there is replaced.
    """
    from stream_ssl.app.demo.run import run

    return run(seconds, out)


def main(arguments: Sequence[str]) -> int:
    status = auto_cli(demo, args=list(arguments), prog="stream-ssl demo")
    assert isinstance(status, int)
    return status
