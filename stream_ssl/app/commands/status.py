"""stream-ssl status: what a running daemon is doing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import auto_cli

from stream_ssl.app.endpoints import load
from stream_ssl.app.failures import DONE, FAILED, USAGE


def status(run: Path, seconds: float = 2.0, json: bool = False) -> int:
    """Show what the processes of a run folder are doing; exit status 1 when one does not answer.

    Args:
        run: the run's folder, as `run:` in the config file.
        seconds: how long to measure rates, above 0.
        json: print the figures as JSON.
    """
    from rich.console import Console

    from stream_ssl.app import overview

    if not seconds > 0:
        print(f"--seconds {seconds:g}: must be above 0; rates are over that time", file=sys.stderr)
        return USAGE
    if run.exists() and not run.is_dir():
        print(f"{run} is a file: name the run's folder, `run:` of the config file", file=sys.stderr)
        return USAGE
    addresses = {role: entry["http"] for role, entry in load(run).items()}
    console = Console()
    if not addresses:
        told = f"{run}: nothing has run here. Start it with: stream-ssl run CONFIG --run {run}"
        console.print(told, markup=False, highlight=False)
        return FAILED
    figures = overview.measure(lambda: addresses, seconds, time.sleep)
    if json:
        console.print_json(data=figures)
    else:
        console.print(overview.table(run, addresses, figures))
    return DONE if all(figures["up"].values()) else FAILED


def main(arguments: Sequence[str]) -> int:
    result = auto_cli(status, args=list(arguments), prog="stream-ssl status")
    assert isinstance(result, int)
    return result
