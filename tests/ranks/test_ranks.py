"""Tests that ranks decide, learn and save the same as one process.

The checks run in one process, forked before any computation, which forks the ranks: see
run_checks.py.
"""

from __future__ import annotations

import json

import pytest
import run_checks
from forked import Forked
from run_checks import CHECKS

EVERY = [(name, ranks) for name, (_, counts) in CHECKS.items() for ranks in counts]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """Return the failure of each check and number of ranks; empty if the check passed."""
    output = tmp_path_factory.mktemp("ranks") / "output"
    checks = Forked(run_checks.main, (), output=output)
    try:
        assert checks.wait(280) == 0, output.read_text()
    finally:
        checks.kill()
    said = output.read_text()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"check"')]
    return {
        (line["check"], line["ranks"]): line["fault"] and line["fault"] + said for line in lines
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("check", "ranks"), EVERY)
def test_ranks_are_as_one_process(
    faults: dict[tuple[str, int], str], check: str, ranks: int
) -> None:
    fault = faults[check, ranks]
    assert not fault, fault
