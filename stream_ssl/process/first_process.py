"""Run the learner and the supervisor as the first process of a container.

The first process must wait for orphans, which stay as zombies otherwise. The supervisor waits only
for its own children. If a learner is killed, its children become orphans.

LMDB identifies the processes that read a journal by their process ids: each locks the byte of its
id. A receiver in a container of its own is process 1, so the learner must have another id.
"""

from __future__ import annotations

import os
import secrets
import signal

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
MOST_IDS_SKIPPED = 256


def leave_first_process() -> None:
    """If this is process 1, continue in a child. The parent forwards signals to the child.

    The parent ends with the status of the child. The child's id is random. A learner that was
    killed here before may have left an entry among the journal's readers. LMDB clears that entry
    only if no living process has its id.
    """
    if os.getpid() != 1:
        return
    for _ in range(secrets.randbelow(MOST_IDS_SKIPPED)):
        os.waitpid(os.fork() or os._exit(0), 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    child = os.fork()
    if child:
        for number in HANDED_ON:
            signal.signal(number, lambda given, _: os.kill(child, given))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while child:
        ended, status = os.wait()  # process 1 must also wait for orphans
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
