"""stream-ssl status: what a running daemon is doing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from jsonargparse import auto_cli
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream_ssl.app.endpoints import load
from stream_ssl.app.failures import DONE, FAILED, USAGE
from stream_ssl.app.scrape import History, Scraper
from stream_ssl.observe.http_access import Token

ROLES = ("receiver", "learner")
HEALTH_SECONDS = 3.0


def status(
    run: Path,
    seconds: float = 2.0,
    json: bool = False,
    health: Literal["receiver", "learner"] | None = None,
) -> int:
    """Show what the processes of a run folder are doing; exit status 1 when one does not answer.

    Args:
        run: the run's folder, as `run:` in the config file.
        seconds: how long to measure rates, above 0.
        json: print the figures as JSON.
        health: only ask this process whether its loops get on, as a container's health check
            does; exit status 1 when it does not answer, or when they do not.
    """
    if not seconds > 0:
        print(f"--seconds {seconds:g}: must be above 0; rates are over that time", file=sys.stderr)
        return USAGE
    if run.exists() and not run.is_dir():
        print(f"{run} is a file: name the run's folder, `run:` of the config file", file=sys.stderr)
        return USAGE
    endpoints = load(run)
    addresses = {role: entry["http"] for role, entry in endpoints.items()}
    if health is not None:
        return check_health(health, addresses.get(health))
    try:
        token = token_of(endpoints)
    except ValueError as error:
        print(error, file=sys.stderr)
        return FAILED
    console = Console()
    if not addresses:
        told = f"{run}: nothing has run here. Start it with: stream-ssl run CONFIG --run {run}"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        return FAILED
    figures = measure(lambda: addresses, seconds, time.sleep, token)
    if json:
        console.print_json(data=figures)
    else:
        console.print(table(run, addresses, figures))
    return DONE if all(figures["up"].values()) else FAILED


def main(arguments: Sequence[str]) -> int:
    result = auto_cli(status, args=list(arguments), prog="stream-ssl status")
    assert isinstance(result, int)
    return result


def check_health(role: str, address: str | None) -> int:
    """Print what /healthz answers; the exit status."""
    if address is None:
        print(f"the {role} has not started")
        return FAILED
    connection = HTTPConnection(urlsplit(address).netloc, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", "/healthz")
        reply = connection.getresponse()
        print(reply.read().decode(errors="replace"))
    except (OSError, HTTPException) as error:
        print(f"the {role} does not answer at {address}: {error or type(error).__name__}")
        return FAILED
    finally:
        connection.close()
    return DONE if reply.status == HTTPStatus.OK else FAILED


def token_of(endpoints: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The token that the run's processes ask for; None where they ask for none.

    Raises:
        ValueError: this user may not read its file.
    """
    files = {entry["token_file"] for entry in endpoints.values() if "token_file" in entry}
    return Token.load(Path(files.pop())).secret if files else None


def measure(
    addresses: Callable[[], Mapping[str, str]],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    token: str | None = None,
) -> dict[str, Any]:
    """Scrape twice, `seconds` apart; rates are over that time.

    Returns:
        Plain values in base units. A figure is None where its process does not answer.
    """
    scraper, history = Scraper(addresses, token=token), History()
    history.append(scraper.scrape())
    sleep(seconds)
    history.append(scraper.scrape())
    up = history.snapshots[-1].up
    return {
        "up": {role: role in up for role in ROLES},
        "receiver": receiver_figures(history) if "receiver" in up else None,
        "learner": learner_figures(history) if "learner" in up else None,
    }


def receiver_figures(history: History) -> dict[str, float]:
    """The receiver's figures."""
    return {
        "producers": history.last("stream_ssl_producers_connected"),
        "samples_per_second": history.rate("stream_ssl_received_samples_total"),
        "bytes_per_second": history.rate("stream_ssl_received_bytes_total"),
        "samples": history.last("stream_ssl_received_samples_total"),
        "journal_bytes": history.last("stream_ssl_journal_bytes"),
        "journal_room_bytes": history.last("stream_ssl_journal_room_bytes"),
        "journal_last_record": history.last("stream_ssl_journal_last_record"),
    }


