"""Floods a ROUTER that nobody reads, as while a receiver waits for its disk: prints how many
connections were cut off, and by how many bytes this process grew. In a process of its own, for the
memory that another has freed would be taken first."""

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
            with contextlib.suppress(ConnectionError):  # cut off
                while not backlogs.cut and time.monotonic() < end:
                    with contextlib.suppress(TimeoutError):  # what was sent before is still taken
                        peer.send(b"\0\0" * 100_000)  # 2 bytes a message here, some tens there
        time.sleep(0.2)  # for the count of what was just cut
        grown = psutil.Process().memory_info().rss - before
        sys.stdout.write(f"{backlogs.cut} {grown}\n")
        backlogs.close()


if __name__ == "__main__":
    main()
