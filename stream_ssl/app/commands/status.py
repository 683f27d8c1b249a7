"""stream-ssl status: show what a running daemon is doing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from itertools import islice
from json import dumps
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream_ssl.config.parser import run_function
from stream_ssl.daemon.run_states import (
    HEALTH_SECONDS,
    Run,
    RunFolder,
    RunPage,
    address_in,
    broken_file,
    endpoints_of,
    not_a_folder,
    rank_of,
    run_at,
    silence,
    token_of,
)
from stream_ssl.observe.answer import Answer
from stream_ssl.observe.answers import MOST_PRODUCERS, as_json
from stream_ssl.observe.ask import ask, bearer, map_in
from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.conditions import OF_CHECK, SLOWEST_RANK
from stream_ssl.observe.health import STARTING
from stream_ssl.observe.metric_spec import ROLES, role_of
from stream_ssl.observe.scrape import History, Scraper
from stream_ssl.observe.wording import few, percent, plural
from stream_ssl.process.failures import DONE, FAILED, USAGE
from stream_ssl.rate_limited_logger import printable

COLOURS = {"good": "green", "watch": "yellow", "bad": "red", "wait": "dim", "unknown": "dim"}
"""The colour of each level of an answer."""
MARKS = {"good": "●", "watch": "▲", "bad": "✖", "wait": "○", "unknown": "?"}
"""The mark of each level, for terminals without colours."""
RECEIVER_PARTS = (
    *("producers", "samples_per_second", "bytes_per_second", "samples", "acknowledged_samples"),
    *("journal_bytes", "journal_room_bytes", "journal_last_record"),
)
LEARNER_PARTS = (
    *("samples_per_second", "replayed_samples_per_second", "dropped_samples", "pending_samples"),
    *("memory_slots", "memory_capacity_slots"),
)
"""Figures that are summed over all receivers, and over all ranks."""
LARGEST_PARTS = ("lag_seconds", "lag_records")
"""Figures that are those of the worst rank, because ranks may read several journals."""
PAGE_FIGURES = {
    "receiver": {
        "producers": "producers",
        "samples_per_second": "received",
        "bytes_per_second": "bytes",
    },
    "learner": {
        "samples_per_second": "trained",
        "replayed_samples_per_second": "replayed",
        "steps_per_second": "steps",
    },
}
"""Figures that the answers also have, by their names in the figures of a page."""
STARTING_PARTS = {f"started: {STARTING}"}
"""The unready parts of a process whose main loop does not run yet."""
SHORT = 1.0
"""Seconds over which rates are measured that no page shows."""


def status(
    run: Path,
    seconds: float | None = None,
    json: bool = False,
    history: bool = False,
    token_file: Path | None = None,
    health: Literal["receiver", "learner"] | None = None,
) -> int:
    """Show what the processes of a run are doing. Exit status 1 if one of them does not answer.

    Args:
        run: the run's folder, as `run:` in the config file, or the address of its page.
        seconds: how long to measure rates, above 0. None: the rates over the last minute, as on the
            page. An address shows no rates.
        json: print the figures as JSON.
        history: print the figures over time as JSON, which the page of another run can compare.
        token_file: the file of the token that the page at an address requires.
        health: only ask this process whether its loops make progress, as a container's health check
            does. Exit status 1 if it does not answer, or if they do not. It needs the run's folder.
    """
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        wrong = (
            f"--seconds {seconds:g}: must be finite and above 0, because rates are "
            "measured over this time"
        )
        print(wrong, file=sys.stderr)
        return USAGE
    for option, value in (("--seconds", seconds), ("--health", health)):
        if value is not None and address_in(run) is not None:
            print(f"{option} {value}: needs the run's folder, not an address", file=sys.stderr)
            return USAGE
    if why := not_a_folder(run):
        print(why, file=sys.stderr)
        return USAGE
    try:
        place = run_at(run, token_file)
        if history:
            return print_history(place)
        if isinstance(place, RunPage):
            return of_page(place, json)
        return of_folder(run, seconds, json, health)
    except ValueError as error:
        print(error, file=sys.stderr)
        return FAILED


def print_history(run: Run) -> int:
    """Print the figures of both roles over the whole time of their processes, as JSON."""
    names = [one["run"] for one in run.read().states.values() if one.get("run")]
    histories: dict[str, Any] = {"run": names[0] if names else Path(run.title).name}
    for role in ROLES:
        if found := run.ask(role, "history", track="whole"):
            histories[role] = found[0]
    if len(histories) == 1:
        raise ValueError(
            f"{run.title}: no process answers, and the figures end with their process. Ask while "
            "the run goes on; Prometheus or `loggers: [tensorboard]` keeps figures for longer"
        )
    print(dumps(histories))
    return DONE


def console() -> Console:
    """Return the output, which shows `:x:` of a path as it is, and not as an emoji."""
    return Console(emoji=False)


def print_json(data: Mapping[str, Any]) -> None:
    """Print JSON without colours, which FORCE_COLOR would add also where a program reads it."""
    print(dumps(data, indent=2))


def of_page(page: RunPage, json: bool) -> int:
    """Print the answers that a page gives."""
    reading = page.read()
    if json:
        print_json({"answers": as_json(reading.answers)})
    else:
        shown = answers_table(page.title)
        add_answers(shown, reading.answers)
        console().print(shown)
    return FAILED if any("error" in state for state in reading.states.values()) else DONE


def runs_below(folder: Path) -> list[str]:
    """Return the first three subfolders by name in which a run has started."""
    # Path.exists would raise for a folder that this user may not enter.
    found = (one for one in sorted(folder.glob("*/")) if os.access(one / "journal", os.F_OK))
    return [printable(str(one)) for one in islice(found, 3)]


def of_folder(run: Path, seconds: float | None, json: bool, health: str | None) -> int:
    """Print the answers and the figures of the run in a folder.

    Raises:
        ValueError: this user may not read the token file.
    """
    endpoints, broken = endpoints_of(run), broken_file(run)
    addresses = {role: entry["http"] for role, entry in endpoints.items()}
    if health is not None:
        return check_health(health, addresses.get(health), broken)
    token = token_of(endpoints)
    if not addresses and (error := _nothing_known(run, broken)) is not None:
        if json:
            print_json({"answers": [], "error": error})
        else:
            console().print(error, markup=False, highlight=False, soft_wrap=True)
        return FAILED
    figures = measure(addresses, seconds or SHORT, token)
    reading = RunFolder(run).read()
    silent = silence(run, endpoints, [role for role, up in figures["up"].items() if not up])
    others = ("unknown", "hung", "ended", "absent", "silent")
    keys = {"starting": "pid"} | {key: key for key in others}
    for kind, key in keys.items():
        figures[kind] = {name: state[key] for name, state in silent.items() if key in state}
    if seconds is None:
        figures |= as_on_page(figures, reading.states)
    if json:
        print_json({"answers": as_json(reading.answers), **figures})
    else:
        console().print(table(run, addresses, figures, reading.answers))
    return DONE if all(figures["up"].values()) else FAILED


def _nothing_known(run: Path, broken: str | None) -> str | None:
    """Return an error if a folder without addresses has no trace of a process; None if it has one.

    Args:
        broken: why endpoints.json cannot be used; None if it can.
    """
    facts = {"pid", "unknown", *(() if broken else ("ended",))}
    if any(facts & state.keys() for state in silence(run, {}, ROLES).values()):
        return None
    if broken is not None:
        return f"{broken}. No process of the run is running. Its next start writes the file again"
    if (run / "journal").exists():
        return f"{run}: no process of the run is running. Continue with: stream-ssl run CONFIG"
    if below := runs_below(run):
        which = "that folder" if len(below) == 1 else "one of these folders"
        return f"{run} is no run, but holds {'; '.join(below)}: give {which}"
    return f"{run}: no run has started here. Start it with: stream-ssl run CONFIG --run {run}"


def as_on_page(
    figures: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of both roles, in which the figures that the page shows are the page's.

    The answers come from the page, and one output must not name two numbers. New samples come in
    batches, so a rate over few seconds is often 0 while the learner trains.
    """
    found = {}
    for role, rates in PAGE_FIGURES.items():
        of_role = [state for name, state in states.items() if role_of(name) == role]
        found[role] = figures[role] and dict(figures[role])
        for name, series in rates.items():
            values = [state.get("figures", {}).get(series) for state in of_role]
            if found[role] and values and None not in values:
                added = name in (*RECEIVER_PARTS, *LEARNER_PARTS)
                found[role][name] = sum(values) if added else values[0]
    return found


