"""The demo from start to end: it starts the real commands and scrapes their metrics."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stream_ssl.daemon.endpoints import hold_role, load
from stream_ssl.daemon.supervisor import command
from stream_ssl.demo import data, folder, machine, stream, summary
from stream_ssl.demo.children import DemoProcess
from stream_ssl.demo.display import DemoProgress, Display
from stream_ssl.demo.measures import side_by_side
from stream_ssl.observe.scrape import History, Scraper, Snapshot
from stream_ssl.process.failures import (
    DONE,
    FAILED,
    INTERRUPTED,
    USAGE,
    Failure,
    Misconfigured,
    configuring,
)
from stream_ssl.process.signals import stop_on_signals

LEAST_SECONDS = 15.0
POLL_SECONDS = 0.5
START_SECONDS = 180.0
FIRST_STEP_SECONDS = 90.0
STOP_SECONDS = 60.0
LATEST = "checkpoints/latest"

log = logging.getLogger("stream_ssl.demo")


class Interrupted(Exception):
    """The user pressed Ctrl-C, or SIGTERM arrived."""


def run(seconds: float, out: Path) -> int:
    """Run the demo and write its report.

    Args:
        seconds: how long the stream runs, at least 15. Start and evaluation take some 20 s more.
        out: the run's folder. The files of an earlier demo are replaced.

    Returns:
        0: done; 1: a process failed; 2: wrong arguments; 130: interrupted.
    """
    console = Console(emoji=False)
    if not seconds >= LEAST_SECONDS:
        console.print(
            f"{seconds:g} seconds are too short to learn anything: give --seconds "
            f"{LEAST_SECONDS:g} or more (with make: DEMO_SECONDS={LEAST_SECONDS:g})."
        )
        return USAGE
    try:
        data.check()
        with ExitStack() as stack:
            with configuring():
                folder.claim(out)
                stack.enter_context(hold_role(out, "demo"))
            folder.clear(out)
            Demo(seconds, out, console, stop_on_signals()).run()
    except Interrupted:
        console.print("Interrupted; all processes have ended.")
        return INTERRUPTED
    except Misconfigured as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return USAGE
    except (Failure, OSError) as error:
        console.print(f"The demo failed: {error}", style="red", markup=False, highlight=False)
        return FAILED
    return DONE


def addresses_of(run: Path) -> dict[str, str]:
    """Return the HTTP addresses of a run by role."""
    return {role: entry["http"] for role, entry in load(run).items()}


class Demo:
    """One run of the demo.

    Args:
        out: the run's folder, empty.
        stop: set when the user interrupts the demo.
    """

    def __init__(self, seconds: float, out: Path, console: Console, stop: threading.Event) -> None:
        self._out, self._console, self._stop = out, console, stop
        self._progress = DemoProgress(seconds)
        self._history = History()
        self._scraper = Scraper(self._addresses)
        self._display = Display(self._history, self._progress, console)
        self._seen: dict[str, str] = {}
        self._commands: list[str] = []
        self._logs = out / "logs"
        self._queue = out / folder.QUEUE
        self._queue_scraper = Scraper(lambda: addresses_of(self._queue))

    def run(self) -> None:
        """Stream the images, stop the processes, evaluate and write the report."""
        self._write_settings()
        with self._display:
            with ExitStack() as stack:
                self._stream(stack)
            figures, shown = self._finish()
        self._console.print(shown)
        if warning := summary.too_few_updates(figures):
            self._console.print(f"  {warning}", style="yellow")
        for what, where in self._places():
            line = f"  {what:<22} {where}"
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _stream(self, stack: ExitStack) -> None:
        """Run two daemons. Each receives the same stream from its own producer, at its own pace."""
        ours, theirs = (str(self._out / name) for name in (folder.CONFIG, folder.QUEUE_CONFIG))
        runs = {"daemon": self._out, "queue-daemon": self._queue}
        daemons = [
            self._start(stack, name, "run", ours, *more, "--run", str(out))
            for (name, out), more in zip(runs.items(), ((), ("--config", theirs)), strict=True)
        ]
        self._wait(self._ready, START_SECONDS, daemons, "starting two receivers and two learners")
        source = ("idx", "--config", str(self._out / folder.STREAM))
        producers = []
        for name, out in (("producer", self._out), ("queue-producer", self._queue)):
            to = ("--run", str(out), "--name", stream.NAME)
            producers.append(self._start(stack, name, "produce", *source, *to))
        try:
            self._watch([*daemons, *producers])
            self._halt(producers, daemons)
        finally:
            self._history.save(self._out / folder.HISTORY)

    def _write_settings(self) -> None:
        self._logs.mkdir()
        self._queue.mkdir()
        for name in (folder.CONFIG, folder.QUEUE_CONFIG):
            text = files("stream_ssl.demo").joinpath(name).read_text()
            (self._out / name).write_text(text)
        stream.write_images(self._out / folder.IMAGES)
        source = stream.settings(self._out / folder.IMAGES)
        (self._out / folder.STREAM).write_text(json.dumps(source, indent=2) + "\n")

    def _start(self, stack: ExitStack, name: str, *arguments: str) -> DemoProcess:
        self._commands.append(" ".join(["stream-ssl", *arguments]))
        child = DemoProcess(name, command(*arguments), self._logs / f"{name}.log")
        stack.callback(child.end)
        return child

    def _addresses(self) -> dict[str, str]:
        addresses = addresses_of(self._out)
        self._seen |= addresses
        return addresses

    def _scrape(self) -> Snapshot:
        return side_by_side(self._scraper.scrape(), self._queue_scraper.scrape())

    def _ready(self) -> bool:
        both = {"receiver", "learner"}
        return both <= set(self._scraper.scrape().up) and both <= set(load(self._queue))

    def _watch(self, children: list[DemoProcess]) -> None:
        """Scrape and show metrics until the time is over and the first step is made."""
        self._scraper = Scraper(self._addresses)
        detail = (
            f"metrics: {', '.join(f'{url}/metrics' for url in self._seen.values())}; a "
            "second learner with a queue runs at the same time"
        )
        self._display.update("streaming", detail)
        start, trained = time.monotonic(), False
        while (elapsed := time.monotonic() - start) < self._progress.total or not trained:
            if not trained and elapsed > FIRST_STEP_SECONDS:
                raise children[0].failed(f"trained on nothing within {FIRST_STEP_SECONDS:.0f} s")
            self._pause(children)
            self._history.append(self._scrape())
            self._progress.elapsed = min(elapsed, self._progress.total)
            trained = self._history.last("stream_ssl_steps_total") > 0
            self._display.update("training" if trained else "streaming")
        self._progress.elapsed = self._progress.total

    def _halt(self, producers: list[DemoProcess], daemons: list[DemoProcess]) -> None:
        """Stop the producers, then the daemons. Each learner writes a last checkpoint."""
        self._display.update("checkpoint", "stopping the processes; the learners write checkpoints")
        for producer in producers:
            producer.end()  # undelivered samples are no loss, because the stream is endless
        self._history.append(self._scrape())  # final figures, after the last sample
        for daemon, out in zip(daemons, (self._out, self._queue), strict=True):
            daemon.stop(STOP_SECONDS)
            if not (out / LATEST).exists():
                raise daemon.failed("has written no checkpoint")

    def _finish(self) -> tuple[Mapping[str, float], Table]:
        """Evaluate and write all files. Return the figures, and a table of the main ones."""
        self._display.update("evaluating", "evaluating the encoders on held-out images")
        # This imports torch, so it waits until the learner has released the cores.
        from stream_ssl.demo import evaluation, report, summary

        found = evaluation.evaluate(self._out / LATEST, self._queue / LATEST)
        sent = stream.replay(self._out / folder.IMAGES, found.samples, len(found.key_K))
        figures = summary.figures(self._history, found, sent)
        summary.write(self._out / folder.SUMMARY, figures)
        self._display.update("report", "drawing the plots")
        page = self._out / folder.REPORT
        report.write(page, self._history, found, figures, sent, self._facts())
        return figures, summary.table(figures)

    def _wait(
        self, ready: Callable[[], bool], seconds: float, children: list[DemoProcess], what: str
    ) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            self._display.update(detail=what)
            self._pause(children)
            if time.monotonic() > deadline:
                raise children[0].failed(f"was not ready after {seconds:.0f} s ({what})")

    def _pause(self, children: list[DemoProcess]) -> None:
        for child in children:
            child.check()
        if self._stop.wait(POLL_SECONDS):
            raise Interrupted

    def _facts(self) -> Any:
        from stream_ssl.demo.report import DemoFacts

        settings = {
            "stream": f"{stream.SAMPLES_PER_SECOND:.0f} samples/s at most, endless passes over "
            "7,000 images, 700 of each class",
        }
        return DemoFacts(
            created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            seconds=self._progress.total,
            parked=stream.SHARE,
            scenes=stream.SCENES,
            stretch=stream.STRETCH,
            run=[*(machine.hardware() | machine.versions() | settings).items()],
            commands=self._commands,
            places=self._places(),
            addresses=self._seen,
            config=(self._out / folder.CONFIG).read_text(),
        )

    def _places(self) -> list[tuple[str, str]]:
        names = {
            "report": folder.REPORT,
            "all figures": folder.SUMMARY,
            "metrics over time": folder.HISTORY,
            "checkpoint": LATEST,
            "the queue's run": folder.QUEUE,
            "journal": "journal",
            "logs": "logs",
            "daemon's settings": folder.CONFIG,
            "the queue's changes": folder.QUEUE_CONFIG,
            "stream's settings": folder.STREAM,
        }
        return [(what, str(self._out / name)) for what, name in names.items()]