def learner_figures(history: History) -> dict[str, float]:
    """The learner's figures."""
    return {
        "steps": history.last("stream_ssl_steps_total"),
        "steps_per_second": history.rate("stream_ssl_steps_total"),
        "samples_per_second": history.rate("stream_ssl_trained_samples_total"),
        "loss": history.last("stream_ssl_loss"),
        "lag_seconds": history.last("stream_ssl_lag_seconds"),
        "pending_samples": history.last("stream_ssl_pending_samples"),
        "lag_records": history.last("stream_ssl_lag_records"),
        "memory_slots": history.last("stream_ssl_memory_slots", memory="working"),
        "memory_capacity_slots": history.last("stream_ssl_memory_capacity_slots", memory="working"),
        "memory_effective_rank": history.last("stream_ssl_memory_effective_rank", memory="working"),
        "stream_effective_rank": history.last("stream_ssl_stream_effective_rank"),
        "collision_similarity": history.last("stream_ssl_collision_similarity"),
        "memory_near_copies_ratio": history.last("stream_ssl_memory_near_copies_ratio"),
        "checkpoint_step": history.last("stream_ssl_checkpoint_step"),
        "checkpoint_age_seconds": history.last("stream_ssl_checkpoint_age_seconds"),
        "checkpoint_failures": history.last("stream_ssl_checkpoint_failures_total"),
    }


def table(run: Path, addresses: Mapping[str, str], figures: Mapping[str, Any]) -> Table:
    """The figures as a person reads them."""
    shown = Table(title=escape(f"stream-ssl · {run}"), show_header=False, title_justify="left")
    shown.add_column(style="bold")
    shown.add_column()
    for role in ROLES:
        state = "[green]up[/]" if figures["up"][role] else "[red]does not answer[/]"
        shown.add_row(role, f"{state}  {addresses.get(role, 'never started')}")
    if (r := figures["receiver"]) is not None:
        shown.add_row(
            "receiving",
            f"{r['samples_per_second']:,.0f} samples/s, {r['bytes_per_second'] / 1e6:.1f} MB/s "
            f"from {r['producers']:.0f} producers",
        )
        room = r["journal_room_bytes"] / 1e6
        shown.add_row("journal", f"{r['journal_bytes'] / 1e6:,.1f} MB, room for {room:,.0f} MB")
    if (learning := figures["learner"]) is not None:
        shown.add_row(
            "learning",
            f"{learning['samples_per_second']:,.0f} samples/s, "
            f"{learning['steps_per_second']:.1f} steps/s, "
            f"loss {learning['loss']:.3f}",
        )
        shown.add_row(
            "lag",
            f"{learning['lag_seconds']:.1f} s, {learning['lag_records']:,.0f} packets; "
            f"{learning['pending_samples']:,.0f} samples read and not yet trained on",
        )
        shown.add_row(
            "memory",
            f"{learning['memory_slots']:,.0f} of {learning['memory_capacity_slots']:,.0f} slots, "
            f"{learning['memory_near_copies_ratio']:.0%} near-copies, effective rank "
            f"{learning['memory_effective_rank']:.1f} "
            f"(stream {learning['stream_effective_rank']:.1f})",
        )
        shown.add_row("checkpoint", _checkpoint(learning))
    return shown


def _checkpoint(figures: Mapping[str, float]) -> str:
    failures = figures["checkpoint_failures"]
    failed = f", [red]{failures:.0f} failed[/]" if failures else ""
    if not figures["checkpoint_step"]:
        return f"none yet{failed}"
    age, step = figures["checkpoint_age_seconds"], figures["checkpoint_step"]
    return f"step {step:,.0f}, {age:.0f} s ago{failed}"
