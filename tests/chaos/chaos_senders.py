"""Producers that send as fast as they can: `python chaos_senders.py ADDRESS FIRST COUNT`."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from stream_ssl.producers import Producer

IMAGE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def send(address: str, name: str, pause: float) -> None:
    with Producer(address, name, packet_samples=8, linger=0.0) as producer:
        number = 0
        while True:
            producer.send(IMAGE, f"{name}-{number}")
            number += 1
            if pause:
                time.sleep(pause)


def main(address: str, first: int, count: int) -> None:
    threads = [
        threading.Thread(
            target=send, args=(address, f"robot-{n:02d}", 0.0005 * (n % 3)), daemon=True
        )
        for n in range(first, first + count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
