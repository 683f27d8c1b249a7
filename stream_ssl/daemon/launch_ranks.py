"""torchrun for `stream-ssl run --ranks`: `python -m stream_ssl.daemon.launch_ranks N ...`.

It starts N learners on this host with the given arguments. It ends with the status of the learner
that failed, and with 0 after SIGTERM. It stops the learners if the supervisor dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from stream_ssl.process.crashes import trace_crashes
from stream_ssl.process.failures import DONE, FAILED, USAGE
from stream_ssl.process.signals import KILLED, PARENT, SUPERVISOR, watch_parent
from stream_ssl.process.threads import share_cores


def main(arguments: Sequence[str]) -> int:
    """Run until all ranks have ended. torchrun restarts nothing, because the supervisor does."""
    trace_crashes()
    ranks, *rest = arguments
    if parent := os.environ.pop(PARENT, None):  # the parent of the ranks is this process
        os.environ[SUPERVISOR] = parent
        threading.Thread(target=_terminate_without, args=(int(parent),), daemon=True).start()
    os.environ["PYTHONSAFEPATH"] = "1"  # because torchrun starts the ranks without -P
    share_cores()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks meet on this host, whose own name need not have an address, as in containers.
    where = ["--standalone", "--local-addr=localhost"]
    command = [*where, f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", "--"]
    try:
        run.main([*command, "stream_ssl", "learner", *rest])
    except ChildFailedError as error:
        return status_of([failure.exitcode for failure in error.failures.values()])
    except SignalException:
        return DONE
    return DONE


def status_of(statuses: Sequence[int]) -> int:
    """Return the status of a group from the statuses of its ranks; -N stands for signal N.

    A rank that crashed is the cause. The others fail because it is gone.
    """
    crashes = [-status for status in statuses if status < 0 and -status != signal.SIGTERM]
    if crashes and USAGE not in statuses:
        return KILLED + crashes[0]
    return max((status for status in statuses if status > 0), default=FAILED)


def _terminate_without(parent: int) -> None:
    """Send SIGTERM to this process, and so to torchrun, once its parent is gone."""
    watch_parent(parent, threading.Event())
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