def main(arguments: Sequence[str]) -> int:
    return run_function(status, arguments)


def check_health(role: str, address: str | None, broken: str | None = None) -> int:
    """Print the answer of /healthz, and return the exit status.

    Args:
        address: address of its page; None: unknown.
        broken: why endpoints.json cannot be used; None: it can be used.
    """
    if address is None:
        print(broken or f"the {role} has not started")
        return FAILED
    try:
        code, body = ask(address, "/healthz", HEALTH_SECONDS)
    except (OSError, HTTPException) as error:
        print(f"the {role} does not answer at {address}: {error or type(error).__name__}")
        return FAILED
    print(printable(body.decode(errors="replace"), 4000))
    return DONE if code == HTTPStatus.OK else FAILED


def readiness(address: str, token: str | None = None) -> dict[str, Any]:
    """Return the answer of /readyz (parts, conditions that need attention), or {} without one."""
    try:
        return map_in(ask(address, "/readyz", HEALTH_SECONDS, bearer(token))[1])
    except (OSError, HTTPException, ValueError):
        return {}


def not_ready(ready: Mapping[str, Any]) -> list[str]:
    """Return the parts that are not ready, such as "journal: cannot be written"."""
    parts: Mapping[str, Any] = ready.get("parts", {})
    failing = {name: part.get("detail") for name, part in parts.items() if not part["ok"]}
    return [f"{name}: {detail}" if detail else name for name, detail in failing.items()]


