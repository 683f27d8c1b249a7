"""A receiver whose journal has small segments: `python chaos_receiver.py FOLDER BIND`."""

import signal
import sys
import threading
from pathlib import Path

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.receiver import receiver as receiving


def main(folder: Path, bind: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    journal = Journal(folder / "journal", budget=64 << 20, segment_bytes=256 << 10)
    receiving.GROUP_PACKETS = 4  # many small commits
    receiver = receiving.Receiver(journal, ConsumerOffsets(folder), bind)
    sys.stdout.write(f"{receiver.endpoint}\n")
    sys.stdout.flush()
    for _ in receiver.run(stop):
        pass
    journal.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
