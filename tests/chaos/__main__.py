"""make chaos: all gates of delivery at full length, their figures in a dated report.

    make chaos                                   # all, about two hours
    make chaos GATES="power-cuts kills"          # some
    make chaos GATES=soak SOAK_MINUTES=20160     # 14 days; started again, it goes on; 0: figures

Short forms of all of them are part of `make test`.
"""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml
from rich.console import Console

from benchmarks.report import Result, markdown, path_of, table
from stream_ssl.demo import machine
from stream_ssl.durable import write

Rows = list[dict[str, Any]]
REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports" / "chaos"
TESTS = Path(__file__).parents[1]


def checked(figures: dict[str, Any], target: str, met: bool) -> dict[str, Any]:
    """Return a row of the report."""
    return {**figures, "target": target, "met": bool(met)}


def none_lost(figures: dict[str, Any]) -> dict[str, Any]:
    held = not figures["lost"] and not figures["twice"]
    return checked(figures, "0 lost, 0 twice", held)


def kills(scratch: Path, minutes: float) -> Rows:
    from chaos import kills

    receiver = kills.receiver(scratch / "receiver", 50, 100_000)
    learner = kills.learner(scratch / "learner", 12, 120)
    burst = kills.burst(scratch / "burst")
    return [
        {"gate": 1, **none_lost(receiver)},
        {"gate": 2, **checked(learner, "bit-equal", learner["unequal"] == 0)},
        {"gate": 3, **checked(burst, "healthy in < 60 s", burst["seconds"] < 60)},
    ]


def ranks(scratch: Path, minutes: float) -> Rows:
    from chaos import ranks

    killed = ranks.kills(scratch / "kills", 20, 60_000)
    hung = ranks.hangs(scratch / "hangs", 20_000)
    alike = ranks.evictions()
    soon = hung["gone"] < hung["timeout"] + 60
    return [
        {"gate": 15, **checked(killed, "bit-equal", killed["unequal"] == 0)},
        {"gate": "evictions", **checked(alike, "as one process", not alike["failed"])},
        {"gate": 16, **checked(hung, "gone in the time-out and torchrun's 30 s", soon)},
    ]


def receivers(scratch: Path, minutes: float) -> Rows:
    from chaos import receivers

    found = receivers.away(scratch / "away", 60.0, samples=20_000, rate=200)
    joined = receivers.joins(scratch / "joins", names=40, samples=100)
    held = not (joined["lost"] or joined["twice"] or joined["went_elsewhere"])
    return [
        {"gate": 17, **none_lost(found)},
        {"gate": "a fourth", **checked(joined, "its share moved, 0 lost, 0 twice", held)},
    ]


def elastic(scratch: Path, minutes: float) -> Rows:
    from chaos import elastic

    found = elastic.away(scratch, samples=12_000, rate=60)
    read = found["short_of_a_batch"] < elastic.BATCH
    held = found["parked"] == 1 and read and not (found["lost"] or found["twice"])
    return [{"gate": 18, **checked(found, "1 parked, 0 lost, 0 twice", held)}]


def power_cuts(scratch: Path, minutes: float) -> Rows:
    from chaos import power_cuts

    (scratch / "receiver").mkdir()
    (scratch / "learner").mkdir()
    receiver = power_cuts.receiver(scratch / "receiver", 150)
    learner = power_cuts.learner(scratch / "learner", 100)
    whole = not learner["gone"] and not learner["unequal"]
    return [
        {"gate": 4, "of": "receiver", **none_lost(receiver)},
        {"gate": 4, "of": "learner", **checked(learner, "0 gone, bit-equal", whole)},
    ]


def damage(scratch: Path, minutes: float) -> Rows:
    from chaos import damage

    (scratch / "j").mkdir()
    (scratch / "c").mkdir()
    journal = damage.journal(scratch / "j", 125)
    checkpoints = damage.checkpoints(scratch / "c", 60)
    held = not (journal["wrong"] or journal["failed"] or journal["uncounted"])
    return [
        {"gate": 5, "of": "journal", **checked(journal, "0 wrong, uncounted or failed", held)},
        {
            "gate": 5,
            "of": "checkpoint",
            **checked(checkpoints, "0 failed", not checkpoints["failed"]),
        },
    ]