def measure(
    addresses: Mapping[str, str],
    seconds: float,
    token: str | None = None,
) -> dict[str, Any]:
    """Scrape twice, `seconds` apart, and return the figures. Rates are over that time.

    Returns:
        Plain values in base units. A figure is None if its process does not answer, or has not
        measured it yet. RECEIVER_PARTS and LEARNER_PARTS are summed over receivers and ranks.
        LARGEST_PARTS are the largest values of all ranks.
    """
    scrapers = {
        name: Scraper(partial(dict, {name: address}), token=token)
        for name, address in addresses.items()
    }
    histories = {name: History() for name in addresses}
    for number in range(2):
        if number:
            time.sleep(seconds)
        for name, scraper in scrapers.items():
            histories[name].append(scraper.scrape())
    up = {name: bool(history.snapshots[-1].up) for name, history in histories.items()}
    ranks = _ranks(histories["learner"]) if up.get("learner") else None
    if ranks is not None:  # an earlier start of the group may have had more ranks
        up = {name: answers for name, answers in up.items() if rank_of(name) < ranks}
    answering = [name for name, answers in up.items() if answers]
    receivers = [name for name in answering if role_of(name) == "receiver"]
    ready = {name: readiness(addresses[name], token) for name in answering}
    return {
        "up": dict.fromkeys((role for role in ROLES if role not in map(role_of, up)), False) | up,
        "not_ready": {name: not_ready(ready[name]) for name in answering},
        "conditions": {name: ready[name].get("conditions", []) for name in answering},
        "receiver": _summed(
            [receiver_figures(histories[name]) for name in receivers], set(RECEIVER_PARTS)
        ),
        "learner": _summed(
            [
                learner_figures(history)
                for name, history in histories.items()
                # A learner that starts has not loaded its checkpoint, so its zeros say nothing.
                if name in answering
                and role_of(name) == "learner"
                and not history.last("stream_ssl_starting")
            ],
            set(LEARNER_PARTS),
        ),
        "group": group_figures(histories["learner"]) if ranks and ranks > 1 else None,
    }


