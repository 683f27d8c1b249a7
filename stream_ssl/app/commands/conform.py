"""stream-ssl conform: check a producer in any language against docs/wire.md. Needs no torch."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Callable, Sequence

from stream_ssl.conformance import RULES, Result, tried
from stream_ssl.rate_limited_logger import printable

ADDRESS = "ADDRESS"
KEPT = {True: "kept", False: "BROKEN", None: "not tried"}
DESCRIPTION = f"""Try a producer against the rules of docs/wire.md.

For each rule the producer is started, with the address of a receiver in place of {ADDRESS}. That
receiver is slow, breaks the connection, refuses, grants no credit, restarts, or repeats itself.
The producer must send samples without end, some packets a second, in plain text.
Exit status 0: all rules that could be tried were kept; 1: some were not.
"""
EXAMPLE = f"""example:
  stream-ssl conform -- ./my-producer --to {ADDRESS} --name tried
  stream-ssl conform -- stream-ssl produce synthetic --to {ADDRESS} --name tried --shape.rate 200
"""


def main(arguments: Sequence[str]) -> int:
    """Check each rule, and print a line for it."""
    parser = argparse.ArgumentParser(
        prog="stream-ssl conform",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=list(RULES),
        default=list(RULES),
        metavar="RULE",
        help=f"only these of: {', '.join(RULES)}",
    )
    parser.add_argument("--output", action="store_true", help="show what the producer writes")
    parser.add_argument("command", nargs="+", help=f"the producer, with {ADDRESS} in it")
    settings = parser.parse_args(list(arguments))
    if not any(ADDRESS in word for word in settings.command):
        parser.error(f"the command must have the word {ADDRESS}, for the receiver's address")
    if shutil.which(settings.command[0]) is None:
        parser.error(
            f"{settings.command[0]} is no program that can be started: name the producer's, and "
            "its arguments, after --"
        )
    results = []
    for rule in settings.rules:
        result = tried(rule, starter(settings.command, settings.output))
        print(line(result), flush=True)
        results.append(result)
    broken = sum(result.kept is False for result in results)
    untried = sum(result.kept is None for result in results)
    print(f"\n{len(results) - broken - untried} rules kept, {broken} broken, {untried} not tried")
    return 1 if broken else 0


def line(result: Result) -> str:
    """Return a row of the table, with the observation below it."""
    seen = f"\n{'':<26} {printable(result.why, 2000)}" if result.why else ""
    return f"{KEPT[result.kept]:<10} {result.rule:<15} {result.promise}{seen}"


def starter(command: Sequence[str], output: bool) -> Callable[[str], Callable[[], None]]:
    """Return a function that starts the producer and returns a function that kills it."""

    def start(address: str) -> Callable[[], None]:
        sink = None if output else subprocess.DEVNULL
        process = subprocess.Popen(
            [word.replace(ADDRESS, address) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        )

        def end() -> None:
            process.kill()
            process.wait()

        return end

    return start
