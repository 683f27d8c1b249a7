"""A receiver in a process of its own: `python receiver_process.py FOLDER BIND`.

Prints its endpoint; stops on SIGTERM.
"""

import signal
import sys
import threading
from pathlib import Path

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.receiver.receiver import Receiver


def main(folder, bind):
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    journal = Journal(folder / "journal", budget=256 << 20)
    receiver = Receiver(journal, ConsumerOffsets(folder), bind)
    sys.stdout.write(f"{receiver.endpoint}\n")
    sys.stdout.flush()
    for _ in receiver.run(stop):
        pass
    journal.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