def _ranks(first: History) -> int:
    """Return how many ranks learn together, from the metrics of the first rank."""
    count = 0
    while first.has("stream_ssl_rank_shard_slots", rank=str(count)):
        count += 1
    return max(1, count)


def _summed(figures: Sequence[Mapping[str, Any]], parts: Set[str]) -> Mapping[str, Any] | None:
    """Return the figures of all processes together.

    Those in `parts` are summed. LARGEST_PARTS are the largest values of all processes. The other
    figures are those of the first process.
    """
    if not figures:
        return None
    found = dict(figures[0])
    for name in found:
        if name in parts or name in LARGEST_PARTS:
            join = sum if name in parts else max
            found[name] = join(one[name] for one in figures)
    return found


def group_figures(first: History) -> dict[str, float | None]:
    """Return the figures of the group, from the metrics of the first rank.

    As on the page, no rank is the slowest if all are about as busy, or if no update was made.
    """
    busy = [
        first.rate("stream_ssl_rank_busy_seconds_total", rank=str(rank))
        for rank in range(_ranks(first))
    ]
    differ = first.rate("stream_ssl_steps_total") > 0 and max(busy) > SLOWEST_RANK * min(busy)
    return {
        "ranks": len(busy),
        "slowest_rank": busy.index(max(busy)) if differ else None,
        "slowest_busy_ratio": min(1.0, max(busy)),  # ranks report rarely, so a rate may exceed 1
        "fastest_busy_ratio": min(1.0, min(busy)),
        "sent_bytes_per_second": first.rate("stream_ssl_rank_sent_bytes_total"),
        "parked_journals": first.last("stream_ssl_parked_journals"),
    }


def receiver_figures(history: History) -> dict[str, float]:
    """Return the receiver's figures."""
    return {
        "producers": history.last("stream_ssl_producers_connected"),
        "samples_per_second": history.rate("stream_ssl_received_samples_total"),
        "bytes_per_second": history.rate("stream_ssl_received_bytes_total"),
        "samples": history.last("stream_ssl_received_samples_total"),
        "acknowledged_samples": history.last("stream_ssl_acked_samples_total"),
        "journal_bytes": history.last("stream_ssl_journal_bytes"),
        "journal_room_bytes": history.last("stream_ssl_journal_room_bytes"),
        "journal_last_record": history.last("stream_ssl_journal_last_record"),
    }


def learner_figures(history: History) -> dict[str, float | None]:
    """Return the learner's figures.

    The loss is None before the first step, and after an update that was skipped. The share of
    near-duplicates is None for a memory of vectors, and until two slots are occupied.
    """
    measured = history.snapshots[-1].values.get
    saved = history.last("stream_ssl_checkpoint_timestamp_seconds") > 0  # its step may be 0
    return {
        "steps": history.last("stream_ssl_steps_total"),
        "step": history.last("stream_ssl_step"),
        "steps_per_second": history.rate("stream_ssl_steps_total"),
        "samples_per_second": history.rate("stream_ssl_trained_samples_total"),
        "replayed_samples_per_second": history.rate("stream_ssl_replayed_samples_total"),
        "dropped_samples": history.last("stream_ssl_near_duplicates_total"),
        "loss": measured("stream_ssl_loss"),
        "skipped_updates_in_a_row": history.last("stream_ssl_skipped_updates_in_a_row"),
        "divergence_reloads": history.last("stream_ssl_divergence_reloads_total"),
        "lag_seconds": history.last("stream_ssl_lag_seconds"),
        "pending_samples": history.last("stream_ssl_pending_samples"),
        "lag_records": history.last("stream_ssl_lag_records"),
        "memory_slots": history.last("stream_ssl_memory_slots", memory=WORKING),
        "memory_capacity_slots": history.last("stream_ssl_memory_capacity_slots", memory=WORKING),
        "memory_effective_rank": history.last("stream_ssl_memory_effective_rank", memory=WORKING),
        # The metric is 0 from a start until new samples arrive.
        "stream_effective_rank": measured("stream_ssl_stream_effective_rank") or None,
        "collision_similarity": history.last("stream_ssl_collision_similarity"),
        "memory_near_duplicates_ratio": measured("stream_ssl_memory_near_duplicates_ratio"),
        "checkpoint_step": history.last("stream_ssl_checkpoint_step") if saved else None,
        "checkpoint_age_seconds": history.last("stream_ssl_checkpoint_age_seconds"),
        "checkpoint_failures": history.last("stream_ssl_checkpoint_failures_total"),
        "checkpoint_copies": history.last("stream_ssl_checkpoint_copies_total"),
        "checkpoint_copy_step": history.last("stream_ssl_checkpoint_copy_step"),
        "checkpoint_copy_late_seconds": history.last("stream_ssl_checkpoint_copy_late_seconds"),
        "checkpoint_copy_failures": history.last("stream_ssl_checkpoint_copy_failures_total"),
    }


