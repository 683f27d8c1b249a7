"""endpoints.json in the run folder: where each process of a run can be reached."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stream_ssl.durable import write

log = logging.getLogger(__name__)

FILE = "endpoints.json"


class RoleTaken(RuntimeError):
    """Another process of the same role works in the run folder."""


@contextmanager
def hold_role(run: Path, role: str) -> Iterator[None]:
    """Hold a role ("receiver", "learner") in a run folder until the block is left or we die.

    Raises:
        RoleTaken: another living process holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / f"{role}.lock").open("a+", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RoleTaken(
                f"{run}: a {role} already runs here (pid {lock.read().strip() or 'unknown'}). "
                f"Stop it, or give this one another run folder with --run."
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def publish(run: Path, role: str, **addresses: str) -> None:
    """Write a role's addresses and process id; the other roles' stay."""
    with (run / f"{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        endpoints = load(run)
        endpoints[role] = {**addresses, "pid": os.getpid()}
        write(run / FILE, json.dumps(endpoints, indent=2) + "\n")


def load(run: Path) -> dict[str, dict[str, Any]]:
    """The addresses by role; empty when nothing has run here.

    Nor does a file that cannot be read keep a process from starting: each says anew where it is.
    """
    path = run / FILE
    try:
        endpoints = json.loads(path.read_bytes())
        return {role: entry for role, entry in endpoints.items() if isinstance(entry["http"], str)}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s): written anew when a process starts", path, error)
        return {}
