"""Records of how the last process of each role ended, in RUN/ROLE.last.json.

Each process writes its own file. The file records no end if the process was killed or crashed, or
if the machine lost power. While the process runs, it touches ROLE.lock every 5 seconds. The time of
that file then shows when the process ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from stream_ssl.background import Background
from stream_ssl.bounded_files import MOST_BYTES, read_map
from stream_ssl.durable import write
from stream_ssl.process.signals import PARENT, SUPERVISOR
from stream_ssl.rate_limited_logger import printable

BEAT_SECONDS = 5.0
"""Seconds between two writes that show that the process lives."""
LAST = "the last line of its log: "
INVALID = 0
"""The time of a record that its process could not replace."""
MOST_WORDS = 300
"""The maximum length of a process's last words, in characters."""


class Life(logging.Handler):
    """Records in the run's folder when a process started, its last words, and how it ended."""

    def __init__(self, run: Path, role: str) -> None:
        super().__init__(logging.INFO)
        self._path, self._lock = run / f"{role}.last.json", run / f"{role}.lock"
        self._facts: dict[str, Any] = {
            "pid": os.getpid(),
            "started": time.time(),
            "parent": int(os.environ.get(PARENT) or os.environ.get(SUPERVISOR) or 0),
            "command": shlex.join(("stream-ssl", *sys.argv[1:])),
        }
        self._words = self._written = ""
        self._writing, self._is_over = threading.Lock(), False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last line of the log."""
        self._words = printable(record.getMessage(), MOST_WORDS)

    def beat(self) -> None:
        """Record that the process lives, and its last words if they are new."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        if self._words != self._written:
            self._write()

    def stopped(self) -> None:
        """Record that the process stopped normally."""
        self._write(end="stopped", ended=time.time())

    def failed(self, words: str) -> None:
        """Record that the process ends because of an error."""
        self._words = printable(words, MOST_WORDS)
        self._write(end="failed", ended=time.time())

    def interrupted(self) -> None:
        """Record that a second signal ended the process while it was stopping."""
        self._write(end="interrupted", ended=time.time())

    def child_ended(self, name: str, how: str) -> None:
        """Record how a child ended. A child that ends early in its start leaves no record."""
        ends = self._facts.get("children", {})
        self._facts["children"] = ends | {name: f"the {name} {how} at {_local(time.time())}"}
        self._write()

    def _write(self, **more: object) -> None:
        with self._writing:
            if not self._is_over:  # a beat must not replace the end
                self._is_over = "end" in more
                self._replace(self._facts | {"words": self._words} | more)

    def _replace(self, record: dict[str, Any]) -> None:
        self._written = record["words"]
        wait = record.get("end") != "interrupted"  # the process ends at once
        try:
            write(self._path, json.dumps(record) + "\n", wait=wait)
        except OSError:  # on a full disk, no record is better than a wrong one
            with contextlib.suppress(OSError):
                os.utime(self._path, (INVALID, INVALID))  # which needs no room

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record that this process runs, and how it ends when the block ends."""
        ours = logging.getLogger("stream_ssl")
        self._write()
        ours.addHandler(self)
        beats = Background("beat", self.beat, BEAT_SECONDS).start()
        try:
            yield
        except BaseException as error:
            beats.close()
            self.failed(str(error) or type(error).__name__)
            raise
        else:
            beats.close()
            self.stopped()
        finally:
            ours.removeHandler(self)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a process.

    Attributes:
        end: stopped (by one signal or by two), failed (with an error) or killed (without a record
            of an end).
        says: a sentence with the time.
        words: the error, or the last line of the log; may be empty.
        again: the command that starts the run, or this process alone, again.
        parent: the process id of the supervisor; 0 without one.
    """

    end: Literal["stopped", "failed", "killed"]
    says: str
    words: str
    again: str
    parent: int

    def state(self) -> dict[str, Any]:
        """Return the state of this process, for `answers`."""
        words = f" ({self.words})" if self.words else ""
        return {"error": f"{self.says}{words}", "ended": asdict(self)}


def ending(run: Path, role: str) -> Ending | None:
    """Return how the last process of a role ended. Ask only if no process holds the role.

    The result is None without a record, for example after a full disk.
    """
    path = run / f"{role}.last.json"
    try:
        if path.stat().st_mtime == INVALID:
            return None
        saved = read_map(path)
        words, again = (printable(saved[name], MOST_BYTES) for name in ("words", "command"))
        parent = int(saved["parent"])
        end, when = saved.get("end"), saved.get("ended", (run / f"{role}.lock").stat().st_mtime)
        at = _local(when)
        supervisor = _supervisor_end(run, parent)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    if role != "supervisor" and (why := _failed_run(run, when, end == "failed")) is not None:
        return why
    again = again if supervisor is None else supervisor.again
    if end == "failed":
        return Ending("failed", f"the {role} failed at {at}", words, again, parent)
    if end == "interrupted":
        return Ending("stopped", f"a second signal ended the {role} at {at}", "", again, parent)
    if end != "stopped":
        says, words = f"the {role} was killed or crashed at about {at}", words and LAST + words
        return Ending("killed", says, words, again, parent)
    if supervisor is not None and supervisor.end == "killed":
        says = f"the {role} stopped at {at}, because {supervisor.says.replace('the ', 'its ', 1)}"
        return Ending("killed", says, "", again, parent)
    return Ending("stopped", f"the {role} stopped normally at {at}", "", again, parent)


def last_end_of_child(run: Path, name: str, supervisor: int | None) -> str:
    """Return how a child of this supervisor last ended, as a sentence; "" if none has ended."""
    try:
        saved = read_map(run / "supervisor.last.json")
        return printable(saved["children"][name], MOST_BYTES) if saved["pid"] == supervisor else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _local(when: float) -> str:
    return datetime.fromtimestamp(when).astimezone().isoformat(" ", "seconds")


def _supervisor_end(run: Path, parent: int) -> Ending | None:
    """Return how the supervisor with this process id ended; None without such a record."""
    for folder in (run, run.parent) if parent else ():
        with contextlib.suppress(OSError, ValueError):
            if read_map(folder / "supervisor.last.json").get("pid") == parent:
                return ending(folder, "supervisor")
    return None


def _failed_run(run: Path, when: float, failed: bool) -> Ending | None:
    """Return how the supervisor failed after a process ended; None if it did not fail.

    The record of that process names another reason, or none. But a process that `failed` under
    this supervisor names the fault itself.
    """
    for folder in (run, run.parent):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            saved = read_map(folder / "supervisor.last.json")
            own = failed and when >= saved["started"]
            if saved["end"] == "failed" and saved["ended"] >= when and not own:
                found = ending(folder, "supervisor")
                return found and replace(found, says=found.says.replace("supervisor", "run"))
    return None
