"""A run's processes for the tests: the real commands, real TCP, everything ended afterwards.

They are forked from one that has made their imports already, unless a test asks for whole ones. A
daemon forks its receiver and learner in the same way.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import Forked, daemon
from waiting import until as until

from stream_ssl.app import cli
from stream_ssl.daemon.endpoints import load
from stream_ssl.daemon.supervisor import command
from stream_ssl.observe.scrape import Scraper

BATCH = 16
TINY: dict[str, Any] = {
    "access": "plain",
    "receiver": {"bind": "tcp://127.0.0.1:0"},
    "http": {"receiver": "127.0.0.1:0", "learner": "127.0.0.1:0"},
    "journal": {"budget": 64 << 20},
    "decoder": {"size": 16, "channels": 1},
    "batches": {"batch_size": BATCH},
    "encoder": {"width": 4, "depths": [1, 1, 0, 0]},
    "projector": {"dim": 16},
    "memory": {"capacity": 64},
    # All samples are trained on, which a test counts: noise of so few pixels is much alike.
    "learner": {
        "threads": 1,
        "novelty": None,
        "anchors": "stream",
        "plain_keys": False,
    },
    "checkpoints": {"every_steps": 5, "every_seconds": None},
    "classes": 10,
}


Process = subprocess.Popen[bytes] | Forked


class Processes:
    """Starts commands in one run folder; with `whole`, each in a new interpreter."""

    def __init__(
        self, folder: Path, settings: dict[str, Any] | None = None, whole: bool = False
    ) -> None:
        self.folder, self.whole = folder, whole
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "config.yaml"  # JSON is YAML
        self.config.write_text(json.dumps({**(settings or TINY), "run": str(folder)}))
        self.environment: dict[str, str] | None = None  # of the started processes; None: our own
        self.whole_roles = False  # whether a daemon starts interpreters, as in the product
        self._started: list[Process] = []
        self._scraper = Scraper(lambda: {r: e["http"] for r, e in load(folder).items()})

    def start(self, *arguments: str, log: str | None = None) -> Process:
        """Start one of our commands, whose output goes to a log in the run folder."""
        output = self.folder / f"{log or arguments[0]}.log"
        process = self._process(arguments, output)
        self._started.append(process)
        return process

    def _process(self, arguments: tuple[str, ...], output: Path) -> Process:
        if not self.whole and self.environment is None:
            forks = arguments[0] == "run" and not self.whole_roles
            return Forked(daemon if forks else cli.main, arguments, output=output)
        with output.open("ab") as file:
            return subprocess.Popen(
                command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment,
            )

    def role(self, name: str) -> Process:
        """Start a receiver or a learner, and wait until it has published its address."""
        process = self.start(name, str(self.config))
        until(lambda: self.published(name, process.pid), lambda: self.log(name))
        return process

    def published(self, name: str, pid: int) -> bool:
        return bool(load(self.folder).get(name, {}).get("pid") == pid)

    def produce(self, samples: int, *extra: str, name: str = "robot") -> Process:
        """Start a producer with a synthetic stream of `samples` samples."""
        return self.start(
            *("produce", "synthetic", "--to", self.address, "--name", name),
            *("--source.size", "16", "--source.channels", "1", "--source.seed", "3"),
            *("--shape.limit", str(samples), *extra),
            log=name.replace("/", "-"),
        )

    @property
    def address(self) -> str:
        until(lambda: "receiver" in load(self.folder), lambda: self.log("run"))
        return str(load(self.folder)["receiver"]["data"])

    def metric(self, key: str) -> float:
        """Return a metric of either process by its name without the prefix, or -1 if absent."""
        return self._scraper.scrape().values.get(f"stream_ssl_{key}", -1.0)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


def stop(process: Process, seconds: float = 150.0) -> int:
    """Send SIGTERM, and return the exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(seconds)


def kill(process: Process) -> None:
    """Send SIGKILL, and wait until the process has ended."""
    process.kill()
    process.wait()


@contextmanager
def processes(
    folder: Path, settings: dict[str, Any] | None = None, whole: bool = False
) -> Iterator[Processes]:
    """Yield processes that all end with the block."""
    run = Processes(folder, settings, whole)
    try:
        yield run
    finally:
        run.end()