def bad_disk(scratch: Path, minutes: float) -> Rows:
    from chaos import bad_disk

    found = [
        bad_disk.run(scratch / str(number), number, 20.0) for number in (errno.ENOSPC, errno.EROFS)
    ]
    if os.geteuid() == 0:  # who may mount a file system
        found.append(bad_disk.real_full(scratch / "full", 20.0))
        found.append(bad_disk.own_journal(scratch / "own"))
        found.append(bad_disk.real_read_only(scratch / "read-only", 20.0))
    return [{"gate": 7, **none_lost(figures)} for figures in found]


def slow_learner(scratch: Path, minutes: float) -> Rows:
    from chaos import slow_learner

    found = slow_learner.run(scratch / "run", seconds=180.0, warm_up=30.0)
    within = found["journal_mb"] <= 1.1 * found["budget_mb"]
    target = "journal <= budget + 10 %, least / most >= 0.9"
    return [{"gate": 8, **checked(found, target, within and found["fairness"] >= 0.9)}]


def silence(scratch: Path, minutes: float) -> Rows:
    from chaos import silence

    stopped = silence.stopped(scratch / "stopped", 30.0)
    soon = max(stopped["receiver_back"], stopped["producer_back"]) < silence.RECOVERY_SECONDS
    held = soon and not (stopped["lost"] or stopped["twice"] or stopped["told_lost"])
    relayed = silence.relayed(scratch / "relayed", 20_000, harms=60)
    return [
        {"gate": 9, **checked(stopped, "0 lost, back in 3 heartbeats", held)},
        {"gate": 9, **none_lost(relayed)},
    ]


def hostile(scratch: Path, minutes: float) -> Rows:
    from chaos import fuzz

    found = fuzz.run(scratch, 600.0)
    held = found["rss_mb"] < 300 and found["share"] > 0.8
    return [{"gate": 10, **checked(found, "RSS < 300 MB, share > 0.8", held)}]


def connections(scratch: Path, minutes: float) -> Rows:
    from chaos import connections

    found = connections.run(scratch, idle=1500, bad=4000)
    held = found["descriptors"] < 128 and found["answered"] == found["asked"]
    quiet = found["log_lines"] < 40 and not found["tracebacks"]
    target = "< 128 descriptors, the page answers, < 40 lines of log"
    return [{"gate": "idle connections", **checked(found, target, held and quiet)}]


def foreign(scratch: Path, minutes: float) -> Rows:
    from chaos import foreign

    target = "alive, acknowledges, RSS and descriptors bounded"
    found = [foreign.run(scratch / str(plain), 300.0, plain) for plain in (True, False)]
    return [{"gate": 19, **checked(row, target, foreign.holds(row))} for row in found]


