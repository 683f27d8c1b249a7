"""Break the code in many places, one at a time, and report the changes that no test notices.

    .venv/bin/python tests/mutations.py            all of mutations.yaml, in a copy of the tree
    .venv/bin/python tests/mutations.py losses/    mutations of files with this in their path

A mutation names a whole line that occurs once in its file, its replacement, and the tests that must
then fail. The script first checks that these tests pass without the mutation. Each mutation is
tried in a process forked from one that has imported the libraries. Exit status 1: a mutation
survived, or a line is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).parents[1]
LIMIT = 400  # seconds; a mutation that makes the tests wait longer counts as killed


class Mutation(TypedDict):
    file: str
    line: str
    becomes: str
    tests: str


def copy_tree(to: Path) -> None:
    """Copy the tracked files, and new files that git does not ignore."""
    listed = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def outcome(tree: Path, mutation: Mutation, limit: float = LIMIT) -> str:
    """Try one mutation. Return "killed", "survived" or "gone"."""
    file = tree / mutation["file"]
    source = file.read_text() if file.exists() else ""
    if source.count(mutation["line"] + "\n") != 1:
        return "gone"
    file.write_text(source.replace(mutation["line"] + "\n", mutation["becomes"] + "\n"))
    try:
        return "survived" if passes(tree, mutation["tests"], limit) else "killed"
    finally:
        file.write_text(source)


def passes(tree: Path, tests: str, limit: float = LIMIT) -> bool:
    """Return whether the tests, given as on pytest's command line, pass within `limit` seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(_pytest(tree, shlex.split(tests)))
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.02)
        return False
    finally:
        try:
            os.killpg(child, signal.SIGKILL)  # and all processes that it started
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _pytest(tree: Path, arguments: list[str]) -> int:
    """Run pytest in the forked process, with the project's modules from the copy."""
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    silent = os.open("/dev/null", os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        import pytest

        return int(pytest.main(["-qx", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]))
    except BaseException:  # a mutation may raise anything while tests are collected
        return 1


def imports() -> None:
    """Import the third-party modules of the tests, once for all mutations."""
    import sklearn
    import torch
    import torch._dynamo
    import torchvision  # noqa: F401
    import zmq  # noqa: F401

    del sklearn
    torch.set_num_threads(1)


def main(wanted: str = "") -> int:
    import yaml

    sys.dont_write_bytecode = True
    all_of_them: list[Mutation] = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text())
    chosen = [mutation for mutation in all_of_them if wanted in mutation["file"]]
    imports()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for tests in sorted({mutation["tests"] for mutation in chosen}):
            assert passes(Path(folder), tests), f"nothing is broken, yet these fail: {tests}"
        for mutation in chosen:
            found = outcome(Path(folder), mutation)
            bad += found != "killed"
            print(f"{found:9}{mutation['file']}: {mutation['becomes'].strip()}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} killed")
    return int(bad > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
