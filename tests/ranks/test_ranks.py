"""Tests that ranks decide, learn and save the same as one process.

Each check runs in a process of its own, forked before any computation, which forks the ranks: see
run_checks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import run_checks
from forked import Forked
from run_checks import CHECKS

EVERY = [(name, ranks) for name, (_, counts) in CHECKS.items() for ranks in counts]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("check", "ranks"), EVERY)
def test_ranks_give_the_results_of_one_process(check: str, ranks: int, tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = Forked(run_checks.alone, check, ranks, output=output)
    try:
        assert process.wait(280) == 0, output.read_text()
    finally:
        process.kill()