def answers_table(title: str) -> Table:
    """Return an empty table with the columns of the answers."""
    shown = Table(title=escape(f"stream-ssl · {title}"), show_header=False, title_justify="left")
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")  # a narrow terminal shows the whole path of a folder
    return shown


def add_answers(shown: Table, found: Sequence[Answer]) -> None:
    """Add a row for each answer."""
    for one in found:
        runbooks = [link for _, link in one.links if one.question == "Health" and link[0] != "#"]
        more = "".join(f"\n[dim]docs/{escape(link)}.md[/]" for link in runbooks)
        says = escape(printable(one.says, 2000))
        mark = f"[{COLOURS[one.level]}]{MARKS[one.level]}[/]"
        shown.add_row(f"{mark} {one.question}", f"{one.word}: {says}{more}")


def table(
    run: Path,
    addresses: Mapping[str, str],
    figures: Mapping[str, Any],
    found: Sequence[Answer] = (),
) -> Table:
    """Return the answers and the figures as a table for people."""
    shown = answers_table(str(run))
    add_answers(shown, found)
    shown.add_section()
    for role in sorted(figures["up"], reverse=True):
        shown.add_row(role, _state(role, addresses.get(role), figures) + _reasons(role, figures))
    looks = any((one.question, one.level) == ("Health", "watch") for one in found)
    shown.add_row("health", _verdict(figures, looks))
    known = (*figures["starting"], *figures["unknown"], *figures["ended"])
    if not any((*figures["up"].values(), *known)):
        shown.add_row("", "if the run was stopped, continue it with: stream-ssl run CONFIG")
    if (receiving := figures["receiver"]) is not None:
        _add_receiver(shown, receiving)
    if (learning := figures["learner"]) is not None:
        _add_learner(shown, learning)
    if (group := figures["group"]) is not None:
        parked = group["parked_journals"]
        shown.add_row(
            "group",
            f"{plural(group['ranks'], 'rank')}; {_busy(group)}; each rank sends about "
            f"{group['sent_bytes_per_second'] / 1e6:.1f} MB/s"
            + (f"; [red]{plural(parked, 'journal')} parked[/]" if parked else ""),
        )
    return shown


def _busy(group: Mapping[str, Any]) -> str:
    """Return how busy the ranks are."""
    most = percent(group["slowest_busy_ratio"])
    if group["slowest_rank"] is None:
        return f"each is busy for at most {most} of the time"
    return (
        f"rank {group['slowest_rank']} is the slowest: it is busy for {most} of the time, and "
        f"the fastest for {percent(group['fastest_busy_ratio'])}"
    )


