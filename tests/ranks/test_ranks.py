"""Ranks decide, learn and keep what one process would. The checks run in one process of their own,
which forks the ranks: see run_checks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_checks import CHECKS

SCRIPT = Path(__file__).with_name("run_checks.py")
EVERY = [(name, ranks) for name, (_, counts) in CHECKS.items() for ranks in counts]


@pytest.fixture(scope="module")
def faults() -> dict[tuple[str, int], str]:
    """By check and number of ranks: what went wrong, empty where all is well."""
    found = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    return {
        (line["check"], line["ranks"]): line["fault"] and line["fault"] + found.stderr
        for line in lines
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("check", "ranks"), EVERY)
def test_ranks_are_as_one_process(
    faults: dict[tuple[str, int], str], check: str, ranks: int
) -> None:
    fault = faults[check, ranks]
    assert not fault, fault
