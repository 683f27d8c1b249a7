"""Runs every check on so many ranks: python run_checks.py RANKS ...; a line of JSON for each.

A process of its own, which computes nothing on several threads before it forks.
"""

from __future__ import annotations

import json
import sys
import traceback

import rank_memory
import torch

CHECKS = {**rank_memory.CHECKS}


def main(ranks: list[int], names: list[str]) -> None:
    torch.set_num_threads(1)
    for count in ranks:
        for name in names or CHECKS:
            fault = ""
            try:
                CHECKS[name](count)
            except Exception:
                fault = traceback.format_exc()
            line = {"check": name, "ranks": count, "fault": fault}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1].split(",")], sys.argv[2:])
