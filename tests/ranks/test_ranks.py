"""Ranks decide, learn and keep what one process would. The checks run in one process of their own,
which forks the ranks: see run_checks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_checks import CHECKS

ROOT = Path(__file__).parents[2]
RANKS = (2, 4)


@pytest.fixture(scope="module")
def faults() -> dict[tuple[str, int], Any]:
    """By check and number of ranks: what went wrong, empty where all is well."""
    ranks = ",".join(str(count) for count in RANKS)
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_checks.py")), ranks],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    return {(line["check"], line["ranks"]): line["fault"] + found.stderr for line in lines}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", CHECKS)
def test_ranks_are_as_one_process(
    faults: dict[tuple[str, int], Any], check: str, ranks: int
) -> None:
    fault = faults[check, ranks]
    assert not fault, fault
