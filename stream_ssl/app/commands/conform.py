"""stream-ssl conform: check a producer in any language against docs/wire.md. Needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from stream_ssl.conformance import RULES, RuleResult, Start, tried
from stream_ssl.process.signals import interrupted_by
from stream_ssl.rate_limited_logger import printable

ADDRESS = "ADDRESS"
KEPT = {True: "kept", False: "BROKEN", None: "not tested"}
DESCRIPTION = (
    "Test a producer against the rules of docs/wire.md.\n\nFor each rule, the command "
    f"starts the producer with the address of a receiver in place of {ADDRESS}.\nThat "
    "receiver is slow, breaks the connection, refuses, grants no credit, restarts, or "
    "repeats\nitself. The producer must send samples without end, some packets per "
    "second, in plain text.\nExit status 0: the producer kept all rules that could be "
    "tested. Exit status 1: it broke a rule.\n"
)
EXAMPLE = f"""example:
  stream-ssl conform -- ./my-producer --to {ADDRESS} --name tried
  stream-ssl conform -- stream-ssl produce synthetic --to {ADDRESS} --name tried --shape.rate 200
"""


def main(arguments: Sequence[str]) -> int:
    """Check each rule, and print a line for it."""
    parser = conform_parser()
    settings = parser.parse_args(list(arguments))
    if not any(ADDRESS in word for word in settings.command):
        parser.error(
            f"the command must contain the word {ADDRESS}, which stands for the receiver's address"
        )
    if shutil.which(settings.command[0]) is None:
        parser.error(
            f"{settings.command[0]} is not a program that can be started: give the "
            "producer's command after --"
        )
    results = []
    with interrupted_by(signal.SIGTERM, signal.SIGHUP):
        for rule in settings.rules:
            try:
                result = tried(rule, starter(settings.command, settings.output))
            except OSError as error:  # such as a script without #!
                parser.error(f"{settings.command[0]} cannot be started: {error.strerror}")
            print(line(result), flush=True)
            results.append(result)
    broken = sum(result.kept is False for result in results)
    untried = sum(result.kept is None for result in results)
    print(f"\n{len(results) - broken - untried} rules kept, {broken} broken, {untried} not tested")
    if broken and not settings.output:
        rules = " ".join(result.rule for result in results if result.kept is False)
        print(f"To see what the producer writes, add before --: --output --rules {rules}")
    return 1 if broken else 0


def conform_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
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
        help=f"test only these rules: {', '.join(RULES)}",
    )
    parser.add_argument("--output", action="store_true", help="show what the producer writes")
    parser.add_argument(
        "command", nargs="+", help=f"command that starts the producer; it contains {ADDRESS}"
    )
    return parser


def line(result: RuleResult) -> str:
    """Return a row of the table, with the observation below it."""
    seen = f"\n{'':<26} {printable(result.why, 2000)}" if result.why else ""
    return f"{KEPT[result.kept]:<10} {result.rule:<15} {result.promise}{seen}"


def starter(command: Sequence[str], output: bool) -> Start:
    """Return a function that starts the producer and returns a function that kills it.

    The command may be a script, whose own processes are killed, too.
    """

    def start(address: str) -> Callable[[], int | None]:
        sink = None if output else subprocess.DEVNULL
        process = subprocess.Popen(
            [word.replace(ADDRESS, address) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
        )

        def end() -> int | None:
            status = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return status

        return end

    return start