def tests(scratch: Path, minutes: float) -> Rows:
    """Gates whose whole form is in the test suite."""
    gates = {
        6: ("journal/test_journal.py", "receiver/test_protocol.py"),
        10: ("receiver/test_access.py", "receiver/test_hostile.py", "receiver/test_receiver.py"),
        11: ("daemon/test_stopping.py",),
        14: ("feed/test_batches.py", "daemon/test_end_to_end.py"),
    }
    rows = []
    for gate, files in gates.items():
        command = [sys.executable, "-m", "pytest", "-q", *(str(TESTS / file) for file in files)]
        env = os.environ | {"CHAOS_EXAMPLES": "500"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
        figures = {"gate": gate, "files": " ".join(files), "said": said}
        rows.append(checked(figures, "all pass", done.returncode == 0))
    return rows


def faults(scratch: Path, minutes: float) -> Rows:
    """Run the tests of all faults in faults.yaml together, and report them by kind of fault."""
    kinds: dict[str, list[str]] = yaml.safe_load((TESTS / "chaos" / "faults.yaml").read_text())
    ids = sorted({one for named in kinds.values() for one in named})
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junit-xml={report}"]
    command += [str(TESTS / one) for one in ids]
    subprocess.run(command, capture_output=True, text=True, check=False)
    ran: dict[str, str] = {}  # what went wrong by test, "" for nothing
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname']}.{case.attrib['name']}"
        said = " ".join(part.get("message", part.tag) for part in case)
        ran[name] = " ".join(said.split()).replace("|", "/")[:200]
    rows = []
    for kind, named in kinds.items():
        found = {one: [name for name in ran if _is_of(name, one)] for one in named}
        wrong = [f"{one} did not run" for one, names in found.items() if not names]
        wrong += [f"{name}: {ran[name]}" for names in found.values() for name in names if ran[name]]
        figures = {"fault": kind, "tests": sum(map(len, found.values())), "wrong": "; ".join(wrong)}
        rows.append(checked(figures, "all pass", not wrong))
    return rows


def _is_of(name: str, wanted: str) -> bool:
    """Whether a name such as "tests.app.test_x.test_y[z]" is of an id "app/test_x.py::test_y".

    An id without brackets stands for all values of the test's parameters.
    """
    path, _, values = wanted.partition("[")
    dotted, _, given = name.partition("[")
    of_test = f".{path.replace('.py', '').replace('::', '/').replace('/', '.')}."
    return of_test in f".{dotted}." and (not values or given == values)


def divergence(scratch: Path, minutes: float) -> Rows:
    from chaos import divergence

    found = divergence.run(scratch / "run")
    held = found["red_seconds"] < 120 and found["up"] and found["survived"] and found["repaired"]
    return [{"gate": "divergence", **checked(found, "red in 2 min, repaired by its rate", held)}]


def speed(scratch: Path, minutes: float) -> Rows:
    from benchmarks import ingest

    return [{"gate": 13, **row} for row in ingest.run()]


def soak(scratch: Path, minutes: float) -> Rows:
    from chaos import soak

    folder = Path("soak")
    if minutes:
        soak.soak(folder, 60 * minutes)
    return [
        {"gate": 12, **checked(row, "<= 1 MB/h, scrape < 50 ms", soak.holds(row))}
        for row in soak.findings(folder)
    ]


GATES: dict[str, Callable[[Path, float], Rows]] = {
    "kills": kills,
    "ranks": ranks,
    "receivers": receivers,
    "elastic": elastic,
    "power-cuts": power_cuts,
    "damage": damage,
    "bad-disk": bad_disk,
    "slow-learner": slow_learner,
    "silence": silence,
    "hostile": hostile,
    "connections": connections,
    "foreign": foreign,
    "tests": tests,
    "faults": faults,
    "divergence": divergence,
    "speed": speed,
    "soak": soak,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gates. Return 0 if all passed, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("gates", nargs="*", choices=[*GATES, []], help="default: all")
    parser.add_argument("--soak_minutes", type=float, default=60.0)
    parser.add_argument("--reports", type=Path, default=REPORTS)
    chosen = parser.parse_args(arguments)
    console = Console(width=180) if not sys.stdout.isatty() else Console()
    path, held = path_of(chosen.reports, date.today()), True
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen.gates or list(GATES):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            try:
                rows, error = GATES[name](Path(scratch), chosen.soak_minutes), ""
            except Exception as raised:
                rows, error = [], f"{type(raised).__name__}: {str(raised)[:500]}"
        result = Result(name, rows, time.monotonic() - began, error)
        console.print(table(result))
        report(path, result)
        held = held and not error and all(row["met"] in (True, None) for row in rows)
    console.print(f"report: {path}", soft_wrap=True)
    return int(not held)


def report(path: Path, result: Result) -> None:
    """Write the figures of a gate to the report of the day. They replace earlier figures."""
    told = path.read_text() if path.exists() else ""
    parts = {part.partition("\n")[0]: part for part in told.split("\n## ")[1:]}
    text = markdown(result).replace("python -m benchmarks ", "make chaos GATES=")
    parts[result.name] = text.removeprefix("## ")
    facts = machine.hardware() | machine.versions()
    head = [
        f"# Chaos, {path.name[:10]}\n",
        "`make chaos`: the gates of delivery, by number; `met` says whether one held.\n",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n",
    ]
    body = [f"## {parts[name].rstrip()}\n" for name in GATES if name in parts]
    write(path, "\n".join(head + body))


if __name__ == "__main__":
    sys.exit(main())