def _state(role: str, address: str | None, figures: Mapping[str, Any]) -> str:
    """Return whether a process is up, or how it ended."""
    if figures["up"][role]:
        begins = STARTING_PARTS & {*figures["not_ready"].get(role, [])}
        return f"[yellow]{STARTING}[/]  {address}" if begins else f"[green]up[/]  {address}"
    if (pid := figures["starting"].get(role)) is not None:
        return f"[yellow]starting[/] (pid {pid})"
    if (ended := figures["ended"].get(role)) is not None:
        colour = "yellow" if ended["end"] == "stopped" else "red"
        how = f"[{colour}]{escape(ended['says'].removeprefix(f'the {role} '))}[/]"
        return how + (f"; {escape(ended['words'])}" if ended["words"] else "")
    if (why := figures["unknown"].get(role)) is not None:
        return f"[red]its address is unknown[/]: {escape(why)}"
    if (why := figures["silent"].get(role)) is not None:
        return f"[red]{escape(why.removeprefix(f'the {role} '))}[/]"
    return f"[red]does not answer[/] at {address}" if address else "[red]not started[/]"


def _reasons(role: str, figures: Mapping[str, Any]) -> str:
    """Return a line for each reason that a process is not ready, and for each condition."""
    conditions = figures["conditions"].get(role, [])
    present = {one["name"] for one in conditions}
    reasons = ""
    for reason in figures["not_ready"].get(role, []):
        check = reason.partition(":")[0]
        # A reason that is a condition stands below, with its remedy.
        if reason not in STARTING_PARTS and OF_CHECK.get(check, check) not in present:
            reasons += f"\n[red]not ready[/]: {escape(reason)}"
    by_advice: dict[tuple[str, str], list[str]] = {}
    for one in sorted(conditions, key=itemgetter("producer")):
        by_advice.setdefault((one["name"], one["remedy"]), []).append(one["says"])
    for (name, remedy), says in by_advice.items():
        shown = escape(few(says, MOST_PRODUCERS, "; "))
        reasons += f"\n[red]{name}[/]: {shown}. {escape(remedy)}"
    if why := figures["hung"].get(role):
        reasons += f"\n[red]process-hung[/]: {escape(why)}"
    return reasons


def _add_receiver(shown: Table, figures: Mapping[str, Any]) -> None:
    """Add the rows of the receiver's figures."""
    shown.add_row(
        "receiving",
        f"{figures['samples_per_second']:,.0f} samples/s, "
        f"{figures['bytes_per_second'] / 1e6:.1f} MB/s "
        f"from {plural(figures['producers'], 'producer')}; "
        f"{plural(figures['acknowledged_samples'], 'sample')} acknowledged "
        "since the receiver started",
    )
    room, held = figures["journal_room_bytes"] / 1e6, figures["journal_bytes"] / 1e6
    if held or room:  # both are 0 until the receiver has measured them
        shown.add_row(
            "journal", f"{held:,.1f} MB; its budget and its disk have room for {room:,.0f} MB"
        )


def _add_learner(shown: Table, figures: Mapping[str, Any]) -> None:
    """Add the rows of the learner's figures."""
    shown.add_row(
        "learning",
        f"{figures['samples_per_second']:,.0f} new samples/s, "
        f"{figures['replayed_samples_per_second']:,.0f}/s again, "
        f"{figures['steps_per_second']:.1f} updates/s, {_loss(figures)}; step "
        f"{figures['step']:,.0f}, {figures['steps']:,.0f} updates since the start",
    )
    if away := figures["dropped_samples"]:
        shown.add_row(
            "dropped",
            f"{plural(away, 'near-duplicate')}, before they were encoded (learner.novelty)",
        )
    wait = "read and not yet trained on" if figures["lag_records"] else "wait for a full batch"
    shown.add_row(
        "lag",
        f"{figures['lag_seconds']:.1f} s, {plural(figures['lag_records'], 'packet')}; "
        f"{plural(figures['pending_samples'], 'sample')} {wait}",
    )
    shown.add_row("memory", _memory(figures))
    shown.add_row("checkpoint", _checkpoint(figures))


