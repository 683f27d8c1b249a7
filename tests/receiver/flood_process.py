"""A program that floods a ROUTER which nobody reads, as a receiver is flooded during an fsync.

It prints the number of connections that were cut off, and the growth of its memory in bytes. The
flood needs a new process, because an old process would first use memory that it has freed.
"""

import contextlib
import sys
import time

import psutil
import zmq
from test_hostile import begun

from stream_ssl.receiver.backlogs import Backlogs

LIMIT, SECONDS = 64 << 20, 60.0


def main():
    before = psutil.Process().memory_info().rss
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvhwm = 0, 0
        backlogs = Backlogs(router, LIMIT, memory=LIMIT)
        backlogs.start()
        router.bind("tcp://127.0.0.1:0")
        with begun(router.getsockopt_string(zmq.LAST_ENDPOINT)) as peer:
            time.sleep(0.5)  # for the ROUTER's part of the handshake
            peer.settimeout(0.2)
            end = time.monotonic() + SECONDS
            with contextlib.suppress(ConnectionError):  # the watchdog has cut it off
                while not backlogs.cut and time.monotonic() < end:
                    with contextlib.suppress(TimeoutError):  # the ROUTER still reads earlier bytes
                        peer.send(b"\0\0" * 100_000)  # libzmq needs tens of bytes for each
        time.sleep(0.2)  # until the connection is counted
        grown = psutil.Process().memory_info().rss - before
        sys.stdout.write(f"{backlogs.cut} {grown}\n")
        backlogs.close()


if __name__ == "__main__":
    main()
