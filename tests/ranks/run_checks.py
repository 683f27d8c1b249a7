"""Run checks on ranks, and print a line of JSON for each: python run_checks.py [NAME ...].

This is a separate process, because it must not compute on several threads before it forks.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence

import torch
from rank_checkpoints import (
    check_disk_full,
    check_divergence,
    check_journal_shares,
    check_other_ranks,
    check_part_refused,
    check_restarts,
)
from rank_learning import (
    check_batchnorm,
    check_devices,
    check_gradients,
    check_layers,
    check_meetings,
    check_steps,
    check_turns,
    check_zeros,
)
from rank_losses import check_losses
from rank_memory import (
    check_evictions,
    check_frames,
    check_images,
    check_many_evictions,
    check_queue,
    check_shares,
    check_types,
)
from rank_refusals import check_refusals

CHECKS: dict[str, tuple[Callable[[int], None], Sequence[int]]] = {
    "evictions": (check_evictions, (2, 3)),
    "images": (check_images, (2, 3)),
    "frames": (check_frames, (2, 3)),
    "queue": (check_queue, (3,)),
    "shares": (check_shares, (2, 3)),
    "types": (check_types, (2, 3)),
    "losses": (check_losses, (2, 3)),
    "gradients": (check_gradients, (4,)),
    "batchnorm": (check_batchnorm, (2,)),
    "layers": (check_layers, (2,)),
    "devices": (check_devices, (2,)),
    "meetings": (check_meetings, (2,)),
    "turns": (check_turns, (2,)),
    "zeros": (check_zeros, (2,)),
    "steps": (check_steps, (2, 4)),
    "restarts": (check_restarts, (2,)),
    "divergence": (check_divergence, (2,)),
    "part refused": (check_part_refused, (2,)),
    "disk full": (check_disk_full, (2, 4)),
    "other ranks": (check_other_ranks, (4,)),
    "refusals": (check_refusals, (2,)),
    "journal shares": (check_journal_shares, (2, 4)),
}
"""The checks by name, with the numbers of ranks."""
LONG: dict[str, tuple[Callable[[int], None], Sequence[int]]] = {
    "many evictions": (check_many_evictions, (2, 4)),
}
"""Long checks that only run if they are named, as in `make chaos`."""


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names or CHECKS:
        check, counts = (CHECKS | LONG)[name]
        for ranks in counts:
            fault = ""
            try:
                check(ranks)
            except Exception:
                fault = traceback.format_exc()
            sys.stdout.write(json.dumps({"check": name, "ranks": ranks, "fault": fault}) + "\n")
            sys.stdout.flush()


def alone(name: str, ranks: int) -> None:
    """Run one check on this number of ranks. Use it as a `main`: it fails if the check fails."""
    torch.set_num_threads(1)
    check, _ = CHECKS[name]
    check(ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