def _verdict(figures: Mapping[str, Any], looks: bool) -> str:
    """Return a line on the run's health: "all well" only if every process answers and is ready."""
    present = figures["conditions"].values()
    conditions = len({one["name"] for found in present for one in found if not one.get("over")})
    starting = figures["starting"]
    down = [role for role in sorted(figures["up"], reverse=True) if not figures["up"][role]]
    silent = [role for role in down if role not in starting]
    if silent:
        if figures["unknown"]:
            return "[red]unknown[/]: a running process writes endpoints.json again; try again"
        if any(figures["up"].values()) and figures["absent"].keys() >= {*silent}:
            return f"[yellow]incomplete[/]: no {' and no '.join(silent)} has started here"
        if figures["ended"]:
            ends = {one["end"] for one in figures["ended"].values()}
            colour = "yellow" if ends == {"stopped"} else "red"
            here = any(figures["up"].values()) or starting
            who = " and ".join(silent) if here else "no process of the run is running"
            return f"[{colour}]down[/]: {who}, see above"
        verb = "does" if len(silent) == 1 else "do"
        return f"[red]unknown[/]: {' and '.join(silent)} {verb} not answer"
    if conditions:
        verb = "needs" if conditions == 1 else "need"
        return f"[red]{plural(conditions, 'condition')} {verb} attention[/], see above"
    if starting:
        return f"[yellow]starting[/]: {' and '.join(down)}"
    if waiting := [role for role, parts in figures["not_ready"].items() if parts]:
        begin = all({*figures["not_ready"][role]} <= STARTING_PARTS for role in waiting)
        text = f"{STARTING}[/]: {' and '.join(sorted(waiting, reverse=True))}"
        return f"[yellow]{text}" if begin else "[yellow]not ready yet[/]"
    return "[yellow]worth a look[/], see above" if looks else "[green]healthy[/]"


def _loss(figures: Mapping[str, float | None]) -> str:
    if (loss := figures["loss"]) is not None:
        return f"loss {loss:.3f}"
    if skipped := figures["skipped_updates_in_a_row"]:
        return "no loss: the last " + (
            "update was skipped" if skipped == 1 else f"{skipped:.0f} updates were skipped"
        )
    if figures["steps"] or figures["divergence_reloads"]:
        return "no loss: the last updates were skipped"
    return "no update yet"


def _memory(figures: Mapping[str, Any]) -> str:
    text = f"{figures['memory_slots']:,.0f} of {figures['memory_capacity_slots']:,.0f} slots"
    if not figures["memory_slots"]:
        return text
    if (alike := figures["memory_near_duplicates_ratio"]) is not None:
        text += f", {percent(alike)} near-duplicates"
    rank = figures["stream_effective_rank"]
    return f"{text}, effective rank {figures['memory_effective_rank']:.1f}" + (
        "" if rank is None else f" (stream {rank:.1f})"
    )


def _checkpoint(figures: Mapping[str, float | None]) -> str:
    failures = figures["checkpoint_failures"]
    failed = f", [red]{failures:.0f} failed[/]" if failures else ""
    if figures["checkpoint_step"] is None:
        return f"none yet{failed}"
    age, step = figures["checkpoint_age_seconds"], figures["checkpoint_step"]
    return f"step {step:,.0f}, {age:.0f} s ago{failed}{_copies(figures)}"


def _copies(figures: Mapping[str, float | None]) -> str:
    """Return the newest copy in the bucket, its delay and the failures; "" without copies."""
    failures, late = figures["checkpoint_copy_failures"], figures["checkpoint_copy_late_seconds"]
    if not (figures["checkpoint_copies"] or failures or late):
        return ""
    step = figures["checkpoint_copy_step"]
    newest = f"step {step:,.0f}" if figures["checkpoint_copies"] else "none yet"
    waits = f", a checkpoint waits for {late:.0f} s" if late else ""
    failed = f", [red]{failures:.0f} failed[/]" if failures else ""
    return f"; in the bucket: {newest}{waits}{failed}"
