"""The learner as the first process of a container.

LMDB tells the processes that read a journal apart by their ids: each locks the byte of that number.
A receiver in a container of its own is process 1 there, so the learner must not have that id too.
"""

from __future__ import annotations

import os
import secrets
import signal

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
MOST_IDS_SKIPPED = 256


def leave_first_process() -> None:
    """Where this is process 1, go on in a child; the parent hands signals on and ends as it ends.

    The child's id is drawn: whoever was killed here before may have left an entry among the
    journal's readers, which LMDB clears away when no process of that id is alive.
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
        ended, status = os.wait()  # orphans, too: they are process 1's
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
